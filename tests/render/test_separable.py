"""Templates in pieces: what is taken for one gives the whole, out of pieces of other conversations too."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import _compile_jinja_template

from helpers.templates import templates
from trivet.render.separable import Inseparable, Separable

VARIABLES = {"tools": None, "documents": None, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}


def separable(source: str) -> Separable:
    return Separable(_compile_jinja_template(source), source)


def whole(source: str, messages, variables=VARIABLES) -> str:
    return _compile_jinja_template(source).render(messages=messages, **variables)


class Kept:
    """Pieces as one who keeps them would: by all that they may depend on, and nothing else."""

    def __init__(self, source: str) -> None:
        self.template = separable(source)
        self.kept: dict = {}

    def render(self, messages, variables=VARIABLES) -> str:
        first, last, places = str(messages[0]), len(messages) - 1, self.template.places
        head = (str(variables), first)
        if head not in self.kept:
            run = self.template.run(variables, messages, [])
            self.kept[head] = run.before, run.behind, run.begin
        before, behind, begin = self.kept[head]
        texts = []
        for place in range(begin, len(messages)):
            key = (head, str(messages[place]))
            key += tuple({"first": place == begin, "last": place == last}.get(name, place) for name in sorted(places))
            if key not in self.kept:
                (self.kept[key],) = self.template.run(variables, messages, [place]).texts
            texts.append(self.kept[key])
        return before + "".join(texts) + behind


def assert_growing_is_whole(source: str, conversations) -> bool:
    """Whether the template is separable; if it is, all beginnings of all conversations are what they are whole."""
    try:
        kept = Kept(source)
    except Inseparable:
        return False
    for messages in conversations:
        for length in range(1, len(messages) + 1):
            try:
                proper = whole(source, messages[:length])
            except Exception as error:
                with pytest.raises((type(error), Inseparable)):
                    kept.render(messages[:length])
                continue
            try:
                assert kept.render(messages[:length]) == proper
            except Inseparable:
                return False
    return True


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TURNS = [says(("user", "assistant")[number % 2], f" {number % 3} ") for number in range(7)]
CONVERSATIONS = [
    [says("system", "Be kind."), *TURNS],
    TURNS,
    [says("system", "Be short."), *TURNS[2:]],
    [*TURNS[2:], says("system", "Be kind."), *TURNS],
    [says("user", " 0 "), says("user", " 0 "), says("user", " 0 ")],
]
SEPARABLE = {"llama3", "qwen", "deepseek", "gemma", "llama2", "harmony", "plain", "smollm2", "basic", "blip2"}
SEPARABLE |= {"deepseek_ocr", "deepseek_vl2"}


@pytest.mark.parametrize("name", templates())
def test_known_templates_give_the_whole_in_pieces(name):
    assert assert_growing_is_whole(templates()[name], CONVERSATIONS) is (name in SEPARABLE)


CONTENTS = st.one_of(st.text(max_size=12), st.sampled_from(["<|im_end|>", "{{ x }}", "\x00", " \n ", "<s>"]))
CHATS = st.lists(st.builds(says, st.sampled_from(["system", "user", "assistant"]), CONTENTS), min_size=1, max_size=5)


@pytest.mark.parametrize("name", sorted(SEPARABLE & set(templates())))
def test_any_chat_is_the_whole_in_pieces(name):
    @settings(max_examples=25, deadline=None)
    @given(conversations=st.lists(CHATS, min_size=1, max_size=3))
    def same(conversations):
        assert_growing_is_whole(templates()[name], conversations)

    same()


QWEN = """{%- if tools %}{{- tools | tojson }}{%- else %}{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{%- endif %}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant"
        and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA = """{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{% set rest = messages[1:] %}{% else %}{% set system = false %}{% set rest = messages %}{% endif %}
{% for message in rest %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}
{% if loop.index0 == 0 and system %}{{ '<<' + system + '>>' }}{% endif %}
{% if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content | trim + ' [/INST]' }}{% else %}{{ ' ' + message.content + eos_token }}
{% endif %}{% endfor %}"""  # noqa: E501


@pytest.mark.parametrize("source", [QWEN, LLAMA], ids=["qwen 2.5", "llama 2"])
def test_templates_of_vendors_are_separable(source):
    assert assert_growing_is_whole(source, CONVERSATIONS)


LOOP = "{% for message in messages %}@{{ message.content }}{% endfor %}"
NOT = {
    "a namespace": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{{ n.x }}{% endfor %}",
    "a joiner": "{% set j = joiner(',') %}{% for m in messages %}{{ j() }}{{ m.content }}{% endfor %}",
    "a cycler": "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{% endfor %}",
    "an iterator": "{% set g = [1, 2, 3] | map('string') %}{% for m in messages %}{{ g | first }}{% endfor %}",
    "chance": "{% for m in messages %}{{ [1, 2, 3] | random }}{% endfor %}",
    "the time": "{% for m in messages %}{{ strftime_now('%s') }}{% endfor %}",
    "the length": "{% for m in messages %}{{ messages | length }}{% endfor %}",
    "the length of the loop": "{% for m in messages %}{{ loop.length }}{% endfor %}",
    "the end of the loop": "{% for m in messages %}{{ loop.revindex }}{% endfor %}",
    "the last message": "{% for m in messages %}{{ messages[-1].content }}{% endfor %}",
    "the next message": "{% for m in messages %}{{ loop.nextitem.content }}{% endfor %}",
    "the message before": "{% for m in messages %}{{ loop.previtem.content }}{% endfor %}",
    "a change": "{% for m in messages %}{% if loop.changed(m.role) %}{{ m.content }}{% endif %}{% endfor %}",
    "all of it before": "{{ messages }}" + LOOP,
    "all of it behind": LOOP + "{{ messages | length }}",
    "all of it by another name": "{% set all = messages %}" + LOOP + "{{ all | length }}",
    "all of it in a list": "{% set all = [messages] %}" + LOOP + "{{ all[0] | length }}",
    "two loops": LOOP + LOOP,
    "a loop in the loop": "{% for m in messages %}{% for o in messages %}{{ o.content }}{% endfor %}{% endfor %}",
    "a loop before, by another name": "{% set all = [messages] %}{% for m in all[0] %}x{% endfor %}" + LOOP,
    "some of them": "{% for m in messages if m.role != 'user' %}{{ loop.index }}{% endfor %}",
    "backwards": "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
    "the end of them": "{% for m in messages[-2:] %}{{ m.content }}{% endfor %}",
    "an end before the end": "{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}x{% endfor %}",
    "a macro": "{% macro say(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "none": "{{ messages[0].content }}",
    "whether it is one of them": "{% for m in messages %}{{ m in messages }}{% endfor %}",
    "as JSON": "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | tojson }}",
    "its place, asked otherwise": "{% for m in messages %}{{ loop['length'] }}{% endfor %}",
    "the loop": "{% for m in messages %}{% set l = loop %}{{ l.length }}{% endfor %}",
    "an order": "{% for m in messages | sort(attribute='content') %}{{ m.content }}{% endfor %}",
    "recursion": "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "else": "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}",
}


