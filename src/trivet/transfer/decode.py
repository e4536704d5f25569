"""Scheduler side of decode: takes blocks once prefill has begun, and lets a request go on when its KV is there.

A request that is to receive goes through these states:

    opened      prefill was asked; vLLM is told to ask again (``None``), so that the request holds no blocks
    announced   prefill has scheduled the prompt's first chunk: the rest of the prompt is claimed
    loading     blocks are there and the workers write into them
    settled     vLLM goes on by itself: with KV, or (nothing came) computing the prompt here

Where prefill's token is the answer's first, a request does not go on before that token is known.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from trivet.transfer.link import Connection, Listener
from trivet.transfer.messages import (
    PROTOCOL,
    Alive,
    Announce,
    Close,
    First,
    Hello,
    Landed,
    Lost,
    Message,
    Open,
    Welcome,
    Withdraw,
)
from trivet.transfer.pieces import ranges_of
from trivet.transfer.plan import Receive, Report, StepPlan
from trivet.transfer.settings import Settings
from trivet.transfer.stats import Counts
from trivet.transfer.trace import Trace

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.trivet")

_NO_BLOCK = 0
"""vLLM's null block: a place outside a sliding window."""


class _State(Enum):
    OPENED = auto()
    ANNOUNCED = auto()
    LOADING = auto()
    SETTLED = auto()


@dataclass(slots=True, eq=False)
class _Incoming:
    """A request whose KV prefill computes."""

    transfer: str
    request: Request
    takes_first_token: bool
    link: _Link
    state: _State = _State.OPENED
    announced: bool = False
    lost: str | None = None
    """Why its KV will not come."""
    token: int | None = None
    token_known: bool = False
    """Prefill is done: ``token`` is what there will ever be."""
    token_lost: bool = False
    """Prefill will never say it."""
    token_taken: bool = False
    deadline_s: float = float("inf")
    """Until when what prefill has computed must be here."""
    withdrawn: bool = False
    """Prefill begins again: what is here is worth nothing until it announces anew."""
    attempt: int = 0
    """How often it was withdrawn: reports of former attempts may still be under way."""
    dropped: bool = False
    """The workers were told to stop."""
    has_all: bool = False
    aborted: bool = False
    fails: bool = False
    """It must end with an error: its first token went to the client and is not known here."""
    cached_tokens: int = 0
    landed_at: set[int] = field(default_factory=set)
    """Ranks that have said so."""


