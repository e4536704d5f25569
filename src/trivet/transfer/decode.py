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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trivet.connectors.address import path_of
from trivet.transfer.incoming import Incoming, State
from trivet.transfer.link import Connection, Listener
from trivet.transfer.messages import Landed, is_transfer
from trivet.transfer.pieces import ranges_of
from trivet.transfer.plan import Receive, Report, StepPlan
from trivet.transfer.prefill_link import PrefillLink
from trivet.transfer.prompts import prompt_of
from trivet.transfer.room import Room
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


_MOST_LINKS = 256
"""Prefill engines at once. Addresses come with requests, and each link has threads."""


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
        windows: Sequence[int | None] = (),
        max_model_len: int,
        carries_output: bool,
        overtaken: bool,
        counts: Counts,
        trace: Trace,
    ) -> None:
        """
        Args:
            block_tokens: tokens of a block, by cache group.
            windows: tokens of a sliding window, by cache group.
            max_model_len: the longest that a prompt with its answer may be.
            carries_output: whether the model runner takes tokens of the answer with a request that it does not know
                yet (V2); else the first token must look like the prompt's last one.
            overtaken: see ``Room``.
        """
        self._settings, self.engine_id, self.identity = settings, engine_id, identity
        self._ranks, self._block_tokens, self._carries_output = ranks, block_tokens, carries_output
        self._counts, self.trace = counts, trace
        self._windows, self._max_model_len = tuple(windows), max_model_len
        self._manager: KVCacheManager | None = None
        self._room = Room(block_tokens, overtaken=overtaken)
        self.lock = threading.RLock()
        self._links: dict[str, PrefillLink] = {}
        self._incoming: dict[str, Incoming] = {}
        """By request id, until vLLM goes on by itself."""
        self._given_back: set[Request] = set()
        """They hold no blocks, and vLLM counts as if they did."""
        self._receives: list[Receive] = []
        self._given_up: list[tuple[str, int]] = []
        self._failed: list[str] = []
        self._forget: list[str] = []
        self._notices = Listener(settings.notice_path, self._hear_workers, "trivet-notices")

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM's owner of blocks: those of a transfer that failed go back to it."""
        self._manager = manager
        self._room.bind(manager)

    def close(self) -> None:
        """Closes all links."""
        self._notices.close()
        for link in list(self._links.values()):
            link.close()

    # --- the scheduler

    def on_new_request(self, request: Request, params: dict[str, Any]) -> None:
        """A request has come; if its KV is to come from prefill, prefill is asked for it now.

        What ``params`` has is the client's word: anything.
        """
        transfer, address = params.get("transfer_id"), params.get("prefill_address")
        if not params.get("do_remote_prefill") or params.get("do_remote_decode"):
            return
        if not is_transfer(transfer) or not isinstance(address, str):
            return
        first = bool(params.get("first_token"))
        embedded = request.prompt_token_ids is None or request.prompt_embeds is not None
        if embedded and not first:
            return  # this engine computes it
        skips = bool(request.skip_reading_prefix_cache)
        incoming = Incoming(transfer, request, first, prompt_of(request), skips)
        with self.lock:
            if request.request_id in self._incoming:
                return
            self._incoming[request.request_id] = incoming
            self.trace.mark("decode", transfer, "request queued")
            incoming.park()
            why = self._open(incoming, address)
            if why is not None:
                incoming.lose(why)
            if first and (why := self._refusal(request, embedded=embedded)) is not None:
                self._fail(incoming, why)

    def _open(self, incoming: Incoming, address: str) -> str | None:
        """Asks prefill; why that cannot be done, or None."""
        link = self._links.get(address)
        if link is None or link.ended:
            if len(self._links) >= _MOST_LINKS:
                return f"prefill cannot be reached: there are {_MOST_LINKS} links"
            try:
                path_of(address)
                link = self._links[address] = PrefillLink(self, address, self._settings.lease_s)
            except (ValueError, RuntimeError) as error:
                return f"prefill cannot be reached: {error}"
        if not link.open(incoming):
            return "another request has its transfer id"
        incoming.link = link
        return None

    def forget(self, link: PrefillLink) -> None:
        """A link has ended. Called with the lock."""
        self._links = {address: one for address, one in self._links.items() if one is not link}

    def _refusal(self, request: Request, *, embedded: bool) -> str | None:
        """Why a request cannot go on behind a first token, or None: it would be another answer, or none at all."""
        if embedded:
            return "its prompt has embeddings, which are computed here"
        if request.num_prompt_tokens + 1 >= self._max_model_len:
            return f"no token has room behind the first: --max-model-len is {self._max_model_len}"
        if request.max_tokens <= 1:
            return "no token was asked for behind the first"
        if request.use_structured_output:
            return "its grammar begins with the first token"
        return None

    def matched(self, request: Request, cached_tokens: int) -> tuple[int | None, bool]:
        """Tokens whose KV comes, behind those cached here; see ``get_num_new_matched_tokens``."""
        with self.lock:
            incoming = self._incoming.get(request.request_id)
            if incoming is None:
                return (0 if self._room.lets(request) else None), False
            tokens = self._tokens(incoming, cached_tokens)
            # vLLM 0.32 has no KV come for a request that may not read caches: it would make its first token again.
            # The wish is heard all the same, as vLLM looks into its own cache before it asks; see ``plan``.
            request.skip_reading_prefix_cache = incoming.skips_cache and incoming.state is State.SETTLED
            return tokens, bool(tokens)

    def _tokens(self, incoming: Incoming, cached_tokens: int) -> int | None:
        request = incoming.request
        if incoming.gave_back:
            # Asked again it stands among those without blocks; until then it would hold up those that have theirs.
            incoming.gave_back = False
            return None
        if incoming.woken:
            incoming.woken = False
            if not cached_tokens and not incoming.skips_cache and self._has_cached(request):
                return None  # vLLM looked into its cache a moment before this could be said: it is to look again
        if incoming.state is not State.SETTLED and not incoming.fails:
            if incoming.lost is None and self._is_past_window(request, incoming):
                incoming.lost = "its last token's window begins in a block that decode does not get"
            if incoming.lost is not None:
                if incoming.awaits_token:
                    self._room.leave(incoming)
                    return None  # prefill lives and will say
                if incoming.lacks_token:
                    self._fail(incoming, incoming.lost)  # vLLM ends with an error only what it waits for
                else:
                    self._recompute(incoming, request.num_prompt_tokens - cached_tokens)
            elif incoming.state is State.OPENED:
                return None
        if not self._room.fits(incoming, cached_tokens):
            return None
        if incoming.state is State.SETTLED:
            return 0
        incoming.cached_tokens = cached_tokens
        return request.num_tokens - cached_tokens

    def _has_cached(self, request: Request) -> bool:
        """Whether the prompt's first block is in vLLM's prefix cache."""
        pool = getattr(self._manager, "block_pool", None)
        hashes = request.block_hashes
        return pool is not None and bool(hashes) and pool.get_cached_block(hashes[0], [0]) is not None

    def _is_past_window(self, request: Request, incoming: Incoming) -> bool:
        """Whether decode, computing the prompt's last token again for the answer's first, lacks a block for it.

        vLLM gives blocks for the window of the token behind the prompt. That of the last one begins one token earlier,
        which may be in a block of its own; prefill gives that block free when its request ends.
        """
        last = request.num_prompt_tokens
        return not incoming.takes_first_token and any(
            window is not None and last >= window and (last - window + 1) % size == 0
            for window, size in zip(self._windows, self._block_tokens, strict=False)
        )

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM has given blocks to a request; see ``update_state_after_alloc``."""
        with self.lock:
            incoming = self._incoming.get(request.request_id)
            self._given_back.discard(request)
            if incoming is None or incoming.state is State.LOADING:
                return
            if tokens == 0:
                if incoming.state is not State.SETTLED:
                    self._without(incoming)
                del self._incoming[request.request_id]
                self._room.leave(incoming)
                return
            incoming.state = State.LOADING
            self._room.take(incoming)
            if incoming.fails:
                self._failed.append(request.request_id)
                return
            self.trace.mark("decode", incoming.transfer, "blocks taken")
            if incoming.token_known:
                incoming.deadline_s = time.monotonic() + self._settings.lease_s
            ids = tuple(tuple(group) for group in blocks.get_block_ids())
            wanted = tuple(self._wanted(group, own, incoming) for group, own in enumerate(ids))
            link = incoming.link
            assert link is not None  # else it was lost before it could load
            self._receives.append(
                Receive(
                    incoming.transfer,
                    request.request_id,
                    incoming.attempt,
                    tuple(link.data_paths),
                    link.prefill_engine,
                    ids,
                    wanted,
                )
            )

    def _without(self, incoming: Incoming) -> None:
        """vLLM goes on without the KV that it was told of. No version that is known does."""
        log = logger.error if incoming.takes_first_token else logger.warning
        log("TrivetConnector: transfer %s: vLLM did not take KV from prefill", incoming.transfer)
        self._counts.failed("other")
        self._settle(incoming)

    def _wanted(self, group: int, ids: tuple[int, ...], incoming: Incoming) -> tuple[tuple[int, int], ...]:
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
                incoming.woken = False  # vLLM looks into its cache after this
                if incoming.state is State.OPENED and incoming.lost is None:
                    incoming.park()
                elif incoming.state is not State.LOADING:
                    incoming.unpark()
                elif not incoming.dropped and not incoming.fails:
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
                if incoming.state is not State.LOADING or incoming.fails:
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
                if incoming.aborted or incoming.has_all:
                    del self._incoming[request_id]

    def _goes_on(self, incoming: Incoming, *, complete: bool) -> bool:
        """Prepares a request on which no worker works any more to go on; False if it must wait."""
        request = incoming.request
        if incoming.aborted:
            self._settle(incoming)
            self._room.leave(incoming)
            return True
        if incoming.withdrawn and incoming.lost is None:
            # Also where all KV has come: while prefill begins again, blocks that are kept here for a first token may
            # be those for which others wait, who in turn keep the blocks that prefill needs to begin.
            self._give_blocks_back(incoming)
            incoming.state = State.ANNOUNCED if incoming.announced else State.OPENED
            return True
        if incoming.lacks_token:
            self._fail(incoming, incoming.lost or "prefill is done and has no first token")
            self._failed.append(request.request_id)
            self._forget.append(request.request_id)
            return False
        if complete:
            if incoming.awaits_token:
                return False
            incoming.has_all = True
            self._take_first_token(incoming)
            self._settle(incoming)
            self._room.landed(incoming)
            return True
        self._give_blocks_back(incoming)
        incoming.state = State.OPENED
        if not incoming.awaits_token:
            self._recompute(incoming, request.num_prompt_tokens - incoming.cached_tokens)
        return True

    def _give_blocks_back(self, incoming: Incoming) -> None:
        """What came is of no use; vLLM then begins with what is cached here."""
        assert self._manager is not None
        self._manager.free(incoming.request)
        incoming.request.num_computed_tokens = 0
        self._given_back.add(incoming.request)
        self._room.leave(incoming)
        incoming.gave_back = True
        incoming.withdrawn = incoming.dropped = False
        incoming.deadline_s = float("inf")
        incoming.landed_at.clear()
        incoming.attempt += 1

    def take_given_back(self) -> set[Request]:
        """Requests that hold no blocks any more, each once; see ``backport.release_reservations``."""
        with self.lock:
            given_back, self._given_back = self._given_back, set()
            return given_back

    def _fail(self, incoming: Incoming, why: str) -> None:
        """It must end with an error, and never with another answer."""
        incoming.lose(why)
        incoming.fails = True
        logger.error("TrivetConnector: transfer %s fails: %s", incoming.transfer, why)
        self._counts.failed(_kind(why))

    def _recompute(self, incoming: Incoming, tokens: int) -> None:
        why = incoming.lost or "its KV did not come"
        logger.warning(
            "TrivetConnector: transfer %s: %s; decode computes %d tokens itself", incoming.transfer, why, tokens
        )
        self._counts.failed(_kind(why))
        self._counts.recomputed(tokens)
        self._take_first_token(incoming)
        self._settle(incoming)

    def _settle(self, incoming: Incoming) -> None:
        self.trace.mark("decode", incoming.transfer, "goes on")
        incoming.state = State.SETTLED
        incoming.unpark()
        if incoming.link is not None:
            incoming.link.close_transfer(incoming)

    def _take_first_token(self, incoming: Incoming) -> None:
        if not incoming.takes_first_token or incoming.token is None or incoming.token_taken:
            return
        incoming.token_taken = True
        request, token = incoming.request, incoming.token
        if self._carries_output:
            request.append_output_token_ids(token)
            return
        assert request.prompt_token_ids is not None
        # A list of its own: where engine and front end are one process, the front end and the other requests of one
        # that asks for several answers (``n``) have the same list. ``_all_token_ids`` is the request's alone.
        request.prompt_token_ids = [*request.prompt_token_ids, token]
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
            self._given_back.discard(request)
            if incoming is None:
                return
            if incoming.state is State.LOADING and not incoming.fails:
                incoming.aborted = True
                return
            if incoming.state is not State.SETTLED:
                self._settle(incoming)
            self._room.leave(incoming)
            del self._incoming[request.request_id]


_KINDS = (
    "checksum",
    "differ",
    "cannot be reached",
    "no mover",
    "did not arrive",
    "lease",
    "gone",
    "another prompt",
    "transfer id",
    "window",
    "behind the first",
    "ended",
)


def _kind(why: str) -> str:
    """The reason as a metric's label: few values."""
    return next((word for word in _KINDS if word in why), "other")
