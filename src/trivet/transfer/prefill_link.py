"""Decode's link to the scheduler side of a prefill engine, and the threads that serve it."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from trivet.connectors.address import path_of
from trivet.transfer.incoming import Incoming, State
from trivet.transfer.link import Connection
from trivet.transfer.messages import (
    PROTOCOL,
    Alive,
    Announce,
    Close,
    First,
    Hello,
    Lost,
    Message,
    Open,
    Welcome,
    Withdraw,
)

if TYPE_CHECKING:
    from trivet.transfer.decode import DecodeSide

logger = logging.getLogger("vllm.trivet")


class PrefillLink:
    """See the module."""

    def __init__(self, side: DecodeSide, address: str, lease_s: float) -> None:
        """
        Raises:
            RuntimeError: the process can have no more threads.
        """
        self._side, self._address, self._lease_s = side, address, lease_s
        self._connection: Connection | None = None
        self._transfers: dict[str, Incoming] = {}
        self.ended = False
        self.data_paths: list[str] = []
        self.prefill_engine = ""
        self._wake = threading.Event()
        try:
            threading.Thread(target=self._say_alive, name="trivet-alive", daemon=True).start()
            threading.Thread(target=self._run, name="trivet-link", daemon=True).start()
        except RuntimeError:
            self.ended = True
            self._wake.set()
            raise

    def open(self, incoming: Incoming) -> bool:
        """Asks prefill for a transfer, now or once the link stands. Called with the side's lock.

        False where another request has that transfer: it would never hear of it.
        """
        if incoming.transfer in self._transfers:
            return False
        self._transfers[incoming.transfer] = incoming
        self._wake.set()
        if self._connection is not None:
            self._connection.send(Open(incoming.transfer, incoming.prompt))
        return True

    def close_transfer(self, incoming: Incoming) -> None:
        """Tells prefill that decode is through with it. Called with the side's lock."""
        if self._transfers.get(incoming.transfer) is not incoming:
            return
        del self._transfers[incoming.transfer]
        if self._connection is not None:
            self._connection.send(Close(incoming.transfer, has_all=incoming.has_all))

    def close(self) -> None:
        """Closes the connection, which ends the threads."""
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        why = "prefill is gone"
        connection: Connection | None = None
        try:
            connection = Connection.to(path_of(self._address))
            connection.send(Hello(PROTOCOL, self._side.engine_id, self._side.identity))
            welcome = connection.receive()
            if not isinstance(welcome, Welcome):
                raise ValueError("prefill did not answer")
            if welcome.problem is not None:
                logger.error("TrivetConnector: prefill at %s: %s", self._address, welcome.problem)
            with self._side.lock:
                self.data_paths, self.prefill_engine = welcome.data_paths, welcome.engine_id
                self._connection = connection
                for incoming in self._transfers.values():
                    connection.send(Open(incoming.transfer, incoming.prompt))
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
                self._side.forget(self)
                for incoming in self._transfers.values():
                    incoming.lose(why)
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
                if incoming.state is State.OPENED:
                    incoming.state = State.ANNOUNCED
                    incoming.wake()
            case Withdraw():
                incoming.announced = False
                if incoming.state is State.ANNOUNCED:
                    incoming.state = State.OPENED
                elif incoming.state is State.LOADING:
                    incoming.withdrawn = True
            case First():
                incoming.token, incoming.token_known = message.token, True
                self._side.trace.mark("decode", incoming.transfer, "prefill is done")
                if incoming.state is State.LOADING:  # one that waits for blocks may wait longer than a lease
                    incoming.deadline_s = time.monotonic() + self._lease_s
            case Lost():
                incoming.token_lost = not message.first_comes and not incoming.token_known
                incoming.lose(message.why)
            case _:
                raise ValueError(f"a {type(message).__name__} on a link")

    def _say_alive(self) -> None:
        """Keeps the leases of what is opened, and is asleep while nothing is."""
        while not self.ended:
            if not self._transfers:
                self._wake.wait()
                self._wake.clear()
                continue
            time.sleep(self._lease_s / 3)
            if self._transfers and self._connection is not None:
                self._connection.send(Alive())
