"""Worker side of decode: reads pieces out of prefill's staging into this engine's pages.

A thread for each prefill engine, on a stream of its own. The engine's main thread hands transfers over and asks what
has become of them; it never waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass, field

import torch

from trivet.transfer.identity import host
from trivet.transfer.link import Connection
from trivet.transfer.messages import Cannot, Got, Landed, Offer, Piece, Stop, Took, Try, Use, Want
from trivet.transfer.movers import MOVERS, MoverError, Window, movers_for
from trivet.transfer.pages import Pages, checksum
from trivet.transfer.pieces import Arrivals, indexes
from trivet.transfer.plan import Receive, Report, StepPlan
from trivet.transfer.settings import Settings
from trivet.transfer.stats import Counts
from trivet.transfer.streams import own_stream
from trivet.transfer.trace import Trace

logger = logging.getLogger("vllm.trivet")

_GIVEN_UP = "given up"


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
        self._counts, self._trace = counts, trace
        self.device = pages.device
        self._movers = movers_for(pages.device, settings.movers)
        self._receiving: dict[str, _Receiving] = {}
        """By request id, until the scheduler side has read of it."""
        self._peers: dict[str, _Peer] = {}
        """By prefill's engine id: a prefill engine that was started again is another."""
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
                self._peer(receive).submit(receiving)

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
            path = receive.data_paths[self._rank] if self._rank < len(receive.data_paths) else ""
            peer = _Peer(self, path, receive.prefill_engine)
            self._peers[receive.prefill_engine] = peer
            for name in [name for name, other in self._peers.items() if other.ended]:
                del self._peers[name]
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

    def open(self, connection: Connection) -> tuple[str, Window]:
        """Agrees with a prefill worker on a mover.

        Raises:
            MoverError: there is none, in one line.
        """
        rejected: dict[str, str] = {}
        for mover in self._movers:
            connection.send(Try(self._engine_id, host(), mover))
            answer = connection.receive()
            files = connection.take_files()
            try:
                match answer:
                    case Offer():
                        window = MOVERS[mover].open(self._pages.device, answer.window, files)
                        connection.send(Use(mover, rejected))
                        for name, why in rejected.items():
                            logger.warning("TrivetConnector: no %s from prefill: %s", name, why)
                        return mover, window
                    case Cannot():
                        rejected[mover] = answer.why
                    case _:
                        raise MoverError("prefill's worker ended while a mover was agreed on")
            except MoverError as error:
                rejected[mover] = str(error)
            finally:
                for file in files:
                    os.close(file)
        raise MoverError("; ".join(f"{name}: {why}" for name, why in rejected.items()))

    def write(self, mover: str, window: Window, receiving: _Receiving, piece: Piece) -> str | None:
        """Writes a piece into the pages; what is wrong with it, or None."""
        start_ns = time.monotonic_ns()
        stream = torch.cuda.current_stream() if self._pages.device.type == "cuda" else None
        if stream is not None and receiving.after is not None:
            stream.wait_event(receiving.after)
            receiving.after = None
        ids = self._ids(receiving, piece)
        if self._pages.bytes_of(piece.layers, len(ids)) != piece.bytes:
            return f"a piece of {piece.bytes} bytes that should have {self._pages.bytes_of(piece.layers, len(ids))}"
        self._pages.scatter(piece.layers, ids, window.read(piece.slot, piece.bytes))
        if stream is not None:
            from trivet.transfer.movers.cuda import wait

            wait(stream)
        if piece.checksum is not None:  # of what lies in the pages now, not of what was read
            written = torch.empty(piece.bytes, dtype=torch.uint8, device=self._pages.device)
            self._pages.gather(piece.layers, ids, written)
            if checksum(written) != piece.checksum:
                return "a piece whose checksum differs"
        try:
            receiving.arrivals.came(piece.layers, piece.ranges)
        except ValueError as error:
            return f"a piece out of order ({error})"
        receiving.bytes += piece.bytes
        receiving.pieces += 1
        now_ns = time.monotonic_ns()
        name = receiving.receive.transfer
        self._trace.span("decode", name, f"write {piece.bytes / 2**20:.1f} MiB by {mover}", start_ns, now_ns)
        if receiving.arrivals.is_complete():
            tail_ns = now_ns - piece.computed_ns if piece.computed_ns else 0
            self._counts.received(
                mover, receiving.bytes, receiving.pieces, (now_ns - receiving.started_ns) / 1e9, tail_ns / 1e9
            )
            self._trace.span("decode", name, "receive", receiving.started_ns, now_ns)
        return None

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
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._waiting: list[_Receiving] = []
        """Submitted before the connection stood."""
        self._reading: dict[str, _Receiving] = {}
        self.ended = False
        self._why = "prefill's worker is gone"
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
        """Tells prefill that it is not wanted any more."""
        with self._lock:
            if self._reading.get(receiving.receive.transfer) is receiving:
                del self._reading[receiving.receive.transfer]
            connection = self._connection
        if connection is not None:
            connection.send(Stop(receiving.receive.transfer, receiving.receive.attempt))

    def close(self) -> None:
        """Closes the connection, which ends the thread."""
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.close()

    def _want(self, connection: Connection, receiving: _Receiving) -> None:
        receive = receiving.receive
        connection.send(Want(receive.transfer, receive.attempt, [list(one) for one in receive.wanted]))
        if receiving.arrivals.is_complete():  # nothing is wanted
            receiving.landed = True
            self._receiver.notify(receive)

    @torch.inference_mode()
    def _run(self) -> None:
        connection: Connection | None = None
        window: Window | None = None
        try:
            with own_stream(self._receiver.device):
                connection = Connection.to(self._path)
                mover, window = self._receiver.open(connection)
                logger.info("TrivetConnector: receives from prefill engine %s by %s", self._engine_id, mover)
                self._receiver._counts.pair(self._engine_id, mover)
                with self._lock:
                    self._connection = connection
                    waiting, self._waiting = self._waiting, []
                for receiving in waiting:
                    self._want(connection, receiving)
                while (message := connection.receive()) is not None:
                    if not isinstance(message, Piece):
                        raise ValueError(f"a {type(message).__name__} from prefill's worker")
                    self._read(connection, mover, window, message)
        except MoverError as error:
            self._why = f"no mover between prefill and decode: {error}"
            logger.error("TrivetConnector: %s", self._why)
        except OSError as error:
            self._why = f"prefill's worker cannot be reached at {self._path}: {error.strerror or error}"
            logger.error("TrivetConnector: %s", self._why)
        except Exception as error:
            self._why = f"receiving failed: {error}"
            logger.exception("TrivetConnector: receiving failed")
        finally:
            with self._lock:
                self.ended = True
                left = list(self._reading.values())
                self._reading = {}
            for receiving in left:
                if not receiving.landed:
                    receiving.ended = receiving.ended or self._why
            if connection is not None:
                connection.close()
            if window is not None:
                with contextlib.suppress(MoverError):
                    window.close()

    def _read(self, connection: Connection, mover: str, window: Window, piece: Piece) -> None:
        with self._lock:
            receiving = self._reading.get(piece.transfer)
        if receiving is not None and receiving.receive.attempt == piece.attempt:
            with receiving.writing:
                if receiving.ended is None:
                    problem = self._receiver.write(mover, window, receiving, piece)
                    if problem is not None:
                        receiving.ended = f"prefill sent {problem}"
                        logger.error("TrivetConnector: transfer %s: %s", piece.transfer, receiving.ended)
                    elif receiving.arrivals.is_complete():
                        receiving.landed = True
                        self._receiver.notify(receiving.receive)
            if receiving.landed or receiving.ended is not None:
                with self._lock:
                    if self._reading.get(piece.transfer) is receiving:
                        del self._reading[piece.transfer]
                connection.send(Took(piece.slot))
                last = Got if receiving.landed else Stop
                connection.send(last(piece.transfer, piece.attempt))
                return
        connection.send(Took(piece.slot))
