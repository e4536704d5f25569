"""What ``trivet demo`` does with a service that is up: one chat split, the same one colocated, and the difference."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import orjson

from trivet.errors import EngineFailedError, TrivetError
from trivet.fleet import probe
from trivet.fleet.process import tail
from trivet.fleet.supervisor import State
from trivet.gateway.service import Service

PASSAGE = """\
A trivet is a small stand with three legs. It is placed between a hot pot and a table, so that the heat does not
burn the wood. Three legs are enough, and they have an advantage over four: a stand with three legs never rocks,
because three points always lie in one plane, however uneven the table is. A fourth leg would have to be cut to
exactly the right length.

Cooks used trivets long before there were stoves. A trivet made of iron stood in the fire itself, and the pot stood
on the trivet, a hand above the coals. When the pot was ready, it was carried to the table together with its stand.
Smiths made trivets in many shapes: round ones for pots, long ones for pans, and tall ones with a hook for a kettle
that should hang and not stand. Some could be folded, so that they took little room in a wagon. Travellers liked
those best.

Today most trivets are found on dining tables. They are made of cork, wood, silicone or cast iron. Cork is light and
keeps heat away well, but it stains. Wood is handsome and must be dried after washing. Silicone bends, survives the
dishwasher, and doubles as a grip for opening jars. Cast iron lasts for ever, and it is heavy enough that nobody
pushes it off the table by accident. Whatever it is made of, a trivet does one thing: it carries a load that would
harm what is below it, and it stands still while doing so.

The word is old as well. It comes from the Latin word for three-footed, and it has given English a saying: to be as
right as a trivet means to be in good order, steady and dependable.
"""
QUESTION = "Why does a stand with three legs never rock? Answer in one or two sentences."


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The facts of a demo; times in milliseconds."""

    answer: str
    model: str
    connector: str
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float
    """First byte of the request at the gateway to the first token there."""
    render_ms: float
    prefill_ms: float
    handover_ms: float
    """Prefill's answer to decode's first token."""
    decode_ms: float
    """The answer's first token to its last, the handover included where prefill made the first."""
    colocated_ttft_ms: float
    kv_bytes_moved: int
    """What decode's connector counted."""
    decode_computed_prompt_tokens: int
    """Prompt tokens that decode computed itself, by its own count."""
    prefill_engine: str
    decode_engine: str
    first_token_engine: str
    """Which of the two made the answer's first token: prefill's is at the client before the handover."""
    colocated_engine: str
    equal_to_colocated: bool
    answer_colocated: str

    @property
    def first_is_prefills(self) -> bool:
        """Whether prefill made the answer's first token, so that decode's first is the second."""
        return self.first_token_engine == self.prefill_engine

    def fault(self) -> str | None:
        """What of it is not as it must be, or None."""
        if not self.equal_to_colocated:
            return "the split answer is not the colocated one"
        if self.kv_bytes_moved <= 0:
            return "no KV moved from prefill to decode"
        if self.decode_computed_prompt_tokens > 1:
            return f"decode computed {self.decode_computed_prompt_tokens} prompt tokens itself"
        return None

    def facts(self) -> dict[str, Any]:
        """As ``--json`` writes them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    token_ids: tuple[int, ...]
    facts: Mapping[str, Any]


async def run_demo(service: Service, prompt: str, max_tokens: int, show: Callable[[str], None]) -> DemoResult:
    """Sends ``prompt`` split and colocated, greedy, each with a cache salt of its own.

    Args:
        show: called with each piece of the split answer as it arrives.

    Raises:
        EngineFailedError: a tier failed; ``detail`` is the tail of its log.
        TrivetError: the answer is too short to show anything.
    """
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        # The first transfer of a pair pays for its handshake; it is not what a running service shows.
        await _ask(service, session, "Say yes.", 2, lambda _: None)
        reference = await _ask(service, session, prompt, max_tokens, lambda _: None, colocated=True)
        decode_urls = {one.name: one.url for one in service.plan.engines if one.tier == "decode"}
        await asyncio.sleep(1.0)  # counters of the requests so far may come with an engine's next steps
        before = {name: await _metrics(session, name, url) for name, url in decode_urls.items()}
        split = await _ask(service, session, prompt, max_tokens, show)
        generation = split.facts["generations"][0]
        if not generation["split"]:
            raise EngineFailedError(f"the request was not served split: {generation['reason']}", detail=_log(service))
        if generation["handover_ms"] is None:
            raise TrivetError(
                "the answer ended with prefill's token, so that decode had nothing to do",
                mend="ask for a longer answer",
            )
        decode = generation["decode_engine"]
        bytes_metric = service.plan.connector.bytes_metric if service.plan.connector else None
        after = await _settled(session, decode, decode_urls[decode], before[decode], bytes_metric)
        moved = _delta(before[decode].values, after.values, bytes_metric) if bytes_metric else 0.0
        computed = _delta(before[decode].prompt_tokens, after.prompt_tokens, "local_compute")
    colocated = reference.facts["generations"][0]
    assert service.plan.connector is not None
    return DemoResult(
        answer=split.text,
        model=service.plan.served_names[0],
        connector=service.plan.connector.name,
        prompt_tokens=generation["prompt_tokens"],
        completion_tokens=generation["completion_tokens"],
        ttft_ms=generation["ttft_ms"],
        render_ms=generation["render_ms"],
        prefill_ms=generation["prefill_ms"],
        handover_ms=generation["handover_ms"],
        decode_ms=generation["decode_ms"],
        colocated_ttft_ms=colocated["ttft_ms"],
        kv_bytes_moved=int(moved),
        decode_computed_prompt_tokens=int(computed),
        prefill_engine=generation["prefill_engine"],
        decode_engine=decode,
        first_token_engine=generation["prefill_engine"] if _is_prefills(generation) else decode,
        colocated_engine=colocated["decode_engine"],
        equal_to_colocated=split.token_ids == reference.token_ids,
        answer_colocated=reference.text,
    )


def _is_prefills(generation: Mapping[str, Any]) -> bool:
    """Whether the first token was there before the handover: behind prefill's answer it has no way to go."""
    beyond_ms = generation["ttft_ms"] - generation["render_ms"] - generation["prefill_ms"]
    return bool(beyond_ms < generation["handover_ms"] / 2)


