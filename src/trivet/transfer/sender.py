"""Worker side of prefill: KV leaves in pieces while the rest of the prompt is computed.

The engine's main thread only records events between layers and puts notes into a queue. One thread waits for the
events; another gathers pieces into free slots of the staging, on a stream of its own, and tells decode. Where no slot
is free, or decode has no blocks yet, what is ready waits in the pages where it was computed; the scheduler side keeps
those blocks after the request has ended until all has been read.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from trivet.transfer.link import Connection, Listener
from trivet.transfer.messages import Cannot, Got, Message, Offer, Piece, Stop, Took, Try, Use, Want
from trivet.transfer.movers import MOVERS, MoverError, Staging, movers_for
from trivet.transfer.pages import Pages, checksum
from trivet.transfer.pieces import Coverage, Cut, indexes, part
from trivet.transfer.plan import StepPlan
from trivet.transfer.settings import Settings
from trivet.transfer.stats import Counts
from trivet.transfer.streams import own_stream
from trivet.transfer.trace import Trace

logger = logging.getLogger("vllm.trivet")

_FEWEST_GROUPS = 4
"""Into at least so many groups of layers a chunk is cut, that something overlaps and the last group is small."""
_READ_AGAIN = 64
"""Wants for transfers that this worker has not heard of yet, kept for each peer."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A decode worker that is connected."""

    connection: Connection
    engine_id: str = ""
    mover: str | None = None
    early: dict[str, Want] = field(default_factory=dict)
    """What it wants of transfers that the scheduler side has not told of yet."""


