"""What the two sides of a transfer say to each other. MessagePack, each message behind its length.

The link joins the scheduler sides (decode connects), the data link one worker of each side (decode connects, rank by
rank). A transfer is named by the id that the gateway made for it; engines' own request ids never leave an engine.

What a peer says is not trusted: every field has its type and its bounds, and what is outside is no message. Texts for
people are cut to one line of bounded length wherever a message is made, so that none of ours is refused for that.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeGuard

import msgspec
from msgspec import Meta

PROTOCOL = 2
"""Raised when messages, or the meaning of staged bytes, change: both sides must speak the same."""

LONGEST_BYTES = 4 * 2**20
"""Of a message: hundreds of times what a prompt of a million tokens needs."""
_LONGEST_TRANSFER = 512
_LONGEST_TEXT = 500
_MOST_BLOCKS = 2**24
"""Of a prompt, so that a few bytes cannot stand for more block ids than memory holds."""

Transfer: TypeAlias = Annotated[str, Meta(max_length=_LONGEST_TRANSFER)]
Name: TypeAlias = Annotated[str, Meta(max_length=2**16)]
"""Of an engine or a request; clients have their say in it."""
Word: TypeAlias = Annotated[str, Meta(max_length=64)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Index: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
BlockIndex: TypeAlias = Annotated[int, Meta(ge=0, le=_MOST_BLOCKS)]
Ranges: TypeAlias = list[tuple[BlockIndex, BlockIndex]]
"""Pairs of the first and the one behind the last, ascending."""
Fact: TypeAlias = Annotated[str, Meta(max_length=1024)] | int | None
Identity: TypeAlias = Annotated[dict[Annotated[str, Meta(max_length=256)], Fact], Meta(max_length=4096)]


def is_transfer(value: object) -> TypeGuard[str]:
    """Whether messages can carry it as a transfer's id. One that is too long would end the link for all others."""
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_TRANSFER and value.isprintable()


def one_line(text: object) -> str:
    """A text for a log: what a peer wrote stays one line of bounded length."""
    words = " ".join("".join(one if one.isprintable() else " " for one in str(text)[: 4 * _LONGEST_TEXT]).split())
    return words if len(words) <= _LONGEST_TEXT else f"{words[: _LONGEST_TEXT - 3]}..."


def _check(ranges: list[tuple[int, int]]) -> None:
    last = 0
    for start, end in ranges:
        if not last <= start < end:
            raise ValueError("ranges of blocks are empty, overlap or are out of order")
        last = end


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=False):
    """The base of all: an array of the type's name and its fields."""

    def _shorten(self, field: str) -> None:
        if (text := getattr(self, field)) is not None:
            msgspec.structs.force_setattr(self, field, one_line(text))


# --- the link: decode's scheduler to prefill's ---------------------------------------------------------------


class Hello(_Message, frozen=True):
    """Decode's first word."""

    protocol: int
    engine_id: Name
    identity: Identity
    """See ``identity.py``."""


class Welcome(_Message, frozen=True):
    """Prefill's answer."""

    engine_id: Name
    """New for each start of an engine: its generation."""
    data_paths: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=4096)]
    """Where the workers listen, by rank."""
    problem: str | None
    """Why the two cannot exchange KV, or None."""

    def __post_init__(self) -> None:
        self._shorten("problem")


class Open(_Message, frozen=True):
    """Decode has the request of this transfer and wants its KV."""

    transfer: Transfer
    prompt: Word = ""
    """Which prompt it is, see ``prompts.py``: KV of another must not be handed over. Not compared where it is empty."""


class Close(_Message, frozen=True):
    """Decode is through with it."""

    transfer: Transfer
    has_all: bool
    """It has all KV; else it does not want it any more."""


class Alive(_Message, frozen=True):
    """Decode still wants what it has opened."""


class Announce(_Message, frozen=True):
    """The first chunk of the prompt is scheduled: now decode may take blocks for it."""

    transfer: Transfer


