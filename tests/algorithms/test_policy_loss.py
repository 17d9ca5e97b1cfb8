from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import (
    TokenLoss,
    abs_difference,
    k1,
    k2,
    k3,
    masked_is,
    policy_gradient,
    policy_loss,
    ppo_clip,
    reject_sequences,
    straight_through,
    truncated_is,
)
from tests.algorithms.surrogates import CLIP, EXAMPLE, SURROGATES, inputs

LOSS = partial(policy_loss, surrogate=partial(ppo_clip, **CLIP))
REFERENCE = replace(
    EXAMPLE, reference_logprobs=EXAMPLE.logprobs + torch.tensor([-0.5, 1.0, 0.0, 0.0])
)
CORRECTIONS = [truncated_is, masked_is, partial(reject_sequences, low=0.5, high=2.0)]


@pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)
def test_without_options_the_loss_is_the_surrogates(surrogate):
    surrogate_only, whole = surrogate(EXAMPLE), policy_loss(EXAMPLE, surrogate=surrogate)
    assert torch.equal(whole.loss, surrogate_only.loss)
    assert set(whole.metrics) == {*surrogate_only.metrics, "kl_to_sampler", "entropy"}


def test_kl_to_sampler_compares_with_the_current_policy():
    metrics = LOSS(
        replace(EXAMPLE, rollout_logprobs=EXAMPLE.logprobs - 0.5, entropy=torch.arange(4.0))
    ).metrics
    # exp(.5) - 1 - .5: the sampler is p in KL(p, q)
    assert_close(metrics["kl_to_sampler"], torch.full((4,), 0.148721))
    assert_close(metrics["entropy"], torch.arange(4.0))


def test_the_kl_is_added_in_proportion_to_its_coefficient():
    result = LOSS(REFERENCE, kl_coefficient=0.1)
    assert_close(result.metrics["reference_kl"], torch.tensor([0.106531, 0.718282, 0.0, 0.0]))
    assert_close(result.loss - LOSS(EXAMPLE).loss, 0.1 * result.metrics["reference_kl"])


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (k1, [0.5, -1.0]),
        (abs_difference, [0.5, 1.0]),
        (k2, [0.125, 0.5]),
        (straight_through, [0.106531, 0.718282]),
    ],
)
def test_the_loss_uses_the_chosen_estimate_and_the_metric_stays_k3(kl, expected):
    result = LOSS(REFERENCE, kl=kl, kl_coefficient=0.1)
    assert_close(result.loss - LOSS(EXAMPLE).loss, 0.1 * torch.tensor([*expected, 0.0, 0.0]))
    assert_close(result.metrics["reference_kl"], torch.tensor([0.106531, 0.718282, 0.0, 0.0]))


def test_bias_correction_multiplies_the_kl_by_the_ratio_to_old():
    # ratios exp(.5), exp(-.5), exp(.5), exp(2) times k3 and k1 of the test above; the surrogate and
    # the metric stay
    result = LOSS(REFERENCE, kl_coefficient=0.1, kl_bias_correction=True)
    assert_close(
        result.loss - LOSS(EXAMPLE).loss, 0.1 * torch.tensor([0.175639, 0.435660, 0.0, 0.0])
    )
    assert_close(result.metrics["reference_kl"], torch.tensor([0.106531, 0.718282, 0.0, 0.0]))
    with_k1 = LOSS(REFERENCE, kl=k1, kl_coefficient=0.1, kl_bias_correction=True)
    assert_close(
        with_k1.loss - LOSS(EXAMPLE).loss, 0.1 * torch.tensor([0.824361, -0.606531, 0.0, 0.0])
    )


@pytest.mark.parametrize("kl", [k1, k3])
def test_the_bias_corrected_kl_and_its_gradient_are_unbiased(kl):
    """Expectations over a vocabulary of three tokens, drawn from an old policy that differs from
    both others.
    """
    old = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()
    logits = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    tokens = inputs(
        logprobs, old.log(), torch.zeros(3, dtype=torch.float64), reference_logprobs=reference
    )
    estimate = (old * LOSS(tokens, kl=kl, kl_coefficient=1.0, kl_bias_correction=True).loss).sum()
    assert_close(estimate, exact)
    gradients = [
        torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, exact)
    ]
    assert_close(*gradients)


def test_without_a_coefficient_the_reference_is_only_measured():
    result = LOSS(replace(EXAMPLE, reference_logprobs=EXAMPLE.logprobs + 1))
    assert torch.equal(result.loss, LOSS(EXAMPLE).loss)
    assert "reference_kl" in result.metrics


def test_a_coefficient_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="reference_logprobs"):
        LOSS(EXAMPLE, kl_coefficient=0.1)


