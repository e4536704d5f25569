"""Worker side of decode: reads pieces out of prefill's staging into this engine's pages.

A thread for each prefill engine, on a stream of its own. The engine's main thread hands transfers over and asks what
has become of them; it never waits. What goes wrong with one transfer ends that transfer, with its reason; a mover that
goes wrong is not tried again with the same prefill engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from trivet.transfer.identity import host
from trivet.transfer.link import FIRST_WITHIN_S, Connection
from trivet.transfer.messages import Cannot, Got, Landed, Lost, Message, Offer, Piece, Stop, Took, Try, Use, Want
from trivet.transfer.movers import MOVERS, MoverError, Window, movers_for, told_as
from trivet.transfer.pages import Pages, checksum
from trivet.transfer.pieces import Arrivals, indexes
from trivet.transfer.plan import Receive, Report, StepPlan
from trivet.transfer.settings import Settings
from trivet.transfer.stats import Counts
from trivet.transfer.streams import finish, own_stream
from trivet.transfer.trace import Trace

logger = logging.getLogger("vllm.trivet")

_GIVEN_UP = "given up"
_MOST_FAULTS = 3
"""Transfers in a row whose pieces cannot be read: the fault is the mover's then, not theirs."""
_TRY_AGAIN_S = 60.0
"""Where no mover works, all are tried again after so long: memory that there was not may be free."""
_REMEMBERED = 64
"""Prefill engines of which it is known which movers do not work with them; each start of one counts."""


@dataclass(slots=True, eq=False)
class _Receiving:
    """A transfer that arrives."""

    receive: Receive
    arrivals: Arrivals
    started_ns: int
    after: torch.cuda.Event | None
    """Work of the engine that may still use these blocks."""
    writing: threading.Lock = field(default_factory=threading.Lock)
    """Held while a piece is written: whoever holds it knows that nobody writes."""
    landed: bool = False
    ended: str | None = None
    """Why nothing more is written, though not all has come."""
    bytes: int = 0
    pieces: int = 0
    ids: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Rejected:
    """Movers that do not work with a prefill engine."""

    why: dict[str, str] = field(default_factory=dict)
    """By name; told when it is found out, and not again."""
    last_s: float = 0.0


