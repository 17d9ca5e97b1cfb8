from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import masked_is, reject_sequences, truncated_is
from tests.algorithms.surrogates import EXAMPLE, TWO_ROWS, inputs

OLD = EXAMPLE.old_logprobs
WEIGHTS = torch.tensor([0.25, 1.0, 1.5, 4.0])
MISMATCH = inputs(EXAMPLE.logprobs, OLD, EXAMPLE.advantages, rollout_logprobs=OLD - WEIGHTS.log(), offsets=TWO_ROWS)
CORRECTIONS = {
    "truncated_is": truncated_is,
    "masked_is": masked_is,
    "reject_sequences": partial(reject_sequences, low=0.5, high=2.0),
}
every_correction = pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)


def test_hand_checked_values():
    assert_close(truncated_is(MISMATCH), torch.tensor([0.25, 1.0, 1.5, 2.0]))
    assert_close(truncated_is(MISMATCH, cap=1.2), torch.tensor([0.25, 1.0, 1.2, 1.2]))
    assert_close(masked_is(MISMATCH), torch.tensor([0.0, 1.0, 1.5, 0.0]))
    # geometric means: sqrt(.25) = .5 and sqrt(6) = 2.449
    assert reject_sequences(MISMATCH, low=0.49, high=2.4).tolist() == [1, 1, 0, 0]
    assert reject_sequences(MISMATCH, low=0.51, high=2.5).tolist() == [0, 0, 1, 1]


@every_correction
def test_a_sampler_equal_to_the_policy_has_weight_1(correction):
    assert correction(EXAMPLE).tolist() == [1, 1, 1, 1]


@every_correction
def test_weights_ignore_the_current_policy_and_have_no_gradient(correction):
    old = OLD.clone().requires_grad_()
    logprobs = (EXAMPLE.logprobs + 3).requires_grad_()
    moved = inputs(logprobs, old, EXAMPLE.advantages, rollout_logprobs=MISMATCH.rollout_logprobs, offsets=TWO_ROWS)
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
    far = inputs(OLD, OLD, OLD, rollout_logprobs=OLD + torch.tensor([100.0, 100.0, -100.0, -100.0]), offsets=TWO_ROWS)
    assert correction(far).isfinite().all()


@every_correction
def test_no_tokens_give_no_weights(correction):
    assert correction(inputs(*[torch.zeros(0)] * 3, offsets=torch.tensor([0, 0]))).shape == (0,)


@pytest.mark.parametrize("correction", [masked_is, reject_sequences])
@pytest.mark.parametrize(("low", "high"), [(2.0, 0.5), (-1.0, 2.0), (float("nan"), 2.0)])
def test_an_empty_range_is_refused(correction, low, high):
    with pytest.raises(ValueError, match="expected 0 <= low <= high"):
        correction(EXAMPLE, low=low, high=high)


def test_a_cap_of_0_is_refused():
    with pytest.raises(ValueError, match="cap=0: expected more than 0"):
        truncated_is(EXAMPLE, cap=0)
