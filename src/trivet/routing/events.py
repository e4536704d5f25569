"""Listens to the KV events of engines, on a thread of the gateway worker that leads, and writes what they hold.

Nothing here is on a request's path: requests read ``Held``, which says nothing of an engine whose events do not arrive
or cannot be read. The wire is vLLM's (``vllm/distributed/kv_events.py``): ZeroMQ, batches in msgpack.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec
import zmq

from trivet.routing.blocks import Blocks, TooManyBlocksError
from trivet.routing.engines import EngineView
from trivet.routing.held import Held, new_key
from trivet.routing.stream import Stream

logger = logging.getLogger(__name__)

_LOOK_MS = 200
"""How often it is looked whether this worker leads, and what is due."""
_PROBE_S = 1.0
"""Between an answer's end and the next question. vLLM goes through what it keeps for each, 10,000 batches at most."""
_ANSWER_S = 3.0
"""How long an answer may take: an engine sends it between its steps."""
_AGAIN_S = 0.05
_ANEW_S = 30.0
"""After so long an engine is listened to anew, where what went wrong may have been of the moment."""
_AT_ONCE = 64
"""Messages of a socket before others have their turn."""
_MOST_WAITING = 10_000
_LARGEST_BYTES = 64 * 2**20
_END = (-1).to_bytes(8, "big", signed=True)
_WHOLE_PREFIXES = frozenset({None, "full_attention", "mla_attention"})
"""Kinds of KV of which a prefix is cached if all of its blocks are; with windows or state, fewer do or one must."""


class BlockStored(msgspec.Struct, tag=True, frozen=True):
    """vLLM's event of that name, as far as it is used."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True):
    """vLLM's event of that name, as far as it is used."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """vLLM's event of that name."""


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """Events of one step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class UnusableError(Exception):
    """What an engine tells cannot be used, for a reason that stays."""


