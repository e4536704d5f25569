"""vLLM's API server as the CPU side of a split service: an ASGI application over a ``TokenEngine``."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import vllm.v1.engine.async_llm as async_llm
from pydantic import ValidationError
from starlette.types import ASGIApp
from vllm.config import LoRAConfig, ParallelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.executor import Executor

from trivet.errors import TrivetError
from trivet.render.contract import TokenEngine
from trivet.render.core import SplitCore
from trivet.render.detokenizing import shorten_prompts
from trivet.render.features import Rules
from trivet.render.hub import look_for
from trivet.render.parsing import parse_in_turns
from trivet.render.quicken import quicken
from trivet.render.tokenizing import PromptTokenizer, TokenizingSettings


@dataclass(frozen=True, slots=True)
class Frontend:
    """What a gateway worker runs: the application and the core under it."""

    app: ASGIApp
    core: SplitCore
    served_names: Sequence[str]
    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    prompts: PromptTokenizer | None
    """What tokenizes prompts; None where that is left to vLLM."""


_INLINE_CHARACTERS = 4096
"""Texts up to so long are rendered on the event loop: a few tenths of a millisecond, that streams wait. To hand them to
a thread and back costs about as much."""


IN_TOPOLOGY = "`flags` and `tiers.render.flags` in the topology"
"""Where a person finds the flags of the render tier."""


def parse_flags(flags: Sequence[str], flags_in: str = IN_TOPOLOGY) -> Namespace:
    """vLLM's ``serve`` flags, parsed by vLLM.

    Args:
        flags_in: where a person finds them.

    Raises:
        TrivetError: vLLM refuses them; its own words are in the message.
    """
    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
    captured: list[str] = []

    def refuse(message: str) -> None:
        captured.append(message)
        raise SystemExit(2)

    parser.error = refuse
    try:
        args = parser.parse_args(list(flags))
        if getattr(args, "model_tag", None):
            args.model = args.model_tag
        validate_parsed_serve_args(args)
    except SystemExit as stop:
        raise TrivetError(
            f"vLLM refuses the render flags: {captured[0] if captured else stop}",
            mend=f"look at {flags_in}; `vllm serve --help=all` lists them",
        ) from None
    except Exception as error:  # argparse and vLLM's checks raise several kinds
        raise refused_flags(error, flags_in) from error
    assert isinstance(args, Namespace)
    return args


async def prepare(args: Namespace) -> None:
    """Loads the plugins that parsed flags name, and looks whether the model and tokenizer are there.

    Raises:
        TrivetError: one is not.
    """
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    await asyncio.to_thread(look_for, args.model, args.revision)
    if args.tokenizer:
        await asyncio.to_thread(look_for, args.tokenizer, args.tokenizer_revision)


@contextlib.asynccontextmanager
async def open_frontend(
    flags: Sequence[str], engine: TokenEngine, tokenizing: TokenizingSettings | None = None
) -> AsyncIterator[Frontend]:
    """Builds vLLM's API server over ``engine``.

    Args:
        flags: what one would give ``vllm serve``, the model first.
        engine: what generates.
        tokenizing: how prompts are tokenized; the defaults unless given.

    Raises:
        TrivetError: bad flags, or a model whose config or tokenizer cannot be read.
    """
    args = parse_flags(flags)
    await prepare(args)
    served = list(args.served_model_name or [args.model])
    core = SplitCore(engine, served[0])
    try:
        config = render_config(args)
        llm = _front_end_llm(config, core)  # reads the tokenizer
    except TrivetError:
        raise
    except Exception as error:
        raise unreadable_model(args.model, error) from error
    try:
        tasks = await llm.get_supported_tasks()
        try:  # parsers, templates, middleware and adapters are looked up here
            with root_logger_kept():
                app = build_app(args, tasks, config.model_config)
            app.state.server = SimpleNamespace(should_exit=False)  # vLLM's error handler would stop it with the engine
            await init_app_state(llm, app.state, args, tasks)
            settings = tokenizing or TokenizingSettings()
            prompts = await asyncio.to_thread(
                quicken, app, llm.renderer, settings, inline_characters=_INLINE_CHARACTERS
            )
        except Exception as error:
            raise refused_flags(error) from error
        yield Frontend(app, core, served, config.model_config.max_model_len, prompts)
    finally:
        llm.shutdown()


@contextlib.contextmanager
def root_logger_kept() -> Iterator[None]:
    """A package that vLLM loads sets the root logger to ERROR, and nobody's warnings would be heard any more."""
    root = logging.getLogger()
    level = root.level
    try:
        yield
    finally:
        root.setLevel(level)


