from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from siirl_dask.algorithms import abs_difference, k1, k2, k3, k3_clipped, straight_through

LOGPROBS, REFERENCE = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
P, Q = torch.tensor([0.1, 0.2, 0.7]).double(), torch.tensor([0.3, 0.3, 0.4]).double()


def test_hand_checked_values():
    assert_close(k1(LOGPROBS, REFERENCE), torch.tensor([0.5, -1.0]))
    assert_close(k2(LOGPROBS, REFERENCE), torch.tensor([0.125, 0.5]))
    assert_close(k3(LOGPROBS, REFERENCE), torch.tensor([0.106531, 0.718282]))
    assert_close(abs_difference(LOGPROBS, REFERENCE), torch.tensor([0.5, 1.0]))


def test_k1_and_k3_are_unbiased():
    divergence = (P * (P / Q).log()).sum()
    for estimate in (k1, k3):
        assert_close((P * estimate(P.log(), Q.log())).sum(), divergence)


def test_k3_keeps_its_digits_for_nearly_equal_policies():
    assert_close(
        k3(torch.tensor([1e-3]), torch.tensor([0.0])), torch.tensor([5e-7]), rtol=1e-3, atol=0
    )


@given(
    differences=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=9),
    limit=st.sampled_from([0.5, 10.0]),
)
def test_clipped_k3_is_k3_up_to_its_limit_and_has_no_gradient_beyond(differences, limit):
    logprobs = torch.tensor(differences, requires_grad=True)
    reference = torch.zeros(len(differences))
    clipped = k3_clipped(logprobs, reference, limit=limit)
    whole = k3(logprobs.detach().double().clamp(-700, 700), reference)
    assert_close(clipped.double(), whole.clamp(max=limit), rtol=1e-5, atol=1e-5)
    clipped.sum().backward()
    gradient = torch.where(whole < limit, -(-logprobs.detach().double()).expm1(), 0.0)
    far = (whole - limit).abs() > 1e-3  # of the limit itself, where either gradient is right
    assert_close(logprobs.grad.double()[far], gradient[far], rtol=1e-4, atol=1e-5)


def test_clipped_k3_has_by_default_the_limit_of_verls_low_var_kl():
    logprobs = torch.tensor([-3.0, -2.0, 12.0], requires_grad=True)
    clipped = k3_clipped(logprobs, torch.zeros(3))
    assert_close(clipped, torch.tensor([10.0, 4.389056, 10.0]))
    clipped.sum().backward()
    assert_close(logprobs.grad, torch.tensor([0.0, -6.389056, 0.0]))


@pytest.mark.parametrize("value", [k1, k3, abs_difference])
def test_straight_through_has_the_chosen_value_and_k2s_gradient(value):
    logprobs = LOGPROBS.clone().requires_grad_()
    result = straight_through(logprobs, REFERENCE, value=value)
    assert torch.equal(result, value(LOGPROBS, REFERENCE))
    assert torch.equal(torch.autograd.grad(result.sum(), logprobs)[0], LOGPROBS - REFERENCE)


@pytest.mark.parametrize("estimate", [k2, straight_through])
def test_the_expected_gradient_is_that_of_the_kl(estimate):
    logits = P.log().requires_grad_()
    logprobs = logits.log_softmax(0)
    exact = torch.autograd.grad(
        (logprobs.exp() * (logprobs - Q.log())).sum(), logits, retain_graph=True
    )[0]
    assert_close(torch.autograd.grad((P * estimate(logprobs, Q.log())).sum(), logits)[0], exact)


@pytest.mark.parametrize("estimate", [k1, k2, k3, abs_difference])
def test_gradient_equals_finite_differences(estimate):
    reference = torch.tensor([-1.5, -1.0, -0.2, -4.0], dtype=torch.float64)
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -0.1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(partial(estimate, reference=reference), logprobs)
