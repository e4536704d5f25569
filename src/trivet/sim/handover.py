"""Hand-overs: KV that prefill holds for decode, and how decode pulls it. Shaped as vLLM's NixlConnector (pull).

Prefill answers a request that asks for it (``do_remote_decode``) with the coordinates of its blocks and holds them
for the lease. Decode pulls over HTTP, from this engine's own port; a pull frees the blocks. A decode request that
ends before its pull says so, which frees them too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import aiohttp

from trivet.sim.connector import Connector, PullError
from trivet.sim.connector import Source as AnySource
from trivet.sim.pool import BlockPool
from trivet.sim.scheduler import End, SimSequence
from trivet.sim.settings import NIXL, SimSettings
from trivet.sim.stats import Stats
from trivet.sim.tokens import digest

PULL_PATH = "/sim/kv/pull"
RELEASE_PATH = "/sim/kv/release"
_NEEDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a decode request's KV is."""

    engine_id: str
    request_id: str
    url: str
    prefill_cached_tokens: int | None

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> Source | None:
        """From ``kv_transfer_params``; None if they name nothing that can be pulled."""
        if not params.get("do_remote_prefill") or any(params.get(name) is None for name in _NEEDS):
            return None
        if not any(params.get("remote_block_ids") or ()):
            return None
        host, cached = str(params["remote_host"]), params.get("remote_prefill_cached_tokens")
        return cls(
            engine_id=str(params["remote_engine_id"]),
            request_id=str(params["remote_request_id"]),
            url=f"http://{f'[{host}]' if ':' in host else host}:{params['remote_port']}",
            prefill_cached_tokens=cached if isinstance(cached, int) else None,
        )


@dataclass(slots=True)
class _Held:
    blocks: list[int]
    tokens: int
    prompt: str
    expires: asyncio.TimerHandle
    being_pulled: bool = False


