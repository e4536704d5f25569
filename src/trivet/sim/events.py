"""A simulated engine's KV events, on the wire as vLLM's ``ZmqEventPublisher`` sends them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from trivet.errors import PortInUseError, TrivetError
from trivet.sim.pool import Key
from trivet.sim.settings import SimEvents

_END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """What happens in an engine's prefix cache, told to whoever listens. ``open`` once, ``close`` once."""

    def __init__(self, settings: SimEvents, block_size: int) -> None:
        self._settings = settings
        self._block_size = block_size
        self._events: list[dict[str, Any]] = []
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._number = 0
        self._mute_until_s = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._events_out: zmq.Socket[bytes] | None = None
        self._answering: asyncio.Task[None] | None = None
        self._pending: asyncio.Handle | None = None

    async def open(self) -> None:
        """Begins to listen.

        Raises:
            PortInUseError: someone else listens there.
            TrivetError: it cannot listen there.
        """
        settings = self._settings
        for address in (settings.endpoint, settings.replay_endpoint):
            if address.startswith("ipc://"):
                _make_folder(address)
        self._context = zmq.Context()
        shadow = zmq.asyncio.Context.shadow(self._context.underlying)
        try:
            self._events_out = self._context.socket(zmq.PUB)
            self._events_out.linger = 0
            if _is_bound(settings.endpoint):
                _bind(self._events_out, settings.endpoint)
            else:
                self._events_out.connect(settings.endpoint)
            replays = shadow.socket(zmq.ROUTER)
            replays.linger = 0
            _bind(replays, settings.replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            self._context = self._events_out = None
            raise
        self._answering = asyncio.create_task(self._answer(replays), name="kv event replays")

    async def close(self) -> None:
        """Listens no more."""
        self.cut()
        if self._answering is not None:
            await asyncio.gather(self._answering, return_exceptions=True)
            self._answering = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def cut(self) -> None:
        """Goes silent at once, as a process that dies."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._answering is not None:
            self._answering.cancel()
        if self._events_out is not None:
            self._events_out.close(linger=0)
            self._events_out = None

    def mute(self, seconds: float) -> None:
        """A fault: for a time batches are numbered and kept, and sent to those only who ask for them."""
        self._mute_until_s = time.monotonic() + seconds

    def stored(self, keys: Sequence[Key], parent: Key | None, token_ids: Sequence[int], salt: str | None) -> None:
        """Tells of blocks that can be found from now on, which follow each other.

        Args:
            parent: the block before them; None if they begin a prompt.
            salt: the prompt's ``cache_salt``.
        """
        extra: list[tuple[str, ...] | None] = [None] * len(keys)
        if parent is None and salt:
            extra[0] = (salt,)
        self._note(
            {
                "type": "BlockStored",
                "block_hashes": [_name(key) for key in keys],
                "parent_block_hash": None if parent is None else _name(parent),
                "token_ids": list(token_ids),
                "block_size": self._block_size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": extra,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )

    def removed(self, key: Key) -> None:
        """Tells of a block that was given to another prompt."""
        self._note({"type": "BlockRemoved", "block_hashes": [_name(key)], "medium": "GPU", "group_idx": 0})

    def cleared(self) -> None:
        """Tells that the cache is empty."""
        self._note({"type": "AllBlocksCleared"})

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        if self._pending is None and self._events_out is not None:
            self._pending = asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """One batch for all that happened in this turn of the loop, as vLLM sends one a step."""
        self._pending = None
        batch = msgspec.msgpack.encode([time.time(), self._events, 0])
        self._events = []
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._kept.append((number, batch))
        if self._events_out is not None and time.monotonic() >= self._mute_until_s:
            self._events_out.send_multipart([b"", number, batch], zmq.NOBLOCK)

    async def _answer(self, replays: zmq.asyncio.Socket) -> None:
        try:
            while True:
                frames = await replays.recv_multipart()
                if len(frames) != 3:  # as vLLM, which logs it
                    continue
                who, _, since = frames
                for number, batch in list(self._kept):
                    if number >= since:
                        await replays.send_multipart([who, b"", b"", number, batch])
                await replays.send_multipart([who, b"", b"", _END, b""])
        finally:
            with contextlib.suppress(zmq.ZMQError):
                replays.close(linger=0)


def _make_folder(address: str) -> None:
    folder = Path(address.removeprefix("ipc://")).parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise TrivetError(f"KV events: {folder}: {error.strerror}", mend="another endpoint") from None


def _is_bound(endpoint: str) -> bool:
    """As vLLM decides it: it connects to everything else."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _bind(one: zmq.Socket[Any], address: str) -> None:
    try:
        one.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise PortInUseError(f"KV events: {address} is taken", mend="another endpoint") from None
        raise TrivetError(f"KV events: cannot listen at {address}: {error}", mend="another endpoint") from None


def _name(key: Key) -> int:
    """Its last 64 bits, as vLLM names blocks (``maybe_convert_block_hash``)."""
    return int.from_bytes(key, "big") & (2**64 - 1)
