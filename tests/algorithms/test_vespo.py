from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import vespo
from tests.algorithms.surrogates import EXAMPLE, TWO_ROWS, inputs

# ratios of the rows: 2 and 1/2
ROWS = inputs(
    torch.tensor([-0.5, -1.0, -2.0, -1.0]),
    torch.tensor([-1.0, -0.5, -1.0, -2.0]) + torch.tensor([-0.693147, 0.0, 0.693147, 0.0]),
    [1.0, 1.0, -1.0, -1.0],
    offsets=TWO_ROWS,
)


def test_hand_checked_values():
    result = vespo(ROWS)
    assert_close(result.metrics["ratio"], torch.tensor([2.0, 2.0, 0.5, 0.5]))
    # 2^2 exp(3 (1 - 2)) = 4 e^-3 = .199148 and (1/2)^3 exp(2 (1 - 1/2)) = e / 8 = .339785
    assert_close(result.metrics["gate"], torch.tensor([0.199148, 0.199148, 0.339785, 0.339785]))
    assert_close(result.loss, torch.tensor([0.099574, 0.199148, -0.679570, -0.339785]))


def test_each_option_shapes_the_gate_of_its_sign():
    result = vespo(
        ROWS, power_positive=1.0, decay_positive=1.0, power_negative=2.0, decay_negative=4.0
    )
    # 2 e^-1 = .735759 and e^2 / 4 = 1.847264
    assert_close(result.metrics["gate"], torch.tensor([0.735759, 0.735759, 1.847264, 1.847264]))


def test_the_gradient_is_the_gate_times_the_policy_gradient():
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(30, generator=generator, dtype=torch.float64)
    logprobs = (
        old + 0.2 * torch.randn(30, generator=generator, dtype=torch.float64)
    ).requires_grad_()
    advantages = torch.randn(30, generator=generator, dtype=torch.float64)
    offsets = torch.tensor([0, 7, 7, 20, 30])
    naive = []
    for start, stop in ((0, 7), (7, 20), (20, 30)):
        ratio = (logprobs[start:stop] - old[start:stop]).sum().exp().detach()
        for logp, advantage in zip(logprobs[start:stop], advantages[start:stop], strict=True):
            k, c = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
            naive.append(-(ratio**k) * torch.exp(c * (1 - ratio)) * advantage * logp)
    (expected,) = torch.autograd.grad(torch.stack(naive).sum(), logprobs)
    loss = vespo(inputs(logprobs, old, advantages, offsets=offsets)).loss
    (given,) = torch.autograd.grad(loss.sum(), logprobs)
    assert_close(given, expected)


def test_rows_far_from_the_policy_fade_to_no_gradient():
    for distance in (-12.0, 12.0):
        logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
        moved = inputs(logprobs.detach(), torch.tensor([-1.0 - distance, -1.0]), [1.0, -1.0])
        vespo(replace(moved, logprobs=logprobs)).loss.sum().backward()
        assert logprobs.grad.abs().max() < 1e-8


def test_options_that_are_not_above_0_are_refused():
    with pytest.raises(ValueError, match=r"decay_negative=0\.0: expected more than 0 each"):
        vespo(EXAMPLE, decay_negative=0.0)