@dataclass(slots=True, eq=False)
class _Pool:
    """A mover's staging and its slots."""

    staging: Staging
    free: deque[int]
    lent: dict[int, _Peer] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Transfer:
    name: str
    request_id: str
    coverage: Coverage
    blocks: list[list[int]]
    peer: _Peer | None = None
    attempt: int = 0
    """Of decode's, that is served."""
    losses: int = 0
    """How often its blocks were taken away, as far as the sending thread has heard."""
    finished: bool = False
    got: bool = False
    last_computed_ns: int = 0
    ids: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Ready:
    """Layers of a step that are computed once ``event`` has happened."""

    chunks: tuple[tuple[str, tuple[int, ...]], ...]
    """Transfers and, by cache group, how many of their first blocks are then complete."""
    layers: range
    event: torch.cuda.Event | None


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
        self._launched: queue.SimpleQueue[StepPlan | _Ready | None] = queue.SimpleQueue()
        """What the engine's main thread says, in its order."""
        self._notes: queue.SimpleQueue[StepPlan | _Ready | _Said | None] = queue.SimpleQueue()
        """The same once it has happened on the device, and what peers say."""
        self._losses: dict[str, int] = {}
        """How often a transfer's blocks were taken away, by the engine's main thread, at once: the sending thread may
        hear of it later, and must not read them meanwhile."""
        self._sent: set[str] = set()
        self._lock = threading.Lock()
        self._chunks: tuple[tuple[str, tuple[int, ...]], ...] = ()
        self._stride, self._next_layer = 1, 0
        self._transfers: dict[str, _Transfer] = {}
        self._peers: set[_Peer] = set()
        self._pools: dict[str, _Pool] = {}
        self._thread = threading.Thread(target=self._run, name="trivet-sender", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="trivet-watcher", daemon=True).start()
        self._listener = Listener(path, self._serve, "trivet-sender-peer")

    # --- the engine's main thread: constant work for a step, whatever the prompt's length

    def begin(self, plan: StepPlan) -> None:
        """Before a step is computed."""
        for name in (*plan.preempted, *plan.dropped):
            self._losses[name] = self._losses.get(name, 0) + 1
        if plan.chunks or plan.preempted or plan.finished or plan.dropped:
            self._launched.put(plan)
        self._chunks, self._next_layer = (), 0
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

    def layer_done(self, name: str) -> None:
        """A layer's attention has been launched."""
        if not self._chunks:
            return
        end = self._pages.index.get(name, -1) + 1
        # The last layer's event also stands for those before it that no hook saw: the stream runs in order.
        if end == self._next_layer + self._stride or end == len(self._pages.layers):
            self._emit(end)

    def step_done(self) -> None:
        """All layers have been launched, those among them that no hook saw (a CUDA graph of the whole step)."""
        if self._chunks:
            if self._next_layer < len(self._pages.layers):
                self._emit(len(self._pages.layers))
            self._chunks = ()

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
        for peer in list(self._peers):
            peer.connection.close()

    def _emit(self, end: int) -> None:
        event = None
        if self._pages.device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record()
        self._launched.put(_Ready(self._chunks, range(self._next_layer, end), event))
        self._next_layer = end

    # --- a thread for each peer

    def _serve(self, connection: Connection) -> None:
        peer = _Peer(connection)
        try:
            while (message := connection.receive()) is not None:
                self._notes.put(_Said(peer, message))
        finally:
            self._notes.put(_Said(peer, None))

    # --- a thread that waits for the device, so that slots come back and others are served meanwhile

    def _watch(self) -> None:
        if self._pages.device.type == "cuda":
            torch.cuda.set_device(self._pages.device)
        while True:
            note = self._launched.get()
            if isinstance(note, _Ready) and note.event is not None:
                note.event.synchronize()
            self._notes.put(note)
            if note is None:
                return

    # --- the sending thread, which alone touches what is below

    @torch.inference_mode()
    def _run(self) -> None:
        with own_stream(self._pages.device):
            with contextlib.suppress(MoverError):  # told when a peer asks for it
                self._pool(self._movers[0])  # now, and not when the first request waits for it
            while (note := self._notes.get()) is not None:
                try:
                    match note:
                        case StepPlan():
                            self._apply(note)
                        case _Ready():
                            self._computed(note)
                        case _Said():
                            self._hear_or_cut_off(note.peer, note.message)
                    self._pump()
                except Exception:  # one transfer's fault must not end those of others
                    logger.exception("TrivetConnector: sending failed")
            for pool in self._pools.values():
                pool.staging.close()

    def _apply(self, plan: StepPlan) -> None:
        for name in plan.preempted:
            if (transfer := self._transfers.get(name)) is not None:
                transfer.losses += 1
                transfer.coverage.reset_ready()
                transfer.ids.clear()
        for chunk in plan.chunks:
            transfer = self._transfers.get(chunk.transfer)
            if transfer is None:
                layers = self._pages.layers
                coverage = Coverage([layer.group for layer in layers], [layer.block_bytes for layer in layers])
                transfer = _Transfer(chunk.transfer, chunk.request_id, coverage, [[] for _ in chunk.blocks])
                self._transfers[chunk.transfer] = transfer
                for peer in self._peers:
                    if (want := peer.early.pop(chunk.transfer, None)) is not None:
                        self._want(peer, want)
            if chunk.anew:
                transfer.blocks = [[] for _ in chunk.blocks]
                transfer.ids.clear()
            for known, new in zip(transfer.blocks, chunk.blocks, strict=bool(chunk.blocks)):
                known.extend(new)
        for name in plan.finished:
            if (transfer := self._transfers.get(name)) is not None:
                transfer.finished = True
                if transfer.got:
                    self._end(transfer)
        for name in plan.dropped:
            if (transfer := self._transfers.get(name)) is not None:
                self._end(transfer)
            self._losses.pop(name, None)

    def _end(self, transfer: _Transfer) -> None:
        del self._transfers[transfer.name]
        self._losses.pop(transfer.name, None)
        if transfer.finished:  # else its blocks went with its request
            with self._lock:
                self._sent.add(transfer.request_id)

    def _computed(self, ready: _Ready) -> None:
        now_ns = time.monotonic_ns()
        for name, blocks in ready.chunks:
            if (transfer := self._transfers.get(name)) is not None:
                transfer.coverage.ready(ready.layers, blocks)
                transfer.last_computed_ns = now_ns
                self._trace.mark("prefill", name, f"layers to {ready.layers.stop} computed", now_ns)

    def _hear_or_cut_off(self, peer: _Peer, message: Message | None) -> None:
        try:
            self._hear(peer, message)
        except ValueError as error:
            logger.error("TrivetConnector: decode engine %s was cut off: %s", peer.engine_id, error)
            peer.connection.close()

    def _hear(self, peer: _Peer, message: Message | None) -> None:
        match message:
            case Try():
                self._offer(peer, message)
            case Use():
                self._use(peer, message)
            case Want():
                if message.transfer in self._transfers:
                    self._want(peer, message)
                elif len(peer.early) < _READ_AGAIN:
                    peer.early[message.transfer] = message
            case Took():
                pool = self._pools.get(peer.mover or "")
                if pool is not None and pool.lent.get(message.slot) is peer:
                    del pool.lent[message.slot]
                    pool.free.append(message.slot)
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
                    transfer.peer = None
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
            if message.mover not in self._movers:
                raise MoverError(f"{message.mover} is not among prefill's movers ({', '.join(self._movers)})")
            offered = self._pool(message.mover).staging.offered()
        except Exception as error:  # whatever it is, decode must not wait for an answer
            if not isinstance(error, MoverError):
                logger.exception("TrivetConnector: %s cannot run", message.mover)
            peer.connection.send(Cannot(message.mover, str(error) or type(error).__name__))
            return
        peer.connection.send(Offer(message.mover, dict(offered.window)), offered.files)

    def _use(self, peer: _Peer, message: Use) -> None:
        if message.mover not in self._pools:
            raise ValueError(f"decode engine {peer.engine_id} uses {message.mover}, which it was not offered")
        peer.mover = message.mover
        for name, why in message.rejected.items():
            logger.warning("TrivetConnector: no %s to decode engine %s: %s", name, peer.engine_id, why)
        logger.info("TrivetConnector: sends to decode engine %s by %s", peer.engine_id, message.mover)
        self._counts.pair(peer.engine_id, message.mover)

    def _pool(self, mover: str) -> _Pool:
        if mover not in self._pools:
            slots = max(2, self._settings.staging_bytes // self._slot_bytes)
            try:
                staging = MOVERS[mover].stage(self._pages.device, slots, self._slot_bytes)
            except (RuntimeError, OSError) as error:  # torch's and CUDA's: out of memory, for one
                raise MoverError(
                    f"{mover}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
                ) from error
            self._pools[mover] = _Pool(staging, deque(range(slots)))
        return self._pools[mover]

    def _want(self, peer: _Peer, message: Want) -> None:
        transfer = self._transfers[message.transfer]
        transfer.peer, transfer.attempt = peer, message.attempt
        transfer.coverage.want(message.ranges)
        transfer.got = transfer.coverage.is_complete()  # it may lack nothing
        if transfer.got and transfer.finished:
            self._end(transfer)

    def _forget(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        for transfer in self._transfers.values():
            if transfer.peer is peer:
                transfer.peer = None
        for pool in self._pools.values():
            for slot in [slot for slot, lent in pool.lent.items() if lent is peer]:
                del pool.lent[slot]
                pool.free.append(slot)

    def _pump(self) -> None:
        """Sends what is ready, the oldest transfer first, while slots are free."""
        for transfer in list(self._transfers.values()):
            peer = transfer.peer
            if peer is None or peer.mover is None or transfer.got:
                continue
            pool = self._pools[peer.mover]
            while transfer.peer is peer and not self._is_void(transfer):
                if (cut := transfer.coverage.next(self._slot_bytes)) is None:
                    break
                if not pool.free:
                    self._counts.waited_for_slot()
                    break
                if not self._send(transfer, peer, pool, cut):
                    break

    def _is_void(self, transfer: _Transfer) -> bool:
        """Whether its blocks were taken away and the word of it is still under way."""
        return self._losses.get(transfer.name, 0) != transfer.losses

    def _send(self, transfer: _Transfer, peer: _Peer, pool: _Pool, cut: Cut) -> bool:
        assert transfer.coverage.wanted is not None
        ranges = part(transfer.coverage.wanted[cut.group], cut.start, cut.end)
        start_ns = time.monotonic_ns()
        ids = self._ids(transfer, cut, ranges)
        size = self._pages.bytes_of(cut.layers, cut.end - cut.start)
        slot = pool.free.popleft()
        sums: list[int] = []

        def fill(memory: torch.Tensor) -> None:
            self._pages.gather(cut.layers, ids, memory)
            if self._settings.checksums:
                sums.append(checksum(memory))

        pool.staging.write(slot, size, fill)
        if self._is_void(transfer):  # the blocks may have been written over while they were read
            pool.free.append(slot)
            return False
        pool.lent[slot] = peer
        piece = Piece(
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
        if not peer.connection.send(piece):
            self._forget(peer)
            return False
        transfer.coverage.sent(cut)
        self._counts.sent(peer.mover or "", size)
        self._trace.span("prefill", transfer.name, f"gather {size / 2**20:.1f} MiB", start_ns, time.monotonic_ns())
        return True

    def _ids(self, transfer: _Transfer, cut: Cut, ranges: list[tuple[int, int]]) -> torch.Tensor:
        key = (cut.group, cut.start, cut.end)
        if key not in transfer.ids:
            own = transfer.blocks[cut.group]
            ids = [own[index] for index in indexes(ranges)]
            transfer.ids[key] = torch.tensor(ids, dtype=torch.int64, device=self._pages.device)
        return transfer.ids[key]
