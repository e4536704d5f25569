"""A tokenizer with the marks that parsers look for, what models say with them, and chunks of it."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}},
        },
    }
]
MAX_TOKENS = 4096


def write_folder(plain: Path, target: Path) -> Path:
    """The model folder ``plain`` with ``MARKS`` as tokens of their own."""
    shutil.copytree(plain, target)
    file = target / "tokenizer.json"
    told = json.loads(file.read_text())
    first = len(told["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    told["added_tokens"] += [{"id": first + i, "content": mark, **flags} for i, mark in enumerate(MARKS)]
    file.write_text(json.dumps(told))
    config = json.loads((target / "config.json").read_text())
    more = {"vocab_size": first + len(MARKS), "max_position_embeddings": MAX_TOKENS}
    (target / "config.json").write_text(json.dumps({**config, **more}))
    return target


@dataclass(frozen=True)
class Case:
    """A model's answer, and the parsers of its family."""

    says: str
    reasoning: str | None = None
    tools: str | None = None
    asks: dict[str, Any] = field(default_factory=dict)
    """Of the request, beside its messages."""
    prompt: str = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    finish: str = "stop"


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "zwölf 🦜", "b": 30}}\n</tool_call>'
THOUGHT = "<think>Hm, 12 and 30 🧪… that is easy.</think>"
CASES = {
    "reasoning": Case(f"{THOUGHT}\n\nIt is 42 🎉, as ever.", "deepseek_r1"),
    "reasoning opened by the prompt": Case("so easy 🧪</think>42", "deepseek_r1", prompt="Hi<think>"),
    "reasoning that never ends": Case("<think>and so on 🧪 and on", "deepseek_r1", finish="length"),
    "reasoning that nobody wants": Case(f"{THOUGHT}42 🎉", "deepseek_r1", asks={"include_reasoning": False}),
    "reasoning by vLLM's engine": Case(f"{THOUGHT}\n\nIt is 42 🎉.", "qwen3"),
    "tool": Case(f"Let me see 🧪.\n{CALL}", None, "hermes", {"tools": TOOLS}),
    "two tools": Case(f"{CALL}\n{CALL}", None, "hermes", {"tools": TOOLS}),
    "two tools where one is wanted": Case(
        f"{CALL}\n{CALL}", None, "hermes", {"tools": TOOLS, "parallel_tool_calls": False}
    ),
    "reasoning and tool": Case(f"{THOUGHT}\n{CALL}", "deepseek_r1", "hermes", {"tools": TOOLS}),
    "reasoning and tool by vLLM's engine": Case(
        f"{THOUGHT}\n<tool_call>\n<function=add>\n<parameter=a>\nzwölf 🦜\n</parameter>\n</function>\n</tool_call>",
        "qwen3",
        "qwen3_coder",
        {"tools": TOOLS},
    ),
    "tool that must be": Case(
        '[{"name": "add", "parameters": {"a": "🦜", "b": 30}}]',
        None,
        "hermes",
        {"tools": TOOLS, "tool_choice": "required"},
    ),
    "tool by name": Case(
        '{"a": "🦜", "b": 30}',
        None,
        "hermes",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
    ),
    "tool that ends in the middle": Case(
        '<tool_call>\n{"name": "add", "arguments": {"a": "zwö', None, "hermes", {"tools": TOOLS}, finish="length"
    ),
    "tool in plain JSON": Case(
        '{"name": "add", "parameters": {"a": "zwölf 🦜", "b": 30}}', None, "llama3_json", {"tools": TOOLS}
    ),
    "tool in a list": Case(
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": "zwölf 🦜", "b": 30}}]', None, "mistral", {"tools": TOOLS}
    ),
    "no tool": Case("It is 42 🎉, as ever.", None, "hermes", {"tools": TOOLS}),
    "token ids": Case(f"{THOUGHT}42", "deepseek_r1", asks={"return_token_ids": True}),
}


