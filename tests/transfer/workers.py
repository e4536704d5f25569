"""Worker sides on the CPU, stepped as vLLM's runner steps them: a prefill that "computes" known bytes, and a decode."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from transfer.waiting import LIMIT_S, until
from trivet.transfer.link import Connection
from trivet.transfer.messages import Lost, Message, Offer, Piece, Took, Try, Use, Want
from trivet.transfer.pages import Layer, Pages
from trivet.transfer.plan import Chunk, Receive, Report, StepPlan
from trivet.transfer.receiver import Receiver
from trivet.transfer.sender import Sender
from trivet.transfer.settings import Settings
from trivet.transfer.stats import Counts
from trivet.transfer.trace import Trace

WORDS = 24
"""Of a block, in layers of the first group."""
BLOCK_BYTES = WORDS * 8
TOKENS = 16
JUNK = 0x5EED
SIX = (0,) * 6
"""Layers of one group."""


def settings(folder: Path, name: str = "p", *, staging: int = 64, piece: int = 8, **changes) -> Settings:
    """Staging and pieces in blocks of one layer."""
    own = {"movers": (), "lease_s": 30.0, "checksums": False, **changes}
    return Settings(
        f"unix:{folder / name}", staging_bytes=staging * BLOCK_BYTES, piece_bytes=piece * BLOCK_BYTES, **own
    )


def make_pages(groups: Sequence[int], blocks: int, block_tokens: Sequence[int] = (TOKENS, TOKENS)) -> Pages:
    """Layers of these groups; a block of a later group is larger."""
    layers = [
        Layer(f"model.layers.{index}.attn", group, torch.full((blocks, WORDS * (group + 1)), -1, dtype=torch.int64))
        for index, group in enumerate(groups)
    ]
    return Pages(layers, block_tokens[: max(groups) + 1])


def kv(prompt: str, layer: int, block: int, words: int) -> torch.Tensor:
    """What a prompt's block holds in a layer."""
    start = zlib.crc32(f"{prompt} {layer} {block}".encode())
    return torch.arange(start * 1000, start * 1000 + words, dtype=torch.int64)


@dataclass(eq=False)
class Prompt:
    """A request of prefill."""

    name: str
    tokens: int
    blocks: list[list[int]] = field(default_factory=list)
    done: int = 0
    told: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return f"p-{self.name}"


