"""Long bodies parsed sooner, and others' turns between parsing and validating them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from starlette.requests import Request

_LONG_BYTES = 2**16
_parse = msgspec.json.Decoder().decode
"""Of what it takes it makes what ``json`` does; the rest it refuses."""


def parse_in_turns() -> None:
    """Has requests of this process parse long bodies here. FastAPI validates what it gets at once."""
    if Request.json is not _json:
        Request.json = _json  # type: ignore[assignment, method-assign]


async def _json(self: Request) -> Any:
    """As ``Request.json``."""
    if not hasattr(self, "_json"):
        body = await self.body()
        if len(body) <= _LONG_BYTES:
            self._json = json.loads(body)
        else:
            try:
                self._json = _parse(body)
            except Exception:  # also of what only ``json`` takes; its errors are told
                self._json = json.loads(body)
            await asyncio.sleep(0)
    return self._json
