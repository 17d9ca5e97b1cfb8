from dataclasses import replace
from itertools import pairwise
from math import exp

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import (
    Totals,
    gmpo,
    gspo,
    sequence_clip,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
)
from tests.algorithms.surrogates import EXAMPLE, TWO_ROWS, inputs

EXAMPLE = replace(EXAMPLE, offsets=TWO_ROWS)
"""Log-ratios .5, -.5 and .5, 2: means 0 and 1.25."""


def test_gspo_hand_checked():
    result = gspo(EXAMPLE)
    assert_close(result.loss, torch.tensor([-1.0, -1.0, 3.490343, 3.490343]))
    assert_close(result.metrics["ratio"], torch.tensor([1.0, 1.0, 3.490343, 3.490343]))
    assert_close(result.metrics["clip_fraction"], torch.zeros(4))


def test_gspo_clips_the_ratio_of_a_row():
    result = gspo(replace(EXAMPLE, advantages=torch.tensor([-1.0, -1.0, 1.0, 1.0])))
    assert_close(result.loss, torch.tensor([1.0, 1.0, -1.0004, -1.0004]))
    assert_close(result.metrics["clip_fraction"], torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_gspo_resolves_its_narrow_bounds_on_unlikely_tokens():
    """float32 steps by 4e-6 at -50, a hundredth of the bounds: that rounding must not reach the
    ratio.
    """
    old = torch.full((3,), -50.0)
    result = gspo(inputs(old + torch.tensor([2.0**-12, 2.0**-12, 0.0]), old, [1.0, 1.0, 1.0]))
    # exp(2^-11 / 3)
    assert_close(result.metrics["ratio"], torch.full((3,), 1.00016277), atol=3e-7, rtol=0)


def test_sequence_clip_hand_checked():
    # sums of log-ratios 0 and 2.5: ratios 1 and 12.182494
    result = sequence_clip(EXAMPLE)
    assert_close(result.loss, torch.tensor([-1.0, -1.0, 12.182494, 12.182494]))
    assert_close(result.metrics["ratio"], torch.tensor([1.0, 1.0, 12.182494, 12.182494]))
    assert_close(result.metrics["clip_fraction"], torch.zeros(4))


def test_sequence_clip_clips_the_ratio_of_a_row():
    rising = replace(EXAMPLE, advantages=torch.tensor([-1.0, -1.0, 1.0, 1.0]))
    result = sequence_clip(rising, clip_high=0.28)
    assert_close(result.loss, torch.tensor([1.0, 1.0, -1.28, -1.28]))
    assert_close(result.metrics["clip_fraction"], torch.tensor([0.0, 0.0, 1.0, 1.0]))
    falling = inputs([-2.0, -1.5], [-1.0, -1.0], [-1.0, -1.0])  # ratio exp(-1.5), below .8
    assert_close(sequence_clip(falling).loss, torch.tensor([0.8, 0.8]))


def test_sequence_clip_has_the_gradient_of_rloos_loss():
    """Written out, that loss is the mean over responses of one clipped ratio times one
    advantage.
    """
    torch.manual_seed(0)
    offsets = torch.tensor([0, 5, 5, 9, 16])
    old = -torch.rand(16, dtype=torch.float64)
    per_row = torch.tensor([1.0, 0.0, -1.0, 0.5], dtype=torch.float64)
    logprobs = (old + 0.1 * torch.randn(16, dtype=torch.float64)).requires_grad_()
    ratios = torch.stack(
        [row.sum() for row in (logprobs - old).split(offsets.diff().tolist())]
    ).exp()
    losses = torch.maximum(-per_row * ratios, -per_row * ratios.clamp(0.8, 1.2))
    expected = torch.autograd.grad(losses.sum() / 3, logprobs)[0]  # a row without tokens is no row
    result = sequence_clip(
        inputs(logprobs, old, per_row.repeat_interleave(offsets.diff()), offsets=offsets)
    )
    weights = sequence_mean_token_sum(offsets, Totals(tokens=16, rows=3)).double()
    assert_close(torch.autograd.grad((result.loss * weights).sum(), logprobs)[0], expected)
    assert expected.any()


def test_gspo_by_the_sum_has_luspos_gradient():
    """LUSPO is the mean over responses of the clipped ratio times the advantage times the
    length.
    """
    torch.manual_seed(0)
    offsets = torch.tensor([0, 5, 9, 16])
    lengths = offsets.diff()
    old = -torch.rand(16, dtype=torch.float64)
    per_row = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    logprobs = (old + 0.004 * torch.randn(16, dtype=torch.float64)).requires_grad_()
    ratios = torch.stack([row.mean() for row in (logprobs - old).split(lengths.tolist())]).exp()
    losses = (
        torch.maximum(-per_row * ratios, -per_row * ratios.clamp(1 - 2e-3, 1 + 2.5e-3)) * lengths
    )
    expected = torch.autograd.grad(losses.mean(), logprobs)[0]
    tokens = inputs(logprobs, old, per_row.repeat_interleave(lengths), offsets=offsets)
    weights = sequence_mean_token_sum(offsets, Totals(tokens=16, rows=3)).double()
    loss = gspo(tokens, clip_low=2e-3, clip_high=2.5e-3).loss
    assert_close(torch.autograd.grad((loss * weights).sum(), logprobs)[0], expected)
    assert expected.any()


def test_gmpo_hand_checked():
    # row 0: .5 is clipped to .4, -.5 is not: exp(-.05); row 1, A < 0: nothing is clipped, exp(1.25)
    result = gmpo(EXAMPLE)
    assert_close(result.loss, torch.tensor([-0.951229, -0.951229, 3.490343, 3.490343]))
    assert_close(result.metrics["clip_fraction"], torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_gmpo_clips_from_below_for_negative_advantages():
    result = gmpo(inputs([-1.5, -3.0], [-1.0, -1.0], [-1.0, -1.0]))
    assert_close(result.loss, torch.tensor([0.670320, 0.670320]))  # exp(-.4)


def test_gmpo_equals_a_loop_over_rows():
    """Tokens of a row may have different advantages, 0 among them: they are bounded from below."""
    generator = torch.Generator().manual_seed(1)
    old, moved = torch.randn(2, 12, generator=generator)
    offsets = [0, 4, 4, 9, 12]
    advantages = [0.7] * 4 + [-1.3, 0.0, 0.0, 2.0, -1.3] + [0.0] * 3
    result = gmpo(
        inputs(old + moved, old, advantages, offsets=torch.tensor(offsets)),
        clip_low=0.3,
        clip_high=0.5,
    )
    clipped = [
        min(log_ratio, 0.5) if advantage > 0 else max(log_ratio, -0.3)
        for log_ratio, advantage in zip(moved.tolist(), advantages, strict=True)
    ]
    for begin, end in pairwise(offsets):
        row = clipped[begin:end]
        expected = [-advantage * exp(sum(row) / len(row)) for advantage in advantages[begin:end]]
        assert_close(result.loss[begin:end], torch.tensor(expected))
    assert torch.equal(
        result.metrics["clip_fraction"], (moved != torch.tensor(clipped)).to(torch.float32)
    )


@pytest.mark.parametrize("surrogate", [gspo, gmpo])
def test_the_gradient_of_a_rows_loss_equals_finite_differences(surrogate):
    """A row's loss is the mean of its tokens'. GSPO's token form has its gradient if a row has
    one advantage.
    """
    torch.manual_seed(0)
    offsets = torch.tensor([0, 5, 5, 9, 16])
    lengths = offsets.diff()
    old = -torch.rand(16, dtype=torch.float64)
    advantages = torch.tensor([1.0, 2.0, -1.0, -0.5], dtype=torch.float64).repeat_interleave(
        lengths
    )
    shift = torch.tensor([0.2, 0.0, 0.3, -0.3], dtype=torch.float64).repeat_interleave(lengths)
    weights = sequence_mean_token_mean(offsets, Totals(tokens=16, rows=3)).double()

    def loss(logprobs):
        return (surrogate(inputs(logprobs, old, advantages, offsets=offsets)).loss * weights).sum()

    moved = old + shift + 0.3 * torch.randn(16, dtype=torch.float64)
    assert torch.autograd.gradcheck(loss, moved.requires_grad_())
    assert torch.autograd.grad(loss(moved), moved)[0].any()


def test_gspo_moves_each_token_by_its_own_advantage():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    tokens = replace(EXAMPLE, logprobs=logprobs, advantages=torch.tensor([1.0, -2.0, -1.0, -3.0]))
    gspo(tokens).loss.sum().backward()
    assert_close(logprobs.grad, torch.tensor([-1.0, 2.0, 3.490343, 10.471029]))