class PrefillWorker(AbstractContextManager["PrefillWorker"]):
    """A sender, its pages, and a scheduler that gives blocks away."""

    def __init__(self, folder: Path, *, groups: Sequence[int] = SIX, blocks: int = 512, name: str = "p", **changes):
        self.pages = make_pages(groups, blocks)
        self.counts = Counts()
        own = settings(folder, name, **changes)
        self.path = f"{own.path}.0"
        self.sender = Sender(self.pages, own, self.path, self.counts, Trace("prefill"))
        self._free = list(range(1, blocks))
        random.Random(7).shuffle(self._free)

    def __exit__(self, *error: object) -> None:
        self.sender.close()
        self.cut()

    def cut(self) -> None:
        """What the end of the process does: every connection ends."""
        for peer in list(self.sender._peers):
            peer.connection.close()

    def chunk(self, prompt: Prompt, to: int | None = None) -> Chunk:
        """The prompt goes on to so many tokens, in blocks that it is given now."""
        anew = not prompt.blocks
        if anew:
            prompt.blocks = [[] for _ in self.pages.block_tokens]
            prompt.done = 0
        to = prompt.tokens if to is None else to
        new = []
        for group, size in enumerate(self.pages.block_tokens):
            more = -(-to // size) - len(prompt.blocks[group])
            new.append(tuple(self._free.pop() for _ in range(more)))
            prompt.blocks[group] += new[-1]
        return Chunk(prompt.name, prompt.request_id, tuple(new), anew, to, to == prompt.tokens)

    def run(self, plan: StepPlan, work: Iterable[tuple[Prompt, int]] = (), *, hooks: bool = True) -> set[str]:
        """A step: computes prompts to a number of tokens. Request ids that were sent."""
        self.sender.begin(plan)
        work = list(work)
        for index, layer in enumerate(self.pages.layers):
            for prompt, to in work:
                self._compute(prompt, index, to)
            if hooks:
                self.sender.layer_done(layer.name)
        self.sender.step_done()
        for prompt, to in work:
            prompt.done = to
        return self.sender.take_sent()

    def compute(self, *work: Prompt | tuple[Prompt, int], hooks: bool = True, **plan: tuple) -> set[str]:
        """A step of these prompts, to their end where no token is given."""
        each = [(one, one.tokens) if isinstance(one, Prompt) else one for one in work]
        chunks = tuple(self.chunk(prompt, to) for prompt, to in each)
        return self.run(StepPlan(chunks=chunks, **plan), each, hooks=hooks)

    def tell(self, **plan: tuple) -> set[str]:
        """A step in which nothing of a prompt is computed."""
        return self.run(StepPlan(**plan))

    def overwrite(self, prompt: Prompt) -> None:
        """Another request computes in this one's blocks, which are its no more."""
        for layer in self.pages.layers:
            layer.rows[prompt.blocks[layer.group]] = JUNK
        prompt.blocks = []

    def finish(self, *prompts: Prompt) -> None:
        """Ends requests, whose blocks must be told as sent."""
        left = {prompt.request_id for prompt in prompts}
        left -= self.tell(finished=tuple(prompt.name for prompt in prompts))

        def sent() -> bool:
            came = self.sender.take_sent()
            assert came <= left
            left.difference_update(came)
            return not left

        until(sent, "sending")

    def _compute(self, prompt: Prompt, index: int, to: int) -> None:
        layer = self.pages.layers[index]
        size = self.pages.block_tokens[layer.group]
        for block in range(prompt.done // size, -(-to // size)):
            content = kv(prompt.name, index, block, layer.rows.shape[1])
            if (block + 1) * size > to != prompt.tokens:
                content[-1] = JUNK  # a block that is not full is not what it will be
            layer.rows[prompt.blocks[layer.group][block]] = content


class DecodeWorker(AbstractContextManager["DecodeWorker"]):
    """A receiver and its pages."""

    def __init__(self, folder: Path, *, groups: Sequence[int] = SIX, blocks: int = 512, name: str = "d", **changes):
        self.pages = make_pages(groups, blocks)
        self.counts = Counts()
        own = settings(folder, name, **changes)
        self.receiver = Receiver(self.pages, own, f"engine-{name}", 0, self.counts, Trace("decode"))
        self.landed: set[str] = set()
        self.stopped: dict[str, str] = {}
        self.expected: dict[tuple[int, int], torch.Tensor] = {}
        """What lies in a layer's block, where it is not what lay there at first."""
        self._free = list(range(1, blocks))
        random.Random(9).shuffle(self._free)

    def __exit__(self, *error: object) -> None:
        self.receiver.close()

    def receive(
        self,
        prompt: Prompt,
        prefill: PrefillWorker | str,
        *,
        cached: int = 0,
        window: int | None = None,
        engine: str | None = None,
        attempt: int = 0,
    ) -> Receive:
        """A request whose first blocks are cached here; the second group keeps its last ``window`` blocks only."""
        blocks, wanted = [], []
        for group, size in enumerate(self.pages.block_tokens):
            number = -(-prompt.tokens // size)
            start = cached if window is None or group == 0 else max(cached, number - window)
            none = 0 if window is None or group == 0 else start
            blocks.append((0,) * none + tuple(self._free.pop() for _ in range(number - none)))
            wanted.append(((start, number),) if start < number else ())
        path = prefill if isinstance(prefill, str) else prefill.path
        receive = Receive(
            prompt.name, f"d-{prompt.name}", attempt, (path,), engine or f"of {path}", tuple(blocks), tuple(wanted)
        )
        for index, layer in enumerate(self.pages.layers):
            for start, end in wanted[layer.group]:
                for block in range(start, end):
                    content = kv(prompt.name, index, block, layer.rows.shape[1])
                    self.expected[index, blocks[layer.group][block]] = content
        return receive

    def start(self, *receives: Receive, given_up: Sequence[Receive] = ()) -> None:
        """A step that has these to receive, and gives those up."""
        plan = StepPlan(receives=receives, given_up=tuple((one.request_id, one.attempt) for one in given_up))
        self.receiver.begin(plan)
        self.receiver.start(plan)

    def want(self, prompt: Prompt, prefill: PrefillWorker | str, **kind) -> Receive:
        """Both in one."""
        receive = self.receive(prompt, prefill, **kind)
        self.start(receive)
        return receive

    def look(self) -> Report:
        """What the workers report in a step."""
        report = self.receiver.report() or Report()
        self.landed |= set(report.landed)
        self.stopped |= report.reasons
        assert not self.landed & set(self.stopped)
        return report

    def wait(self, *prompts: Prompt, limit_s: float = LIMIT_S) -> None:
        """Until these have landed."""
        names = {f"d-{prompt.name}" for prompt in prompts}

        def all_there() -> bool:
            self.look()
            assert not self.stopped, self.stopped
            return names <= self.landed

        until(all_there, f"landing of {sorted(names)}", limit_s)

    def wait_stopped(self, prompt: Prompt) -> str:
        """Until it has stopped, and why."""

        def stopped() -> str | None:
            self.look()
            assert f"d-{prompt.name}" not in self.landed
            return self.stopped.get(f"d-{prompt.name}")

        return until(stopped, f"stopping of {prompt.name}") or ""

    def forget(self, receive: Receive) -> None:
        """Nothing that came of it is looked at."""
        for index, layer in enumerate(self.pages.layers):
            for block in receive.blocks[layer.group]:
                self.expected[index, block] = layer.rows[block].clone()

    def check(self) -> None:
        """Every byte is what it should be, those of blocks that nobody wanted included."""
        for index, layer in enumerate(self.pages.layers):
            for block in range(len(layer.rows)):
                own = layer.rows[block]
                content = self.expected.get((index, block))
                right = (own == (-1 if content is None else content)).all()
                assert right, f"layer {index} block {block} holds {own[:3].tolist()}..., {own[-1]}"


class Gate:
    """Holds whoever calls a method of a class, from the ``after``-th call on, until it is opened."""

    def __init__(self, monkeypatch, owner, name, after=0):
        self.calls, self._open, self._after = 0, threading.Event(), after
        original = getattr(owner, name)

        def held(*arguments):
            self.calls += 1
            if self.calls > self._after:
                assert self._open.wait(LIMIT_S)
            return original(*arguments)

        monkeypatch.setattr(owner, name, held)

    @property
    def holds(self):
        return self.calls > self._after

    def open(self):
        self._open.set()


class Talker:
    """A decode worker that says what a test wants it to say."""

    def __init__(self, path: str):
        self.connection = Connection.to(path)

    def ask(self, message: Message) -> Message | None:
        assert self.connection.send(message)
        return self.connection.receive()

    def close(self) -> None:
        self.connection.close()

    @classmethod
    def joined(cls, path: str, name: str = "talker") -> Talker:
        """One that has agreed on a mover."""
        talker = cls(path)
        assert isinstance(talker.ask(Try(name, "h", "shm")), Offer)
        talker.connection.send(Use("shm", {}))
        return talker

    def want(self, transfer: str, *ranges: tuple[int, int], attempt: int = 0) -> None:
        self.connection.send(Want(transfer, attempt, [list(ranges)]))

    def hear(self) -> Piece | Lost:
        """The next word of prefill."""
        message = self.connection.receive(LIMIT_S)
        assert isinstance(message, Piece | Lost), message
        return message

    def took(self, piece: Piece) -> None:
        self.connection.send(Took(piece.slot))
