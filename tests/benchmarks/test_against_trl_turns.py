"""Tests of the comparison of runs with a tool with TRL, as far as they can run without TRL."""

import json
from functools import partial

import pytest

from benchmarks.against_trl.turns_page import write_page
from benchmarks.against_trl.turns_setting import CHAT_TEMPLATE, RESPONSE_TEMPLATE, SlowCalculator
from siirl_dask.environments.protocol import Action
from siirl_dask.environments.tools import Call, CallParser, Malformed, schema_of, schemas_by_name
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer
from siirl_dask.tasks.calculator import BETWEEN, CLOSE, OPEN, Calculator, demonstration, question
from siirl_dask.tasks.tiny_model import tiny_tokenizer

SUM = (214, 387)
TOOLS = schemas_by_name([schema_of(Calculator.add)])


@pytest.fixture(scope="module")
def tokenizer():
    given = tiny_tokenizer(chat_template=CHAT_TEMPLATE, pieces=(OPEN, BETWEEN, CLOSE))
    given.response_template = RESPONSE_TEMPLATE
    return given


def ids_of(tokenizer, text, *, end=True):
    return [*tokenizer(text)["input_ids"], *([tokenizer.eos_token_id] if end else [])]


def test_the_template_that_both_read_renders_what_the_warm_start_shows(tokenizer):
    prompt, call, observed, _ = (text for text, _ in demonstration(SUM))
    ours, message = (
        HuggingFaceTokenizer(tokenizer, "model"),
        {"role": "tool", "name": "add", "content": str(sum(SUM))},
    )
    assert ours.encode(question(SUM)) == ids_of(tokenizer, prompt, end=False)
    last = ids_of(tokenizer, call)[-1]
    assert ours.after_turn(question(SUM), [message], [], last) == ids_of(
        tokenizer, observed, end=False
    )


def test_what_follows_a_turn_is_what_trl_cuts_out_of_a_rendered_chat(tokenizer):
    """TRL renders a call with and without its result, and takes what is behind the end token of
    the first.
    """
    called = {"type": "function", "function": {"name": "add", "arguments": {}}}
    chat = [
        {"role": "user", "content": "dummy"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
    ]
    result = {"role": "tool", "name": "add", "content": str(sum(SUM))}
    render = partial(tokenizer.apply_chat_template, tokenize=True, return_dict=False)
    before, whole = render(chat), render([*chat, result], add_generation_prompt=True)
    end = before.index(tokenizer.eos_token_id) + 1
    assert whole[:end] == before[:end]
    assert whole[end:] == ids_of(tokenizer, demonstration(SUM)[2][0], end=False)


def test_calls_are_read_from_the_template_and_answers_are_none(tokenizer):
    def read(text):
        return CallParser(tokenizer).calls(Action(text, ids_of(tokenizer, text)), TOOLS)

    assert read(demonstration(SUM)[1][0]) == [Call("add", {"first": 214, "second": 387})]
    assert read(" 601") == []
    (broken,) = read(f"{OPEN}2x{BETWEEN}387{CLOSE}")
    assert isinstance(broken, Malformed)


def test_the_slow_tool_says_what_the_quick_one_says():
    assert SlowCalculator().add(*SUM) == Calculator().add(*SUM)
    assert schema_of(SlowCalculator.add) == schema_of(Calculator.add)


def test_the_page_says_success_and_speed(tmp_path):
    run = {
        "rewards": [0.2, 0.4],
        "entropy": [0.5, 0.4],
        "ends": [1.0, 2.0],
        "accuracy": [0.25, 0.75],
    }
    rates = {
        "samples_per_second": {"ours": [90.0], "trl": [60.0]},
        "medians": {"ours": 90.0, "trl": 60.0},
    }
    found = {
        "success": {"ours": [run], "trl": [run]},
        "slow, 1 core": {**rates, "ratio": 1.5, "loads": [3.0]},
    }
    around = {
        "command": "python x.py",
        "machine": "a machine",
        "versions": "1",
        "day": "today",
        "load": 0.1,
    }
    parts = {part: {**around, "found": values} for part, values in found.items()}
    write_page(tmp_path / "page.md", tmp_path / "record.json", parts)
    page = (tmp_path / "page.md").read_text()
    assert "success, 2 steps: ours 0.250 -> 0.750, trl 0.250 -> 0.750" in page
    assert "slow, 1 core: ours 90, trl 60, ratio 1.50 (load of up to 3.0 before a round)" in page
    assert json.loads((tmp_path / "record.json").read_text()) == parts
