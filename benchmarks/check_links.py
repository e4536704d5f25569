"""What ``trivet check`` says of the same pair over links that are known to differ.

    python benchmarks/check_links.py nixl nixl_no_p2p cuda_p2p pinned --tokenizer PATH --out FILE --logs DIR

Writes a seeded Llama (``--layers`` layers with Llama-3.1-8B's KV heads and head size, so that 32 layers have its
131,072 bytes of KV a token; the rest is small, and weights are not vLLM's dummy ones, with which wrong KV shows
nowhere), starts a pair for each arm by ``trivet check`` itself, and keeps what that writes. An arm whose verdict is
not what its link deserves is named, and the exit code is 1. On a machine without GPUs: ``--device cpu``, arms
``nixl``, ``nixl_tcp``, ``shm``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import Shape, write_checkpoint
from facts import facts
from serving import free_ports

_ON_CUDA = {
    "compilation-config": json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
    "gpu-memory-utilization": "0.5",
}
_ON_ONE_GPU = {"gpu-memory-utilization": "0.3", "kv-cache-memory-bytes": str(8 << 30)}
"""Engines that share a GPU and start together misread what is free."""
_LIMIT_S = 270.0
"""Of an arm, the start of its engines included."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of moving KV, and what a check has to say of it."""

    connector: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    finding: str = "link"
    """The line that tells it from the others."""
    says: str = ""
    """What must stand in that line."""
    fails: bool = False
    """Whether the whole is FAIL."""


ARMS = {
    "nixl": Arm("NixlConnector", says="gpu-peer"),
    "nixl_no_p2p": Arm("NixlConnector", env={"UCX_TLS": "^cuda_ipc"}, says="reach each other", fails=True),
    "cuda_p2p": Arm("TrivetConnector", {"movers": ["cuda_p2p"]}, finding="mover", says="cuda_p2p"),
    "pinned": Arm("TrivetConnector", {"movers": ["pinned"]}, finding="mover", says="pinned"),
    "nixl_tcp": Arm("NixlConnector", env={"UCX_TLS": "tcp"}, says="tcp", fails=True),
    "shm": Arm("TrivetConnector", {"movers": ["shm"]}, finding="mover", says="shm"),
}
_ON_CPU = {"nixl": Arm("NixlConnector", says="shared-memory")}


def topology(arm: Arm, model: Path, ports: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """A pair, each engine on a GPU of its own."""
    cuda = options.device == "cuda"
    engines = {
        tier: {
            "device": options.device,
            "engines": [{"name": tier, "port": port, **({"gpus": [gpu]} if cuda else {})}],
        }
        for tier, port, gpu in zip(("prefill", "decode"), ports, options.gpus, strict=False)
    }
    return {
        "model": {"name": str(model), "served_names": ["m"], "max_length": options.max_length},
        "kv": {"connector": arm.connector, **({"options": dict(arm.options)} if arm.options else {})},
        "flags": {**_ON_CUDA, **(_ON_ONE_GPU if len(set(options.gpus)) == 1 else {})} if cuda else {},
        "env": {**arm.env, **({"VLLM_USE_FLASHINFER_SAMPLER": "0"} if cuda else {})},
        "tiers": engines,
        "gateway": {"port": ports[2]},
    }


def check(name: str, arm: Arm, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One arm: what the check wrote, and what is amiss with that."""
    folder = options.logs / name
    folder.mkdir(parents=True, exist_ok=True)
    file, told = folder / "topology.yaml", folder / "check.json"
    file.write_text(json.dumps(topology(arm, model, free_ports(3, 18800), options), indent=1))
    command = [sys.executable, "-m", "trivet.cli", "check", str(file), "--json", str(told)]
    command += ["--prompt-tokens", ",".join(map(str, options.prompt_tokens))]
    began_s = time.monotonic()
    with (folder / "check.log").open("wb") as log:
        try:
            status: int | None = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=_LIMIT_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    result: dict[str, Any] = {"took_s": round(time.monotonic() - began_s, 1), "exit_status": status}
    try:
        report = json.loads(told.read_text())
    except (OSError, ValueError):
        return {**result, "amiss": f"no report: {(folder / 'check.log').read_text(errors='replace')[-2000:]}"}
    lines = [one["said"] for one in report["findings"] if one["name"] == arm.finding]
    amiss = []
    if not any(arm.says in line for line in lines):
        amiss.append(f"{arm.finding} says {lines} and not {arm.says!r}")
    if (report["verdict"] == "fail") != arm.fails:
        amiss.append(f"the verdict is {report['verdict']}")
    return {**result, "amiss": "; ".join(amiss) or None, "report": report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", choices=ARMS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokenizer", type=Path, help="a model folder; the demo's model unless given")
    parser.add_argument("--gpus", type=int, nargs=2, default=[0, 1], help="of prefill and of decode")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=16384)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[1000, 4000, 8000])
    parser.add_argument("--model", type=Path, help="where the checkpoint is kept; a temporary folder unless given")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    options = parser.parse_args()
    arms = {**ARMS, **(_ON_CPU if options.device == "cpu" else {})}
    scratch = Path(tempfile.mkdtemp(prefix="check-links-"))
    model = options.model or scratch / "model"
    results: dict[str, Any] = {}
    try:
        if not (model / "config.json").is_file():
            shape = Shape(layers=options.layers, longest=options.max_length)
            write_checkpoint(model, shape, tokenizer=options.tokenizer)
        for name in options.arms:
            results[name] = check(name, arms[name], model, options)
            print(name, {key: value for key, value in results[name].items() if key != "report"}, flush=True)
            for one in results[name].get("report", {}).get("findings", ()):
                if one["level"] != "pass" or one["name"] in ("link", "mover", "prediction", "handover", "bytes"):
                    print(f"   {one['level']:<4} {one['name']}: {one['said']}", flush=True)
            options.out.write_text(json.dumps({"facts": facts(), "arms": results}, indent=1) + "\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if any(one["amiss"] for one in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
