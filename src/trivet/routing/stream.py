"""The order of an engine's KV events: each batch once, in turn, and what is missing asked for again.

Batches are numbered from 0 when the engine starts. They come by themselves; those of late are kept by the engine and
sent again when asked for (``ZmqEventPublisher`` in ``vllm/distributed/kv_events.py``). They are also asked for from
time to time when nothing seems to be missing: the answer begins with the batch that came last, and nothing else says
that the engine is still the same one and that the newest batch was not lost.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto


class _Answer(Enum):
    """What is known of the batches that were asked for."""

    NONE = auto()
    """Nothing was asked."""
    BEGINS = auto()
    GOES_ON = auto()
    BROKEN = auto()
    """They are another engine's than those before, or have a hole, as ZeroMQ drops what is sent faster than it leaves:
    the rest is not taken, and is asked for anew."""


class Stream:
    """What came of one engine, and what is to come."""

    def __init__(self, take: Callable[[bytes], None], forget: Callable[[], None]) -> None:
        """
        Args:
            take: given each batch once, in order, without holes.
            forget: called when there is a hole that cannot be filled, before what lies behind it is taken.
        """
        self._take_in = take
        self._forget = forget
        self._last: tuple[int, bytes] | None = None
        """The number of the batch taken last, and the batch."""
        self._heard = -1
        """The number of the one that came last by itself."""
        self._asked: tuple[int, bytes] | None = None
        self._answer = _Answer.NONE
        self.in_order = False
        """All that the engine has told so far was taken, as far as is known. While it is False, ``came`` must wait."""
        self.whole = False
        """It was taken from the engine's start on."""

    @property
    def is_asking(self) -> bool:
        """Whether an answer is awaited."""
        return self._answer is not _Answer.NONE

    def ask(self) -> int:
        """The number of the first batch to ask for."""
        self._asked, self._answer = self._last, _Answer.BEGINS
        return 0 if self._last is None else self._last[0]

    def give_up(self) -> None:
        """Awaits the answer no more. The engine may be gone, and another in its place: it must be asked first."""
        self._answer, self.in_order = _Answer.NONE, False

    def came(self, number: int, batch: bytes) -> None:
        """Takes a batch that came by itself; ``in_order`` is False afterwards if others must come first."""
        again, self._heard = number <= self._heard, number
        if again:  # numbers began anew
            self.in_order = False
        elif number == self._next:
            self._take(number, batch)
        elif number > self._next:
            self.in_order = False

    def answered(self, number: int, batch: bytes) -> None:
        """Takes a batch of an answer."""
        if self._answer is _Answer.BEGINS:
            self._answer = _Answer.GOES_ON
            if self._asked is None:
                self.whole = number == 0
                if self._last is None and number:
                    self._last = number - 1, b""
            elif number > self._asked[0]:  # the engine has kept no more: nothing says that it is the same one
                self._forget()
                self._last, self._heard, self.whole = (number - 1, b""), -1, False
        if self._last is not None and number == self._last[0] and batch != self._last[1]:
            self._start_again()
        if self._answer is _Answer.GOES_ON and number > self._next:
            self._answer = _Answer.BROKEN
        if self._answer is _Answer.GOES_ON and number == self._next:
            self._take(number, batch)

    def ended(self) -> None:
        """Takes an answer's end. ``in_order`` is False afterwards if it is to be asked once more."""
        if self._answer is _Answer.BEGINS:  # the engine has told nothing
            if self._asked is None:
                self.whole = self.whole or self._last is None
            else:
                self._start_again()
        self.in_order = self._answer in (_Answer.BEGINS, _Answer.GOES_ON)
        self._answer = _Answer.NONE

    def cleared(self) -> None:
        """Notes that the engine holds nothing: whatever was missed, it counts no more."""
        self.whole = True

    @property
    def _next(self) -> int:
        return 0 if self._last is None else self._last[0] + 1

    def _take(self, number: int, batch: bytes) -> None:
        self._last = number, batch
        self._take_in(batch)

    def _start_again(self) -> None:
        """It is another engine, or the same one started anew."""
        self._forget()
        self._last, self._heard, self._answer, self.whole = None, -1, _Answer.BROKEN, False
