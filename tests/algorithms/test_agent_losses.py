"""Losses of turns and of agents that are updated one by one: values and gradients by hand."""

from dataclasses import replace
from math import exp

import pytest
import torch

from siirl_dask.algorithms import gspo, happo_clip, ppo_clip, sequence_clip, turn_clip
from tests.algorithms.surrogates import inputs as inputs_of


def of_turns(logprobs, old, advantages, turns, offsets, **columns):
    own = torch.tensor(logprobs, requires_grad=True)
    tokens = inputs_of(
        own, torch.tensor(old), torch.tensor(advantages), offsets=torch.tensor(offsets)
    )
    return replace(
        tokens, columns={"token_turns": torch.tensor(turns, dtype=torch.int32), **columns}
    )


OFFSETS = [0, 3, 5]
TURNS = [0, 0, 1, 1, 1]
LOGPROBS = [-1.0, -0.9, -0.5, -2.0, -1.8]
OLD = [-1.1, -1.0, -0.6, -1.95, -1.8]
ADVANTAGES = [1.0, 1.0, -1.0, 2.0, 2.0]


def test_a_turn_has_one_ratio():
    result = turn_clip(
        of_turns(LOGPROBS, OLD, ADVANTAGES, TURNS, OFFSETS), clip_low=0.5, clip_high=0.5
    )
    # sums of differences: .2 of the first turn, .1 of the second, and -.05 of the other row's turn
    # 1
    ratios = [exp(0.2), exp(0.2), exp(0.1), exp(-0.05), exp(-0.05)]
    torch.testing.assert_close(result.metrics["ratio"], torch.tensor(ratios))
    torch.testing.assert_close(
        result.loss.detach(),
        torch.tensor([-a * r for a, r in zip(ADVANTAGES, ratios, strict=True)]),
    )


def test_a_mean_ratio_does_not_grow_with_the_turn():
    result = turn_clip(of_turns(LOGPROBS, OLD, ADVANTAGES, TURNS, OFFSETS), mean=True)
    ratios = [exp(0.1), exp(0.1), exp(0.1), exp(-0.025), exp(-0.025)]
    torch.testing.assert_close(result.metrics["ratio"], torch.tensor(ratios))


def test_the_gradient_is_that_of_the_turns_ratio():
    inputs = of_turns(LOGPROBS, OLD, ADVANTAGES, TURNS, OFFSETS)
    (given,) = torch.autograd.grad(
        turn_clip(inputs, clip_low=0.5, clip_high=0.5).loss.sum(), inputs.logprobs
    )
    difference = inputs.logprobs - inputs.old_logprobs
    turns = [difference[:2].sum(), difference[2:3].sum(), difference[3:].sum()]
    by_hand = sum(-a * turn.exp() for a, turn in zip([1.0, -1.0, 2.0], turns, strict=True))
    (expected,) = torch.autograd.grad(by_hand, inputs.logprobs)
    torch.testing.assert_close(given, expected)


def test_a_turn_that_is_clipped_has_no_gradient():
    inputs = of_turns(LOGPROBS, OLD, ADVANTAGES, TURNS, OFFSETS)
    result = turn_clip(inputs, clip_low=0.15, clip_high=0.15)
    # exp(.2) above 1.15, with A > 0
    assert result.metrics["clip_fraction"].tolist() == [1, 1, 0, 0, 0]
    (gradient,) = torch.autograd.grad(result.loss.sum(), inputs.logprobs)
    assert gradient[:2].tolist() == [0, 0]
    assert gradient[2:].ne(0).all()


def test_one_turn_a_row_is_the_ratio_of_the_row():
    inputs = of_turns(LOGPROBS, OLD, ADVANTAGES, [0, 0, 0, 4, 4], OFFSETS)
    torch.testing.assert_close(
        turn_clip(inputs).loss, sequence_clip(inputs, clip_low=0.2, clip_high=0.2).loss
    )
    bounds = {"clip_low": 0.3, "clip_high": 0.3}
    torch.testing.assert_close(
        turn_clip(inputs, mean=True, **bounds).loss, gspo(inputs, **bounds).loss
    )


def test_a_turn_of_each_token_is_ppo():
    inputs = of_turns(LOGPROBS, OLD, ADVANTAGES, [0, 1, 2, 0, 1], OFFSETS)
    torch.testing.assert_close(turn_clip(inputs).loss, ppo_clip(inputs).loss)


def happo(change, **options):
    inputs = of_turns(LOGPROBS, OLD, ADVANTAGES, TURNS, OFFSETS, policy_change=torch.tensor(change))
    return inputs, happo_clip(inputs, **options)


def test_the_ratio_of_earlier_agents_multiplies_the_advantage():
    inputs, result = happo([0.5, 0.5, 0.5, -0.25, -0.25])
    scaled = torch.tensor([exp(0.5)] * 3 + [exp(-0.25)] * 2)
    torch.testing.assert_close(
        result.loss, ppo_clip(replace(inputs, advantages=inputs.advantages * scaled)).loss
    )
    torch.testing.assert_close(result.metrics["earlier_ratio"], scaled)


def test_without_a_change_it_is_ppo():
    inputs, result = happo([0.0] * 5)
    assert torch.equal(result.loss, ppo_clip(inputs).loss)


def test_a_change_that_explodes_stays_finite_and_one_that_is_not_is_not_hidden():
    assert happo([1e4] * 5)[1].loss.isfinite().all()
    assert happo([float("nan")] + [0.0] * 4)[1].loss.isfinite().tolist() == [False] + [True] * 4


@pytest.mark.parametrize(
    ("loss", "column"), [(turn_clip, "token_turns"), (happo_clip, "policy_change")]
)
def test_a_column_that_is_missing_is_named(loss, column):
    inputs = replace(of_turns(LOGPROBS, OLD, ADVANTAGES, TURNS, OFFSETS), columns={})
    with pytest.raises(ValueError, match=f"{column}.*option 'columns'"):
        loss(inputs)