def unreadable_model(model: str, error: Exception) -> TrivetError:
    """What a person is told of a model that is not read."""
    return TrivetError(
        f"the render tier cannot set up {model!r}: {_in_a_line(error)}",
        mend="give a Hugging Face folder (config.json, tokenizer) or a hub name that this machine can reach, and a "
        "longest length and flags that fit it",
    )


def refused_flags(error: Exception, flags_in: str = IN_TOPOLOGY) -> TrivetError:
    """What a person is told of flags that vLLM, or what it was told to load, does not take."""
    return TrivetError(
        f"vLLM refuses the render flags: {_in_a_line(error)}",
        mend=f"look at {flags_in}",
    )


def _in_a_line(error: Exception) -> str:
    """The line of an error that says what is wrong."""
    told, named = str(error), isinstance(error, LookupError)  # whose text is a key and no more
    if isinstance(error, ValidationError):  # which counts its errors first, and ends with a web address
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        told = f"{place}: {first['msg']}" if place else first["msg"]
    line = next((line.strip() for line in told.splitlines() if line.strip()), "")
    line = line.replace("Value error, ", "", 1)
    kind = type(error).__name__
    return f"{kind}: {line}" if named and line else line or kind


def render_config(args: Namespace) -> VllmConfig:
    """A config for a process that renders and never computes: vLLM's own recipe for ``vllm launch render``."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    model_config = engine_args.create_model_config()
    model_config.quantization = None  # no kernels here, so none to check
    structured = getattr(engine_args, "create_structured_outputs_config", None)
    more: dict[str, Any] = {"structured_outputs_config": structured()} if structured else {}
    if not structured:
        # vLLM 0.30 puts these two flags in there only when it makes the config of an engine
        for flag in ("reasoning_parser", "reasoning_parser_plugin"):
            if value := getattr(engine_args, flag):
                setattr(engine_args.structured_outputs_config, flag, value)
        more["structured_outputs_config"] = engine_args.structured_outputs_config
    logging_config = getattr(engine_args, "create_logging_config", None)
    if logging_config and "logging_config" in inspect.signature(VllmConfig).parameters:
        more["logging_config"] = logging_config()
    # What requests are checked against besides the model: adapters, thinking budgets, tracing.
    more["observability_config"] = engine_args.create_observability_config()
    # With several API servers vLLM keeps no shadow of its engine's cache of images, which says what need not be sent.
    more["parallel_config"] = ParallelConfig(_api_process_count=2)
    if engine_args.enable_lora:
        more["lora_config"] = LoRAConfig(
            max_lora_rank=engine_args.max_lora_rank,
            max_loras=engine_args.max_loras,
            default_mm_loras=engine_args.default_mm_loras,
        )
    if hasattr(engine_args, "_set_default_reasoning_config_args"):
        engine_args._set_default_reasoning_config_args()
        more["reasoning_config"] = engine_args.reasoning_config
    return VllmConfig(model_config=model_config, **more)


def _front_end_llm(config: VllmConfig, core: SplitCore) -> async_llm.AsyncLLM:
    """vLLM's ``AsyncLLM`` over ``core``.

    ``AsyncLLM.__init__`` makes its engine core client itself and takes none from outside. For the length of that
    call the factory it uses gives ours.
    """
    try:
        with _core_client(core):
            llm = async_llm.AsyncLLM(
                vllm_config=config,
                executor_class=Executor,  # never made: there is no engine core in this process
                log_stats=False,
                log_requests=False,
            )
    except AttributeError as error:  # there is no such factory any more, or it is asked for something else
        raise _unknown_vllm(f": {error}") from error
    if llm.engine_core is not core:
        llm.shutdown()
        raise _unknown_vllm()
    shorten_prompts()
    parse_in_turns()
    # vLLM makes a span of its engine's timings, which are not here; trace headers reach the legs all the same.
    llm.output_processor.tracing_enabled = False
    # Whether there will be a watermark is the engines' to know: here only a client's refusal of one is kept.
    if hasattr(llm.input_processor, "resolve_watermarking"):
        llm.input_processor.resolve_watermarking = lambda params: params.watermarking is not False
    core.attach(llm.output_processor, config.model_config.max_model_len, Rules.of(config.model_config))
    return llm


def _unknown_vllm(detail: str = "") -> TrivetError:
    return TrivetError(
        f"this vLLM builds its engine client in a way that Trivet does not know{detail}",
        mend="use a vLLM that this Trivet was tested with (see README)",
    )


@contextlib.contextmanager
def _core_client(core: SplitCore) -> Iterator[None]:
    class Ours:
        @staticmethod
        def make_async_mp_client(*_: object, **__: object) -> SplitCore:
            return core

    theirs = async_llm.EngineCoreClient
    async_llm.EngineCoreClient = Ours
    try:
        yield
    finally:
        async_llm.EngineCoreClient = theirs
