"""What was found of tokenizers, kept for the next process in files that nobody else can have written.

A verdict says which compiled library tokenizes, and which texts are left to the reference: whoever could write one
could have prompts tokenized wrongly.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trivet.render.compare import Finding

logger = logging.getLogger(__name__)

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is kept of a tokenizer."""

    unsuitable: str | None
    finding: Finding


class Verdicts:
    """A folder of them, by name. What cannot be kept is found again at the next start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> Verdict | None:
        """That of a tokenizer; None if there is none that can be read and trusted."""
        try:
            with os.fdopen(os.open(self._file(name), os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
                if not (_is_ours(self._folder.stat()) and _is_ours(os.fstat(file.fileno()))):
                    logger.warning(
                        "%s is ignored: others than this user can have written it. chmod -R go-w, or remove it",
                        self._file(name),
                    )
                    return None
                told = json.load(file)
            return Verdict(told["unsuitable"], Finding(**told["finding"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, name: str, verdict: Verdict) -> None:
        """Keeps it, if that can be."""
        try:
            self._open()
            descriptor, draft = tempfile.mkstemp(dir=self._folder, prefix=f"{name}.")  # for this user, and new
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(asdict(verdict), file)
                Path(draft).replace(self._file(name))
            except BaseException:
                Path(draft).unlink()
                raise
        except OSError as error:
            logger.warning("what was found of tokenizers is not kept: %s", error)

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """While the block runs, no other process is in such a block for the same tokenizer. Waits for one that is."""
        with contextlib.ExitStack() as held:
            try:
                self._open()
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                lock = os.open(self._folder / f"{name}.lock", flags, 0o600)
                held.callback(os.close, lock)
                _take(lock)
            except OSError as error:  # then several may do the same, as was always right
                logger.debug("no lock: %s", error)
            yield

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _open(self) -> None:
        """Makes the folder, for this user only.

        Raises:
            OSError: it cannot be made, or is somebody else's.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self._folder.stat()
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{self._folder} belongs to another user")
        if stat.S_IMODE(status.st_mode) != stat.S_IRWXU:
            self._folder.chmod(stat.S_IRWXU)


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE


def _take(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("another process compares fast tokenizers for this model; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