class Mirror:
    """One engine's cache out of its batches."""

    def __init__(self, blocks: Blocks, cleared: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            cleared: called when the engine says that it holds nothing.
        """
        self._blocks = blocks
        self._cleared = cleared
        self._decoder = msgspec.msgpack.Decoder(Batch)

    def take(self, payload: bytes) -> None:
        """Takes a batch.

        Raises:
            UnusableError: it cannot be read, or does not say what is needed.
        """
        try:
            batch = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise UnusableError(f"they cannot be read ({error})") from None
        if batch.data_parallel_rank:
            raise UnusableError("they are of one of several data-parallel ranks, among which the engine chooses")
        try:
            for event in batch.events:
                self._take(event)
        except TooManyBlocksError as error:
            raise UnusableError(f"it holds {error}, which are not kept") from None
        except (IndexError, OverflowError, ValueError, TypeError) as error:
            raise UnusableError(f"they make no sense ({error})") from None

    def _take(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self._blocks.clear()
            self._cleared()
            return
        if event.medium not in (None, "GPU"):  # offloaded blocks come back at a cost that is not known here
            return
        if event.group_idx:
            raise UnusableError("its model keeps several kinds of KV, of which no single one says what is cached")
        if isinstance(event, BlockRemoved):
            self._blocks.remove(event.block_hashes)
        elif event.kv_cache_spec_kind in _WHOLE_PREFIXES:
            self._blocks.store(event)
        else:
            raise UnusableError(f"its KV is {event.kv_cache_spec_kind}, of which not all blocks of a prefix are kept")


class _Subscription:
    """One engine, as it was started."""

    def __init__(self, view: EngineView, held: Held, served_name: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """
        Raises:
            zmq.ZMQError: its addresses are none.
        """
        assert view.kv_events is not None
        self.view = view
        self._held = held
        self._context = context
        self._key = key = new_key()
        self._blocks = Blocks(served_name, lambda chunks: held.add(key, chunks), lambda chunks: held.drop(key, chunks))
        self.stream = Stream(self._take, self._blocks.clear)
        self._mirror = Mirror(self._blocks, self.stream.cleared)
        self._due_s = 0.0
        self._was_live = False
        self.events = self._open(zmq.SUB, view.kv_events[0])
        try:
            self.replays = self._open(zmq.DEALER, view.kv_events[1])
        except BaseException:
            self.events.close()
            raise

    def _open(self, kind: int, address: str) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        try:
            opened.linger = 0
            opened.rcvhwm = _MOST_WAITING
            opened.maxmsgsize = _LARGEST_BYTES
            opened.setsockopt(zmq.IPV6, 1)
            if kind == zmq.SUB:
                opened.subscribe(b"")
            opened.connect(address)
        except BaseException:
            opened.close()
            raise
        return opened

    def close(self) -> None:
        """Forgets what the engine held."""
        self._held.doubt(self.view, self._key)
        self._blocks.clear()
        self.events.close()
        self.replays.close()

    def tick(self, now_s: float) -> None:
        """Asks what is due."""
        if now_s < self._due_s:
            return
        if self.stream.is_asking:  # it was asked and has not answered: the question may lie with an engine that is gone
            self.stream.give_up()
            if self._was_live:
                logger.info("KV events of %s do not arrive", self.view.name)
            self._was_live = False
            assert self.view.kv_events is not None
            self.replays.close()
            self.replays = self._open(zmq.DEALER, self.view.kv_events[1])
        with contextlib.suppress(zmq.Again):
            self.replays.send_multipart([b"", self.stream.ask().to_bytes(8, "big")], zmq.NOBLOCK)
        self._due_s = now_s + _ANSWER_S

    def hear(self, now_s: float) -> None:
        """Takes what has come by itself.

        Raises:
            UnusableError: it cannot be used.
        """
        for _ in range(_AT_ONCE):
            if not self.stream.in_order:
                break
            try:
                frames = self.events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            _, number, batch = frames if len(frames) == 3 else _wrong(frames)
            self.stream.came(int.from_bytes(number, "big"), batch)
            time.sleep(0)  # the event loop's turn
        if not self.stream.in_order and not self.stream.is_asking:
            self._due_s = now_s

    def read(self, now_s: float) -> None:
        """Takes answers.

        Raises:
            UnusableError: they cannot be used.
        """
        for _ in range(_AT_ONCE):
            try:
                frames = self.replays.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not self.stream.is_asking:
                continue
            number, batch = frames[-2:] if len(frames) >= 3 else _wrong(frames)
            if number != _END:
                self.stream.answered(int.from_bytes(number, "big"), batch)
                self._due_s = now_s + _ANSWER_S
                time.sleep(0)
                continue
            self.stream.ended()
            if self.stream.in_order:
                self._held.verify(self.view, self._key, whole=self.stream.whole)
                if not self._was_live:
                    logger.info("KV events of %s arrive", self.view.name)
                self._was_live = True
            self._due_s = now_s + (_PROBE_S if self.stream.in_order else _AGAIN_S)

    def _take(self, batch: bytes) -> None:
        self._mirror.take(batch)


def _wrong(frames: list[bytes]) -> list[bytes]:
    raise UnusableError(f"a message has {len(frames)} parts")


class Subscriber:
    """Listens to all engines that tell, while this worker leads. Its methods may be called from any thread."""

    def __init__(self, held: Held, served_name: str, leads: Callable[[], bool]) -> None:
        """
        Args:
            served_name: see ``Blocks``.
            leads: whether it is this worker's turn; one at a time may write ``held``.
        """
        self._held = held
        self._served_name = served_name
        self._leads = leads
        self._wanted: dict[str, EngineView] = {}
        self._open: dict[str, _Subscription] = {}
        self._given_up: dict[str, _GivenUp] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def update(self, views: Iterable[EngineView]) -> None:
        """Takes the fleet's newest word; an engine that was started anew is listened to anew."""
        with self._lock:
            self._wanted = {view.name: view for view in views if view.kv_events is not None}
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Ends the thread and what it has open; waits for it."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        os.close(self._bell)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        leading = False
        try:
            while not self._stopping:
                leads = self._leads()
                if leads and not leading:
                    self._held.clear()
                leading = leads
                with self._lock:
                    wanted = dict(self._wanted) if leads else {}
                self._agree(wanted, context)
                self._turn()
        finally:
            for one in self._open.values():
                one.close()
            context.term()

    def _agree(self, wanted: dict[str, EngineView], context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Opens and closes what has changed."""
        for name, one in list(self._open.items()):
            if name not in wanted or _differs(one.view, wanted[name]):
                one.close()
                del self._open[name]
        self._given_up = {
            name: one for name, one in self._given_up.items() if name in wanted and not _differs(one.view, wanted[name])
        }
        now_s = time.monotonic()
        for name, view in wanted.items():
            given_up = self._given_up.get(name)
            if name not in self._open and (given_up is None or given_up.until_s <= now_s):
                try:
                    self._open[name] = _Subscription(view, self._held, self._served_name, context)
                except Exception as error:
                    problem = f"nothing can be reached at {view.kv_events} ({error})"
                    self._give_up(view, problem, now_s + _ANEW_S)

    def _turn(self) -> None:
        """Waits for messages, and takes them."""
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        now_s = time.monotonic()
        for one in list(self._open.values()):
            with self._alone(one):
                one.tick(now_s)
        for one in self._open.values():
            poller.register(one.replays, zmq.POLLIN)
            if one.stream.in_order:
                poller.register(one.events, zmq.POLLIN)
        came = dict(poller.poll(_LOOK_MS))
        if self._bell in came:
            os.eventfd_read(self._bell)
        now_s = time.monotonic()
        for one in list(self._open.values()):
            with self._alone(one):
                if one.replays in came:
                    one.read(now_s)
                if one.events in came:
                    one.hear(now_s)

    @contextlib.contextmanager
    def _alone(self, one: _Subscription) -> Iterator[None]:
        """Whatever goes wrong in the block ends this subscription, and no other."""
        try:
            yield
        except Exception as error:
            one.close()
            del self._open[one.view.name]
            if isinstance(error, UnusableError):
                self._give_up(one.view, str(error), math.inf)
            else:
                self._give_up(one.view, f"{type(error).__name__}: {error}", time.monotonic() + _ANEW_S)

    def _give_up(self, view: EngineView, problem: str, until_s: float) -> None:
        """Leaves an engine alone until then, or until it is started anew, and says so once."""
        before = self._given_up.get(view.name)
        self._given_up[view.name] = _GivenUp(view, problem, until_s)
        if before is None or before.problem != problem:
            logger.warning("KV events of %s are not used: %s; what it has cached is guessed", view.name, problem)


class _GivenUp(NamedTuple):
    """An engine that is not listened to, or was not for a while."""

    view: EngineView
    problem: str
    until_s: float


def _differs(one: EngineView, other: EngineView) -> bool:
    return (one.kv_events, one.generation, one.slot) != (other.kv_events, other.generation, other.slot)
