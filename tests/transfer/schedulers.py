"""What scheduler sides are told by vLLM: requests and steps, in vLLM's own types."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any, TypeVar

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from transfer.waiting import LIMIT_S, until
from trivet.transfer.link import Connection, Listener
from trivet.transfer.messages import PROTOCOL, Close, Hello, Lost, Message, Open, Welcome
from trivet.transfer.plan import Report

M = TypeVar("M", bound=Message)

BLOCK = 16
IDENTITY = {"protocol": PROTOCOL, "model": "m", "block_tokens": BLOCK}

init_none_hash(sha256)


def make_request(name: str, tokens: int = 40, params: dict[str, Any] | None = None, **sampling: Any) -> Request:
    """A request as the scheduler has it."""
    sampling = {"max_tokens": 8, "min_tokens": 0, **sampling}
    request = Request(
        request_id=name,
        prompt_token_ids=list(range(1000, 1000 + tokens)),
        sampling_params=SamplingParams(**sampling),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    request.kv_transfer_params = params
    return request


def step(*scheduled: tuple[Request, int], first: int = 1, resumed: tuple[Request, ...] = ()) -> SchedulerOutput:
    """A step in which each request computes so many tokens, behind those that it has.

    Args:
        first: the id of the first block that is given away.
        resumed: requests that were preempted before, and are told as the V1 runner is.
    """
    output = SchedulerOutput.make_empty()
    cached = output.scheduled_cached_reqs
    for request, tokens in scheduled:
        before = request.num_computed_tokens
        known = 0 if request in resumed else -(-before // BLOCK)
        number = -(-(before + tokens) // BLOCK) - known
        blocks = (list(range(first, first + number)),)
        first += number
        output.num_scheduled_tokens[request.request_id] = tokens
        if before == 0 and request not in resumed:
            output.scheduled_new_reqs.append(NewRequestData.from_request(request, blocks))
        else:
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(blocks if number else None)
            cached.num_computed_tokens.append(before)
            cached.num_output_tokens.append(0)
            if request in resumed:
                cached.resumed_req_ids.add(request.request_id)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = before + tokens
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    return output


def preempt(request: Request) -> None:
    """What vLLM's scheduler does to a request whose blocks it needs."""
    request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0


def end(request: Request, token: int | None = 7, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED) -> None:
    """The request has made a token, and ended."""
    if token is not None:
        request.append_output_token_ids(token)
    request.status = status


def blocks_of(*groups: list[int]) -> Any:
    """Blocks as the cache manager gives them."""
    return SimpleNamespace(get_block_ids=lambda: groups)


def output_of(report: Report | None = None) -> KVConnectorOutput:
    """What workers say behind a step."""
    return KVConnectorOutput(kv_connector_worker_meta=report)


class Peer:
    """An end of a link that keeps what it hears."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.heard: queue.Queue[Message | None] = queue.Queue()

    def listen(self) -> None:
        """Until the other side is gone."""
        while (message := self.connection.receive()) is not None:
            self.heard.put(message)
        self.heard.put(None)

    def send(self, message: Message) -> None:
        """Says something."""
        assert self.connection.send(message)

    def next(self, kind: type[M]) -> M:
        """The next thing that was heard, which is of this type."""
        message = self.heard.get(timeout=LIMIT_S)
        assert isinstance(message, kind), message
        return message

    def silent(self) -> bool:
        """Whether nothing has been heard that was not looked at."""
        return self.heard.empty()


class FakeDecode(Peer):
    """A decode engine, as prefill sees one."""

    def __init__(self, path: str, identity: dict[str, Any] | None = None, protocol: int = PROTOCOL) -> None:
        import threading

        super().__init__(Connection.to(path))
        self.connection.send(Hello(protocol, "decode-1", IDENTITY if identity is None else identity))
        threading.Thread(target=self.listen, daemon=True).start()
        self.welcome = self.next(Welcome)

    def settle(self) -> None:
        """Returns once prefill has heard all that was said, and nothing else was answered: one more than it ended."""
        self.send(Open("ended long ago"))
        assert self.next(Lost).transfer == "ended long ago"

    def close(self) -> None:
        """Goes away."""
        self.connection.close()


class FakePrefill:
    """A prefill engine, as decode sees one."""

    def __init__(self, path: str, engine: str = "prefill-1", problem: str | None = None) -> None:
        self.address = f"unix:{path}"
        self.links: list[Peer] = []
        self.hellos: list[Hello] = []
        self._engine, self._problem, self._path = engine, problem, path
        self._listener = Listener(path, self._serve, "fake-prefill")

    def _serve(self, connection: Connection) -> None:
        hello = connection.receive()
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        peer = Peer(connection)
        peer.send(Welcome(self._engine, [f"{self._path}.0", f"{self._path}.1"], self._problem))
        self.links.append(peer)
        peer.listen()

    @property
    def link(self) -> Peer:
        """The newest link."""
        until(lambda: self.links, "connecting")
        return self.links[-1]

    def opened(self, transfer: str) -> None:
        """Waits until decode has asked for a transfer."""
        assert self.link.next(Open).transfer == transfer

    def closed(self, transfer: str) -> bool:
        """Waits until decode is through with it. Whether it has all."""
        closed = self.link.next(Close)
        assert closed.transfer == transfer
        return closed.has_all

    def close(self) -> None:
        """Ends, as a process does."""
        self._listener.close()
        for link in self.links:
            link.connection.close()
