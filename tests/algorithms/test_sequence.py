from dataclasses import replace
from math import exp

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import Totals, gmpo, gspo, sequence_mean_token_mean
from tests.algorithms.surrogates import EXAMPLE, TWO_ROWS, inputs

EXAMPLE = replace(EXAMPLE, offsets=TWO_ROWS)
"""Log-ratios .5, -.5 and .5, 2: means 0 and 1.25."""


def test_gspo_by_hand():
    result = gspo(EXAMPLE)
    assert_close(result.loss, torch.tensor([-1.0, -1.0, 3.490343, 3.490343]))
    assert_close(result.metrics["ratio"], torch.tensor([1.0, 1.0, 3.490343, 3.490343]))
    assert_close(result.metrics["clip_fraction"], torch.zeros(4))


def test_gspo_clips_the_rows_ratio():
    result = gspo(replace(EXAMPLE, advantages=torch.tensor([-1.0, -1.0, 1.0, 1.0])))
    assert_close(result.loss, torch.tensor([1.0, 1.0, -1.0004, -1.0004]))
    assert_close(result.metrics["clip_fraction"], torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_gspos_narrow_bounds_hold_for_unlikely_tokens():
    """float32 has steps of 4e-6 at -50, a hundredth of the bounds: they must not get into the ratio."""
    old = torch.full((3,), -50.0)
    result = gspo(inputs(old + torch.tensor([2.0**-12, 2.0**-12, 0.0]), old, [1.0, 1.0, 1.0]))
    assert_close(result.metrics["ratio"], torch.full((3,), 1.00016277), atol=3e-7, rtol=0)  # exp(2^-11 / 3)


def test_gmpo_by_hand():
    # row 0: .5 is cut to .4, -.5 is not: exp(-.05); row 1, A < 0: nothing is cut, exp(1.25)
    result = gmpo(EXAMPLE)
    assert_close(result.loss, torch.tensor([-0.951229, -0.951229, 3.490343, 3.490343]))
    assert_close(result.metrics["clip_fraction"], torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_gmpo_cuts_from_below_where_the_advantage_is_negative():
    result = gmpo(inputs([-1.5, -3.0], [-1.0, -1.0], [-1.0, -1.0]))
    assert_close(result.loss, torch.tensor([0.670320, 0.670320]))  # exp(-.4)


def test_gmpo_by_a_scalar_reference():
    generator = torch.Generator().manual_seed(1)
    old, moved = torch.randn(2, 9, generator=generator)
    offsets, per_row = [0, 4, 4, 9], [0.7, 1.0, -1.3]
    advantages = torch.tensor([0.7] * 4 + [-1.3] * 5)
    loss = gmpo(inputs(old + moved, old, advantages, offsets=torch.tensor(offsets)), clip_low=0.3, clip_high=0.5).loss
    for row, advantage in enumerate(per_row):
        tokens = moved[offsets[row] : offsets[row + 1]].tolist()
        cut = [min(d, 0.5) if advantage > 0 else max(d, -0.3) for d in tokens]
        expected = [-advantage * exp(sum(cut) / len(cut))] * len(cut) if cut else []
        assert_close(loss[offsets[row] : offsets[row + 1]], torch.tensor(expected))


@pytest.mark.parametrize("surrogate", [gspo, gmpo])
def test_gradient_of_the_rows_loss_is_that_of_finite_differences(surrogate):
    """A row's loss is the mean of its tokens'. GSPO's token form has that gradient where advantages are the row's."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, 5, 5, 9, 16])
    lengths = offsets.diff()
    old = -torch.rand(16, dtype=torch.float64)
    advantages = torch.tensor([1.0, 2.0, -1.0, -0.5], dtype=torch.float64).repeat_interleave(lengths)
    shift = torch.tensor([0.2, 0.0, 0.3, -0.3], dtype=torch.float64).repeat_interleave(lengths)
    weights = sequence_mean_token_mean(offsets, Totals(tokens=16, rows=3)).double()

    def loss(logprobs):
        return (surrogate(inputs(logprobs, old, advantages, offsets=offsets)).loss * weights).sum()

    moved = old + shift + 0.3 * torch.randn(16, dtype=torch.float64)
    assert torch.autograd.gradcheck(loss, moved.requires_grad_())
    assert torch.autograd.grad(loss(moved), moved)[0].any()


def test_gspo_moves_each_token_by_its_own_advantage():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    given = replace(EXAMPLE, logprobs=logprobs, advantages=torch.tensor([1.0, -2.0, -1.0, -3.0]))
    gspo(given).loss.sum().backward()
    assert_close(logprobs.grad, torch.tensor([-1.0, 2.0, 3.490343, 10.471029]))