class Receiver:
    """See the module. Public methods are for the engine's main thread."""

    def __init__(
        self, pages: Pages, settings: Settings, engine_id: str, rank: int, counts: Counts, trace: Trace
    ) -> None:
        """
        Raises:
            ValueError: the settings do not suit this engine, in one line.
        """
        self._pages, self._settings, self._engine_id, self._rank = pages, settings, engine_id, rank
        self.counts, self._trace = counts, trace
        self.device = pages.device
        self._movers = movers_for(pages.device, settings.movers)
        self._receiving: dict[str, _Receiving] = {}
        """By request id, until the scheduler side has read of it."""
        self._peers: dict[str, _Peer] = {}
        """By prefill's engine id: a prefill engine that was started again is another."""
        self._rejected: OrderedDict[str, _Rejected] = OrderedDict()
        """By prefill's engine id, the one asked for last at the end."""
        self._rejecting = threading.Lock()
        self._failed: set[str] = set()
        self._notices: Connection | None = None
        self._notifying = threading.Lock()
        self._closed = False

    def begin(self, plan: StepPlan) -> None:
        """Before a step is computed."""
        for request_id in plan.forget:
            self._receiving.pop(request_id, None)
        self._failed.update(plan.failed)

    def start(self, plan: StepPlan) -> None:
        """Behind a step's computation, on the engine's stream."""
        for request_id, attempt in plan.given_up:
            receiving = self._receiving.get(request_id)
            if receiving is not None and receiving.receive.attempt == attempt and not receiving.landed:
                receiving.ended = receiving.ended or _GIVEN_UP
                if (peer := self._peers.get(receiving.receive.prefill_engine)) is not None:
                    peer.give_up(receiving)
        for receive in plan.receives:
            after = None
            if self._pages.device.type == "cuda":
                after = torch.cuda.Event()
                after.record()
            arrivals = Arrivals([layer.group for layer in self._pages.layers], receive.wanted)
            receiving = _Receiving(receive, arrivals, time.monotonic_ns(), after)
            self._receiving[receive.request_id] = receiving
            if (receive.request_id, receive.attempt) in plan.given_up:
                receiving.ended = _GIVEN_UP
            else:
                try:
                    self._peer(receive).submit(receiving)
                except RuntimeError as error:  # no thread is left: an exception here would end the engine
                    receiving.ended = f"receiving failed: {_line(error)}"

    def report(self) -> Report | None:
        """What is settled and not read yet; None while nothing is received."""
        if not self._receiving:
            return None
        report = Report()
        for request_id, receiving in self._receiving.items():
            report.attempts[request_id] = receiving.receive.attempt
            if receiving.landed:
                report.landed[request_id] = 1
            elif receiving.ended is not None and receiving.writing.acquire(blocking=False):
                receiving.writing.release()  # nobody writes any more, and nobody will
                report.stopped[request_id] = 1
                report.reasons[request_id] = receiving.ended
        return report

    def take_failed(self) -> set[str]:
        """Request ids that must end with an error, each once."""
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Ends its threads and gives memory back."""
        for peer in list(self._peers.values()):
            peer.close()
        with self._notifying:
            self._closed = True
            if self._notices is not None:
                self._notices.close()

    def _peer(self, receive: Receive) -> _Peer:
        peer = self._peers.get(receive.prefill_engine)
        if peer is None or peer.ended:
            for name in [name for name, other in self._peers.items() if other.ended]:
                del self._peers[name]
            path = receive.data_paths[self._rank] if self._rank < len(receive.data_paths) else ""
            peer = self._peers[receive.prefill_engine] = _Peer(self, path, receive.prefill_engine)
        return peer

    # --- for the peers' threads

    def notify(self, receive: Receive) -> None:
        """Tells the scheduler side at once. vLLM brings the same with a step's output, which may be two steps later."""
        with self._notifying, contextlib.suppress(OSError):
            if self._closed:
                return
            if self._notices is None or self._notices.closed:
                self._notices = Connection.to(self._settings.notice_path)
            self._notices.send(Landed(receive.request_id, receive.attempt, self._rank))

    def _rejected_with(self, prefill_engine: str) -> _Rejected:
        with self._rejecting:
            known = self._rejected.setdefault(prefill_engine, _Rejected())
            self._rejected.move_to_end(prefill_engine)
            if len(self._rejected) > _REMEMBERED:
                self._rejected.popitem(last=False)
            return known

    def reject(self, prefill_engine: str, mover: str, error: Exception) -> None:
        """This mover does not work with that engine, and is not tried again."""
        logger.warning("TrivetConnector: no %s from prefill engine %s: %s", mover, prefill_engine, _line(error))
        known = self._rejected_with(prefill_engine)
        known.why[mover], known.last_s = _line(error), time.monotonic()

    def open(self, connection: Connection, prefill_engine: str) -> tuple[str, Window]:
        """Agrees with a prefill worker on a mover.

        Raises:
            MoverError: there is none, in one line.
            OSError: prefill's worker has ended.
        """
        rejected = self._rejected_with(prefill_engine)
        if len(rejected.why) == len(self._movers) and time.monotonic() - rejected.last_s > _TRY_AGAIN_S:
            rejected.why.clear()
        for mover in [name for name in self._movers if name not in rejected.why]:
            try:
                window = self._try(connection, mover)
            except OSError:
                raise
            except Exception as error:  # whatever it is, the next may work
                self.reject(prefill_engine, mover, error)
                continue
            connection.send(Use(mover, dict(rejected.why)))
            return mover, window
        raise MoverError("; ".join(f"{name}: {why}" for name, why in rejected.why.items()))

    def _try(self, connection: Connection, mover: str) -> Window:
        connection.send(Try(self._engine_id, host(), mover))
        answer = connection.receive(FIRST_WITHIN_S)
        files = connection.take_files()
        try:
            match answer:
                case Offer():
                    with told_as(mover):
                        return MOVERS[mover].open(self._pages.device, answer.window, files)
                case Cannot():
                    raise MoverError(answer.why)
                case _:
                    raise ConnectionResetError("it ended while a mover was agreed on")
        finally:
            for file in files:
                os.close(file)

    def write(
        self, mover: str, window: Window, receiving: _Receiving, piece: Piece, is_void: Callable[[], bool]
    ) -> None:
        """Writes a piece into the pages.

        Args:
            is_void: whether prefill may have written the slot again while it was read.

        Raises:
            ValueError: what is wrong with the piece, in one line.
            ConnectionAbortedError: it is void.
        """
        start_ns = time.monotonic_ns()
        self._check(receiving, piece)  # first: whatever a piece names is written, also what nobody wanted
        ids = self._ids(receiving, piece)
        if (size := self._pages.bytes_of(piece.layers, len(ids))) != piece.bytes:
            raise ValueError(f"a piece of {piece.bytes} bytes that should have {size}")
        if receiving.after is not None:
            torch.cuda.current_stream().wait_event(receiving.after)
            receiving.after = None
        try:
            self._pages.scatter(piece.layers, ids, window.read(piece.slot, piece.bytes))
        finally:  # also where a later layer failed: whoever is told that nobody writes frees the blocks
            finish(self._pages.device)
        if is_void():
            raise ConnectionAbortedError
        if piece.checksum is not None:  # of what lies in the pages now, not of what was read
            written = torch.empty(piece.bytes, dtype=torch.uint8, device=self._pages.device)
            self._pages.gather(piece.layers, ids, written)
            if checksum(written) != piece.checksum:
                raise ValueError("a piece whose checksum differs")
        receiving.arrivals.came(piece.layers, piece.ranges)
        receiving.bytes += piece.bytes
        receiving.pieces += 1
        now_ns = time.monotonic_ns()
        name = receiving.receive.transfer
        self._trace.span("decode", name, f"write {piece.bytes / 2**20:.1f} MiB by {mover}", start_ns, now_ns)
        if receiving.arrivals.is_complete():
            tail_ns = now_ns - piece.computed_ns if piece.computed_ns else 0
            self.counts.received(
                mover, receiving.bytes, receiving.pieces, (now_ns - receiving.started_ns) / 1e9, tail_ns / 1e9
            )
            self._trace.span("decode", name, "receive", receiving.started_ns, now_ns)

    def _check(self, receiving: _Receiving, piece: Piece) -> None:
        layers = self._pages.layers
        if any(layer >= len(layers) or layers[layer].group != piece.group for layer in piece.layers):
            raise ValueError(f"a piece of layers that are not in cache group {piece.group}")
        try:
            receiving.arrivals.check(piece.layers, piece.ranges)
        except ValueError as error:
            raise ValueError(f"a piece out of order ({error})") from error

    def _ids(self, receiving: _Receiving, piece: Piece) -> torch.Tensor:
        key = (piece.group, *(end for one in piece.ranges for end in one))
        if key not in receiving.ids:
            own = receiving.receive.blocks[piece.group]
            ids = [own[index] for index in indexes(piece.ranges)]
            receiving.ids[key] = torch.tensor(ids, dtype=torch.int64, device=self._pages.device)
        return receiving.ids[key]


