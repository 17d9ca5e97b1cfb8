from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import policy_gradient, sapo
from tests.algorithms.surrogates import EXAMPLE, inputs


def test_hand_checked_values():
    # ratios e^.5, e^-.5, e^.5, e^2; tau 1, 1, 1.05, 1.05
    result = sapo(EXAMPLE)
    assert_close(result.loss, torch.tensor([-2.626889, -1.611530, 2.529512, 3.804880]))
    assert_close(result.metrics["ratio"], torch.tensor([1.648721, 0.606531, 1.648721, 7.389056]))
    assert_close(
        result.metrics["gate"],
        torch.tensor([0.901753, 0.962273, 0.892420, 0.004870]),
        atol=1e-6,
        rtol=0,
    )


def test_the_gradient_is_the_ratio_times_the_gate():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    sapo(replace(EXAMPLE, logprobs=logprobs)).loss.sum().backward()
    assert_close(
        logprobs.grad,
        torch.tensor([-1.486739, -0.583648, 1.471352, 0.035985]),
        atol=1e-6,
        rtol=1e-5,
    )


@pytest.mark.parametrize("tau", [0.1, 1.0, 20.0])
def test_at_ratio_1_the_gradient_does_not_depend_on_tau(tau):
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    on_policy = replace(EXAMPLE, logprobs=logprobs, old_logprobs=EXAMPLE.logprobs)
    for surrogate in (
        policy_gradient(on_policy),
        sapo(on_policy, tau_positive=tau, tau_negative=tau),
    ):
        gradient = torch.autograd.grad(surrogate.loss.sum(), logprobs)[0]
        assert_close(gradient, -EXAMPLE.advantages)


@pytest.mark.parametrize(
    ("sign", "changed", "same"),
    [(1.0, "tau_positive", "tau_negative"), (-1.0, "tau_negative", "tau_positive")],
)
def test_each_tau_gates_the_tokens_of_its_sign(sign, changed, same):
    tokens = replace(EXAMPLE, advantages=torch.full((4,), sign))
    gate = sapo(tokens, tau_positive=1.0, tau_negative=1.0).metrics["gate"]
    assert (sapo(tokens, **{changed: 2.0, same: 1.0}).metrics["gate"] < gate).all()
    assert torch.equal(sapo(tokens, **{changed: 1.0, same: 2.0}).metrics["gate"], gate)


@pytest.mark.parametrize(
    "taus", [{"tau_positive": 0.0}, {"tau_negative": -1.0}, {"tau_negative": float("nan")}]
)
def test_a_tau_of_0_or_less_is_refused(taus):
    with pytest.raises(ValueError, match="expected more than 0 each"):
        sapo(EXAMPLE, **taus)


def test_gradient_equals_finite_differences():
    torch.manual_seed(0)
    old, advantages = -torch.rand(20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    moved = (old + 0.5 * torch.randn(20, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda logprobs: sapo(inputs(logprobs, old, advantages)).loss, moved
    )
