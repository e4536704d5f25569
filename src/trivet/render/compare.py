"""Compares fast tokenizers with the reference in a process of its own, which may end as it likes.

What is compared is other people's compiled code, given the hardest texts there are: a crash, a hang or the memory of
those that are not used must be nobody else's. ``python -m trivet.render.compare`` reads a definition on standard input.
It leaves no file behind, and the kernel ends it with the thread that has started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tokenizers import Tokenizer

from trivet.render.fast import Limits, choose
from trivet.render.hard_texts import hard_texts

_LIMIT_S = 300.0
"""It takes 5 to 15 s of CPU."""
_TOLD_CHARACTERS = 200
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a comparison."""

    fast: str | None = None
    """The tokenizer to use; None for the reference."""
    unlike: Sequence[str] = ()
    meaningless: bool = False
    rows: Sequence[Sequence[str]] = ()
    refused: dict[str, str] = field(default_factory=dict)
    """Why not, for each of the others."""
    spelling: int = 0
    """Which of ``spellings`` it is to read."""
    lasts: bool = True
    """False if the comparison did not come to its end: another may."""

    @property
    def limits(self) -> Limits:
        """What is the reference's all the same."""
        rows = frozenset((first, second, third) for first, second, third in self.rows)
        return Limits(frozenset(self.unlike), self.meaningless, rows)


def compare(definition: str, names: Sequence[str]) -> Finding:
    """The fastest of some tokenizers that is shown to give the reference's ids. Takes seconds.

    Args:
        definition: ``tokenizer.json``, as ``Tokenizer.to_str`` gives it.
    """
    asked = json.dumps({"definition": definition, "names": list(names), "parent": os.getpid()})
    libc = ctypes.CDLL(None)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trivet.render.compare"],
            input=asked,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
            start_new_session=True,  # Ctrl-C is for the parent, and ends this with it
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
    except subprocess.TimeoutExpired:
        why = f"the comparison took longer than {_LIMIT_S:g} s"
    else:
        if done.returncode == 0:
            return Finding(**json.loads(done.stdout.splitlines()[-1]))
        said = done.stderr.strip().splitlines()[-1:] or [""]
        how = f"by signal {-done.returncode}" if done.returncode < 0 else f"with status {done.returncode}"
        why = f"the comparison ended {how} {said[0][:_TOLD_CHARACTERS]}".rstrip()
    return Finding(refused=dict.fromkeys(names, why), lasts=False)


def main() -> None:
    """The process."""
    asked = json.load(sys.stdin)
    if os.getppid() != asked["parent"]:  # it was gone before
        sys.exit(1)
    backend = Tokenizer.from_str(asked["definition"])

    def reference(texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    added = [token["content"] for token in json.loads(asked["definition"])["added_tokens"]]
    choice = choose(asked["definition"], reference, list(hard_texts(added)), asked["names"])
    fast, refused = choice.fast, dict(choice.refused)
    if fast is None:
        found = Finding(refused=refused)
    else:
        limits = fast.limits
        rows = sorted(limits.rows)
        found = Finding(fast.name, sorted(limits.unlike), limits.meaningless, rows, refused, fast.spelling)
    sys.stdout.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
