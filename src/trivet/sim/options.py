"""The command line of a simulated engine: vLLM's flags as far as they mean something here, and the sim's own."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from trivet.errors import TrivetError
from trivet.sim.link import path_of
from trivet.sim.settings import CONNECTORS, NIXL, TRIVET, SimEvents, SimSettings

_OTHER_CONNECTORS = f"a simulated engine imitates {' and '.join(CONNECTORS)} only"
_LEASES = {NIXL: "kv_lease_duration", TRIVET: "lease_s"}
"""The connectors' own names for it."""

_TIERS = {"kv_producer": "prefill", "kv_consumer": "decode"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _OptionError(f"simulated engine: {message}", mend="python -m trivet.sim serve --help")


class _OptionError(TrivetError):
    exit_code = 2


def parse(arguments: Sequence[str], env: Mapping[str, str] = os.environ) -> tuple[SimSettings, str, list[str]]:
    """What ``python -m trivet.sim`` is started with: settings, the engine's name, and notes for a person.

    Raises:
        TrivetError: a value is wrong.
    """
    known, rest = _parser().parse_known_args([_with_dashes(one) for one in arguments])
    notes = []
    if strange := [one for one in rest if one.startswith("-")]:
        names = ", ".join(dict.fromkeys(one.partition("=")[0] for one in strange))
        notes.append(f"no effect in a simulated engine: {names}")
    kv = _kv(known.kv_transfer_config)
    options = kv.get("kv_connector_extra_config") or {}
    connector = NIXL if kv.get("kv_connector") != TRIVET else TRIVET
    lease = known.kv_lease_s if known.kv_lease_s is not None else options.get(_LEASES[connector], 30.0)
    address = known.kv_address or (options.get("address") if connector == TRIVET else None)
    blocks = known.num_gpu_blocks_override
    kv_tokens = blocks * known.block_size if blocks is not None else known.kv_tokens
    settings = SimSettings(
        model=known.model or known.model_flag or "sim",
        served_names=tuple(known.served_model_name or ()),
        host=known.host,
        port=known.port,
        api_key=(known.api_key or [None])[0] or env.get("VLLM_API_KEY") or None,
        vllm_version=known.vllm_version,
        max_model_len=known.max_model_len,
        block_size=known.block_size,
        kv_tokens=kv_tokens,
        max_num_seqs=known.max_num_seqs,
        max_num_batched_tokens=known.max_num_batched_tokens,
        max_num_queued_reqs=known.max_num_queued_reqs,
        max_logprobs=known.max_logprobs,
        stream_interval=known.stream_interval,
        enable_prefix_caching=known.enable_prefix_caching,
        enable_prompt_tokens_details=known.enable_prompt_tokens_details,
        enable_scale_out=known.enable_scale_out or known.tokens_only,
        kv_transfer=bool(kv),
        kv_connector=connector,
        kv_address=None if address is None else _address(address),
        kv_load_failure_policy=str(kv.get("kv_load_failure_policy", "fail")),
        kv_lease_s=_number(lease, _LEASES[connector]),
        kv_bytes_per_token=known.kv_bytes_per_token,
        kv_host=env.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or None,
        kv_events=_events(known.kv_events_config),
        step_ms=known.step_ms,
        prefill_ms=known.prefill_ms,
        prefill_ms_per_token=known.prefill_ms_per_token,
        transfer_ms_per_token=known.transfer_ms_per_token,
        transfer_last_ms=known.transfer_last_ms,
        jitter=known.jitter,
        seed=known.seed,
        vocab_size=known.vocab_size,
        eos_token_id=known.eos_token_id,
        eos_chance=known.eos_chance,
        keep_requests=known.keep_requests,
    )
    return settings, known.name or settings.names[0], notes


def tier_of(arguments: Sequence[str]) -> str:
    """The tier of an engine that is started so, by its end of the connector; ``mixed`` without one."""
    known, _ = _parser().parse_known_args([_with_dashes(one) for one in arguments])
    return _TIERS.get(_kv(known.kv_transfer_config).get("kv_role", ""), "mixed")


def _parser() -> argparse.ArgumentParser:
    defaults = SimSettings()
    parser = _Parser(
        prog="python -m trivet.sim",
        description="A simulated vLLM engine. Other vLLM flags are accepted and have no effect.",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model", nargs="?", help="name of the model; nothing is loaded")

    vllm = parser.add_argument_group("vLLM's flags")
    vllm.add_argument("--model", dest="model_flag", help=argparse.SUPPRESS)
    vllm.add_argument("--served-model-name", nargs="+", metavar="NAME")
    vllm.add_argument("--host", default=defaults.host)
    vllm.add_argument("--port", type=_port, default=8000, help="0 takes a free one")
    vllm.add_argument("--api-key", nargs="+", metavar="KEY", help="else VLLM_API_KEY")
    vllm.add_argument("--max-model-len", type=_size, default=defaults.max_model_len, metavar="TOKENS")
    vllm.add_argument("--block-size", type=_size, default=defaults.block_size, metavar="TOKENS")
    vllm.add_argument("--num-gpu-blocks-override", type=_size, metavar="BLOCKS", help="size of the KV pool")
    vllm.add_argument("--max-num-seqs", type=_size, default=defaults.max_num_seqs, metavar="N")
    vllm.add_argument("--max-num-batched-tokens", type=_size, default=defaults.max_num_batched_tokens, metavar="TOKENS")
    vllm.add_argument("--max-num-queued-reqs", type=_size, metavar="N", help="beyond it: 503")
    vllm.add_argument("--max-logprobs", type=int, default=defaults.max_logprobs, metavar="N")
    vllm.add_argument("--stream-interval", type=_size, default=1, metavar="TOKENS")
    vllm.add_argument("--kv-transfer-config", metavar="JSON", help=f"without it no KV moves; {_OTHER_CONNECTORS}")
    vllm.add_argument("--kv-events-config", metavar="JSON", help="where it tells what its prefix cache holds")
    vllm.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    vllm.add_argument("--enable-prompt-tokens-details", action=argparse.BooleanOptionalAction, default=False)
    vllm.add_argument("--enable-scale-out", action=argparse.BooleanOptionalAction, default=False)
    vllm.add_argument("--tokens-only", action="store_true", help=argparse.SUPPRESS)

    own = parser.add_argument_group("the simulation's own")
    own.add_argument("--name", help="in the log and in /sim/state")
    own.add_argument("--vllm-version", default=defaults.vllm_version, help="0.30.0 answers as that version does")
    own.add_argument("--step-ms", type=float, default=0.0, help="a step: one token of every running answer")
    own.add_argument("--prefill-ms", type=float, default=0.0, help="added for each prompt")
    own.add_argument("--prefill-ms-per-token", type=float, default=0.0)
    own.add_argument("--transfer-ms-per-token", type=float, default=0.0, help="of KV that decode pulls")
    own.add_argument(
        "--transfer-last-ms",
        type=float,
        default=defaults.transfer_last_ms,
        help=f"{TRIVET}: least time from prefill's end until decode has all KV",
    )
    own.add_argument("--jitter", type=float, default=0.0, help="share by which steps vary, 0 to 1")
    own.add_argument("--seed", type=int, default=0, help="of the jitter")
    own.add_argument("--kv-tokens", type=_size, default=defaults.kv_tokens, help="size of the KV pool")
    own.add_argument("--kv-lease-s", type=float, help="how long prefill holds KV; 30 unless given")
    own.add_argument("--kv-address", help=f"{TRIVET}: unix: and a path; else the option address of the connector")
    own.add_argument("--kv-bytes-per-token", type=_size, default=defaults.kv_bytes_per_token, help="in the metrics")
    own.add_argument("--vocab-size", type=_size, default=defaults.vocab_size)
    own.add_argument("--eos-token-id", type=int, default=defaults.eos_token_id)
    own.add_argument("--eos-chance", type=float, default=0.0, help="that a token ends the answer, 0 to 1")
    own.add_argument("--keep-requests", type=_size, default=defaults.keep_requests, help="in /sim/state")
    return parser


def _kv(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise _OptionError(f"simulated engine: --kv-transfer-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise _OptionError("simulated engine: --kv-transfer-config is not an object", mend='{"kv_connector": ...}')
    connector = config.get("kv_connector")
    if connector not in (*CONNECTORS, "NixlPullConnector"):
        raise _OptionError(f"simulated engine: kv_connector is {connector!r}", mend=_OTHER_CONNECTORS)
    return config


def _events(text: str | None) -> SimEvents | None:
    """As vLLM takes it; what no simulated engine needs has no effect."""
    try:
        told = {} if text is None else json.loads(text)
        if not told.get("enable_kv_cache_events") or told.get("publisher", "zmq") != "zmq":
            return None
        return SimEvents(
            str(told.get("endpoint", "tcp://*:5557")),
            str(told["replay_endpoint"]),
            int(told.get("buffer_steps", 10000)),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _OptionError(
            f"simulated engine: --kv-events-config: {type(error).__name__}: {error}",
            mend='{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}',
        ) from None


def _address(value: object) -> str:
    try:
        path_of(address := str(value))
    except ValueError as error:
        raise _OptionError(f"simulated engine: the connector's address is {value!r}", mend=str(error)) from None
    return address


def _number(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _OptionError(f"simulated engine: {name} is {value!r}", mend="give seconds")
    return float(value)


def _size(text: str) -> int:
    """A whole number; as with vLLM, ``1k`` is 1000 and ``1K`` is 1024."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[match[2]]


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _with_dashes(argument: str) -> str:
    """vLLM takes ``--max_model_len`` for ``--max-model-len``."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
