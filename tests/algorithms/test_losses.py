from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import LossInputs, ppo_clip

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def inputs(logprobs, old, advantages, **others):
    given = {
        "logprobs": torch.as_tensor(logprobs),
        "old_logprobs": torch.as_tensor(old),
        "advantages": torch.as_tensor(advantages),
        "rollout_logprobs": torch.as_tensor(old),
        "entropy": torch.zeros(len(logprobs)),
        "offsets": torch.tensor([0, len(logprobs)]),
    }
    return LossInputs(**given | others)


EXAMPLE = inputs([-0.5, -1.5, -0.5, -1.0], [-1.0, -1.0, -1.0, -3.0], [1.0, 1.0, -1.0, -1.0])


def test_hand_checked_values():
    # the hand-checked last value, 3.0, is dual clip's; without it exp(2) stays
    assert_close(ppo_clip(EXAMPLE, **CLIP).loss, torch.tensor([-1.28, -0.606531, 1.648721, 7.389056]))


def test_metrics_are_one_number_a_token():
    metrics = ppo_clip(replace(EXAMPLE, rollout_logprobs=EXAMPLE.logprobs - 0.5), **CLIP).metrics
    assert_close(metrics["clip_fraction"], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert_close(metrics["ratio"], torch.tensor([1.648721, 0.606531, 1.648721, 7.389056]))
    assert_close(metrics["kl_to_sampler"], torch.full((4,), 0.148721))  # exp(.5) - 1 - .5: the sampler is p in KL(p, q)
    assert set(metrics) == {"ratio", "clip_fraction", "kl_to_sampler", "entropy"}


def test_a_clipped_token_gives_no_gradient():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    ppo_clip(replace(EXAMPLE, logprobs=logprobs), **CLIP).loss.sum().backward()
    assert_close(logprobs.grad, torch.tensor([0.0, -0.606531, 1.648721, 7.389056]))


def test_the_reference_is_added_in_proportion():
    with_reference = replace(EXAMPLE, reference_logprobs=EXAMPLE.logprobs + torch.tensor([-0.5, 1.0, 0.0, 0.0]))
    result = ppo_clip(with_reference, **CLIP, kl_coefficient=0.1)
    assert_close(result.metrics["reference_kl"], torch.tensor([0.106531, 0.718282, 0.0, 0.0]))
    assert_close(result.loss - ppo_clip(EXAMPLE, **CLIP).loss, 0.1 * result.metrics["reference_kl"])


def test_a_reference_that_costs_nothing_is_only_measured():
    with_reference = replace(EXAMPLE, reference_logprobs=EXAMPLE.logprobs + 1)
    result = ppo_clip(with_reference, **CLIP)
    assert torch.equal(result.loss, ppo_clip(EXAMPLE, **CLIP).loss)
    assert "reference_kl" in result.metrics


def test_a_coefficient_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="reference_logprobs"):
        ppo_clip(EXAMPLE, **CLIP, kl_coefficient=0.1)


def test_metrics_carry_no_gradient():
    leaves = {field.name: getattr(EXAMPLE, field.name) for field in fields(EXAMPLE)} | {
        "logprobs": EXAMPLE.logprobs.clone().requires_grad_(),
        "entropy": torch.zeros(4, requires_grad=True),
        "reference_logprobs": EXAMPLE.logprobs,
    }
    metrics = ppo_clip(LossInputs(**leaves), **CLIP, kl_coefficient=0.1).metrics
    assert not any(metric.requires_grad for metric in metrics.values())


def test_no_tokens_give_no_loss_and_the_same_metrics():
    nothing = inputs(*[torch.zeros(0)] * 3)
    result = ppo_clip(nothing, **CLIP)
    assert result.loss.shape == (0,)
    assert list(result.metrics) == list(ppo_clip(EXAMPLE, **CLIP).metrics)


def test_a_ratio_too_large_for_float_is_bounded():
    result = ppo_clip(inputs([0.0, -200.0], [-200.0, 0.0], [-1.0, -1.0]), **CLIP)
    assert_close(result.metrics["ratio"].log(), torch.tensor([20.0, -20.0]))
    assert result.loss.isfinite().all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages"])
def test_what_is_not_finite_is_not_hidden(where, number):
    values = getattr(EXAMPLE, where).clone()
    values[1] = number
    loss = ppo_clip(replace(EXAMPLE, **{where: values}), **CLIP).loss
    assert loss.isfinite().tolist() == [True, False, True, True]


def test_gradient_is_that_of_finite_differences():
    torch.manual_seed(0)
    old = -torch.rand(20, dtype=torch.float64)
    advantages = torch.randn(20, dtype=torch.float64)
    reference = old + 0.1 * torch.randn(20, dtype=torch.float64)

    def loss(logprobs):
        given = inputs(logprobs, old, advantages, reference_logprobs=reference)
        return partial(ppo_clip, **CLIP, kl_coefficient=0.3)(given).loss

    assert torch.autograd.gradcheck(loss, (old + 0.3 * torch.randn(20, dtype=torch.float64)).requires_grad_())