class Handovers(Connector):
    """The hand-overs of one engine, as prefill and as decode."""

    name: ClassVar[str | None] = NIXL

    def __init__(
        self,
        settings: SimSettings,
        pool: BlockPool,
        stats: Stats,
        *,
        engine_id: str,
        address: Callable[[], tuple[str, int]],
        freed: Callable[[], None],
    ) -> None:
        """
        Args:
            address: host and port under which decode finds this engine.
            freed: called when blocks have become free.
        """
        super().__init__()
        self._settings = settings
        self._pool = pool
        self._stats = stats
        self._engine_id = engine_id
        self._address = address
        self._freed = freed
        self._held: dict[str, _Held] = {}
        self._session: aiohttp.ClientSession | None = None
        self._notifications: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> int:
        """See ``Connector``."""
        return len(self._held)

    async def close(self) -> None:
        """See ``Connector``."""
        for held in self._held.values():
            held.expires.cancel()
            self._pool.let_go(held.blocks)
        self._held.clear()
        for task in list(self._notifications):
            task.cancel()
        await asyncio.gather(*self._notifications, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # as every connector

    def source(self, params: Mapping[str, Any]) -> Source | None:
        """See ``Connector``."""
        return Source.parse(params)

    def declines(self, source: AnySource) -> bool:
        """See ``Connector``."""
        assert isinstance(source, Source)
        self.notify(source)
        return True

    def refused(self, params: Mapping[str, Any]) -> None:
        """See ``Connector``."""
        if (source := Source.parse(params)) is not None:
            self.notify(source)

    def ended(self, sequence: SimSequence, end: End) -> None:
        """See ``Connector``."""
        if sequence.hands_over and not sequence.withholds and end in (End.STOP, End.LENGTH):
            sequence.told = self.offer(sequence)
        # a pull that failed leaves prefill's blocks to their lease; one that was cut off may not have reached prefill
        if sequence.source is not None and not sequence.pulled and end is not End.ERROR:
            self.notify(sequence.source)

    def recomputes(self, sequence: SimSequence) -> bool:  # noqa: ARG002
        """See ``Connector``."""
        return self._settings.kv_load_failure_policy == "recompute"

    # prefill's side

    def offer(self, sequence: SimSequence) -> dict[str, Any] | None:
        """Holds a finished sequence's blocks; the parameters that decode needs, None if there is nothing to hold."""
        if not sequence.blocks:
            return None
        blocks = list(sequence.blocks)
        self._pool.hold(blocks)
        expires = asyncio.get_running_loop().call_later(self._settings.kv_lease_s, self._expire, sequence.name)
        self._held[sequence.name] = _Held(blocks, sequence.computed, digest(sequence.prompt), expires)
        self.counts.offered += 1
        host, port = self._address()
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self._engine_id,
            "remote_request_id": sequence.name,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": sequence.computed,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }
        if not self._settings.is_old:
            params["remote_prefill_cached_tokens"] = sequence.cached
        return params

    async def give(self, asked: Mapping[str, Any]) -> str | None:
        """Serves a pull; what is wrong with it, None if decode has the KV now.

        Cancelled when decode is gone: the blocks are free then all the same.
        """
        held = self._held.get(str(asked.get("request_id")))
        if asked.get("engine_id") != self._engine_id or held is None or held.being_pulled:
            self.counts.refused += 1
            self._stats.late_notifications += 1
            return f"{asked.get('request_id')} is not held here (any more)"
        if asked.get("prompt") != held.prompt:
            self.counts.mismatched += 1
            self._end(str(asked["request_id"]))
            return "decode's prompt is not the one that prefill computed"
        held.being_pulled = True
        held.expires.cancel()  # decode's heartbeats extend the lease while it reads
        whole = False
        try:
            await asyncio.sleep(max(float(asked.get("transfer_s") or 0.0), self._transfer_s(asked.get("tokens"))))
            whole = not asked.get("only_to_release")
        finally:
            if str(asked["request_id"]) in self._held:
                if whole:
                    self.counts.taken += 1
                else:
                    self.counts.released += 1
                self._end(str(asked["request_id"]))
        return None

    def release(self, asked: Mapping[str, Any]) -> bool:
        """Frees what decode will not pull; whether it was held."""
        held = self._held.get(str(asked.get("request_id")))
        if asked.get("engine_id") != self._engine_id or held is None:
            self._stats.late_notifications += 1
            return False
        if not held.being_pulled:
            self.counts.released += 1
            self._end(str(asked["request_id"]))
        return True

    def _expire(self, request_id: str) -> None:
        self.counts.expired += 1
        self._stats.expired += 1
        self._end(request_id)

    def _end(self, request_id: str) -> None:
        held = self._held.pop(request_id)
        held.expires.cancel()
        self._pool.let_go(held.blocks)
        self._freed()

    # decode's side

    async def pull(self, sequence: SimSequence) -> None:
        """See ``Connector``."""
        source: Source = sequence.source
        asked = {
            "engine_id": source.engine_id,
            "request_id": source.request_id,
            "prompt": digest(sequence.prompt),
            "tokens": (tokens := len(sequence.prompt) - sequence.computed),
            "transfer_s": self._transfer_s(tokens),
            "only_to_release": sequence.leg == "release",
        }
        try:
            if sequence.loses_at is not None:
                raise PullError("simulated fault: the transfer is lost")
            async with self._open().post(f"{source.url}{PULL_PATH}", json=asked) as answer:
                if answer.status != 200:
                    raise PullError((await answer.text())[:200])
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self.counts.failed += 1
            raise PullError(f"{source.url} does not answer ({type(error).__name__})") from error
        except PullError:
            self.counts.failed += 1
            raise
        self.counts.pulled += 1

    def notify(self, source: Source) -> None:
        """Tells prefill, in the background, that a request will not pull."""
        task = asyncio.create_task(self._notify(source), name=f"release {source.request_id}")
        self._notifications.add(task)
        task.add_done_callback(self._notifications.discard)

    async def _notify(self, source: Source) -> None:
        asked = {"engine_id": source.engine_id, "request_id": source.request_id}
        try:
            async with self._open().post(f"{source.url}{RELEASE_PATH}", json=asked) as answer:
                if answer.status != 200:
                    self._stats.failed_notifications += 1
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            self._stats.failed_notifications += 1

    def _transfer_s(self, tokens: Any) -> float:
        return int(tokens or 0) * self._settings.transfer_ms_per_token / 1000

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT, connector=aiohttp.TCPConnector(keepalive_timeout=1))
        return self._session
