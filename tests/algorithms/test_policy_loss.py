from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import (
    TokenLoss,
    absolute,
    k1,
    k2,
    k3,
    masked_is,
    policy_loss,
    ppo_clip,
    reject_sequences,
    straight_through,
    truncated_is,
)
from tests.algorithms.surrogates import CLIP, EXAMPLE, SURROGATES, inputs

LOSS = partial(policy_loss, surrogate=partial(ppo_clip, **CLIP))
REFERENCE = replace(EXAMPLE, reference_logprobs=EXAMPLE.logprobs + torch.tensor([-0.5, 1.0, 0.0, 0.0]))
CORRECTIONS = [truncated_is, masked_is, partial(reject_sequences, low=0.5, high=2.0)]


@pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)
def test_alone_a_surrogate_is_the_whole_loss(surrogate):
    alone, whole = surrogate(EXAMPLE), policy_loss(EXAMPLE, surrogate=surrogate)
    assert torch.equal(whole.loss, alone.loss)
    assert set(whole.metrics) == {*alone.metrics, "kl_to_sampler", "entropy"}


def test_the_sampler_is_compared_with_the_current_policy():
    metrics = LOSS(replace(EXAMPLE, rollout_logprobs=EXAMPLE.logprobs - 0.5, entropy=torch.arange(4.0))).metrics
    assert_close(metrics["kl_to_sampler"], torch.full((4,), 0.148721))  # exp(.5) - 1 - .5: the sampler is p in KL(p, q)
    assert_close(metrics["entropy"], torch.arange(4.0))


def test_the_reference_is_added_in_proportion():
    result = LOSS(REFERENCE, kl_coefficient=0.1)
    assert_close(result.metrics["reference_kl"], torch.tensor([0.106531, 0.718282, 0.0, 0.0]))
    assert_close(result.loss - LOSS(EXAMPLE).loss, 0.1 * result.metrics["reference_kl"])


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(k1, [0.5, -1.0]), (absolute, [0.5, 1.0]), (k2, [0.125, 0.5]), (straight_through, [0.106531, 0.718282])],
)
def test_the_estimate_in_the_loss_is_the_one_chosen_and_the_metric_stays(kl, expected):
    result = LOSS(REFERENCE, kl=kl, kl_coefficient=0.1)
    assert_close(result.loss - LOSS(EXAMPLE).loss, 0.1 * torch.tensor([*expected, 0.0, 0.0]))
    assert_close(result.metrics["reference_kl"], torch.tensor([0.106531, 0.718282, 0.0, 0.0]))


def test_a_reference_that_costs_nothing_is_only_measured():
    result = LOSS(replace(EXAMPLE, reference_logprobs=EXAMPLE.logprobs + 1))
    assert torch.equal(result.loss, LOSS(EXAMPLE).loss)
    assert "reference_kl" in result.metrics


def test_a_coefficient_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="reference_logprobs"):
        LOSS(EXAMPLE, kl_coefficient=0.1)


def test_entropy_is_taken_off_in_proportion():
    entropy = torch.tensor([0.0, 1.0, 2.0, 3.0])
    result = LOSS(replace(EXAMPLE, entropy=entropy), entropy_coefficient=0.1)
    assert_close(result.loss, LOSS(EXAMPLE).loss - 0.1 * entropy)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_weighs_the_surrogate_and_nothing_else(correction):
    apart = replace(REFERENCE, rollout_logprobs=EXAMPLE.old_logprobs - torch.tensor([0.0, -1.0, 0.5, 1.0]))
    apart = replace(apart, entropy=torch.ones(4))
    weights = correction(apart)
    result = LOSS(apart, kl_coefficient=0.2, entropy_coefficient=0.1, correction=correction)
    added = LOSS(apart, kl_coefficient=0.2, entropy_coefficient=0.1).loss - LOSS(apart).loss
    assert_close(result.loss, LOSS(apart).loss * weights + added)
    assert torch.equal(result.metrics["correction_weight"], weights)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["rollout_logprobs", "reference_logprobs", "entropy"])
def test_what_is_not_finite_is_not_hidden(where, number, correction):
    values = getattr(REFERENCE, where).clone()
    values[1] = number
    given = replace(REFERENCE, **{where: values}, offsets=torch.tensor([0, 2, 4]))
    loss = LOSS(given, kl_coefficient=0.1, entropy_coefficient=0.1, correction=correction).loss
    assert not loss[1].isfinite()
    assert loss[2:].isfinite().all()


@pytest.mark.parametrize("kl", [k1, k2, k3, absolute, straight_through])
@pytest.mark.parametrize("apart", [100.0, -100.0])
def test_a_policy_far_from_all_others_gives_finite_numbers(kl, apart):
    logprobs = torch.full((4,), -1.0 - max(-apart, 0), requires_grad=True)
    elsewhere = torch.full((4,), -1.0 - max(apart, 0))
    given = inputs(logprobs, elsewhere, EXAMPLE.advantages, reference_logprobs=elsewhere)
    given = replace(given, rollout_logprobs=elsewhere + apart)
    result = LOSS(given, kl=kl, kl_coefficient=0.1, correction=truncated_is)
    result.loss.sum().backward()
    assert result.loss.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert all(metric.isfinite().all() for metric in result.metrics.values())


def test_metrics_carry_no_gradient():
    given = replace(
        REFERENCE, logprobs=REFERENCE.logprobs.clone().requires_grad_(), entropy=torch.zeros(4, requires_grad=True)
    )
    metrics = LOSS(
        given, kl_coefficient=0.1, entropy_coefficient=0.1, correction=lambda inputs: inputs.logprobs.exp()
    ).metrics
    assert "correction_weight" in metrics
    assert not any(metric.requires_grad for metric in metrics.values())


def test_no_tokens_give_no_loss_and_the_same_metrics():
    nothing = inputs(*[torch.zeros(0)] * 3, reference_logprobs=torch.zeros(0), offsets=torch.tensor([0, 0]))
    options = {"kl_coefficient": 0.1, "entropy_coefficient": 0.1, "correction": truncated_is}
    result = LOSS(nothing, **options)
    assert result.loss.shape == (0,)
    assert list(result.metrics) == list(LOSS(REFERENCE, **options).metrics)


def test_a_surrogate_of_ones_own_needs_no_more_than_to_be_passed():
    def surrogate(given):
        return TokenLoss(loss=given.logprobs, metrics={"mine": given.advantages})

    result = policy_loss(EXAMPLE, surrogate=surrogate)
    assert torch.equal(result.loss, EXAMPLE.logprobs)
    assert torch.equal(result.metrics["mine"], EXAMPLE.advantages)


@pytest.mark.parametrize("kl", [k1, k2, k3, absolute])
def test_gradient_is_that_of_finite_differences(kl):
    torch.manual_seed(0)
    old = -torch.rand(20, dtype=torch.float64)
    advantages = torch.randn(20, dtype=torch.float64)
    reference = old + 0.1 * torch.randn(20, dtype=torch.float64)
    rollout = old + 0.5 * torch.randn(20, dtype=torch.float64)

    def loss(logprobs, entropy):
        given = inputs(logprobs, old, advantages, reference_logprobs=reference, entropy=entropy)
        given = replace(given, rollout_logprobs=rollout)
        return LOSS(given, kl=kl, kl_coefficient=0.3, entropy_coefficient=0.2, correction=truncated_is).loss

    logprobs = (old + 0.3 * torch.randn(20, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(loss, (logprobs, torch.rand(20, dtype=torch.float64, requires_grad=True)))
