from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import dppo
from tests.algorithms.surrogates import EXAMPLE, inputs

# probabilities .2 -> .5, .5 -> .2, .2 -> .5, .5 -> .2 of tokens that the advantages push up, up,
# down, down
OLD = torch.tensor([0.2, 0.5, 0.2, 0.5])
NOW = torch.tensor([0.5, 0.2, 0.5, 0.2])
MOVED = inputs(NOW.log(), OLD.log(), [1.0, 1.0, -1.0, -1.0])


def naive_kl(q, p):
    return q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))


def test_hand_checked_values():
    result = dppo(MOVED)
    assert_close(result.metrics["divergence"], torch.full((4,), 0.3))
    assert result.metrics["clip_fraction"].tolist() == [1, 0, 0, 1]
    assert_close(result.metrics["ratio"], torch.tensor([2.5, 0.4, 2.5, 0.4]))
    # -r A logp: -0.4 ln .2 = .643775 and 2.5 ln .5 = -1.732868
    assert_close(result.loss, torch.tensor([0.0, 0.643775, -1.732868, 0.0]))
    assert_close(dppo(MOVED, cap=2.0).loss, torch.tensor([0.0, 0.643775, -1.386294, 0.0]))


def test_hand_checked_values_of_kl():
    result = dppo(MOVED, divergence="kl", low=0.22, high=0.2)
    # .2 ln .4 + .8 ln 1.6 = .192745 and .5 ln 2.5 + .5 ln .625 = .223144
    assert_close(
        result.metrics["divergence"], torch.tensor([0.192745, 0.223144, 0.192745, 0.223144])
    )
    assert result.metrics["clip_fraction"].tolist() == [0, 0, 0, 1]
    assert dppo(MOVED, divergence="kl", low=0.23, high=0.19).metrics["clip_fraction"].tolist() == [
        1,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_the_gradient_is_that_of_a_naive_formula_and_exactly_0_outside(divergence):
    generator = torch.Generator().manual_seed(0)
    old = torch.rand(200, generator=generator, dtype=torch.float64) * 0.98 + 0.01
    now = torch.rand(200, generator=generator, dtype=torch.float64) * 0.98 + 0.01
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    limits = {"low": 0.1, "high": 0.2}
    logprobs = now.log().requires_grad_()
    naive = []
    for q, logp, advantage in zip(old, logprobs, advantages, strict=True):
        p = logp.exp()
        distance = (p - q).abs() if divergence == "tv" else naive_kl(q, p)
        further = p > q if advantage > 0 else p < q
        outside = further and distance > limits["high" if advantage > 0 else "low"]
        naive.append(torch.zeros_like(p) if outside else -advantage * p / q)
    (expected,) = torch.autograd.grad(torch.stack(naive).sum(), logprobs)
    loss = dppo(inputs(logprobs, old.log(), advantages), divergence=divergence, **limits).loss
    (given,) = torch.autograd.grad(loss.sum(), logprobs)
    assert_close(given, expected)
    assert torch.equal(given == 0, expected == 0)
    assert 20 < int((given == 0).sum()) < 150


def test_limits_that_nothing_reaches_leave_the_importance_weighted_policy_gradient():
    logprobs = MOVED.logprobs.clone().requires_grad_()
    dppo(replace(MOVED, logprobs=logprobs), low=1.0, high=1.0).loss.sum().backward()
    assert_close(logprobs.grad, torch.tensor([-2.5, -0.4, 2.5, 0.4]))


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_tokens_of_probability_1_and_0_give_finite_numbers(divergence):
    edges = inputs([0.0, 0.0, -90.0, -1e-9], [0.0, -90.0, 0.0, 0.0], [1.0, 1.0, -1.0, 1.0])
    result = dppo(edges, divergence=divergence)
    assert result.loss.isfinite().all()
    assert result.metrics["divergence"].isfinite().all()
    assert result.metrics["clip_fraction"].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "limits", [{"low": 0.0}, {"high": -1.0}, {"cap": 0.0}, {"low": float("nan")}]
)
def test_limits_that_are_not_above_0_are_refused(limits):
    with pytest.raises(ValueError, match="expected more than 0 each"):
        dppo(EXAMPLE, **limits)


def test_another_divergence_is_refused():
    with pytest.raises(ValueError, match="expected 'tv' or 'kl'"):
        partial(dppo, divergence="js")(EXAMPLE)
