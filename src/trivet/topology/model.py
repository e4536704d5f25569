"""The topology file as pydantic models. Every default has its reason in its description."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from trivet.connectors import CONNECTORS
from trivet.connectors.address import path_of

DEMO_MODEL = "SmolLM2-135M-Instruct"
"""What ``model.name: demo`` stands for."""

TIERS = ("prefill", "decode", "mixed")
"""The tiers that run engines."""

Steering = Literal["kv_transfer_params", "ec_transfer_params", "request_id", "data_parallel_rank"]
"""What a client could say of how KV is moved and where a request goes; see ``surface.steering``."""

Device = Literal["cpu", "cuda", "sim"]
"""``sim``: a simulated engine (``trivet.sim``), for tests and load work without a model."""

OWN_FLAGS: Mapping[str, str] = {
    "model": "model.name",
    "tokenizer": "model.tokenizer",
    "served-model-name": "model.served_names",
    "host": "bind",
    "port": "port",
    "kv-transfer-config": "kv",
    "tensor-parallel-size": "tensor_parallel",
    "api-key": "gateway.api_keys (engines: api_key)",
    "ssl-keyfile": "gateway.tls",
    "ssl-certfile": "gateway.tls",
    "ssl-ca-certs": "gateway.tls",
    "ssl-cert-reqs": "gateway.tls",
    "ssl-ciphers": "gateway.tls",
    "allowed-origins": "gateway.cors",
    "allowed-methods": "gateway.cors",
    "allowed-headers": "gateway.cors",
    "allow-credentials": "gateway.cors",
    "root-path": "a proxy in front that takes the prefix off",
}
"""vLLM flags that Trivet sets itself, and the topology field that says what they get."""

_NEVER_EMPTY = frozenset({"api_keys"})
"""What may not be left empty: a gateway whose keys were forgotten would be open."""

_SHORT_FLAGS = {"-tp": "tensor-parallel-size", "-dp": "data-parallel-size"}


def is_collector_url(text: str) -> bool:
    """Whether spans could be sent there, as far as its form says."""
    return re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", text) is not None and names_a_host(text)


def names_a_host(url: str) -> bool:
    """Whether a URL has a host, and a port that there can be if it has one."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0  # reading a port above 65535 raises
    except ValueError:
        return False


def flag_list(value: object) -> list[str]:
    """vLLM flags as a command line takes them.

    A list is taken as it is. A mapping is written out: ``{enforce-eager: true, block-size: 64}`` becomes
    ``--enforce-eager --block-size 64``; false becomes ``--no-NAME``, null leaves it out, a list repeats the values
    behind one name, and an object becomes JSON.
    """
    if value is None:
        return []
    if isinstance(value, str):
        raise ValueError("flags are a list (['--enforce-eager', '--block-size', '64']) or a mapping, not one string")
    if isinstance(value, Mapping):
        flags: list[str] = []
        for raw_name, setting in value.items():
            name = "--" + str(raw_name).removeprefix("--").replace("_", "-")
            if setting is None:
                continue
            if setting is True:
                flags.append(name)
            elif setting is False:
                flags.append(f"--no-{name.removeprefix('--')}")
            elif isinstance(setting, Mapping):
                flags += [name, json.dumps(setting)]
            elif isinstance(setting, Sequence) and not isinstance(setting, str):
                flags += [name, *(str(one) for one in setting)]
            else:
                flags += [name, str(setting)]
        return flags
    if isinstance(value, Sequence):
        return [str(one) for one in value]
    raise ValueError("flags are a list or a mapping")


