from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import cpgd
from tests.algorithms.surrogates import CLIP, EXAMPLE, inputs


def test_hand_checked_values():
    result = cpgd(EXAMPLE, **CLIP, drift=0.0)
    assert_close(result.loss, torch.tensor([0.753140, 1.5, -0.5, -1.0]))
    assert_close(result.metrics["drift"], torch.tensor([-0.324361, 0.590204, -0.324361, -2.0]))
    assert_close(result.metrics["clip_fraction"], torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_drift_is_added_in_proportion_to_its_factor():
    plain = cpgd(EXAMPLE, **CLIP, drift=0.0)
    assert_close(cpgd(EXAMPLE, **CLIP, drift=0.1).loss, plain.loss + 0.1 * plain.metrics["drift"])


def test_a_negative_advantage_bounds_logp_from_below():
    # ln .8 - 1
    assert_close(
        cpgd(inputs([-2.0], [-1.0], [-1.0]), **CLIP, drift=0.0).loss, torch.tensor([-1.223144])
    )


def test_drifts_pull_to_the_old_policy_grows_up_to_a_ratio_of_3():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    no_advantage = replace(EXAMPLE, logprobs=logprobs, advantages=torch.zeros(4))
    cpgd(no_advantage, **CLIP, drift=0.5).loss.sum().backward()
    assert_close(logprobs.grad, 0.5 * torch.tensor([0.648721, -0.393469, 0.648721, 2.0]))  # r - 1


def test_gradient_equals_finite_differences():
    torch.manual_seed(0)
    old = -torch.rand(20, dtype=torch.float64)
    advantages = torch.randn(20, dtype=torch.float64)
    moved = (old + 0.3 * torch.randn(20, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: cpgd(inputs(x, old, advantages), **CLIP, drift=0.0).loss, moved
    )
    beyond_ratio_3 = (old + 2).requires_grad_()  # where the drift's factor is constant
    assert torch.autograd.gradcheck(
        lambda x: cpgd(inputs(x, old, advantages), **CLIP, drift=0.3).loss, beyond_ratio_3
    )


@pytest.mark.parametrize("clip_low", [1.0, -0.1, float("nan")])
def test_a_lower_bound_without_a_logarithm_is_refused(clip_low):
    with pytest.raises(ValueError, match="expected 0 to below 1"):
        cpgd(EXAMPLE, clip_low=clip_low)
