"""Worker side of prefill: KV leaves in pieces while the rest of the prompt is computed.

The engine's main thread only records events between layers and puts notes into a queue. One thread waits for the
events; another gathers pieces into free slots of the staging, on a stream of its own, and tells decode. Where no slot
is free, or decode has no blocks yet, what is ready waits in the pages where it was computed; the scheduler side keeps
those blocks after the request has ended until all has been read.

What goes wrong with one transfer ends that transfer, by name and with the reason; the threads and the other transfers
go on.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from trivet.transfer.link import Connection, Listener
from trivet.transfer.messages import Cannot, Got, Lost, Message, Offer, Piece, Stop, Took, Try, Use, Want
from trivet.transfer.movers import MOVERS, MoverError, Staging, movers_for, told_as
from trivet.transfer.pages import Pages, checksum
from trivet.transfer.pieces import Coverage, Cut, indexes, part
from trivet.transfer.plan import Chunk, StepPlan
from trivet.transfer.settings import Settings
from trivet.transfer.slots import Slots
from trivet.transfer.stats import Counts
from trivet.transfer.streams import own_stream
from trivet.transfer.trace import Trace

logger = logging.getLogger("vllm.trivet")

_FEWEST_GROUPS = 4
"""Into at least so many groups of layers a chunk is cut, that something overlaps and the last group is small."""
_FEWEST_SLOTS = 2
"""So that one is filled while another is read."""
_MOST_EARLY = 4096
"""Wants of a peer for transfers that this worker has not heard of yet: far more than an engine has requests at once."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A decode worker that is connected."""

    connection: Connection
    engine_id: str = ""
    mover: str | None = None
    early: dict[str, Want] = field(default_factory=dict)
    """What it wants of transfers that the scheduler side has not told of yet, the oldest first."""
    ready: dict[_Transfer, None] = field(default_factory=dict)
    """Its transfers that may have something to send, in the order in which that was computed."""
    could_not: set[str] = field(default_factory=set)
    """Movers that this worker has refused it."""
    gone: bool = False


@dataclass(slots=True, eq=False)
class _Pool:
    """A mover's staging, and who has its slots."""

    staging: Staging
    slots: Slots[_Peer]