def flag_names(flags: Sequence[str]) -> list[str]:
    """The names in a list of flags, without dashes and ``=value``, in vLLM's spelling (dashes)."""
    names = []
    for flag in flags:
        short = flag.split("=", 1)[0]
        if short in _SHORT_FLAGS:
            names.append(_SHORT_FLAGS[short])
        elif flag.startswith("--"):
            names.append(short[2:].replace("_", "-"))
    return names


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The value of a flag, the last one if it is given twice; None if it is absent."""
    found = None
    for position, flag in enumerate(flags):
        head, equals, tail = flag.partition("=")
        if flag_names([head]) != [name]:
            continue
        if equals:
            found = tail
        elif position + 1 < len(flags):
            found = flags[position + 1]
    return found


def _check_flags(flags: list[str]) -> list[str]:
    for name in flag_names(flags):
        whole = name.partition(".")[0]  # --kv-transfer-config.kv_role is a part of --kv-transfer-config to vLLM
        for own, instead in OWN_FLAGS.items():
            # vLLM's parser takes beginnings of names too
            if own == whole or (len(whole) > 2 and own.startswith(whole)):
                raise ValueError(f"--{name} is set by Trivet: use {instead} instead")
    return flags


def _environment(value: object) -> object:
    return {str(key): _env_text(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _env_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value)


Flags = Annotated[list[str], BeforeValidator(flag_list), AfterValidator(_check_flags)]
Environment = Annotated[dict[str, str], BeforeValidator(_environment)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, value: object) -> object:
        """A mapping or list with nothing behind its key (``options:``, all below it commented out) is not there."""
        if not isinstance(value, Mapping):
            return value
        collecting = {name for name, field in cls.model_fields.items() if field.default_factory is not None}
        return {
            name: one
            for name, one in value.items()
            if one is not None or name not in collecting or name in _NEVER_EMPTY
        }


class Model(_Strict):
    """The model that every engine serves."""

    name: str = Field("demo", description="a Hugging Face folder, a hub name, or `demo` (SmolLM2-135M-Instruct)")
    tokenizer: str | None = Field(None, description="another tokenizer than the model's own")
    served_names: list[str] = Field(
        default_factory=list, description="names that clients may ask for; the first is answered"
    )
    dtype: str | None = Field(
        None, description="CPU engines: float32, as bfloat16 prefills four times slower without AMX; else vLLM's auto"
    )
    max_length: int | None = Field(None, gt=1, description="longest prompt plus answer in tokens; else the model's own")

    @property
    def default_served_name(self) -> str:
        """The name clients use if ``served_names`` gives none: the model's, as ``vllm serve`` has it."""
        return DEMO_MODEL if self.name == "demo" else self.name

    @field_validator("served_names", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class Kv(_Strict):
    """How KV moves from prefill to decode."""

    connector: str = Field("TrivetConnector", description="KV moves while prefill computes; within one host")
    options: dict[str, Any] = Field(default_factory=dict, description="its kv_connector_extra_config")

    @field_validator("connector")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in CONNECTORS:
            raise ValueError(f"unknown connector {value!r}; Trivet speaks {', '.join(sorted(CONNECTORS))}")
        return value

    @field_validator("options")
    @classmethod
    def _of_the_connector(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "connector" in info.data:  # else it is unknown itself
            CONNECTORS[info.data["connector"]].check_options(value)
        return value


class KvEvents(_Strict):
    """Where an engine that someone else started tells what its prefix cache holds."""

    endpoint: str = Field(description="tcp://HOST:PORT or ipc:///PATH, as its --kv-events-config says")
    replay: str = Field(description="its replay_endpoint: without it nothing tells whether an event was missed")

    @field_validator("endpoint", "replay")
    @classmethod
    def _can_be_reached(cls, value: str) -> str:
        if re.fullmatch(r"tcp://[^/\s*]+:\d+|ipc:///\S+", value) is None or not (
            value.startswith("ipc:") or names_a_host(value)
        ):
            raise ValueError(f"{value!r} is no address to connect to: write tcp://HOST:PORT or ipc:///PATH")
        return value


class _EngineFields(_Strict):
    device: Device | None = None
    gpus: list[Annotated[int, Field(ge=0)]] | None = None
    tensor_parallel: int | None = Field(None, ge=1)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    cpu_kv_gib: int | None = Field(None, ge=1)
    cores: list[Annotated[int, Field(ge=0)]] | None = None
    flags: Flags = Field(default_factory=list)
    env: Environment = Field(default_factory=dict)

    @field_validator("gpus")
    @classmethod
    def _distinct(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and len(set(value)) != len(value):
            raise ValueError("the same GPU is named twice")
        return value


class Engine(_EngineFields):
    """One engine of a tier; what it leaves out comes from its tier."""

    name: str | None = Field(None, description="for logs, metrics and `trivet engine`; TIER-NUMBER unless given")
    url: str | None = Field(None, description="an engine that someone else started; nothing else is needed then")
    api_key: str | None = Field(None, description="what it wants as a bearer token; given to those started by Trivet")
    host: str = Field("local", description="where it runs; anything but `local` is started there: trivet engine NAME")
    bind: str | None = Field(None, description="address it listens on: 127.0.0.1, or 0.0.0.0 on another host")
    advertise: str | None = Field(None, description="how the others reach it: the bind address, or the host's name")
    port: int | None = Field(None, ge=1, le=65535, description="HTTP; a free one unless given")
    kv_port: int | None = Field(
        None, ge=1, le=65535, description="the connector's side channel; a free one unless given"
    )
    kv_address: str | None = Field(
        None,
        description="where TrivetConnector listens, for an engine whose address Trivet does not make up itself",
    )
    kv_events: KvEvents | None = Field(None, description="an engine with url: where it publishes its KV events")
    kv_events_port: int | None = Field(
        None,
        ge=1,
        le=65534,
        description="where it publishes KV events, on all of its addresses: this and the next. Else sockets of "
        "this user's, which only engines on this machine can have",
    )

    @field_validator("name")
    @classmethod
    def _can_name_files(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*", value):
            raise ValueError(f"{value!r} is no name: letters, digits and _ . - make one, a letter or digit first")
        return value

    @field_validator("kv_address")
    @classmethod
    def _can_be_listened_at(cls, value: str | None) -> str | None:
        if value is not None:
            path_of(value)
        return value

    @field_validator("url")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is not None and not (re.fullmatch(r"https?://[^/\s]+(/\S*)?", value) and names_a_host(value)):
            raise ValueError("an engine's url looks like http://host:port, with a port from 1 to 65535")
        return value.rstrip("/") if value else value

    @model_validator(mode="after")
    def _whole(self) -> Engine:
        if self.url is not None:
            extra = sorted(self.model_fields_set - {"url", "name", "api_key", "device", "kv_address", "kv_events"})
            if extra:
                raise ValueError(f"an engine with url is not started by Trivet, so {', '.join(extra)} means nothing")
        elif self.kv_events is not None:
            raise ValueError("kv_events says where an engine with url publishes; for others there is kv_events_port")
        elif self.host != "local" and self.port is None:
            raise ValueError("an engine on another host needs a port, so that the gateway knows where it is")
        return self


class Tier(_EngineFields):
    """Engines that do the same work."""

    replicas: int | None = Field(None, ge=0)
    engines: list[Engine] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Tier:
        if self.replicas is not None and self.engines is not None:
            raise ValueError("give replicas or a list of engines, not both")
        return self

    def listed(self) -> list[Engine]:
        """Its engines as a list; ``replicas`` (1 unless given) become as many without settings of their own."""
        if self.engines is not None:
            return list(self.engines)
        return [Engine() for _ in range(1 if self.replicas is None else self.replicas)]


class RenderTier(_Strict):
    """The CPU tier. It runs inside the gateway's workers, which may have servers make the token ids of prompts."""

    flags: Flags = Field(
        default_factory=list,
        description="vLLM front-end flags: --chat-template, --tool-call-parser, --enable-auto-tool-choice ...",
    )
    env: Environment = Field(default_factory=dict, description="environment of the gateway's workers")
    cache_mib: int = Field(
        64,
        ge=0,
        le=2**20,
        strict=True,
        description="memory of each worker for token ids of text that came before, so that a conversation's next turn "
        "has only its new text tokenized; 64 MiB hold some 1.5 million tokens",
    )
    fast_tokenizer: Literal["auto", "off", "fastokens", "gigatoken"] = Field(
        "auto",
        description="auto: the fastest that is installed and is shown, at start, to give the reference's ids; a name: "
        "that one if it does",
    )
    servers: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="URLs of render servers (`vllm launch render`, `trivet render`) that make token ids of prompts; "
        "none, as a worker renders itself",
    )
    running: int = Field(
        16,
        ge=1,
        le=10**6,
        strict=True,
        description="requests at one server at once, of all workers together: it renders one after the other, so more "
        "would only wait there, where none can go to another server",
    )
    queued: int = Field(
        64, ge=0, le=10**6, strict=True, description="requests that may wait for a server; the next one falls back"
    )
    queue_s: float = Field(
        2.0,
        gt=0,
        le=3600,
        strict=True,
        description="longest wait for a server, then it falls back: to render a long prompt here takes a tenth of that",
    )
    timeout_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        strict=True,
        description="longest that a server may take for one request; one that takes longer counts as hung",
    )
    fallback: Literal["local", "refuse"] = Field(
        "local",
        description="a request that no server takes: local renders it in the worker, which can; refuse answers 503, "
        "for workers that have no CPU to spare",
    )
    local_below_bytes: int = Field(
        0,
        ge=0,
        strict=True,
        description="requests with smaller bodies are rendered in the worker, where that takes less than the way to a "
        "server; none, as it depends on both",
    )
    api_key: str | None = Field(
        None, min_length=1, description="what the servers want as a bearer token; clients' keys never go there"
    )

    @field_validator("fast_tokenizer", mode="before")
    @classmethod
    def _off_is_false(cls, value: object) -> object:
        """What YAML makes of ``off``."""
        return "off" if value is False else value

    @field_validator("servers")
    @classmethod
    def _can_be_asked(cls, value: list[str]) -> list[str]:
        for url in value:
            if not (re.fullmatch(r"https?://[^/\s?#@]+(/[^\s?#]*)?", url) and names_a_host(url)):
                raise ValueError(f"{url!r} is no render server: write http://host:port, with a port from 1 to 65535")
            if path := urlsplit(url).path.rstrip("/"):
                raise ValueError(f"{url!r}: leave out {path}, as paths are vLLM's: write http://host:port")
        urls = [url.rstrip("/") for url in value]
        if len(set(urls)) != len(urls):
            raise ValueError("the same server is named twice")
        return urls

    @model_validator(mode="after")
    def _limits_are_for_servers(self) -> RenderTier:
        idle = sorted(self.model_fields_set & _OF_RENDER_SERVERS)
        if idle and not self.servers:
            raise ValueError(f"without servers, {', '.join(idle)} means nothing: name servers, or leave it out")
        return self


_OF_RENDER_SERVERS = frozenset(RenderTier.model_fields) - {"flags", "env", "cache_mib", "fast_tokenizer", "servers"}


class Tiers(_Strict):
    """What exists. Prefill and decode come together; mixed engines do both and take what is not split."""

    render: RenderTier = Field(default_factory=RenderTier)
    prefill: Tier | None = None
    decode: Tier | None = None
    mixed: Tier | None = None

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, value: object) -> object:
        """``decode:`` with nothing behind it is a tier with defaults, not an absent one."""
        if isinstance(value, Mapping):
            return {name: {} if tier is None else tier for name, tier in value.items()}
        return value


class Limits(_Strict):
    """What the gateway takes on, all of its workers together, and how long it waits."""

    model_config = ConfigDict(strict=True)

    running: int = Field(1024, ge=1, le=10**6, description="requests served at once: more only make each other slower")
    queued: int = Field(
        1024, ge=0, le=10**6, description="requests that may wait for their turn; the next is refused with 429"
    )
    queue_s: float = Field(
        30.0, gt=0, le=86400, description="longest wait for a turn, then 503: clients have given up by then"
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=86400,
        description="longest life of a request; none, as long answers take minutes (X-Trivet-Deadline-S)",
    )
    silence_s: float | None = Field(
        300.0, gt=0, le=86400, description="an engine that says nothing about a request for so long counts as hung"
    )
    unread_s: float | None = Field(
        60.0, gt=0, le=86400, description="a client that reads nothing for so long, though there is more, is cut off"
    )
    body_mib: int = Field(64, ge=1, le=4096, description="largest body of a request; more than any prompt needs")


class Split(_Strict):
    """When a request that could be split is split."""

    mode: Literal["auto", "always", "never"] = Field(
        "auto", description="auto: where it pays; always, never: for comparisons and tests"
    )
    min_uncached_tokens: int = Field(
        256,
        ge=1,
        le=10**7,
        strict=True,
        description="auto: fewer prompt tokens to compute are served colocated, as they stall running answers for one "
        "step at most, and a handover takes longer",
    )
    max_handover_s: float = Field(
        1.0,
        gt=0,
        le=3600,
        description="auto: pairs whose handovers take longer are not used while there is another way; with direct "
        "copies they take a tenth of that",
    )

    @model_validator(mode="after")
    def _thresholds_are_for_auto(self) -> Split:
        idle = sorted(self.model_fields_set - {"mode"})
        if self.mode != "auto" and idle:
            raise ValueError(f"with mode {self.mode}, {', '.join(idle)} means nothing: leave it out, or set mode: auto")
        return self


def _split(value: object) -> object:
    """``split: always`` is short for ``split: {mode: always}``."""
    if value is None or isinstance(value, Mapping | Split):
        return {} if value is None else value
    if value not in ("auto", "always", "never"):
        raise ValueError(
            f"{value!r} is no way to split; write auto, always or never, or a mapping such as "
            "{min_uncached_tokens: 256, max_handover_s: 1.0}"
        )
    return {"mode": value}


class Guard(_Strict):
    """How the gateway watches its pairs: a canary through each, at its start, after a restart and on a timer."""

    every_s: float = Field(
        60.0,
        ge=1,
        le=86400,
        description="between two canaries of a pair that is well: what goes wrong without any error is found so soon; "
        "errors are looked at at once",
    )
    prompt_tokens: int = Field(
        144,
        ge=2,
        le=4096,
        strict=True,
        description="of a canary: more than one block of the largest usual size, 128, and a small part of one step",
    )


def _guard(value: object) -> object:
    """``guard: off``, which YAML reads as false; ``on`` is the default."""
    if value is False or value == "off":
        return None
    return {} if value is True or value == "on" else value


class Tls(_Strict):
    """HTTPS of the gateway. Files in PEM; relative ones count from the topology's folder."""

    certificate: str = Field(description="the gateway's certificate, and behind it those that vouch for it")
    key: str | None = Field(None, description="its private key; null: it stands in the certificate's file")
    key_password: str | None = Field(None, description="of an encrypted key")
    client_ca: str | None = Field(
        None, description="clients must show a certificate that one of this file's vouches for; null: they need none"
    )


_ORIGIN = re.compile(r"https?://[^/\s?#@,*]+|[a-z][a-z0-9+.-]*://[^/\s,*]*|null")
_TOKEN = re.compile(r"\*|[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Cors(_Strict):
    """Which websites a browser lets read the gateway's answers."""

    origins: list[str] = Field(default=["*"], description="https://host each, * for any; [] for none")
    methods: list[str] = Field(default=["*"], description="HTTP methods that pages may use")
    headers: list[str] = Field(default=["*"], description="headers that pages may send")
    credentials: bool = Field(False, description="pages may have cookies and such sent along")

    @field_validator("origins")
    @classmethod
    def _are_origins(cls, value: list[str]) -> list[str]:
        for one in value:
            if one != "*" and _ORIGIN.fullmatch(one) is None:
                raise ValueError(f"{one!r} is no origin: write https://host or http://host:port, without a path, or *")
        return value

    @field_validator("methods", "headers")
    @classmethod
    def _are_names(cls, value: list[str]) -> list[str]:
        for one in value:
            if _TOKEN.fullmatch(one) is None:
                raise ValueError(f"{one!r} is no name; write one for each entry, or *")
        return value

    @model_validator(mode="after")
    def _not_anybody_as_a_visitor(self) -> Cors:
        if self.credentials and "*" in self.origins:
            raise ValueError("with credentials any website could act as its visitor: name the origins")
        return self


class Gateway(_Strict):
    """Where clients come in."""

    host: str = Field("127.0.0.1", description="this machine only, unless told otherwise")
    port: int = Field(8000, ge=0, le=65535, description="0: a free one")
    workers: int = Field(1, ge=1, le=64, description="processes; more when one core cannot render and stream it all")
    api_keys: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="clients must send one of them, if there are any"
    )
    drain_s: float = Field(30.0, ge=0, le=86400, description="how long running requests may take after a stop")
    continue_answers: bool | None = Field(
        None,
        description="continue an answer that broke off on another engine; null: unless engines have logits processors "
        "or watermarks, which may count an answer's tokens",
    )
    plane: Literal["tokens", "text"] = Field(
        "tokens",
        description="tokens: rendered once, here; text: engines render themselves and their bytes are passed through",
    )
    limits: Limits = Field(default_factory=Limits, description="what all workers together take on")
    split: Annotated[Split, BeforeValidator(_split)] = Field(
        default_factory=Split, description="when a request that could be split is split"
    )
    guard: Annotated[Guard | None, BeforeValidator(_guard)] = Field(
        default_factory=Guard, description="canaries through pairs, so that a bad one gets no request; off: none"
    )
    tell_served: bool = Field(
        True, description="answers say in X-Trivet-Served how they were made, and by which engines (their names)"
    )
    allow: list[Steering] = Field(
        default_factory=list, description="what clients may say of how KV is moved: nothing, as it can end an engine"
    )
    tls: Tls | None = Field(None, description="HTTPS; none unless there is a certificate")
    cors: Cors = Field(default_factory=Cors, description="which websites may read answers: any, as with `vllm serve`")
    otlp: str | None = Field(
        None, description="URL of an OpenTelemetry collector that takes spans (OTLP); none, unless OTEL_* variables say"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="the gateway's log: lines for people; or JSON, with one line for each request"
    )

    @field_validator("otlp")
    @classmethod
    def _collector(cls, value: str | None) -> str | None:
        if value is not None and not is_collector_url(value):
            raise ValueError("a collector's URL looks like http://host:4318, with a port from 1 to 65535")
        return value


class Topology(_Strict):
    """The whole file."""

    model: Model = Field(default_factory=Model)
    kv: Kv = Field(default_factory=Kv)
    flags: Flags = Field(default_factory=list, description="vLLM flags for every engine and for rendering")
    env: Environment = Field(default_factory=dict, description="environment of every engine")
    tiers: Tiers
    gateway: Gateway = Field(default_factory=Gateway)
    kv_events: bool = Field(
        False,
        description="engines tell the gateway what their prefix caches hold, so that it need not guess; off, as each "
        "prompt's token ids then travel once more, and are kept by engines for a while",
    )

    @model_validator(mode="after")
    def _fits_its_plane(self) -> Topology:
        if self.kv_events and self.gateway.plane == "text":
            raise ValueError(
                "kv_events needs gateway.plane: tokens; on the text plane the gateway knows no token ids to compare"
            )
        if self.tiers.render.servers and self.gateway.plane == "text":
            raise ValueError(
                "tiers.render.servers needs gateway.plane: tokens; on the text plane the engines render by themselves"
            )
        if not self.kv_events:
            for tier in TIERS:
                for engine in (self.tier(tier) or Tier(engines=[])).listed():
                    given = sorted({"kv_events", "kv_events_port"} & engine.model_fields_set)
                    if given:
                        raise ValueError(f"{given[0]} of an engine means nothing without kv_events: true beside tiers")
        return self

    _folder: Path | None = PrivateAttr(default=None)
    _locate: Callable[[Sequence[str | int]], str] | None = PrivateAttr(default=None)

    def where(self, *location: str | int) -> str:
        """``file:line`` of a field, for messages."""
        return self._locate(location) if self._locate else "topology"

    @property
    def folder(self) -> Path | None:
        """Where the file lies, which relative paths count from; None if it came from no file."""
        return self._folder

    def tier(self, name: str) -> Tier | None:
        """The tier of that name, or None if the file has none."""
        tier = getattr(self.tiers, name)
        assert tier is None or isinstance(tier, Tier)
        return tier
