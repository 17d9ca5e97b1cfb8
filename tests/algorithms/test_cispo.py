from dataclasses import replace

import torch
from torch.testing import assert_close

from siirl_dask.algorithms import cispo
from tests.algorithms.surrogates import CLIP, EXAMPLE, inputs


def test_hand_checked_values():
    # weights 1.28, .8, 1.28, 1.28
    result = cispo(EXAMPLE, **CLIP)
    assert_close(result.loss, torch.tensor([0.64, 1.2, -0.64, -1.28]))
    assert_close(result.metrics["clip_fraction"], torch.ones(4))
    assert_close(result.metrics["ratio"], torch.tensor([1.648721, 0.606531, 1.648721, 7.389056]))


def test_the_default_has_no_lower_bound():
    assert_close(cispo(EXAMPLE).loss, torch.tensor([0.64, 0.909796, -0.64, -1.28]))


def test_a_clipped_token_keeps_its_gradient():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    cispo(replace(EXAMPLE, logprobs=logprobs), **CLIP).loss.sum().backward()
    assert_close(logprobs.grad, torch.tensor([-1.28, -0.8, 1.28, 1.28]))


def test_an_unclipped_token_has_the_gradient_of_its_ratio():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    cispo(replace(EXAMPLE, logprobs=logprobs), clip_low=1.0, clip_high=100.0).loss.sum().backward()
    assert_close(
        logprobs.grad, -EXAMPLE.advantages * (EXAMPLE.logprobs - EXAMPLE.old_logprobs).exp()
    )


def test_gradient_equals_finite_differences_where_the_weight_is_constant():
    old = -torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_ratios = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(10)  # beyond both bounds
    advantages = torch.linspace(-1, 1, 20, dtype=torch.float64)
    moved = (old + log_ratios).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda logprobs: cispo(inputs(logprobs, old, advantages), **CLIP).loss, moved
    )
