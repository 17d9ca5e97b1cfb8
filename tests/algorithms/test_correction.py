from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import (
    combined,
    k1,
    k2,
    keep_high_entropy,
    mask_off_policy,
    masked_is,
    policy_gradient,
    reject_divergent,
    reject_sequences,
    reject_tokens,
    truncated_is,
)
from tests.algorithms.surrogates import EXAMPLE, TWO_ROWS, inputs

OLD = EXAMPLE.old_logprobs
WEIGHTS = torch.tensor([0.25, 1.0, 1.5, 4.0])
MISMATCH = inputs(
    EXAMPLE.logprobs,
    OLD,
    EXAMPLE.advantages,
    rollout_logprobs=OLD - WEIGHTS.log(),
    offsets=TWO_ROWS,
)
CORRECTIONS = {
    "truncated_is": truncated_is,
    "masked_is": masked_is,
    "truncated_is of sequences": partial(truncated_is, level="sequence"),
    "masked_is of sequences": partial(masked_is, level="sequence"),
    "reject_tokens": partial(reject_tokens, low=0.5, high=2.0),
    "reject_sequences": partial(reject_sequences, low=0.5, high=2.0),
    "reject_sequences by the product": partial(reject_sequences, low=0.5, high=2.0, over="sum"),
    "reject_divergent tokens": partial(reject_divergent, limit=0.1, over="token"),
    "reject_divergent by the mean": partial(reject_divergent, limit=0.1, over="mean"),
    "reject_divergent by the sum": partial(reject_divergent, limit=0.1, over="sum"),
    "reject_divergent by the maximum": partial(reject_divergent, limit=0.1),
    "combined": partial(
        combined, parts=(truncated_is, partial(reject_sequences, low=0.5, high=2.0))
    ),
}
every_correction = pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)


def test_hand_checked_values():
    assert_close(truncated_is(MISMATCH), torch.tensor([0.25, 1.0, 1.5, 2.0]))
    assert_close(truncated_is(MISMATCH, cap=1.2), torch.tensor([0.25, 1.0, 1.2, 1.2]))
    assert_close(truncated_is(MISMATCH, cap=1.2, low=0.5), torch.tensor([0.5, 1.0, 1.2, 1.2]))
    assert_close(masked_is(MISMATCH), torch.tensor([0.0, 1.0, 1.5, 0.0]))
    # geometric means: sqrt(.25) = .5 and sqrt(6) = 2.449
    assert reject_sequences(MISMATCH, low=0.49, high=2.4).tolist() == [1, 1, 0, 0]
    assert reject_sequences(MISMATCH, low=0.51, high=2.5).tolist() == [0, 0, 1, 1]


def test_hand_checked_values_of_sequences():
    # products: .25 and 6
    assert_close(truncated_is(MISMATCH, level="sequence"), torch.tensor([0.25, 0.25, 2.0, 2.0]))
    assert_close(
        truncated_is(MISMATCH, level="sequence", cap=7.0), torch.tensor([0.25, 0.25, 6.0, 6.0])
    )
    assert_close(
        masked_is(MISMATCH, level="sequence", low=0.2, high=5.0),
        torch.tensor([0.25, 0.25, 0.0, 0.0]),
    )
    assert reject_sequences(MISMATCH, low=0.24, high=5.9, over="sum").tolist() == [1, 1, 0, 0]
    assert reject_sequences(MISMATCH, low=0.26, high=6.1, over="sum").tolist() == [0, 0, 1, 1]


def test_hand_checked_values_of_masks():
    assert reject_tokens(MISMATCH, low=0.5, high=2.0).tolist() == [0, 1, 1, 0]
    # k3 = w - 1 - ln w: .636294, 0, .094535, 1.613706; means .318147 and .854120
    assert reject_divergent(MISMATCH, limit=0.63, over="token").tolist() == [0, 1, 1, 0]
    assert reject_divergent(MISMATCH, limit=0.64, over="token").tolist() == [1, 1, 1, 0]
    assert reject_divergent(MISMATCH, limit=0.32, over="mean").tolist() == [1, 1, 0, 0]
    assert reject_divergent(MISMATCH, limit=0.31, over="mean").tolist() == [0, 0, 0, 0]
    assert reject_divergent(MISMATCH, limit=1.7, over="sum").tolist() == [1, 1, 0, 0]
    assert reject_divergent(MISMATCH, limit=1.71, over="sum").tolist() == [1, 1, 1, 1]
    assert reject_divergent(MISMATCH, limit=1.6).tolist() == [1, 1, 0, 0]
    assert reject_divergent(MISMATCH, limit=1.62).tolist() == [1, 1, 1, 1]
    # k2 = (ln w)^2 / 2: .960906, 0, .082201, .960906
    assert reject_divergent(MISMATCH, limit=0.96, estimate=k2, over="token").tolist() == [
        0,
        1,
        1,
        0,
    ]
    assert reject_divergent(MISMATCH, limit=0.97, estimate=k2).tolist() == [1, 1, 1, 1]


def test_the_divergence_is_that_of_the_engine_from_the_policy():
    """k1 of it is ln(rollout / old): positive where the engine finds a token likelier."""
    likelier = replace(MISMATCH, offsets=torch.arange(5))
    assert reject_divergent(likelier, limit=1.0, estimate=k1).tolist() == [0, 1, 1, 1]