class Shop:
    """vLLM's application, and derenderers like its own for any family of parsers."""

    def __init__(self, app: Any, folder: Path, engine: Any) -> None:
        self.app = app
        self.engine = engine
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._first = app.state.online_derenderer
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.scale_out.derender.serving import ServingDerender
        from vllm.entrypoints.scale_out.token_in_token_out import protocol

        self.protocol = protocol
        self._chat, self._serving = ChatCompletionRequest, ServingDerender
        self.chunk_cls = protocol.DerenderChatStreamRequest.model_fields["generate_chunk"].annotation

    @property
    def parses_streams(self) -> bool:
        """0.30 does not."""
        return hasattr(type(self._first), "_derender_chat_stream_parsed")

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def theirs(self, case: Case | None = None) -> Any:
        """vLLM's derenderer, as it is."""
        reasoning, tools = (case.reasoning, case.tools) if case else (None, None)
        first = self._first
        return type(first)(
            first.model_config,
            first.renderer,
            request_logger=None,
            chat_template=first.chat_template,
            chat_template_content_format=first.chat_template_content_format,
            enable_auto_tools=tools is not None,
            tool_parser=tools,
            reasoning_parser=reasoning,
        )

    def chat(self, case: Case, **more: Any) -> Any:
        """Its request, read by vLLM."""
        return self._chat.model_validate(self.chat_body(case, **more))

    def chat_body(self, case: Case, **more: Any) -> dict[str, Any]:
        return {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **copy.deepcopy(case.asks), **more}

    @contextlib.contextmanager
    def serving(self, derenderer: Any, routes: Sequence[Any] = ()) -> Iterator[httpx.AsyncClient]:
        """The application with another derenderer, and these routes before vLLM's."""
        state, table = self.app.state, self.app.router.routes
        before = state.online_derenderer, state.serving_derender, list(table)
        state.online_derenderer = derenderer
        state.serving_derender = self._serving(state.openai_serving_models, derenderer)
        table[:] = [*routes, *(one for one in table if not type(one).__module__.startswith("trivet."))]
        try:
            yield httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://render", timeout=20)
        finally:
            state.online_derenderer, state.serving_derender, table[:] = before


def chunks(
    ids: Sequence[int], sizes: Iterator[int], *, index: int = 0, finish: str = "stop", logprobs: bool = False
) -> Iterator[dict[str, Any]]:
    """What ``/inference/v1/generate`` streams: tokens, their end with the last or by itself, usage."""
    start, draw = 0, random.Random(len(ids))
    alone = draw.random() < 0.5
    while start < len(ids):
        some = list(ids[start : start + next(sizes)])
        start += len(some)
        choice: dict[str, Any] = {"index": index, "token_ids": some, "finish_reason": None}
        if logprobs:
            choice["logprobs"] = {"content": [entry(one) for one in some]}
        if start == len(ids) and not alone:
            choice["finish_reason"] = finish
        yield {"request_id": "r", "choices": [choice]}
    if alone:
        yield {"request_id": "r", "choices": [{"index": index, "token_ids": [], "finish_reason": finish}]}
    usage = {"prompt_tokens": 9, "completion_tokens": len(ids), "total_tokens": 9 + len(ids)}
    yield {"request_id": "r", "choices": [], "usage": usage}


def entry(token_id: int) -> dict[str, Any]:
    """Logprobs of one token, with another in its place."""
    top = [{"token_id": token_id, "logprob": -0.5, "rank": 1}, {"token_id": token_id + 1, "logprob": -1.5, "rank": 2}]
    return {"token_id": token_id, "logprob": -0.5, "rank": 1, "top_logprobs": top}


def at_random(seed: int) -> Iterator[int]:
    """Sizes of chunks: mostly one token, at times many."""
    draw = random.Random(seed)
    while True:
        yield draw.choice((1, 1, 1, 2, 3, 7, 40))


def of(size: int) -> Iterator[int]:
    while True:
        yield size


@contextlib.asynccontextmanager
async def shop(frontend: Any, around: Any, folder: Path, engine: Any, *flags: str) -> AsyncIterator[Shop]:
    """vLLM's application over ``engine``, with its scale-out paths."""
    with contextlib.ExitStack() as setting_up:
        setting_up.enter_context(around)
        told = [str(folder), "--served-model-name", "tiny", "--enable-scale-out", *flags]
        async with frontend.open_frontend(told, engine) as opened:
            setting_up.close()
            yield Shop(opened.app, folder, engine)
