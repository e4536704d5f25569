"""Answers in the forms of the three endpoints, streamed and whole, as vLLM 0.32 and 0.30 write them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from trivet.sim import text
from trivet.sim.asks import Ask, error_facts
from trivet.sim.scheduler import End
from trivet.sim.settings import SimSettings
from trivet.sim.tokens import candidates, prompt_logprob

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """One answer as it grows."""

    index: int
    prompt: Sequence[int]
    text: text.TextStream | None = None
    """None where nobody wants text."""
    tokens: list[int] = field(default_factory=list)
    draws: list[bytes] = field(default_factory=list)
    """Of the tokens, where log-probabilities are wanted."""
    sent: int = 0
    """Tokens that are in events already."""
    end: End | None = None
    stop_reason: int | str | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has its last token."""
        return self.end is not None


class Form(Protocol):
    """How one endpoint writes an answer."""

    done: bytes
    """The end mark of a stream."""

    def opening(self) -> bytes:
        """Sent before anything is computed."""
        ...

    def begin(self) -> bytes:
        """Sent with the first token, ahead of it."""
        ...

    def failed(self) -> bytes | None:
        """The end of a stream that failed; None where its connection is only closed."""
        ...

    def event(self, choice: Choice) -> bytes:
        """What is new in a choice as an event; empty if that is nothing."""
        ...

    def finish(self, choices: Sequence[Choice], cached_tokens: int | None) -> bytes:
        """Behind the last token: usage, if it was asked for. The end mark is not in it."""
        ...

    def whole(
        self, choices: Sequence[Choice], cached_tokens: int | None, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """An answer that is not streamed; ``params`` are its ``kv_transfer_params``."""
        ...


def make_choices(ask: Ask) -> list[Choice]:
    """An empty answer for each prompt and each of its ``n``."""
    wants_text = ask.text_mode or bool(ask.stop) or not ask.name.startswith("generate-")
    return [
        Choice(
            index=number * ask.n + one,
            prompt=prompt,
            text=text.TextStream(ask.stop, include_stop=ask.include_stop, after_tokens=ask.min_tokens)
            if wants_text
            else None,
        )
        for number, prompt in enumerate(ask.prompts)
        for one in range(ask.n)
    ]


def usage_facts(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None, *, terse: bool = True
) -> dict[str, Any]:
    """vLLM's usage; ``terse`` leaves out what is null."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        details: dict[str, Any] = {"cached_tokens": cached_tokens}
        if not terse:
            details |= {"created_cache_tokens": None, "multimodal_tokens": None}
        usage["prompt_tokens_details"] = details
    elif not terse:
        usage["prompt_tokens_details"] = None
    if not terse:
        usage["completion_tokens_details"] = None
    return usage


def sse(value: object) -> bytes:
    """An event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class _Base:
    done = DONE

    def __init__(self, ask: Ask, settings: SimSettings) -> None:
        self._ask = ask
        self._settings = settings
        self._created = int(time.time())

    def opening(self) -> bytes:
        """See ``Form``."""
        return b""

    def begin(self) -> bytes:
        """See ``Form``."""
        return b""

    def failed(self) -> bytes | None:
        """See ``Form``."""
        return sse(error_facts("Internal server error", "InternalServerError", 500)) + DONE

    def _usage(self, choices: Sequence[Choice], cached_tokens: int | None, *, terse: bool) -> dict[str, Any]:
        prompts = {choice.index // self._ask.n: len(choice.prompt) for choice in choices}
        completion = sum(len(choice.tokens) for choice in choices)
        told = cached_tokens if self._settings.enable_prompt_tokens_details else None
        return usage_facts(sum(prompts.values()), completion, told, terse=terse)

    def _running_usage(self, choice: Choice) -> dict[str, Any]:
        return usage_facts(len(choice.prompt), len(choice.tokens), terse=False)

    def _best(self, choice: Choice, place: int, count: int) -> list[tuple[int, float]]:
        return candidates(choice.draws[place], choice.tokens[place], count, self._settings.vocab_size)

    def _prompt_logprobs(self, prompt: Sequence[int]) -> list[dict[str, Any] | None] | None:
        count = self._ask.prompt_logprobs
        if count is None:
            return None
        places: list[dict[str, Any] | None] = [None]
        for place, token in enumerate(prompt[1:], 1):
            best = prompt_logprob(token, place)
            pairs = [(token, best), *((token + rank, best - rank * 0.5) for rank in range(1, max(count, 1)))]
            decoded = self._ask.detokenize
            places.append(
                {
                    str(one): {
                        "logprob": logprob,
                        "rank": rank,
                        "decoded_token": text.decode([one]) if decoded else None,
                    }
                    for rank, (one, logprob) in enumerate(pairs, 1)
                }
            )
        return places

    def _chat_logprobs(self, choice: Choice, begin: int, computed: int, told: int) -> dict[str, Any]:
        content = []
        for place in range(begin, len(choice.tokens)):
            entries = [
                {"token": (word := text.decode([token])), "logprob": logprob, "bytes": list(word.encode())}
                for token, logprob in self._best(choice, place, computed)
            ]
            content.append({**entries[0], "top_logprobs": entries[:told]})
        return {"content": content}


class GenerateForm(_Base):
    """``/inference/v1/generate``."""

    def __init__(self, ask: Ask, settings: SimSettings) -> None:
        super().__init__(ask, settings)
        self._prompt_told = not ask.return_token_ids
        self._plain = ask.logprobs is None and not ask.continuous_usage and not ask.text_mode
        name = orjson.dumps(ask.name)
        mode = b"" if settings.is_old else b',"output_mode":"tokens"'
        self._head = b'data: {"request_id":' + name + b',"usage":null' + mode + b',"choices":[{"index":%d,'
        self._tail = (
            b'"finish_reason":null,"token_ids":[%b],"routed_experts":null,"sampling_mask":null,"logprobs":null}]}\n\n'
            if settings.is_old
            else b'"finish_reason":null,"stop_reason":null,"token_ids":[%b],"routed_experts":null,'
            b'"sampling_mask":null,"weight_versions":null,"logprobs":null}]}\n\n'
        )

    def event(self, choice: Choice) -> bytes:
        """See ``Form``."""
        begin, choice.sent = choice.sent, len(choice.tokens)
        new = choice.tokens[begin:]
        if not new and (choice.end is None or (self._settings.is_old and self._prompt_told)):
            return b""
        if choice.end is None and self._plain and self._prompt_told:  # nearly all events are like this
            return self._head % choice.index + self._tail % ",".join(map(str, new)).encode()
        facts: dict[str, Any] = {
            "request_id": self._ask.name,
            "usage": self._running_usage(choice) if self._ask.continuous_usage else None,
        }
        if not self._prompt_told:
            facts |= {"prompt_token_ids": list(choice.prompt), "mm_placeholders": None}
            self._prompt_told = True
        if not self._settings.is_old:
            facts["output_mode"] = "text" if self._ask.text_mode else "tokens"
        facts["choices"] = [self._choice(choice, begin)]
        return sse(facts)

    def finish(self, choices: Sequence[Choice], cached_tokens: int | None) -> bytes:
        """See ``Form``."""
        if not self._ask.include_usage:
            return b""
        facts: dict[str, Any] = {
            "request_id": self._ask.name,
            "usage": self._usage(choices, cached_tokens, terse=True),
        }
        if not self._settings.is_old:
            facts["output_mode"] = "text" if self._ask.text_mode else "tokens"
        return sse(facts | {"choices": []})

    def whole(
        self, choices: Sequence[Choice], cached_tokens: int | None, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """See ``Form``."""
        facts: dict[str, Any] = {
            "request_id": self._ask.name,
            "model": self._ask.model,
            "created": self._created,
            "usage": self._usage(choices, cached_tokens, terse=False),
            "prompt_logprobs": self._prompt_logprobs(self._ask.prompts[0]),
            "prompt_token_ids": self._ask.prompts[0] if self._ask.return_token_ids else None,
            "mm_placeholders": None,
            "kv_transfer_params": params,
            "ec_transfer_params": None,
        }
        if not self._settings.is_old:
            mode = "text" if self._ask.text_mode else "tokens"
            facts |= {"prompt_token_id_logprobs": None, "metrics": None, "output_mode": mode}
        facts["choices"] = [self._choice(choice, 0) for choice in choices]
        return facts

    def _choice(self, choice: Choice, begin: int) -> dict[str, Any]:
        facts: dict[str, Any] = {"index": choice.index, "finish_reason": choice.end}
        if not self._settings.is_old:
            facts["stop_reason"] = choice.stop_reason
        facts |= {"token_ids": choice.tokens[begin:], "routed_experts": None, "sampling_mask": None}
        if not self._settings.is_old:
            facts["weight_versions"] = None
        if self._ask.text_mode:
            assert choice.text is not None
            facts["text"] = choice.text.delta(finished=choice.end is not None)
        return facts | {"logprobs": self._logprobs(choice, begin)}

    def _logprobs(self, choice: Choice, begin: int) -> dict[str, Any] | None:
        count = self._ask.logprobs
        if count is None:
            return None
        if self._ask.text_mode:
            return self._chat_logprobs(choice, begin, count, max(count, 1))
        content: list[dict[str, Any]] = []
        for place in range(begin, len(choice.tokens)):
            best = self._best(choice, place, count)
            if self._settings.is_old:
                entries: list[dict[str, Any]] = [
                    {"token": f"token_id:{token}", "logprob": logprob, "bytes": None} for token, logprob in best
                ]
            else:
                entries = [
                    {"token_id": token, "logprob": logprob, "rank": rank}
                    for rank, (token, logprob) in enumerate(best, 1)
                ]
            content.append({**entries[0], "top_logprobs": entries})
        return {"content": content}


class _OpenAIForm(_Base, ABC):
    """What chats and completions have in common."""

    @abstractmethod
    def _chunk(self, *choices: Mapping[str, Any]) -> dict[str, Any]:
        """An event with these choices."""

    def finish(self, choices: Sequence[Choice], cached_tokens: int | None) -> bytes:
        """See ``Form``."""
        if not self._ask.include_usage:
            return b""
        return sse(self._chunk() | {"usage": self._usage(choices, cached_tokens, terse=True)})


class ChatForm(_OpenAIForm):
    """``/v1/chat/completions``."""

    def begin(self) -> bytes:
        """The role, for each choice."""
        events = []
        for index in range(self._ask.n):
            choice = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            ids = self._ask.prompts[0] if self._ask.return_token_ids else None
            facts = self._chunk(choice) | {"prompt_token_ids": ids}
            if not self._settings.is_old:
                facts["prompt_text"] = None
            if self._ask.continuous_usage:
                facts["usage"] = usage_facts(len(self._ask.prompts[0]), 0)
            events.append(sse(facts))
        return b"".join(events)

    def event(self, choice: Choice) -> bytes:
        """See ``Form``."""
        begin, choice.sent = choice.sent, len(choice.tokens)
        if choice.end is None and begin == len(choice.tokens):
            return b""
        assert choice.text is not None
        facts: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": choice.text.delta(finished=choice.end is not None)},
            "logprobs": self._logprobs(choice, begin),
            "finish_reason": choice.end,
        }
        if choice.end is not None:
            facts["stop_reason"] = choice.stop_reason
        facts["token_ids"] = choice.tokens[begin:] if self._ask.return_token_ids else None
        event = self._chunk(facts)
        if self._ask.continuous_usage:
            event["usage"] = self._running_usage(choice)
        return sse(event)

    def whole(
        self, choices: Sequence[Choice], cached_tokens: int | None, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """See ``Form``."""
        answers = []
        for choice in choices:
            assert choice.text is not None
            message: dict[str, Any] = {"role": "assistant", "content": choice.text.delta(finished=True)}
            message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
            answers.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": self._logprobs(choice, 0),
                    "finish_reason": choice.end,
                    "stop_reason": choice.stop_reason,
                    "token_ids": choice.tokens if self._ask.return_token_ids else None,
                    "routed_experts": None,
                }
            )
        return {
            "id": self._ask.name,
            "object": "chat.completion",
            "created": self._created,
            "model": self._ask.model,
            "choices": answers,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self._usage(choices, cached_tokens, terse=False),
            "prompt_logprobs": self._prompt_logprobs(self._ask.prompts[0]),
            "prompt_token_ids": self._ask.prompts[0] if self._ask.return_token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _chunk(self, *choices: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._ask.name,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._ask.model,
            "choices": list(choices),
        }

    def _logprobs(self, choice: Choice, begin: int) -> dict[str, Any] | None:
        if self._ask.logprobs is None:
            return None
        return self._chat_logprobs(choice, begin, self._ask.logprobs, self._ask.top_logprobs)


class CompletionForm(_OpenAIForm):
    """``/v1/completions``."""

    def __init__(self, ask: Ask, settings: SimSettings) -> None:
        super().__init__(ask, settings)
        self._echoed: set[int] = set()
        self._offsets: dict[int, int] = {}

    def event(self, choice: Choice) -> bytes:
        """See ``Form``."""
        begin, choice.sent = choice.sent, len(choice.tokens)
        if choice.end is None and begin == len(choice.tokens):
            return b""
        assert choice.text is not None
        said, first = choice.text.delta(finished=choice.end is not None), choice.index not in self._echoed
        self._echoed.add(choice.index)
        if first and self._ask.echo:
            said = text.decode(choice.prompt) + said
        facts = {
            "index": choice.index,
            "text": said,
            "logprobs": self._logprobs(choice, begin),
            "finish_reason": choice.end,
            "stop_reason": choice.stop_reason,
            "prompt_token_ids": list(choice.prompt)
            if first and (self._ask.return_token_ids or self._ask.echo)
            else None,
            "token_ids": choice.tokens[begin:] if self._ask.return_token_ids else None,
        }
        event = self._chunk(facts)
        if self._ask.continuous_usage:
            event["usage"] = self._running_usage(choice)
        return sse(event)

    def whole(
        self, choices: Sequence[Choice], cached_tokens: int | None, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """See ``Form``."""
        answers = []
        for choice in choices:
            assert choice.text is not None
            said = choice.text.delta(finished=True)
            answers.append(
                {
                    "index": choice.index,
                    "text": text.decode(choice.prompt) + said if self._ask.echo else said,
                    "logprobs": self._logprobs(choice, 0),
                    "finish_reason": choice.end,
                    "stop_reason": choice.stop_reason,
                    "token_ids": choice.tokens if self._ask.return_token_ids else None,
                    "prompt_logprobs": self._prompt_logprobs(choice.prompt),
                    "prompt_token_ids": list(choice.prompt) if self._ask.return_token_ids else None,
                    "routed_experts": None,
                }
            )
        return {
            "id": self._ask.name,
            "object": "text_completion",
            "created": self._created,
            "model": self._ask.model,
            "choices": answers,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self._usage(choices, cached_tokens, terse=False),
            "kv_transfer_params": params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _chunk(self, *choices: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._ask.name,
            "object": "text_completion",
            "created": self._created,
            "model": self._ask.model,
            "choices": list(choices),
        }

    def _logprobs(self, choice: Choice, begin: int) -> dict[str, Any] | None:
        count = self._ask.logprobs
        if count is None:
            return None
        offsets: list[int] = []
        offset = self._offsets.get(choice.index, 0)
        words, logprobs, tops = [], [], []
        for place in range(begin, len(choice.tokens)):
            best = self._best(choice, place, count)
            words.append(text.decode([choice.tokens[place]]))
            logprobs.append(best[0][1])
            tops.append({text.decode([token]): logprob for token, logprob in best})
            offsets.append(offset)
            offset += len(words[-1])
        self._offsets[choice.index] = offset
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": words, "top_logprobs": tops}