@dataclass(slots=True, eq=False)
class _Transfer:
    name: str
    request_id: str
    coverage: Coverage
    blocks: list[list[int]]
    peer: _Peer | None = None
    attempt: int = 0
    """Of decode's, that is served."""
    problem: str | None = None
    """Why it cannot be sent, until it is computed anew."""
    finished: bool = False
    got: bool = False
    waited: bool = False
    """Its next piece was counted as one that waits for a slot."""
    last_computed_ns: int = 0
    ids: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    """Block ids of pieces, which are the same for every layer. They depend on what is wanted and where it lies."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """Layers of a step that are computed once ``event`` has happened."""

    chunks: tuple[tuple[str, tuple[int, ...]], ...]
    """Transfers and, by cache group, how many of their first blocks are then complete."""
    layers: tuple[int, ...]
    event: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class _Spoiled:
    """Transfers whose KV cannot be relied on."""

    transfers: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class _Said:
    peer: _Peer
    message: Message | None
    """None: it is gone."""


class Sender:
    """See the module. Public methods are for the engine's main thread."""

    def __init__(self, pages: Pages, settings: Settings, path: str, counts: Counts, trace: Trace) -> None:
        """
        Args:
            path: where decode's worker of the same rank connects.

        Raises:
            ValueError: the settings do not suit this engine, in one line.
        """
        self._pages, self._settings, self._counts, self._trace = pages, settings, counts, trace
        self._movers = movers_for(pages.device, settings.movers)
        self._slot_bytes = max(settings.piece_bytes, pages.largest_block_bytes)
        self._launched: queue.SimpleQueue[StepPlan | _Ready | _Spoiled | None] = queue.SimpleQueue()
        """What the engine's main thread says, in its order."""
        self._notes: queue.SimpleQueue[StepPlan | _Ready | _Spoiled | _Said | None] = queue.SimpleQueue()
        """The same once it has happened on the device, and what peers say."""
        self._losing: dict[str, StepPlan] = {}
        """Transfers whose blocks were taken away, with the last step that did so, until the sending thread has heard
        of that step: it must not read them meanwhile."""
        self._sent: set[str] = set()
        self._lock = threading.Lock()
        self._chunks: tuple[tuple[str, tuple[int, ...]], ...] = ()
        self._stride = 1
        self._launching: list[int] = []
        """Layers that were launched and not told of yet."""
        self._to_launch: set[int] = set()
        self._sends_early: bool | None = None
        """Whether a layer is final once its hook was called; None until a step has shown it."""
        self._runs_again = False
        self._last: _Ready | None = None
        """A step's last layers. Told of when it is over, so that no transfer is complete before it is known that none
        ran twice."""
        self._transfers: dict[str, _Transfer] = {}
        self._peers: set[_Peer] = set()
        self._pools: dict[str, _Pool] = {}
        self._broken: str | None = None
        """Why this worker cannot send at all."""
        self._thread = threading.Thread(target=self._run, name="trivet-sender", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="trivet-watcher", daemon=True).start()
        self._listener = Listener(path, self._serve, "trivet-sender-peer")

    # --- the engine's main thread: constant work for a step, whatever the prompt's length

    def begin(self, plan: StepPlan) -> None:
        """Before a step is computed."""
        if plan.preempted or plan.dropped:
            # vLLM may have launched the zeroing of these blocks for their next owner already: V2's runner does it in
            # ``update_requests``, before this and before ``handle_preemptions``. A piece that is gathered in the
            # milliseconds between is wrong, and leaves. Decode is protected from it by the scheduler side alone, which
            # has said ``Withdraw`` or ``Lost`` before the step began.
            with self._lock:
                for name in (*plan.preempted, *plan.dropped):
                    self._losing[name] = plan
        if plan.chunks or plan.preempted or plan.finished or plan.dropped:
            self._launched.put(plan)
        self._chunks = ()
        if plan.chunks:
            tokens = self._pages.block_tokens
            self._chunks = tuple(
                (
                    chunk.transfer,
                    tuple((chunk.computed_tokens + (size - 1) * chunk.is_last) // size for size in tokens),
                )
                for chunk in plan.chunks
            )
            largest = max(max(blocks) for _, blocks in self._chunks) * self._pages.largest_block_bytes
            fits = self._slot_bytes // max(largest, 1)
            self._stride = max(1, min(fits, len(self._pages.layers) // _FEWEST_GROUPS))
            self._launching, self._to_launch = [], set(range(len(self._pages.layers)))
            self._runs_again, self._last = False, None

    def layer_done(self, name: str) -> None:
        """A layer's attention has been launched. Layers come in whatever order the model runs them."""
        if not self._chunks or (layer := self._pages.index.get(name)) is None:
            return
        if layer not in self._to_launch:
            self._runs_again = True
            return
        self._to_launch.remove(layer)
        self._launching.append(layer)
        if self._sends_early and (len(self._launching) >= self._stride or not self._to_launch):
            self._emit()

    def step_done(self) -> None:
        """All layers have been launched, those among them that no hook saw (a CUDA graph of the whole step)."""
        if not self._chunks:
            return
        if self._runs_again and self._sends_early is not False:
            self._sends_late()
        elif self._sends_early is None and len(self._to_launch) < len(self._pages.layers):
            self._sends_early = True
        self._launching += sorted(self._to_launch)
        self._to_launch = set()
        if self._launching:
            self._emit()
        self._tell_last()
        self._chunks = ()

    def _tell_last(self) -> None:
        if (last := self._last) is not None:
            self._last = None
            self._launched.put(last)

    def take_sent(self) -> set[str]:
        """Request ids whose blocks are needed no more, each once."""
        if not self._sent:
            return set()
        with self._lock:
            sent, self._sent = self._sent, set()
        return sent

    def close(self) -> None:
        """Ends its threads and gives memory back."""
        self._listener.close()
        self._launched.put(None)
        self._thread.join(timeout=5)

    def _emit(self) -> None:
        event = None
        if self._pages.device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record()
        ready = _Ready(self._chunks, tuple(self._launching), event)
        self._launching = []
        if self._to_launch:
            self._launched.put(ready)
        else:
            self._last = ready

    def _sends_late(self) -> None:
        """A layer that a step runs more than once is final only when the step is over."""
        logger.warning(
            "TrivetConnector: this model runs layers more than once in a step; KV leaves when a step is over"
        )
        if self._sends_early:
            names = tuple(name for name, _ in self._chunks)
            self._launched.put(_Spoiled(names, "prefill sent layers before they were final"))
            self._last = None
        self._sends_early = False

    # --- a thread for each peer

    def _serve(self, connection: Connection) -> None:
        peer = _Peer(connection)
        try:
            while (message := connection.receive()) is not None:
                self._notes.put(_Said(peer, message))
        finally:
            connection.close()  # before its slots are free
            self._notes.put(_Said(peer, None))

    # --- a thread that waits for the device, so that slots come back and others are served meanwhile

    def _watch(self) -> None:
        if self._pages.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # what is wrong with the device, its events say as well
                torch.cuda.set_device(self._pages.device)
        while (note := self._launched.get()) is not None:
            self._notes.put(self._happened(note) if isinstance(note, _Ready) else note)
        self._notes.put(None)

    def _happened(self, ready: _Ready) -> _Ready | _Spoiled:
        """The same, once it has; or what becomes of it where the device fails."""
        if ready.event is None:
            return ready
        try:
            ready.event.synchronize()
        except Exception as error:  # torch's, of whatever the device was given before
            return _Spoiled(tuple(name for name, _ in ready.chunks), f"prefill's device failed: {_line(error)}")
        return ready

    # --- the sending thread, which alone touches what is below

    @torch.inference_mode()
    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(own_stream(self._pages.device))
                with contextlib.suppress(MoverError):  # told when a peer asks for it
                    self._pool(self._movers[0])  # now, and not when the first request waits for it
            except Exception as error:
                self._broken = f"prefill's worker cannot send: {_line(error)}"
                logger.exception("TrivetConnector: %s", self._broken)
            while True:
                try:
                    note = self._notes.get(timeout=self._patience_s())
                    if note is None:
                        break
                    self._note(note)
                except queue.Empty:
                    pass
                except Exception:  # nothing may end this thread: it would strand every transfer
                    logger.exception("TrivetConnector: sending failed")
                try:
                    self._cut_off_silent()
                    self._pump()
                except Exception:
                    logger.exception("TrivetConnector: sending failed")
            for mover, pool in self._pools.items():
                try:
                    pool.staging.close()
                except Exception:
                    logger.exception("TrivetConnector: the staging of %s was not given back", mover)

    def _note(self, note: StepPlan | _Ready | _Spoiled | _Said) -> None:
        match note:
            case StepPlan():
                self._apply(note)
            case _Ready():
                self._computed(note)
            case _Spoiled():
                for name in note.transfers:
                    self._lose(name, note.why)
            case _Said():
                self._hear_or_cut_off(note.peer, note.message)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """A fault inside ends this transfer and nothing else."""
        try:
            yield
        except Exception as error:
            logger.exception("TrivetConnector: transfer %s cannot be sent", name)
            self._lose(name, f"prefill could not send it: {_line(error)}")

    def _apply(self, plan: StepPlan) -> None:
        for name in plan.preempted:
            if (transfer := self._transfers.get(name)) is not None:
                transfer.got = False  # decode is told as well, and asks anew, also for what it had
                transfer.problem = None  # it is computed anew, and decode's next attempt may be here before that
                transfer.coverage.reset_ready()
                transfer.ids.clear()
        for chunk in plan.chunks:
            with self._alone(chunk.transfer):
                self._scheduled(chunk)
        for name in plan.finished:
            if (transfer := self._transfers.get(name)) is not None:
                transfer.finished = True
                if transfer.got:
                    self._end(transfer)
        for name in plan.dropped:
            if (transfer := self._transfers.get(name)) is not None:
                self._end(transfer)
        with self._lock:
            for name in (*plan.preempted, *plan.dropped):
                if self._losing.get(name) is plan:
                    del self._losing[name]

    def _scheduled(self, chunk: Chunk) -> None:
        transfer = self._transfers.get(chunk.transfer)
        if transfer is None:
            layers = self._pages.layers
            coverage = Coverage([layer.group for layer in layers], [layer.block_bytes for layer in layers])
            transfer = _Transfer(chunk.transfer, chunk.request_id, coverage, [[] for _ in self._pages.block_tokens])
            self._transfers[chunk.transfer] = transfer
            for peer in self._peers:
                if (want := peer.early.pop(chunk.transfer, None)) is not None:
                    self._want(peer, want)
        if chunk.anew:
            transfer.blocks = [[] for _ in self._pages.block_tokens]
            transfer.ids.clear()
            transfer.problem = None
        for known, new in zip(transfer.blocks, chunk.blocks, strict=bool(chunk.blocks)):
            known.extend(new)

    def _end(self, transfer: _Transfer) -> None:
        self._release(transfer)
        del self._transfers[transfer.name]
        if transfer.finished:  # else its blocks went with its request
            with self._lock:
                self._sent.add(transfer.request_id)

    def _lose(self, name: str, why: str) -> None:
        """This transfer will not be completed, which its peer is told; the scheduler side frees its blocks."""
        if (transfer := self._transfers.get(name)) is None:
            return
        transfer.problem = why
        if (peer := transfer.peer) is not None and not transfer.got:
            self._release(transfer)
            peer.connection.send(Lost(name, why, attempt=transfer.attempt))

    def _release(self, transfer: _Transfer) -> None:
        """It is nobody's."""
        if transfer.peer is not None:
            transfer.peer.ready.pop(transfer, None)
            transfer.peer = None

    def _computed(self, ready: _Ready) -> None:
        now_ns = time.monotonic_ns()
        for name, blocks in ready.chunks:
            if (transfer := self._transfers.get(name)) is None:
                continue
            with self._alone(name):
                transfer.coverage.ready(ready.layers, blocks)
                transfer.last_computed_ns = now_ns
                if transfer.peer is not None and not transfer.got:
                    transfer.peer.ready[transfer] = None
                self._trace.mark("prefill", name, f"layers to {ready.layers[-1] + 1} computed", now_ns)

    # --- what peers say

    def _hear_or_cut_off(self, peer: _Peer, message: Message | None) -> None:
        if peer.gone:
            return
        try:
            self._hear(peer, message)
        except Exception as error:
            if not isinstance(error, ValueError):  # those say all there is to say
                logger.exception("TrivetConnector: what decode engine %s said was not understood", peer.engine_id)
            self._cut_off(peer, _line(error))

    def _cut_off(self, peer: _Peer, why: str) -> None:
        """Ends a peer. It sees that before its slots are written again, and then believes nothing of what it read."""
        logger.error("TrivetConnector: decode engine %s was cut off: %s", peer.engine_id, why)
        peer.connection.close()
        self._forget(peer)

    def _cut_off_silent(self) -> None:
        for pool in self._pools.values():
            for peer in pool.slots.silent(self._settings.lease_s):
                self._cut_off(peer, f"it has read nothing for {self._settings.lease_s:g} s of what was staged for it")

    def _patience_s(self) -> float | None:
        """How long the thread may sleep while nobody says anything: for ever, but while something is lent."""
        since_s = [since_s for pool in self._pools.values() if (since_s := pool.slots.silent_since_s()) is not None]
        return max(0.0, min(since_s) + self._settings.lease_s - time.monotonic()) if since_s else None

    def _hear(self, peer: _Peer, message: Message | None) -> None:
        match message:
            case Try():
                self._offer(peer, message)
            case Use():
                self._use(peer, message)
            case Want():
                if peer.mover is None:
                    raise ValueError("it wants KV and has agreed on no mover")
                if message.transfer not in self._transfers:
                    self._wait_for(peer, message)
                    return
                with self._alone(message.transfer):
                    self._want(peer, message)
            case Took():
                if peer.mover is not None:
                    self._pools[peer.mover].slots.give_back(message.slot, peer)
            case Got():
                if (transfer := self._served(peer, message.transfer, message.attempt)) is not None:
                    transfer.got = True
                    if transfer.finished:
                        self._end(transfer)
            case Stop():
                early = peer.early.get(message.transfer)
                if early is not None and early.attempt == message.attempt:
                    del peer.early[message.transfer]
                if (transfer := self._served(peer, message.transfer, message.attempt)) is not None:
                    self._release(transfer)
            case None:
                self._forget(peer)
            case _:
                raise ValueError(f"a {type(message).__name__} on a data link")

    def _served(self, peer: _Peer, name: str, attempt: int) -> _Transfer | None:
        transfer = self._transfers.get(name)
        return transfer if transfer is not None and transfer.peer is peer and transfer.attempt == attempt else None

    def _offer(self, peer: _Peer, message: Try) -> None:
        peer.engine_id = message.engine_id
        self._peers.add(peer)
        try:
            if self._broken is not None:
                raise MoverError(self._broken)
            if message.mover not in self._movers:
                raise MoverError(f"{message.mover} is not among prefill's movers ({', '.join(self._movers)})")
            offered = self._pool(message.mover).staging.offered()
        except Exception as error:  # whatever it is, decode must not wait for an answer
            if not isinstance(error, MoverError):
                logger.exception("TrivetConnector: %s cannot run", message.mover)
            why = _line(error)
            logger.warning("TrivetConnector: no %s to decode engine %s: %s", message.mover, peer.engine_id, why)
            peer.could_not.add(message.mover)
            peer.connection.send(Cannot(message.mover, why))
            return
        peer.connection.send(Offer(message.mover, dict(offered.window)), offered.files)

    def _use(self, peer: _Peer, message: Use) -> None:
        if message.mover not in self._pools:
            raise ValueError(f"it uses {message.mover}, which it was not offered")
        if peer.mover is not None:
            raise ValueError(f"it uses {message.mover} besides {peer.mover}")
        peer.mover = message.mover
        self._pools[message.mover].slots.join(peer)
        for name, why in message.rejected.items():
            if name not in peer.could_not:
                logger.warning("TrivetConnector: no %s to decode engine %s: %s", name, peer.engine_id, why)
        logger.info("TrivetConnector: sends to decode engine %s by %s", peer.engine_id, message.mover)
        self._counts.pair(message.mover)

    def _pool(self, mover: str) -> _Pool:
        if mover not in self._pools:
            slots = max(_FEWEST_SLOTS, self._settings.staging_bytes // self._slot_bytes)
            with told_as(mover):
                staging = MOVERS[mover].stage(self._pages.device, slots, self._slot_bytes)
            self._pools[mover] = _Pool(staging, Slots(slots))
        return self._pools[mover]

    def _wait_for(self, peer: _Peer, want: Want) -> None:
        """Keeps what is wanted until the scheduler side tells of it: the two come by different ways."""
        peer.early.pop(want.transfer, None)
        peer.early[want.transfer] = want
        if len(peer.early) > _MOST_EARLY:
            oldest = next(iter(peer.early))
            attempt = peer.early.pop(oldest).attempt
            why = f"decode asked for more than {_MOST_EARLY} transfers that prefill has not begun"
            logger.error("TrivetConnector: transfer %s: decode engine %s: %s", oldest, peer.engine_id, why)
            peer.connection.send(Lost(oldest, why, attempt=attempt))

    def _want(self, peer: _Peer, message: Want) -> None:
        transfer = self._transfers[message.transfer]
        if transfer.peer is not None and transfer.peer is not peer:
            why = "another decode engine has asked for it"
            transfer.peer.connection.send(Lost(transfer.name, why, attempt=transfer.attempt))
        self._release(transfer)
        transfer.peer, transfer.attempt = peer, message.attempt
        transfer.got = False
        if transfer.problem is not None and not self._is_void(transfer):
            self._lose(transfer.name, transfer.problem)
            return
        transfer.ids.clear()
        transfer.waited = False
        transfer.coverage.want(message.ranges)
        if transfer.coverage.is_complete():  # it lacks nothing
            transfer.got = True
            if transfer.finished:
                self._end(transfer)
            return
        peer.ready[transfer] = None

    def _forget(self, peer: _Peer) -> None:
        peer.gone = True
        self._peers.discard(peer)
        for transfer in self._transfers.values():
            if transfer.peer is peer:
                transfer.peer = None
        peer.ready.clear()
        peer.early.clear()
        for pool in self._pools.values():
            pool.slots.leave(peer)

    # --- what leaves

    def _pump(self) -> None:
        """Sends what is ready while slots are free; so it is never long at it, as they come back by notes."""
        for pool in self._pools.values():
            slots = pool.slots
            while (peer := slots.turn(peer for peer in slots.holders if peer.ready)) is not None:
                if (front := self._front(peer)) is not None:
                    self._send(*front, peer, pool)
            for peer in slots.holders:
                first = next(iter(peer.ready), None)
                if first is not None and not first.waited and (front := self._front(peer)) is not None:
                    front[0].waited = True
                    self._counts.waited_for_slot()

    def _front(self, peer: _Peer) -> tuple[_Transfer, Cut] | None:
        """A peer's next piece; transfers that have none now are ready no more."""
        while (transfer := next(iter(peer.ready), None)) is not None:
            cut = None
            with self._alone(transfer.name):
                cut = None if self._is_void(transfer) else transfer.coverage.next(self._slot_bytes)
            if cut is not None:
                return transfer, cut
            peer.ready.pop(transfer, None)
        return None

    def _is_void(self, transfer: _Transfer) -> bool:
        """Whether its blocks were taken away and the word of it is still under way."""
        return transfer.name in self._losing

    def _send(self, transfer: _Transfer, cut: Cut, peer: _Peer, pool: _Pool) -> None:
        start_ns = time.monotonic_ns()
        slot = pool.slots.lend(peer)
        piece = None
        with self._alone(transfer.name):
            piece = self._stage(transfer, cut, slot, pool.staging)
        if piece is None or self._is_void(transfer):  # the blocks may have been written over while they were read
            pool.slots.give_back(slot, peer)
            peer.ready.pop(transfer, None)
            return
        if not peer.connection.send(piece):
            self._forget(peer)
            return
        transfer.coverage.sent(cut)
        transfer.waited = False
        self._counts.sent(peer.mover or "", piece.bytes)
        self._trace.span(
            "prefill", transfer.name, f"gather {piece.bytes / 2**20:.1f} MiB", start_ns, time.monotonic_ns()
        )

    def _stage(self, transfer: _Transfer, cut: Cut, slot: int, staging: Staging) -> Piece:
        assert transfer.coverage.wanted is not None
        ranges = part(transfer.coverage.wanted[cut.group], cut.start, cut.end)
        ids = self._ids(transfer, cut, ranges)
        size = self._pages.bytes_of(cut.layers, cut.end - cut.start)
        sums: list[int] = []

        def fill(memory: torch.Tensor) -> None:
            self._pages.gather(cut.layers, ids, memory)
            if self._settings.checksums:
                sums.append(checksum(memory))

        staging.write(slot, size, fill)
        return Piece(
            transfer.name,
            transfer.attempt,
            slot,
            size,
            cut.group,
            list(cut.layers),
            ranges,
            transfer.last_computed_ns,
            sums[0] if sums else None,
        )

    def _ids(self, transfer: _Transfer, cut: Cut, ranges: list[tuple[int, int]]) -> torch.Tensor:
        key = (cut.group, cut.start, cut.end)
        if key not in transfer.ids:
            own = transfer.blocks[cut.group]
            ids = [own[index] for index in indexes(ranges)]
            transfer.ids[key] = torch.tensor(ids, dtype=torch.int64, device=self._pages.device)
        return transfer.ids[key]


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
