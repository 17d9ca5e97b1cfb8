"""The task of a calculator: what the warm start shows is what the policy meets when it plays."""

import random

import pytest

from siirl_dask.environments import Action
from siirl_dask.environments.tools import CallParser, schema_of, schemas_by_name
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer
from siirl_dask.tasks.calculator import (
    BETWEEN,
    CLOSE,
    OPEN,
    Calculator,
    demonstration,
    encoded,
    guess,
    question,
)
from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_tokenizer
from siirl_dask.tasks.warm_start import NO_LOSS

SUM = (214, 387)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(chat_template=CHAT_TEMPLATE, pieces=(OPEN, BETWEEN, CLOSE))


def test_a_demonstration_has_the_tokens_of_an_episode_that_is_played(tokenizer):
    wrapped, end = HuggingFaceTokenizer(tokenizer, "model"), tokenizer.eos_token_id
    call = wrapped.encode(f"{OPEN}{SUM[0]}{BETWEEN}{SUM[1]}{CLOSE}")
    result = [{"role": "tool", "name": "add", "content": "601"}]
    tools = [schema_of(Calculator.add)]
    played = [*wrapped.encode(question(SUM), tools), *call, end]
    played += [*wrapped.after_turn(question(SUM), result, tools, end), *wrapped.encode(" 601"), end]
    inputs, labels = encoded(tokenizer, [demonstration(SUM)])
    assert inputs[0].tolist() == played[:-1]
    learned = [token for token in labels[0].tolist() if token != NO_LOSS]
    assert learned == [*call, end, *wrapped.encode(" 601"), end]


def test_what_is_shown_as_a_call_is_read_as_one(tokenizer):
    call = demonstration(SUM)[1][0]
    action = Action(call, tokenizer(call)["input_ids"])
    (found,) = CallParser(tokenizer).calls(action, schemas_by_name([schema_of(Calculator.add)]))
    assert found.arguments == {"first": 214, "second": 387}


def test_only_the_sum_is_rewarded_and_a_guess_is_an_answer():
    calculator = Calculator()
    calculator.reset({"answer": "601"}, 0)
    assert calculator.add(*SUM) == "601"
    assert calculator.step(" 601").reward == 1.0
    assert calculator.step(" 602").reward == 0.0
    texts = {guess(SUM, random.Random(seed))[1][0] for seed in range(50)}
    assert len(texts) > 40
    assert all(200 <= int(text) < 1999 for text in texts)