class _Peer:
    """A prefill worker, and the thread that reads from it."""

    def __init__(self, receiver: Receiver, path: str, engine_id: str) -> None:
        self._receiver, self._path, self._engine_id = receiver, path, engine_id
        self._own: Connection | None = None
        self._connection: Connection | None = None
        """The same once a mover is agreed on and what waited has been asked for."""
        self._closed = False
        self._lock = threading.Lock()
        self._waiting: list[_Receiving] = []
        """Submitted before the connection stood."""
        self._reading: dict[str, _Receiving] = {}
        self.ended = False
        self._why = "prefill's worker is gone"
        self._faults = 0
        """Transfers in a row that ended as a piece could not be written."""
        threading.Thread(target=self._run, name="trivet-receiver", daemon=True).start()

    def submit(self, receiving: _Receiving) -> None:
        """Asks prefill for it."""
        with self._lock:
            if self.ended:
                receiving.ended = self._why
                return
            self._reading[receiving.receive.transfer] = receiving
            if self._connection is None:
                self._waiting.append(receiving)
                return
        self._want(self._connection, receiving)

    def give_up(self, receiving: _Receiving) -> None:
        """Tells prefill that it is not wanted any more, if prefill was asked for it."""
        with self._lock:
            self._end(receiving)
            connection = self._connection
        if connection is not None:
            connection.send(Stop(receiving.receive.transfer, receiving.receive.attempt))

    def close(self) -> None:
        """Closes the connection, which ends the thread."""
        with self._lock:
            self._closed, connection = True, self._own
        if connection is not None:
            connection.close()

    def _end(self, receiving: _Receiving) -> None:
        """It is read no more. Called with the lock."""
        if self._reading.get(receiving.receive.transfer) is receiving:
            del self._reading[receiving.receive.transfer]
        if receiving in self._waiting:
            self._waiting.remove(receiving)

    def _want(self, connection: Connection, receiving: _Receiving) -> None:
        receive = receiving.receive
        connection.send(Want(receive.transfer, receive.attempt, [list(one) for one in receive.wanted]))
        if (
            receiving.arrivals.is_complete() and receiving.ended is None
        ):  # nothing is wanted, which prefill sees from that as well
            with self._lock:
                self._end(receiving)
            receiving.landed = True
            self._receiver.notify(receive)

    @torch.inference_mode()
    def _run(self) -> None:
        connection: Connection | None = None
        window: Window | None = None
        try:
            with own_stream(self._receiver.device):
                connection = Connection.to(self._path)
                with self._lock:
                    self._own = connection
                    if self._closed:
                        return
                mover, window = self._receiver.open(connection, self._engine_id)
                logger.info("TrivetConnector: receives from prefill engine %s by %s", self._engine_id, mover)
                self._receiver.counts.pair(mover)
                self._ask_for_waiting(connection)
                while (message := connection.receive()) is not None:
                    self._hear(connection, mover, window, message)
        except MoverError as error:
            self._why = f"no mover between prefill and decode: {error}"  # the log has had each reason once
        except OSError as error:
            self._why = f"prefill's worker cannot be reached at {self._path}: {error.strerror or error}"
            logger.error("TrivetConnector: %s", self._why)
        except Exception as error:
            self._why = f"receiving failed: {_line(error)}"
            logger.exception("TrivetConnector: receiving failed")
        finally:
            with self._lock:
                self.ended = True
                left = list(self._reading.values())
                self._reading, self._waiting = {}, []
            for receiving in left:
                if not receiving.landed:
                    receiving.ended = receiving.ended or self._why
            if connection is not None:
                connection.close()
            if window is not None:
                try:
                    window.close()
                except Exception:
                    logger.exception("TrivetConnector: a window was not given back")

    def _ask_for_waiting(self, connection: Connection) -> None:
        """Until nothing waits this thread alone speaks, so that no ``Want`` overtakes another or its own ``Stop``."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._connection = connection
                    return
                receiving = self._waiting.pop(0)
            self._want(connection, receiving)
            with self._lock:
                given_up = self._reading.get(receiving.receive.transfer) is not receiving
            if given_up and not receiving.landed:
                connection.send(Stop(receiving.receive.transfer, receiving.receive.attempt))

    def _hear(self, connection: Connection, mover: str, window: Window, message: Message) -> None:
        match message:
            case Piece():
                self._read(connection, mover, window, message)
            case Lost():
                with self._lock:
                    receiving = self._reading.get(message.transfer)
                    if receiving is None or message.attempt not in (None, receiving.receive.attempt):
                        return
                    self._end(receiving)
                receiving.ended = receiving.ended or message.why
                connection.send(Stop(message.transfer, receiving.receive.attempt))
            case _:
                raise ValueError(f"a {type(message).__name__} from prefill's worker")

    def _read(self, connection: Connection, mover: str, window: Window, piece: Piece) -> None:
        with self._lock:
            receiving = self._reading.get(piece.transfer)
        if receiving is None or receiving.receive.attempt != piece.attempt:
            connection.send(Took(piece.slot))
            return
        with receiving.writing:
            if receiving.ended is None:
                self._write(connection, mover, window, receiving, piece)
        connection.send(Took(piece.slot))
        if receiving.landed or receiving.ended is not None:
            with self._lock:
                self._end(receiving)
            last = Got if receiving.landed else Stop
            connection.send(last(piece.transfer, piece.attempt))
        if self._faults >= _MOST_FAULTS:
            error = MoverError(f"the pieces of {self._faults} transfers in a row could not be read")
            self._receiver.reject(self._engine_id, mover, error)
            raise error

    def _write(self, connection: Connection, mover: str, window: Window, receiving: _Receiving, piece: Piece) -> None:
        try:
            self._receiver.write(mover, window, receiving, piece, connection.is_cut_off)
            self._faults = 0
        except ConnectionAbortedError:
            receiving.ended = self._why
            return
        except ValueError as error:
            receiving.ended = f"prefill sent {error}"
            logger.error("TrivetConnector: transfer %s: %s", piece.transfer, receiving.ended)
            return
        except Exception as error:
            self._faults += 1
            receiving.ended = f"decode could not write a piece: {_line(error)}"
            logger.exception("TrivetConnector: transfer %s: %s", piece.transfer, receiving.ended)
            return
        if receiving.arrivals.is_complete():
            receiving.landed = True
            self._receiver.notify(receiving.receive)


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