class Withdraw(_Message, frozen=True):
    """Prefill lost the prompt's blocks and begins again later: decode must not keep blocks for it meanwhile."""

    transfer: Transfer


class First(_Message, frozen=True):
    """Prefill is done with its request; all KV is computed."""

    transfer: Transfer
    token: Count | None
    """The first token of the answer, where it was asked for."""


class Lost(_Message, frozen=True):
    """This transfer will not be completed."""

    transfer: Transfer
    why: str
    first_comes: bool = False
    """Prefill computes the prompt all the same, and will say ``First``."""
    attempt: Count | None = None
    """On the data link: which of decode's attempts, see ``Want``; None on the link, where there are none."""

    def __post_init__(self) -> None:
        self._shorten("why")


# --- the data link: decode's worker to prefill's -------------------------------------------------------------


class Try(_Message, frozen=True):
    """Decode's worker asks for a mover. ``host`` names machine and boot; see ``identity.host``."""

    engine_id: Name
    host: Name
    mover: Word


class Offer(_Message, frozen=True):
    """What decode needs to read prefill's staging; file descriptors travel beside it."""

    mover: Word
    window: Annotated[dict[Word, int | bytes], Meta(max_length=64)]


class Cannot(_Message, frozen=True):
    """This mover cannot run."""

    mover: Word
    why: str

    def __post_init__(self) -> None:
        self._shorten("why")


class Use(_Message, frozen=True):
    """Decode reads with this mover; ``rejected`` says why not with those before it."""

    mover: Word
    rejected: Annotated[dict[Word, str], Meta(max_length=64)]

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "rejected", {name: one_line(why) for name, why in self.rejected.items()})


class Want(_Message, frozen=True):
    """The blocks of a transfer that decode lacks: for each cache group, ranges of block indexes of the prompt."""

    transfer: Transfer
    attempt: Count
    """Which of decode's attempts this is: words and pieces of a former one may still be under way."""
    ranges: Annotated[list[Ranges], Meta(max_length=1024)]

    def __post_init__(self) -> None:
        for ranges in self.ranges:
            _check(ranges)


class Piece(_Message, frozen=True):
    """A slot of the staging holds this: for each layer in turn the blocks of ``ranges`` in order."""

    transfer: Transfer
    attempt: Count
    slot: Index
    bytes: Count
    group: Index
    layers: Annotated[list[Index], Meta(max_length=2**16)]
    """Indexes into the connector's order of layers, see ``pages.py``."""
    ranges: Ranges
    computed_ns: Count
    """When its last layer was computed, on the machine's monotonic clock; 0 if that was not measured."""
    checksum: int | None

    def __post_init__(self) -> None:
        _check(self.ranges)


class Took(_Message, frozen=True):
    """A slot has been read and may be written again."""

    slot: Index


class Got(_Message, frozen=True):
    """Every wanted block of every layer is there: prefill may forget the transfer."""

    transfer: Transfer
    attempt: Count


class Stop(_Message, frozen=True):
    """Decode does not read this transfer any more."""

    transfer: Transfer
    attempt: Count


# --- decode's workers to their own scheduler side -----------------------------------------------------------


class Landed(_Message, frozen=True):
    """All KV of a request is there, at one rank."""

    request_id: Name
    attempt: Count
    rank: Index


Message: TypeAlias = (
    Hello
    | Welcome
    | Open
    | Close
    | Alive
    | Announce
    | Withdraw
    | First
    | Lost
    | Try
    | Offer
    | Cannot
    | Use
    | Want
    | Piece
    | Took
    | Got
    | Stop
    | Landed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """A message as bytes, without its length."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message in ``data``.

    Raises:
        ValueError: there is none, as from a peer of another protocol; in one line.
    """
    if len(data) > LONGEST_BYTES:
        raise ValueError(f"a message of {len(data)} bytes")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"not a message of TrivetConnector's protocol {PROTOCOL}: {one_line(error)}") from None
