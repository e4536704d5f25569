"""Questions to an engine over HTTP: does it live, which vLLM is it, does it generate, how loaded is it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

_QUESTION_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_CANARY_TIMEOUT = aiohttp.ClientTimeout(total=180.0)


class Health(StrEnum):
    """What ``GET /health`` says."""

    OK = "ok"
    DEAD = "dead"
    """The server answers, and says that its engine has died."""
    REFUSED = "refused"
    """Nothing listens there: not up yet, or gone."""
    SILENT = "silent"
    """Nothing answers in time: busy, or cut off."""


async def health(session: aiohttp.ClientSession, url: str) -> Health:
    """Asks an engine whether it lives."""
    try:
        async with session.get(f"{url}/health", timeout=_QUESTION_TIMEOUT) as answer:
            if answer.status == 200:
                return Health.OK
            return Health.DEAD if answer.status == 503 else Health.SILENT
    except aiohttp.ClientConnectorError:
        return Health.REFUSED
    except (aiohttp.ClientError, TimeoutError, OSError):
        return Health.SILENT


async def version(session: aiohttp.ClientSession, url: str) -> str | None:
    """The engine's vLLM version, None if it does not tell."""
    try:
        async with session.get(f"{url}/version", timeout=_QUESTION_TIMEOUT) as answer:
            body = await answer.json(content_type=None)
            return str(body["version"]) if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
        return None


async def canary(session: aiohttp.ClientSession, url: str, model: str, api_key: str | None = None) -> str | None:
    """Has the engine generate one token, with a cache salt of its own; None if it did, else what went wrong."""
    body = {
        "token_ids": [1, 2, 3],
        "model": model,
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
        "cache_salt": uuid.uuid4().hex,
    }
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with session.post(
            f"{url}/inference/v1/generate", json=body, headers=headers, timeout=_CANARY_TIMEOUT
        ) as answer:
            if answer.status == 200:
                return None
            text = (await answer.text())[:200].strip()
            if answer.status in (403, 404):  # switched off (0.30 says 404), or another model's name
                return (
                    f"start it with --enable-scale-out and --served-model-name {model} (HTTP {answer.status}: {text})"
                )
            return f"HTTP {answer.status} on a one-token request: {text}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return f"no answer to a one-token request ({type(error).__name__})"


async def can_abort(session: aiohttp.ClientSession, url: str, api_key: str | None = None) -> bool:
    """Whether an engine has the endpoint that ends requests by their ids; asked to end none."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with session.post(
            f"{url}/inference/v1/abort_requests", json={"request_ids": []}, headers=headers, timeout=_QUESTION_TIMEOUT
        ) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What an engine counts: gauges as they are now, counters since its start."""

    running: float
    waiting: float
    kv_usage: float
    """Share of the KV pool in use, 0 to 1."""
    prompt_tokens: Mapping[str, float]
    """Prompt tokens by where they came from: ``local_compute``, ``local_cache_hit``, ``external_kv_transfer``."""
    values: Mapping[str, float]
    """Every metric by name, summed over its labels."""
    cache_config: Mapping[str, str]
    """vLLM's cache configuration: the labels of ``vllm:cache_config_info``."""

    @property
    def cached_block_tokens(self) -> int | None:
        """Tokens in a block of the prefix cache; None if there is none, or the engine does not tell."""
        size = self.cache_config.get("block_size", "")
        if self.cache_config.get("enable_prefix_caching") != "True" or not size.isdigit():
            return None
        return int(size)


async def metrics(session: aiohttp.ClientSession, url: str) -> EngineMetrics | None:
    """Reads an engine's ``/metrics``; None if it does not answer."""
    try:
        async with session.get(f"{url}/metrics", timeout=_QUESTION_TIMEOUT) as answer:
            text = await answer.text()
            return parse_metrics(text) if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None


async def counts(session: aiohttp.ClientSession, url: str, *names: str) -> Mapping[str, float] | None:
    """Some of an engine's metrics, by name; None if it does not answer. Those that it does not have are left out.

    An engine tells of thousands, and parsing all of them takes a gateway's event loop tens of milliseconds.

    Args:
        names: as they are exposed. With ``{label="value"}`` behind it, only samples with that label count.
    """
    try:
        async with session.get(f"{url}/metrics", timeout=_QUESTION_TIMEOUT) as answer:
            text = await answer.text()
            return parse_counts(text, *names) if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None


def parse_counts(text: str, *names: str) -> dict[str, float]:
    """From Prometheus' exposition text: those metrics, each summed over its labels; see ``counts``."""
    wanted = [(name, *name.rstrip("}").partition("{")[::2]) for name in names]
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):  # one that is there, of which nothing has been counted, has no more than this
            declared = line.split(maxsplit=3)[2:3]
            found.update({name: found.get(name, 0.0) for name, metric, _ in wanted if [metric] == declared})
            continue
        for name, metric, label in wanted:
            if line.startswith(metric) and line[len(metric) : len(metric) + 1] in ("{", " ") and label in line:
                value = line.rpartition("}")[2] if "}" in line else line[len(metric) :]
                found[name] = found.get(name, 0.0) + float(value.split()[0])
    return found


def parse_metrics(text: str) -> EngineMetrics:
    """From Prometheus' exposition text."""
    values: dict[str, float] = {}
    by_source: dict[str, float] = {}
    cache_config: Mapping[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
            if sample.name == "vllm:prompt_tokens_by_source_total":
                source = sample.labels.get("source", "")
                by_source[source] = by_source.get(source, 0.0) + sample.value
            elif sample.name == "vllm:cache_config_info":
                cache_config = dict(sample.labels)
    return EngineMetrics(
        running=values.get("vllm:num_requests_running", 0.0),
        waiting=values.get("vllm:num_requests_waiting", 0.0),
        kv_usage=values.get("vllm:kv_cache_usage_perc", 0.0),
        prompt_tokens=by_source,
        values=values,
        cache_config=cache_config,
    )