def test_a_mask_and_weights_are_multiplied():
    mask = partial(reject_sequences, low=0.49, high=2.4)
    weights = combined(MISMATCH, parts=(mask, truncated_is, partial(truncated_is, cap=0.5)))
    assert_close(weights, torch.tensor([0.25 * 0.25, 0.5, 0.0, 0.0]))
    with pytest.raises(ValueError, match="at least one correction"):
        combined(MISMATCH, parts=())


def test_tokens_that_are_not_marked_have_weight_0():
    marked = replace(MISMATCH, columns={"high_entropy": torch.tensor([True, False, False, True])})
    assert keep_high_entropy(marked).tolist() == [1, 0, 0, 1]
    with pytest.raises(ValueError, match=r"siirl_dask\.nodes:choose_high_entropy"):
        keep_high_entropy(replace(MISMATCH, columns={}))


def test_failures_that_the_current_policy_would_hardly_make_are_masked():
    """The rows' means of rollout - logp are 0.5 and -0.5; only the first is far, and only
    failures are masked.
    """
    logprobs = torch.tensor([-1.2, -1.8, -0.5, -0.5])
    tokens = inputs(logprobs, OLD, torch.tensor([-1.0, -1.0, -1.0, -1.0]), offsets=TWO_ROWS,
                    rollout_logprobs=torch.full((4,), -1.0))  # fmt: skip
    assert mask_off_policy(tokens, limit=0.49).tolist() == [0, 0, 1, 1]
    assert mask_off_policy(tokens, limit=0.51).tolist() == [1, 1, 1, 1]
    assert mask_off_policy(replace(tokens, advantages=torch.ones(4)), limit=0.49).tolist() == [
        1,
        1,
        1,
        1,
    ]
    learned = replace(tokens, logprobs=logprobs.clone().requires_grad_())
    assert not mask_off_policy(learned, limit=0.49).requires_grad
    broken = mask_off_policy(
        replace(tokens, logprobs=torch.tensor([-1.0, float("-inf"), -0.5, -0.5])), limit=0.49
    )
    assert broken[1].isnan()
    assert broken[2:].tolist() == [1, 1]


@every_correction
def test_a_sampler_equal_to_the_policy_has_weight_1(correction):
    assert correction(EXAMPLE).tolist() == [1, 1, 1, 1]


@every_correction
def test_weights_ignore_the_current_policy_and_have_no_gradient(correction):
    old = OLD.clone().requires_grad_()
    logprobs = (EXAMPLE.logprobs + 3).requires_grad_()
    moved = inputs(
        logprobs,
        old,
        EXAMPLE.advantages,
        rollout_logprobs=MISMATCH.rollout_logprobs,
        offsets=TWO_ROWS,
    )
    assert torch.equal(correction(moved), correction(MISMATCH))
    assert not correction(moved).requires_grad


@every_correction
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["old_logprobs", "rollout_logprobs"])
def test_a_nonfinite_logprob_makes_its_weight_nan_and_no_other_row(field, number, correction):
    values = OLD.clone()
    values[1] = number
    weights = correction(replace(EXAMPLE, **{field: values}, offsets=TWO_ROWS))
    assert weights[1].isnan()
    assert weights[2:].tolist() == [1, 1]


@every_correction
def test_a_log_ratio_of_100_gives_finite_weights(correction):
    far = inputs(
        OLD,
        OLD,
        OLD,
        rollout_logprobs=OLD + torch.tensor([100.0, 100.0, -100.0, -100.0]),
        offsets=TWO_ROWS,
    )
    assert correction(far).isfinite().all()


@every_correction
def test_no_tokens_give_no_weights(correction):
    assert correction(inputs(*[torch.zeros(0)] * 3, offsets=torch.tensor([0, 0]))).shape == (0,)


@pytest.mark.parametrize("correction", [masked_is, reject_sequences, reject_tokens])
@pytest.mark.parametrize(("low", "high"), [(2.0, 0.5), (-1.0, 2.0), (float("nan"), 2.0)])
def test_an_empty_range_is_refused(correction, low, high):
    with pytest.raises(ValueError, match="expected 0 <= low <= high"):
        correction(EXAMPLE, low=low, high=high)


@pytest.mark.parametrize("bounds", [{"cap": 0}, {"low": 3.0}, {"low": -1.0}])
def test_bounds_that_leave_no_weight_are_refused(bounds):
    with pytest.raises(ValueError, match="expected cap above 0, and low from 0 to cap"):
        truncated_is(EXAMPLE, **bounds)


@pytest.mark.parametrize("correction", [reject_divergent, mask_off_policy])
@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_not_above_0_is_refused(correction, limit):
    with pytest.raises(ValueError, match="expected more than 0 nats"):
        correction(EXAMPLE, limit=limit)


@pytest.mark.parametrize(
    "correction",
    [
        partial(truncated_is, level="row"),
        partial(masked_is, level="row"),
        partial(reject_sequences, low=0.5, high=2.0, over="max"),
        partial(reject_divergent, limit=1.0, over="row"),
    ],
)
def test_an_unknown_level_is_refused(correction):
    with pytest.raises(ValueError, match=r"expected 'token'|expected 'mean' or 'sum'"):
        correction(EXAMPLE)


def test_tokens_of_weight_0_have_no_gradient_and_others_the_gradient_of_their_weight():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    tokens = replace(MISMATCH, logprobs=logprobs)
    correction = partial(
        combined, parts=(truncated_is, partial(reject_sequences, low=0.49, high=2.4))
    )
    (policy_gradient(tokens).loss * correction(tokens)).sum().backward()
    assert_close(logprobs.grad, torch.tensor([-0.25, -1.0, 0.0, 0.0]))
    assert logprobs.grad[2:].tolist() == [0, 0]
