from types import SimpleNamespace

import pytest

from transfer.schedulers import make_request
from trivet.transfer.messages import Open, decode, encode
from trivet.transfer.prompts import prompt_of


def prompt(ids, lora=None):
    request = make_request("r", len(ids))
    request.prompt_token_ids, request.lora_request = ids, lora
    return prompt_of(request)


def test_prompts_that_are_alike_have_the_same_word():
    assert prompt([1, 2, 3]) == prompt([1, 2, 3])
    assert decode(encode(Open("t", prompt([1] * 1000)))) == Open("t", prompt([1] * 1000))


@pytest.mark.parametrize(
    "other",
    [
        ([1, 2],),
        ([1, 2, 4],),
        ([3, 2, 1],),
        ([1, 2, 2**80],),
        ([1, 2, None],),
        ([1, 2, 3], SimpleNamespace(lora_name="l")),
    ],
)
def test_prompts_that_differ_have_another(other):
    assert prompt([1, 2, 3]) != prompt(*other)