@pytest.mark.parametrize("name", NOT)
def test_what_depends_on_more_is_run_whole(name):
    try:
        template = separable(NOT[name])
    except Inseparable:
        return
    with pytest.raises((Inseparable, TypeError)):
        template.run(VARIABLES, TURNS, range(len(TURNS)))


BEFORE = [
    "",
    "{% set x = 1 %}",
    "{{ bos_token }}",
    "{% if messages[0].role == 'system' %}{% set x = messages[0].content %}{% endif %}",
]
BODY = [
    "{{ message.role }}",
    "{{ x }}",
    "{% set x = (x or 0) ~ message.content %}{{ x }}",
    "{% if message.role == 'user' %}{% set y = 1 %}{% endif %}{{ y is defined }}",
    "{{ loop.index }}",
    "{% if loop.first %}first{% endif %}",
    "{% if loop.last %}last{% endif %}",
    "{% for letter in message.content %}{{ loop.index }}{{ letter }}{% if loop.last %};{% endif %}{% endfor %}",
    "{% for letter in message.content if letter != ' ' %}{{ loop.length }}{% endfor %}",
    "{% for one in [loop.index0] %}{{ loop.last }}{{ one }}{% endfor %}",
    "{% for one in [] %}{% else %}{{ loop.last }}{% endfor %}",
    "{% set message = {'content': 'other'} %}{{ message.content }}",
    "{{ message | tojson }}",
    "{{ messages[0].role }}",
    "{% set loop_index = loop.index %}{{ loop_index }}",
    "\n  {%- if loop.index0 % 2 %} odd {%- endif %}\n",
]
BEHIND = ["", "{{ x }}", "{% if add_generation_prompt %}>{% endif %}", "{{ message }}", "{{ messages[0].role }}"]
OVER = ["messages", "messages[1:]"]


@settings(max_examples=150, deadline=None)
@given(
    before=st.sampled_from(BEFORE),
    body=st.lists(st.sampled_from(BODY), min_size=1, max_size=4).map("".join),
    behind=st.sampled_from(BEHIND),
    over=st.sampled_from(OVER),
    chats=st.lists(CHATS, min_size=1, max_size=2),
)
def test_any_template_that_is_taken_gives_the_whole(before, body, behind, over, chats):
    source = f"{before}{{% for message in {over} %}}{body}{{% endfor %}}{behind}"
    assert_growing_is_whole(source, [*chats, TURNS])


def test_those_templates_are_taken():
    """Otherwise the one above shows nothing."""
    taken = sum(
        assert_growing_is_whole(f"{before}{{% for message in messages %}}{body}{{% endfor %}}{behind}", [TURNS])
        for before, body, behind in itertools.product(BEFORE, BODY, BEHIND)
    )
    assert taken > 0.8 * len(BEFORE) * len(BODY) * len(BEHIND)


def test_a_template_that_raises_raises_in_pieces():
    source = "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    template = separable(source)
    with pytest.raises(Exception, match="no"):
        template.run(VARIABLES, [says("user", "no")], [0])
    assert template.run(VARIABLES, [says("user", "yes"), says("user", "no")], [0]).texts == [""]


def test_what_a_template_is_given_besides_is_not_looked_at():
    assert whole(LOOP, TURNS, {"loop": 7, "x": 1}) == Kept(LOOP).render(TURNS, {"loop": 7, "x": 1})
