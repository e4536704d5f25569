# ruff: noqa: E501, RUF001
"""Chat templates: those that installed packages carry, and short ones in the manner of families of which none does."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from helpers.tokenizer import demo_fields

_LLAMA3 = """{{- bos_token }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + (message.role if message.role != 'tool' else 'ipython') + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}{{- '<|python_tag|>' }}{%- for call in message.tool_calls %}
{{- {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}{%- endfor %}{%- endif %}
{{- message.content | trim }}{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

_QWEN = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""

_DEEPSEEK = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}{{- '<｜Assistant｜></think>' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' + call.function.name }}{{- call.function.arguments | tojson }}{%- endfor %}{{- eos_token }}
{%- else %}{{- message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>' }}{%- endif %}"""

_GEMMA = """{{- bos_token }}
{%- for message in messages %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' + message.content | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

_LLAMA2 = """{%- for message in messages %}
{%- if message.role == 'system' %}{{- '<<SYS>>\\n' + message.content + '\\n<</SYS>>\\n\\n' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + ' ' + eos_token }}
{%- else %}{{- bos_token + '[INST] ' + message.content | trim + ' [/INST]' }}{%- endif %}
{%- endfor %}"""

_HARMONY = """{{- '<|start|>system<|message|>Knowledge cutoff: 2024-06\\n\\nReasoning: medium<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
{%- for tool in tools %}{{- '\\n// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: ' }}
{{- tool.function.parameters | tojson }}{{- ') => any;\\n' }}{%- endfor %}{{- '} // namespace functions<|end|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- for call in message.tool_calls or [] %}
{{- '<|start|>assistant to=functions.' + call.function.name + '<|channel|>commentary json<|message|>' }}
{{- call.function.arguments | tojson }}{{- '<|call|>' }}{%- endfor %}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

_PLAIN = """{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""


@functools.cache
def templates() -> Mapping[str, str]:
    """All of them, by name."""
    made = {
        "llama3": _LLAMA3,
        "qwen": _QWEN,
        "deepseek": _DEEPSEEK,
        "gemma": _GEMMA,
        "llama2": _LLAMA2,
        "harmony": _HARMONY,
        "plain": _PLAIN,
        "smollm2": str(demo_fields()["tokenizer.chat_template"]),
    }
    made.update(_of_vllm())
    made.update(_of_mistral())
    return made


def _of_vllm() -> dict[str, str]:
    """Those that vLLM falls back to for models without one."""
    spec = importlib.util.find_spec("vllm")  # found, not imported
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "transformers_utils" / "chat_templates"
    return {
        path.stem.removeprefix("template_"): path.read_text(encoding="utf-8")
        for path in sorted(folder.glob("template_*.jinja"))
    }


def _of_mistral() -> dict[str, str]:
    """Those that ``mistral_common`` generates for each version of its tokenizers, if it can (1.9 could not)."""
    if importlib.util.find_spec("mistral_common.integrations") is None:
        return {}
    from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    made = {}
    for version in TokenizerVersion:
        for spm in (True, False):
            try:
                config = TemplateConfig(version=version, spm=spm)
            except ValueError:
                continue  # no such tokenizer
            made[f"mistral {version.value} {'spm' if spm else 'tekken'}"] = build_chat_template(config)
    return made