def test_entropy_is_subtracted_in_proportion_to_its_coefficient():
    entropy = torch.tensor([0.0, 1.0, 2.0, 3.0])
    result = LOSS(replace(EXAMPLE, entropy=entropy), entropy_coefficient=0.1)
    assert_close(result.loss, LOSS(EXAMPLE).loss - 0.1 * entropy)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_weighs_the_surrogate_alone(correction):
    rollout_logprobs = EXAMPLE.old_logprobs - torch.tensor([0.0, -1.0, 0.5, 1.0])
    mismatch = replace(REFERENCE, rollout_logprobs=rollout_logprobs, entropy=torch.ones(4))
    weights = correction(mismatch)
    result = LOSS(mismatch, kl_coefficient=0.2, entropy_coefficient=0.1, correction=correction)
    other_terms = (
        LOSS(mismatch, kl_coefficient=0.2, entropy_coefficient=0.1).loss - LOSS(mismatch).loss
    )
    assert_close(result.loss, LOSS(mismatch).loss * weights + other_terms)
    assert torch.equal(result.metrics["correction_weight"], weights)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_the_bias_correction_shows_a_nonfinite_old_logprob(number):
    """The surrogate here is the plain policy gradient, which reads no old log-probabilities."""
    old = EXAMPLE.old_logprobs.clone()
    old[1] = number
    options = {"kl_coefficient": 0.1, "kl_bias_correction": True}
    loss = policy_loss(
        replace(REFERENCE, old_logprobs=old), surrogate=policy_gradient, **options
    ).loss
    assert loss.isfinite().tolist() == [True, False, True, True]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["rollout_logprobs", "reference_logprobs", "entropy"])
def test_a_nonfinite_input_shows_in_its_own_row_alone(field, number, correction):
    values = getattr(REFERENCE, field).clone()
    values[1] = number
    broken = replace(REFERENCE, **{field: values}, offsets=torch.tensor([0, 2, 4]))
    loss = LOSS(broken, kl_coefficient=0.1, entropy_coefficient=0.1, correction=correction).loss
    assert not loss[1].isfinite()
    assert loss[2:].isfinite().all()


@pytest.mark.parametrize("kl_bias_correction", [False, True])
@pytest.mark.parametrize("kl", [k1, k2, k3, abs_difference, straight_through])
@pytest.mark.parametrize("distance", [100.0, -100.0])
def test_a_policy_far_from_all_others_gives_finite_numbers(kl, distance, kl_bias_correction):
    logprobs = torch.full((4,), -1.0 - max(-distance, 0), requires_grad=True)
    others = torch.full((4,), -1.0 - max(distance, 0))
    far = inputs(
        logprobs,
        others,
        EXAMPLE.advantages,
        reference_logprobs=others,
        rollout_logprobs=others + distance,
    )
    options = {"kl": kl, "kl_coefficient": 0.1, "kl_bias_correction": kl_bias_correction}
    result = LOSS(far, **options, correction=truncated_is)
    result.loss.sum().backward()
    assert result.loss.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert all(metric.isfinite().all() for metric in result.metrics.values())


def test_metrics_carry_no_gradient():
    learning = replace(
        REFERENCE,
        logprobs=REFERENCE.logprobs.clone().requires_grad_(),
        entropy=torch.zeros(4, requires_grad=True),
    )
    metrics = LOSS(
        learning,
        kl_coefficient=0.1,
        entropy_coefficient=0.1,
        correction=lambda inputs: inputs.logprobs.exp(),
    ).metrics
    assert "correction_weight" in metrics
    assert not any(metric.requires_grad for metric in metrics.values())


def test_no_tokens_give_no_loss_and_the_same_metrics():
    no_tokens = inputs(
        *[torch.zeros(0)] * 3, reference_logprobs=torch.zeros(0), offsets=torch.tensor([0, 0])
    )
    options = {
        "kl_coefficient": 0.1,
        "kl_bias_correction": True,
        "entropy_coefficient": 0.1,
        "correction": truncated_is,
    }
    result = LOSS(no_tokens, **options)
    assert result.loss.shape == (0,)
    assert list(result.metrics) == list(LOSS(REFERENCE, **options).metrics)


def test_a_surrogate_of_your_own_is_simply_passed():
    def surrogate(inputs):
        return TokenLoss(loss=inputs.logprobs, metrics={"advantage": inputs.advantages})

    result = policy_loss(EXAMPLE, surrogate=surrogate)
    assert torch.equal(result.loss, EXAMPLE.logprobs)
    assert torch.equal(result.metrics["advantage"], EXAMPLE.advantages)


@pytest.mark.parametrize("kl_bias_correction", [False, True])
@pytest.mark.parametrize("kl", [k1, k2, k3, abs_difference])
def test_gradient_equals_finite_differences(kl, kl_bias_correction):
    torch.manual_seed(0)
    old = -torch.rand(20, dtype=torch.float64)
    advantages = torch.randn(20, dtype=torch.float64)
    reference = old + 0.1 * torch.randn(20, dtype=torch.float64)
    rollout = old + 0.5 * torch.randn(20, dtype=torch.float64)

    def loss(logprobs, entropy):
        tokens = inputs(
            logprobs,
            old,
            advantages,
            reference_logprobs=reference,
            entropy=entropy,
            rollout_logprobs=rollout,
        )
        options = {"kl": kl, "kl_coefficient": 0.3, "kl_bias_correction": kl_bias_correction}
        return LOSS(tokens, **options, entropy_coefficient=0.2, correction=truncated_is).loss

    logprobs = (old + 0.3 * torch.randn(20, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(
        loss, (logprobs, torch.rand(20, dtype=torch.float64, requires_grad=True))
    )
