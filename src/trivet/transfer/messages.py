"""What the two sides of a transfer say to each other. MessagePack, each message behind its length.

The link joins the scheduler sides (decode connects), the data link one worker of each side (decode connects, rank by
rank). A transfer is named by the id that the gateway made for it; engines' own request ids never leave an engine.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

PROTOCOL = 1
"""Raised when messages, or the meaning of staged bytes, change: both sides must speak the same."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=False):
    """The base of all: an array of the type's name and its fields."""


# --- the link: decode's scheduler to prefill's ---------------------------------------------------------------


class Hello(_Message, frozen=True):
    """Decode's first word."""

    protocol: int
    engine_id: str
    identity: dict[str, Any]
    """See ``identity.py``."""


class Welcome(_Message, frozen=True):
    """Prefill's answer."""

    engine_id: str
    """New for each start of an engine: its generation."""
    data_paths: list[str]
    """Where the workers listen, by rank."""
    problem: str | None
    """Why the two cannot exchange KV, or None."""


class Open(_Message, frozen=True):
    """Decode has the request of this transfer and wants its KV."""

    transfer: str


class Close(_Message, frozen=True):
    """Decode is through with it."""

    transfer: str
    has_all: bool
    """It has all KV; else it does not want it any more."""


class Alive(_Message, frozen=True):
    """Decode still wants what it has opened."""


class Announce(_Message, frozen=True):
    """The first chunk of the prompt is scheduled: now decode may take blocks for it."""

    transfer: str


class Withdraw(_Message, frozen=True):
    """Prefill lost the prompt's blocks and begins again later: decode must not keep blocks for it meanwhile."""

    transfer: str


class First(_Message, frozen=True):
    """Prefill is done with its request; all KV is computed."""

    transfer: str
    token: int | None
    """The first token of the answer, where it was asked for."""


class Lost(_Message, frozen=True):
    """This transfer will not be completed."""

    transfer: str
    why: str
    first_comes: bool = False
    """Prefill computes the prompt all the same, and will say ``First``."""


# --- the data link: decode's worker to prefill's -------------------------------------------------------------


class Try(_Message, frozen=True):
    """Decode's worker asks for a mover. ``host`` names machine and boot; see ``identity.host``."""

    engine_id: str
    host: str
    mover: str


class Offer(_Message, frozen=True):
    """What decode needs to read prefill's staging; file descriptors travel beside it."""

    mover: str
    window: dict[str, Any]


class Cannot(_Message, frozen=True):
    """This mover cannot run."""

    mover: str
    why: str


class Use(_Message, frozen=True):
    """Decode reads with this mover; ``rejected`` says why not with those before it."""

    mover: str
    rejected: dict[str, str]


class Want(_Message, frozen=True):
    """The blocks of a transfer that decode lacks: for each cache group, ranges of block indexes of the prompt."""

    transfer: str
    attempt: int
    """Which of decode's attempts this is: words and pieces of a former one may still be under way."""
    ranges: list[list[tuple[int, int]]]


class Piece(_Message, frozen=True):
    """A slot of the staging holds this: for each layer in turn the blocks of ``ranges`` in order."""

    transfer: str
    attempt: int
    slot: int
    bytes: int
    group: int
    layers: list[int]
    """Indexes into the connector's order of layers, see ``pages.py``."""
    ranges: list[tuple[int, int]]
    computed_ns: int
    """When its last layer was computed, on the machine's monotonic clock; 0 if that was not measured."""
    checksum: int | None


class Took(_Message, frozen=True):
    """A slot has been read and may be written again."""

    slot: int


class Got(_Message, frozen=True):
    """Every wanted block of every layer is there: prefill may forget the transfer."""

    transfer: str
    attempt: int


class Stop(_Message, frozen=True):
    """Decode does not read this transfer any more."""

    transfer: str
    attempt: int


# --- decode's workers to their own scheduler side -----------------------------------------------------------


class Landed(_Message, frozen=True):
    """All KV of a request is there, at one rank."""

    request_id: str
    attempt: int
    rank: int


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
        ValueError: there is none, as from a peer of another protocol.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"not a message of TrivetConnector's protocol {PROTOCOL}: {error}") from error
