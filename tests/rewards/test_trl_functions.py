"""Reward functions that were written for TRL score here as they do there."""

from __future__ import annotations

import asyncio
import re
from functools import partial

import pytest
import torch

from siirl_dask.cli import main
from siirl_dask.config import RewardsConfig
from siirl_dask.config.file import shipped
from siirl_dask.errors import ConfigError
from siirl_dask.rewards import from_trl
from siirl_dask.rewards.scorer import check_scorer

CHAT = [{"role": "user", "content": "2 + 1?"}]


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def solved(prompts, completions, solution, **kwargs):
    return [float(text == wanted) for text, wanted in zip(completions, solution, strict=True)]


def chatted(prompts, completions, **kwargs):
    return [float(prompts[0][-1]["content"] == "2 + 1?" and completions[0][0]["content"] == "3")]


def skipped(prompts, completions, **kwargs):
    return [None for _ in completions]


async def judged(prompts, completions, log_extra=None, **kwargs):
    return [0.5 for _ in completions]


def ranked(prompts, completions, trainer_state):
    return [0.0]


def narrow(completions):
    return [1.0]


def ours(prompt, response, answer):
    return 1.0


def given(functions, prompt="a", response="bcd", answer="bcd", **options):
    return from_trl(prompt, response, answer, functions=functions, **options)


def test_rewards_are_summed_by_their_weights_and_shown_one_by_one():
    reward = given([length, solved], weights=[0.1, 2.0], answer_name="solution")
    assert reward == {"reward": pytest.approx(2.3), "length": 3.0, "solved": 1.0}
    assert given([length, length])["reward"] == 6.0
    assert set(given([length, length])) == {"reward", "length", "length_2"}


def test_a_prompt_of_messages_has_a_completion_of_messages():
    assert given([chatted], prompt=CHAT, response="3")["reward"] == 1.0


@pytest.mark.parametrize("prompt", ["2 + 1?", CHAT], ids=["text", "chat"])
def test_a_completion_has_no_special_token_as_trl_decodes_it(prompt):
    def ended(prompts, completions, **kwargs):
        (completion,) = completions
        text = completion if isinstance(completion, str) else completion[0]["content"]
        return [float(re.search(r"</answer>$", text) is not None)]

    row = {"prompt": prompt, "response": "<answer>3</answer><|end|>"}
    plain = given([ended], **row, plain_response="<answer>3</answer>")
    assert plain == {"reward": 1.0, "ended": 1.0}
    assert given([ended], **row, plain_response=None)["reward"] == 0.0


def undefined(prompts, completions, **kwargs):
    return torch.tensor([float("nan")] * len(completions))


@pytest.mark.parametrize("absent", [skipped, undefined], ids=["None", "NaN"])
def test_none_or_nan_is_left_out_of_the_sum_and_nothing_is_made_up_where_all_are(absent):
    assert given([length, absent], weights=[1.0, 5.0]) == {"reward": 3.0, "length": 3.0}
    with pytest.raises(ValueError, match=r"gave None or NaN: .*rewards.max_failures=N"):
        given([absent])


def test_async_functions_are_awaited_together():
    assert asyncio.run(given([judged, length])) == {"reward": 3.5, "judged": 0.5, "length": 3.0}


def test_columns_are_lists_of_one_and_only_those_that_a_function_takes():
    assert given([narrow], solution="x")["reward"] == 1.0
    assert given([solved], solution="bcd")["reward"] == 1.0


def cost(reward):
    return check_scorer({"reward": reward, "rewards": RewardsConfig()}, ["0"], None)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (solved, r"a reward of TRL's.*siirl_dask.rewards:from_trl"),
        (narrow, r"does not take prompt, response, answer: it is called as reward\(prompt="),
        (from_trl, "its option functions is missing"),
        (
            partial(from_trl, functions=[narrow]),
            r"narrow \(tests/.*:\d+\) does not take prompts: expected",
        ),
        (partial(from_trl, functions=[ranked]), "needs trainer_state, which TRL's own trainer has"),
        (
            partial(from_trl, functions=[length], weights=[1, 2]),
            r"weights=\[1, 2\] for 1 function: expected",
        ),
        (partial(from_trl, functions=["f"]), "'f' is no function"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_start(reward, said):
    with pytest.raises(ConfigError, match=said):
        cost(reward)


def test_columns_without_a_default_are_needed():
    assert cost(ours).columns == frozenset()
    assert cost(partial(from_trl, functions=[solved, length])).columns == {"solution"}
    answered = partial(from_trl, functions=[solved], answer_name="solution")
    assert cost(answered).columns == frozenset()


def test_a_plan_names_the_column_that_a_reward_needs_and_a_run_trains_by_it(
    digits_task, tmp_path, capsys, monkeypatch
):
    from tests.settings import digits_overrides

    (tmp_path / "mine.py").write_text(
        "def share(prompts, completions, wanted, **kwargs):\n"
        "    return [sum(c in w for c in text) / 8 for text, w in zip(completions, wanted)]\n"
        "def none_for_short(completions, **kwargs):\n"
        "    return [None if len(text) < 2 else 1.0 for text in completions]\n"
    )
    options = [
        one
        for one in digits_overrides(digits_task, tmp_path / "run")
        if "function" not in one and "progress" not in one
    ]
    options += [
        "rewards.function=siirl_dask.rewards:from_trl",
        "run.steps=2",
        "observe.progress=true",
    ]
    mine = f"{tmp_path / 'mine.py'}"
    functions = f"[{mine}:share, {mine}:none_for_short]"
    plain = f"rewards.options={{functions: {functions}}}"
    with pytest.raises(SystemExit):
        main(["plan", str(shipped("quickstart.yaml")), *options, plain])
    assert "needs wanted" in capsys.readouterr().err
    named = f"rewards.options={{functions: {functions}, weights: [1, 0.5], answer_name: wanted}}"
    main(["run", str(shipped("quickstart.yaml")), *options, named])
    assert "step 2/2" in capsys.readouterr().out