async def _ask(
    service: Service,
    session: aiohttp.ClientSession,
    prompt: str,
    max_tokens: int,
    show: Callable[[str], None],
    *,
    colocated: bool = False,
) -> _Answer:
    request_id = uuid.uuid4().hex
    body = {
        "model": service.plan.served_names[0],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": uuid.uuid4().hex,
    }
    headers = {"X-Request-Id": request_id, "X-Trivet-Serve": "colocated" if colocated else "split"}
    if service.api_keys:
        headers["Authorization"] = f"Bearer {service.api_keys[0]}"
    text = ""
    token_ids: list[int] = []
    try:
        async with session.post(f"{service.url}/v1/chat/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise await _failed(service, f"the gateway answered HTTP {response.status}: {await _fault(response)}")
            async for line in response.content:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise await _failed(service, str(event["error"].get("message", event["error"])))
                for choice in event["choices"]:
                    token_ids += choice.get("token_ids") or []
                    if piece := choice["delta"].get("content"):
                        text += piece
                        show(piece)
        async with session.get(f"{service.url}/trivet/requests/{request_id}", headers=headers) as response:
            facts = await response.json()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise await _failed(service, f"the gateway broke off ({type(error).__name__})") from error
    if not token_ids:
        raise await _failed(service, "the answer had no token")
    return _Answer(text, tuple(token_ids), facts)


async def _fault(response: aiohttp.ClientResponse) -> str:
    try:
        return str((await response.json())["error"]["message"])
    except (ValueError, KeyError, TypeError, aiohttp.ClientError):
        return (await response.text())[:200]


async def _failed(service: Service, problem: str) -> EngineFailedError:
    """The error with the log of the engine that is at fault, if one is: the fleet may learn of it a moment later."""
    for _ in range(20):
        if any(status.state is not State.READY for status in service.fleet.engines.values()):
            break
        await asyncio.sleep(0.1)
    for status in service.fleet.engines.values():
        if status.state is not State.READY:
            word = status.problem or str(status.state)
            return EngineFailedError(f"engine {status.plan.name} {word}: {problem}", detail=tail(status.log))
    return EngineFailedError(problem, detail=_log(service))


def _log(service: Service) -> str:
    return tail(service.gateway_log)


async def _metrics(session: aiohttp.ClientSession, name: str, url: str) -> probe.EngineMetrics:
    metrics = await probe.metrics(session, url)
    if metrics is None:
        raise EngineFailedError(f"engine {name} does not answer on {url}/metrics")
    return metrics


async def _settled(
    session: aiohttp.ClientSession, name: str, url: str, before: probe.EngineMetrics, bytes_metric: str | None
) -> probe.EngineMetrics:
    """Metrics once the transfer is in them: an engine counts it with one of its next steps."""
    for _ in range(20):
        metrics = await _metrics(session, name, url)
        if bytes_metric is None or _delta(before.values, metrics.values, bytes_metric):
            return metrics
        await asyncio.sleep(0.25)
    return metrics


def _delta(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)
