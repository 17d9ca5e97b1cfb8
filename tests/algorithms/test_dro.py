from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import dro
from tests.algorithms.surrogates import EXAMPLE, inputs


def test_hand_checked_values():
    # log-ratios .5, -.5, .5, 2: -A logp is .5, 1.5, -.5, -1; with beta 2 their squares come on top
    result = dro(EXAMPLE, beta=2.0)
    assert_close(result.loss, torch.tensor([0.75, 1.75, -0.25, 3.0]))
    assert_close(result.metrics["ratio"], torch.tensor([1.648721, 0.606531, 1.648721, 7.389056]))


def test_the_gradient_ends_where_the_log_probability_has_moved_by_the_advantage_over_beta():
    old = torch.tensor([-1.0, -1.0, -1.0])
    logprobs = torch.tensor([-0.5, -1.5, -1.25], requires_grad=True)
    dro(inputs(logprobs, old, [1.0, -1.0, -1.0]), beta=2.0).loss.sum().backward()
    assert_close(logprobs.grad, torch.tensor([0.0, 0.0, 0.5]))


def test_a_small_beta_leaves_the_policy_gradient():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    dro(replace(EXAMPLE, logprobs=logprobs), beta=1e-9).loss.sum().backward()
    assert_close(logprobs.grad, -EXAMPLE.advantages)


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan")])
def test_a_beta_that_is_not_above_0_is_refused(beta):
    with pytest.raises(ValueError, match=r"beta=.*: expected more than 0"):
        dro(EXAMPLE, beta=beta)
