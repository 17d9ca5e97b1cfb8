from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from siirl_dask.algorithms import policy_gradient, ppo_clip
from tests.algorithms.surrogates import CLIP, EXAMPLE, inputs


def test_hand_checked_values():
    assert_close(
        ppo_clip(EXAMPLE, **CLIP).loss, torch.tensor([-1.28, -0.606531, 1.648721, 7.389056])
    )
    assert_close(
        ppo_clip(EXAMPLE, **CLIP, dual_clip=3.0).loss,
        torch.tensor([-1.28, -0.606531, 1.648721, 3.0]),
    )
    assert_close(policy_gradient(EXAMPLE).loss, torch.tensor([0.5, 1.5, -0.5, -1.0]))


def test_clipping_is_symmetric_by_default():
    assert_close(ppo_clip(EXAMPLE).loss, torch.tensor([-1.2, -0.606531, 1.648721, 7.389056]))


def test_metrics_have_one_number_per_token():
    metrics = ppo_clip(EXAMPLE, **CLIP).metrics
    assert_close(metrics["clip_fraction"], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert_close(metrics["ratio"], torch.tensor([1.648721, 0.606531, 1.648721, 7.389056]))
    assert set(metrics) == {"ratio", "clip_fraction"}


def test_a_clipped_token_has_no_gradient():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    ppo_clip(replace(EXAMPLE, logprobs=logprobs), **CLIP).loss.sum().backward()
    assert_close(logprobs.grad, torch.tensor([0.0, -0.606531, 1.648721, 7.389056]))


def test_a_token_at_the_dual_clip_has_no_gradient_and_its_own_metric():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    result = ppo_clip(replace(EXAMPLE, logprobs=logprobs), **CLIP, dual_clip=3.0)
    result.loss.sum().backward()
    assert_close(logprobs.grad, torch.tensor([0.0, -0.606531, 1.648721, 0.0]))
    assert_close(result.metrics["clip_fraction"], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert_close(result.metrics["dual_clip_fraction"], torch.tensor([0.0, 0.0, 0.0, 1.0]))


@given(
    ratios=st.lists(st.floats(0.01, 100), min_size=1, max_size=20),
    advantage=st.floats(-3, 3),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    dual_clip=st.floats(1.001, 10),
)
def test_no_token_is_at_the_clip_and_at_the_dual_clip(ratios, advantage, bounds, dual_clip):
    logprobs = torch.tensor(ratios).log() - 5
    tokens = inputs(logprobs, torch.full_like(logprobs, -5.0), torch.full_like(logprobs, advantage))
    metrics = ppo_clip(tokens, clip_low=bounds[0], clip_high=bounds[1], dual_clip=dual_clip).metrics
    assert (metrics["clip_fraction"] * metrics["dual_clip_fraction"]).sum() == 0


def test_the_dual_clip_ignores_positive_advantages():
    positive = replace(EXAMPLE, advantages=torch.ones(4))
    assert torch.equal(
        ppo_clip(positive, **CLIP, dual_clip=1.1).loss, ppo_clip(positive, **CLIP).loss
    )


@pytest.mark.parametrize("dual_clip", [1.0, 0.2, float("nan")])
def test_a_dual_clip_of_1_or_less_is_refused(dual_clip):
    with pytest.raises(ValueError, match="expected more than 1"):
        ppo_clip(EXAMPLE, dual_clip=dual_clip)


def test_an_overflowing_ratio_is_bounded():
    result = ppo_clip(inputs([0.0, -200.0], [-200.0, 0.0], [-1.0, -1.0]), **CLIP)
    assert_close(result.metrics["ratio"].log(), torch.tensor([20.0, -20.0]))
    assert result.loss.isfinite().all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "advantages"])
def test_a_nonfinite_input_shows_in_its_own_token_alone(field, number):
    values = getattr(EXAMPLE, field).clone()
    values[1] = number
    loss = ppo_clip(replace(EXAMPLE, **{field: values}), **CLIP).loss
    assert loss.isfinite().tolist() == [True, False, True, True]


@pytest.mark.parametrize("dual_clip", [None, 1.4])
def test_gradient_equals_finite_differences(dual_clip):
    torch.manual_seed(0)
    old = -torch.rand(20, dtype=torch.float64)
    advantages = torch.randn(20, dtype=torch.float64)

    def loss(logprobs):
        return ppo_clip(inputs(logprobs, old, advantages), **CLIP, dual_clip=dual_clip).loss

    assert torch.autograd.gradcheck(
        loss, (old + 0.3 * torch.randn(20, dtype=torch.float64)).requires_grad_()
    )
