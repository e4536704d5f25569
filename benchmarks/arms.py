"""The arms of ``transfer.py``: how KV moves in each, and the topologies that they are served with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asking import MODEL
from trivet.connectors import CONNECTORS

_NIXL, _TRIVET = "NixlConnector", "TrivetConnector"
_DEFAULT_BLOCK_TOKENS = {"cuda": 16, "cpu": 128}
"""vLLM's block size where nobody names one."""
GATEWAY_WORKERS = {"cuda": 4, "cpu": 1}
"""A GPU host has cores to spare: what one worker parses then does not delay the streams of the others."""
_DUMMY_ON_CUDA = (
    "--load-format", "dummy",
    "--no-enable-prefix-caching",
    "--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
    "--gpu-memory-utilization", "0.5",
)  # fmt: skip
_VLLM_LIMITS_ON_CUDA = ("--max-num-batched-tokens", "8192", "--max-num-seqs", "1024")
"""What ``vllm serve`` takes by itself on a GPU of 70 to 160 GB (``EngineArgs.get_batch_defaults``)."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of moving KV."""

    name: str
    connector: str
    block_tokens: int | None = None
    """None: as Trivet sets it for the connector. 0: vLLM's default."""
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    rate: float | None = None
    """The only load it can be measured at; None: those that are asked for."""
    saturates_prefill: bool = True
    """Whether prefill is what bounds it; the copies' cost to prefill cannot be measured otherwise."""

    @property
    def first_token_from_prefill(self) -> bool:
        return CONNECTORS[self.connector].hands_over_first_token

    @property
    def bytes_metric(self) -> str | None:
        return CONNECTORS[self.connector].bytes_metric


ARMS = {
    arm.name: arm
    for arm in (
        Arm("stock", _NIXL, block_tokens=0),
        Arm("stock_tuned", _NIXL, block_tokens=128),
        Arm("cuda_p2p", _TRIVET, options={"movers": ["cuda_p2p"]}),
        Arm(
            "stock_no_p2p",
            _NIXL,
            block_tokens=0,
            env={"UCX_TLS": "^cuda_ipc"},
            rate=0.2,
            saturates_prefill=False,
        ),
        Arm("pinned", _TRIVET, options={"movers": ["pinned"]}),
        Arm("shm", _TRIVET, options={"movers": ["shm"]}),
    )
}


@dataclass(frozen=True, slots=True)
class Ports:
    """Where an arm's servers listen."""

    prefill: int
    decode: int
    gateway: int
    colocated_gateway: int

    @property
    def engine_urls(self) -> tuple[str, str]:
        return f"http://127.0.0.1:{self.prefill}", f"http://127.0.0.1:{self.decode}"


def split_topology(
    arm: Arm, ports: Ports, *, model: str, device: str, gpus: Sequence[int], max_length: int, flags: Sequence[str]
) -> dict[str, Any]:
    """Prefill and decode with the arm's connector.

    Args:
        flags: for both engines, in addition to the device's own.
    """
    own = [*flags]
    if arm.block_tokens is not None:
        own += ["--block-size", str(arm.block_tokens or _DEFAULT_BLOCK_TOKENS[device])]
    places = [{"gpus": [gpu]} for gpu in gpus] if device == "cuda" else [{}, {}]
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0"} if device == "cuda" else {}
    return {
        "model": {"name": model, "served_names": [MODEL], "max_length": max_length},
        "kv": {"connector": arm.connector, "options": dict(arm.options)},
        "flags": own,
        "env": {**env, **arm.env},
        "tiers": {
            tier: {"device": device, "engines": [{"name": tier, "port": port, **place}]}
            for tier, port, place in zip(("prefill", "decode"), (ports.prefill, ports.decode), places, strict=True)
        },
        "gateway": {"port": ports.gateway, "drain_s": 1, "split": "always", "workers": GATEWAY_WORKERS[device]},
    }


def colocated_topology(ports: Ports, *, model: str, device: str, max_length: int) -> dict[str, Any]:
    """The same two engines behind a gateway of their own, each as a mixed engine: nothing is split."""
    names = ("engine-a", "engine-b")
    engines = [{"name": name, "url": url, "device": device} for name, url in zip(names, ports.engine_urls, strict=True)]
    return {
        "model": {"name": model, "served_names": [MODEL], "max_length": max_length},
        "tiers": {"mixed": {"engines": engines}},
        "gateway": {"port": ports.colocated_gateway, "drain_s": 1, "workers": GATEWAY_WORKERS[device]},
    }


def engine_flags(device: str, limits: str) -> list[str]:
    """Flags of both engines on a device.

    Args:
        limits: whose tokens and sequences a pass: ``vllm`` (a colocated engine is then ``vllm serve``) or ``trivet``
            (each tier's own).
    """
    if device == "cpu":
        return ["--no-enable-prefix-caching"]
    return [*_DUMMY_ON_CUDA, *(_VLLM_LIMITS_ON_CUDA if limits == "vllm" else ())]