class DecodeSide:
    """See the module. Methods are for the scheduler's thread; links have threads of their own."""

    def __init__(
        self,
        settings: Settings,
        engine_id: str,
        identity: dict[str, Any],
        *,
        ranks: int,
        block_tokens: list[int],
        carries_output: bool,
        counts: Counts,
        trace: Trace,
    ) -> None:
        """
        Args:
            block_tokens: tokens of a block, by cache group.
            carries_output: whether the model runner takes tokens of the answer with a request that it does not know
                yet (V2); else the first token must look like the prompt's last one.
        """
        self._settings, self.engine_id, self.identity = settings, engine_id, identity
        self._ranks, self._block_tokens, self._carries_output = ranks, block_tokens, carries_output
        self._counts, self.trace = counts, trace
        self._manager: KVCacheManager | None = None
        self.lock = threading.RLock()
        self._links: dict[str, _Link] = {}
        self._incoming: dict[str, _Incoming] = {}
        """By request id."""
        self._receives: list[Receive] = []
        self._given_up: list[tuple[str, int]] = []
        self._failed: list[str] = []
        self._forget: list[str] = []
        self._notices = Listener(settings.notice_path, self._hear_workers, "trivet-notices")

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM's owner of blocks: those of a transfer that failed go back to it."""
        self._manager = manager

    def close(self) -> None:
        """Closes all links."""
        self._notices.close()
        for link in list(self._links.values()):
            link.close()

    # --- the scheduler

    def on_new_request(self, request: Request, params: dict[str, Any]) -> None:
        """A request has come; if its KV is to come from prefill, prefill is asked for it now."""
        transfer, address = params.get("transfer_id"), params.get("prefill_address")
        if not params.get("do_remote_prefill") or not isinstance(transfer, str) or not isinstance(address, str):
            return
        if request.prompt_token_ids is None:
            return  # made of embeddings: this engine computes it
        with self.lock:
            link = self._links.get(address)
            if link is None or link.ended:
                link = self._links[address] = _Link(self, address, self._settings.lease_s / 3)
            incoming = _Incoming(transfer, request, bool(params.get("first_token")), link)
            self._incoming[request.request_id] = incoming
            self.trace.mark("decode", transfer, "request queued")
            link.open(incoming)

    def matched(self, request: Request, cached_tokens: int) -> tuple[int | None, bool]:
        """Tokens whose KV comes, behind those cached here; see ``get_num_new_matched_tokens``."""
        with self.lock:
            incoming = self._incoming.get(request.request_id)
            if incoming is None or incoming.state is _State.SETTLED:
                return 0, False
            if incoming.lost is not None:
                if incoming.takes_first_token and not incoming.token_known:
                    if not (incoming.link.ended or incoming.token_lost):
                        return None, False  # prefill lives and will say
                    incoming.fails = True  # vLLM ends with an error only what it waits for
                elif not incoming.fails:
                    self._recompute(incoming, request.num_prompt_tokens - cached_tokens)
                    return 0, False
            elif incoming.state is _State.OPENED:
                return None, False
            if not incoming.fails and not self._fits(incoming):
                return None, False
            incoming.cached_tokens = cached_tokens
            return request.num_tokens - cached_tokens, True

    def _fits(self, incoming: _Incoming) -> bool:
        """Whether there are blocks for the prompt, and those that first tokens will need besides.

        Behind a prompt that fills its last block, the first token needs a block that vLLM does not know of when it
        gives blocks to the prompt. Were all blocks held by requests of which the first waits for one more, none could
        ever go on: vLLM takes no blocks from a request that is loading, and lets none overtake it. Those that run may
        take what is free; it comes back when they end.
        """
        pool = getattr(self._manager, "block_pool", None)
        loading = (other for other in self._incoming.values() if other.state is _State.LOADING)
        spare = self._needs_spare(incoming) + sum(self._needs_spare(other) for other in loading)
        if pool is None or not spare:
            return True
        needed = spare + sum(-(-incoming.request.num_tokens // size) for size in self._block_tokens)
        return bool(needed <= pool.get_num_free_blocks() or needed > pool.num_gpu_blocks - 1)

    def _needs_spare(self, incoming: _Incoming) -> bool:
        tokens = incoming.request.num_prompt_tokens
        return (
            incoming.takes_first_token
            and not incoming.token_taken
            and any(tokens % size == 0 for size in self._block_tokens)
        )

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM has given blocks to a request; see ``update_state_after_alloc``."""
        with self.lock:
            incoming = self._incoming.get(request.request_id)
            if incoming is None or incoming.state in (_State.SETTLED, _State.LOADING):
                return
            if tokens == 0:  # vLLM does without, as for a request that may not read caches
                self._settle(incoming)
                return
            incoming.state = _State.LOADING
            if incoming.fails:
                self._failed.append(request.request_id)
                return
            self.trace.mark("decode", incoming.transfer, "blocks taken")
            ids = tuple(tuple(group) for group in blocks.get_block_ids())
            wanted = tuple(self._wanted(group, own, incoming) for group, own in enumerate(ids))
            self._receives.append(
                Receive(
                    incoming.transfer,
                    request.request_id,
                    incoming.attempt,
                    tuple(incoming.link.data_paths),
                    incoming.link.prefill_engine,
                    ids,
                    wanted,
                )
            )

    def _wanted(self, group: int, ids: tuple[int, ...], incoming: _Incoming) -> tuple[tuple[int, int], ...]:
        size = self._block_tokens[group]
        start, end = incoming.cached_tokens // size, -(-incoming.request.num_tokens // size)
        end = min(end, len(ids))
        if _NO_BLOCK not in ids[start:end]:
            return ((start, end),) if start < end else ()
        return tuple(ranges_of([index for index in range(start, end) if ids[index] != _NO_BLOCK]))

    def plan(self) -> StepPlan:
        """What the workers are told of this step."""
        with self.lock:
            now_s = time.monotonic()
            for incoming in self._incoming.values():
                if incoming.state is _State.LOADING and not incoming.dropped and not incoming.fails:
                    if incoming.deadline_s < now_s:
                        incoming.lost = incoming.lost or f"it did not arrive within {self._settings.lease_s:g} s"
                    if incoming.lost is not None or incoming.aborted or incoming.withdrawn:
                        incoming.dropped = True
                        self._given_up.append((incoming.request.request_id, incoming.attempt))
            plan = StepPlan(
                receives=tuple(self._receives),
                given_up=tuple(self._given_up),
                failed=tuple(self._failed),
                forget=tuple(self._forget),
            )
            self._receives, self._given_up, self._failed, self._forget = [], [], [], []
            return plan

    def _hear_workers(self, connection: Connection) -> None:
        while (message := connection.receive()) is not None:
            if not isinstance(message, Landed):
                raise ValueError(f"a {type(message).__name__} from a worker")
            with self.lock:
                incoming = self._incoming.get(message.request_id)
                if incoming is not None and incoming.attempt == message.attempt:
                    incoming.landed_at.add(message.rank)

    def update(self, output: KVConnectorOutput) -> None:
        """Lets requests go on whose KV is there. vLLM reads ``finished_recving`` after this."""
        report = output.kv_connector_worker_meta
        if not isinstance(report, Report):
            report = Report()
        with self.lock:
            for request_id, incoming in list(self._incoming.items()):
                if incoming.state is not _State.LOADING:
                    continue
                landed, stopped = len(incoming.landed_at), 0
                if report.attempts.get(request_id) == incoming.attempt:
                    landed = max(landed, report.landed.get(request_id, 0))
                    stopped = report.stopped.get(request_id, 0)
                if stopped and not incoming.dropped:  # one rank failed: the others must stop as well
                    incoming.lost = incoming.lost or report.reasons.get(request_id, "its transfer failed")
                if (
                    not landed + stopped
                    or landed + stopped < self._ranks
                    or not self._goes_on(incoming, complete=landed == self._ranks)
                ):
                    continue
                output.finished_recving = {*(output.finished_recving or ()), request_id}
                self._forget.append(request_id)
                if incoming.aborted:
                    del self._incoming[request_id]

    def _goes_on(self, incoming: _Incoming, *, complete: bool) -> bool:
        """Prepares a request on which no worker works any more to go on; False if it must wait."""
        request = incoming.request
        if incoming.aborted:
            self._settle(incoming)
            return True
        if incoming.withdrawn and incoming.lost is None and not complete:
            self._give_blocks_back(incoming)
            incoming.state = _State.ANNOUNCED if incoming.announced else _State.OPENED
            incoming.withdrawn = incoming.dropped = False
            incoming.landed_at.clear()
            incoming.attempt += 1
            return True
        if incoming.takes_first_token and not incoming.token_known:
            if not (incoming.link.ended or incoming.token_lost):
                return False
            if not incoming.fails:
                incoming.fails = True
                self._failed.append(request.request_id)
                self._forget.append(request.request_id)
            return False
        if complete:
            incoming.has_all = True
            self._take_first_token(incoming)
            self._settle(incoming)
            return True
        self._give_blocks_back(incoming)
        self._recompute(incoming, request.num_prompt_tokens - incoming.cached_tokens)
        return True

    def _give_blocks_back(self, incoming: _Incoming) -> None:
        """What came is of no use; vLLM then begins with what is cached here."""
        assert self._manager is not None
        self._manager.free(incoming.request)
        incoming.request.num_computed_tokens = 0

    def _recompute(self, incoming: _Incoming, tokens: int) -> None:
        logger.warning(
            "TrivetConnector: transfer %s: %s; decode computes %d tokens itself",
            incoming.transfer,
            incoming.lost,
            tokens,
        )
        self._counts.failed(_kind(incoming))
        self._counts.recomputed(tokens)
        self._take_first_token(incoming)
        self._settle(incoming)

    def _settle(self, incoming: _Incoming) -> None:
        self.trace.mark("decode", incoming.transfer, "goes on")
        incoming.state = _State.SETTLED
        incoming.link.close_transfer(incoming)

    def _take_first_token(self, incoming: _Incoming) -> None:
        if not incoming.takes_first_token or incoming.token is None or incoming.token_taken:
            return
        incoming.token_taken = True
        request, token = incoming.request, incoming.token
        if self._carries_output:
            request.append_output_token_ids(token)
            return
        assert request.prompt_token_ids is not None
        request.prompt_token_ids.append(token)
        request._all_token_ids.append(token)
        request.num_prompt_tokens += 1
        request.update_block_hashes()
        request.max_tokens -= 1
        params = request.sampling_params
        if params is not None:
            params = params.clone()
            params.max_tokens = request.max_tokens
            params.min_tokens = max(0, params.min_tokens - 1)
            request.sampling_params = params

    def request_finished(self, request: Request) -> None:
        """A request has ended or was aborted. Blocks that are written into stay vLLM's matter until that is over."""
        with self.lock:
            incoming = self._incoming.get(request.request_id)
            if incoming is None:
                return
            if incoming.state is _State.LOADING and not incoming.fails:
                incoming.aborted = True
                return
            if incoming.state is not _State.SETTLED:
                self._settle(incoming)
            del self._incoming[request.request_id]


def _kind(incoming: _Incoming) -> str:
    """The reason as a metric's label: few values."""
    lost = incoming.lost or ""
    for word in ("checksum", "differ", "cannot be reached", "no mover", "did not arrive", "lease", "gone", "ended"):
        if word in lost:
            return word
    return "other"


class _Link:
    """A prefill engine's scheduler side, and the thread that reads from it."""

    def __init__(self, side: DecodeSide, address: str, alive_every_s: float) -> None:
        self._side, self._address, self._alive_every_s = side, address, alive_every_s
        self._connection: Connection | None = None
        self._transfers: dict[str, _Incoming] = {}
        self.ended = False
        self.data_paths: list[str] = []
        self.prefill_engine = ""
        self._wake = threading.Event()
        threading.Thread(target=self._run, name="trivet-link", daemon=True).start()
        threading.Thread(target=self._say_alive, name="trivet-alive", daemon=True).start()

    def open(self, incoming: _Incoming) -> None:
        """Asks prefill for a transfer, now or once the link stands. Called with the side's lock."""
        self._transfers[incoming.transfer] = incoming
        self._wake.set()
        if self._connection is not None:
            self._connection.send(Open(incoming.transfer))

    def close_transfer(self, incoming: _Incoming) -> None:
        """Tells prefill that decode is through with it. Called with the side's lock."""
        if self._transfers.pop(incoming.transfer, None) is not None and self._connection is not None:
            self._connection.send(Close(incoming.transfer, has_all=incoming.has_all))

    def close(self) -> None:
        """Closes the connection, which ends the threads."""
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        why = "prefill is gone"
        connection: Connection | None = None
        try:
            connection = Connection.to(self._address.removeprefix("unix:"))
            connection.send(Hello(PROTOCOL, self._side.engine_id, self._side.identity))
            welcome = connection.receive()
            if not isinstance(welcome, Welcome):
                raise ValueError("prefill did not answer")
            if welcome.problem is not None:
                logger.error("TrivetConnector: prefill at %s: %s", self._address, welcome.problem)
            with self._side.lock:
                self.data_paths, self.prefill_engine = welcome.data_paths, welcome.engine_id
                self._connection = connection
                for transfer in self._transfers:
                    connection.send(Open(transfer))
            while (message := connection.receive()) is not None:
                with self._side.lock:
                    self._hear(message)
        except OSError as error:
            why = f"prefill cannot be reached at {self._address}: {error.strerror or error}"
            logger.error("TrivetConnector: %s", why)
        except ValueError as error:
            why = f"prefill at {self._address}: {error}"
            logger.error("TrivetConnector: %s", why)
        finally:
            with self._side.lock:
                self.ended = True
                for incoming in self._transfers.values():
                    incoming.lost = incoming.lost or why
            self._wake.set()
            if connection is not None:
                connection.close()

    def _hear(self, message: Message) -> None:
        incoming = self._transfers.get(getattr(message, "transfer", ""))
        if incoming is None:
            return
        match message:
            case Announce():
                incoming.announced = True
                if incoming.state is _State.OPENED:
                    incoming.state = _State.ANNOUNCED
            case Withdraw():
                incoming.announced = False
                if incoming.state is _State.ANNOUNCED:
                    incoming.state = _State.OPENED
                elif incoming.state is _State.LOADING:
                    incoming.withdrawn = True
            case First():
                incoming.token, incoming.token_known = message.token, True
                self._side.trace.mark("decode", incoming.transfer, "prefill is done")
                incoming.deadline_s = time.monotonic() + self._side._settings.lease_s
            case Lost():
                incoming.lost = incoming.lost or message.why
                incoming.token_lost = not message.first_comes and not incoming.token_known
            case _:
                raise ValueError(f"a {type(message).__name__} on a link")

    def _say_alive(self) -> None:
        """Keeps the leases of what is opened, and is asleep while nothing is."""
        while not self.ended:
            if not self._transfers:
                self._wake.wait()
                self._wake.clear()
                continue
            time.sleep(self._alive_every_s)
            if self._transfers and self._connection is not None:
                self._connection.send(Alive())
