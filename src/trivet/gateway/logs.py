"""The log of a gateway worker: lines for people, or one JSON object a line."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

import orjson

from trivet.journal import RequestRecord

logger = logging.getLogger("trivet.request")

_OTHERS = ("vllm", "uvicorn", "uvicorn.error", "uvicorn.access")
"""Who has handlers of its own, if anybody."""
_LONGEST_ERROR = 300


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: ``time`` (UTC), ``level``, ``logger``, ``message``, and what else it carries."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        record.message = record.getMessage()
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        value: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.message,
        }
        if isinstance(facts := getattr(record, "facts", None), dict):
            value |= facts
        if record.exc_info:
            value["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(value, default=str).decode()


def write_text() -> None:
    """Lines for people on standard error: warnings of anybody, and what Trivet tells."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("trivet").setLevel(logging.INFO)


class _Log:
    """A file that lines are appended to whole, each with one write: workers of one gateway share it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        """See ``io.TextIOBase``."""
        os.write(self._descriptor, text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        """Nothing waits here."""


def write_json(descriptor: int | None = None) -> None:
    """The same as JSON, with a line for each request in place of one for each generation.

    A fault that nobody catches is one line, too. Call it again when libraries were loaded that set up their logging
    themselves, as vLLM does.

    Args:
        descriptor: of the log, appended to; where handlers write already unless given.
    """
    formatter = JsonFormatter()
    for name in ("", *_OTHERS):
        for handler in logging.getLogger(name).handlers:
            handler.setFormatter(formatter)
            if descriptor is not None and type(handler) is logging.StreamHandler:
                handler.setStream(_Log(descriptor))
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    logging.getLogger("trivet.legs.generation").setLevel(logging.WARNING)


def _uncaught(kind: type[BaseException], fault: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("trivet").critical("%s: %s", kind.__name__, fault, exc_info=(kind, fault, trace))


def _uncaught_in_thread(told: threading.ExceptHookArgs) -> None:
    if told.exc_value is not None and not isinstance(told.exc_value, SystemExit):
        _uncaught(told.exc_type, told.exc_value, told.exc_traceback)


def tell_request(record: RequestRecord) -> None:
    """Writes the line of a request that is over."""
    logger.info("%s %s", record.path, record.status, extra={"facts": facts_of(record)})


def facts_of(record: RequestRecord) -> dict[str, Any]:
    """A record's facts without any words of a request.

    An engine that refuses a request may quote it. So errors that blame the request are left out, of which the status
    tells, and so is ``reason``, which names faults in the words of engines: ``split_reason`` is a label.
    """
    facts = record.facts()
    for one, generation in zip(facts["generations"], record.generations, strict=True):
        del one["reason"]
        if one["error"] is not None:
            one["error"] = "refused" if generation.refused else one["error"][:_LONGEST_ERROR]
    return facts
