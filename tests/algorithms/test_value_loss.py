from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import ValueInputs, value_clip


def inputs(values, old, returns):
    values, old_values, returns = (torch.as_tensor(numbers) for numbers in (values, old, returns))
    return ValueInputs(
        values=values, old_values=old_values, returns=returns, offsets=torch.tensor([0, 3])
    )


EXAMPLE = inputs([1.0, 2.0, 0.0], [0.0, 2.0, 1.0], [2.0, 1.0, 0.0])


def test_hand_checked_values():
    # clipped values .5, 2, .5: squares max(1, 2.25), max(1, 1), max(0, .25)
    result = value_clip(EXAMPLE)
    assert_close(result.loss, torch.tensor([1.125, 0.5, 0.125]))
    assert_close(result.metrics["clip_fraction"], torch.tensor([1.0, 0.0, 1.0]))
    assert_close(value_clip(EXAMPLE, clip=float("inf")).loss, torch.tensor([0.5, 0.5, 0.0]))


def test_a_clipped_value_has_no_gradient():
    values = EXAMPLE.values.clone().requires_grad_()
    value_clip(replace(EXAMPLE, values=values)).loss.sum().backward()
    assert_close(values.grad, torch.tensor([0.0, 1.0, 0.0]))


def test_the_metrics_means_give_the_explained_variance():
    values, returns = torch.randn(
        2, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    result = value_clip(inputs(values + returns, values, returns))
    mean = {name: float(metric.mean()) for name, metric in result.metrics.items()}
    unexplained = mean["error_squared"] - (mean["return"] - mean["value"]) ** 2
    explained = 1 - unexplained / (mean["return_squared"] - mean["return"] ** 2)
    assert explained == pytest.approx(float(1 - values.var() / returns.var()))


def test_values_far_from_the_returns_give_finite_numbers():
    values = torch.tensor([100.0, -100.0, 1e4], requires_grad=True)
    result = value_clip(inputs(values, [0.0, 0.0, 0.0], [0.0, 0.0, -1e4]))
    result.loss.sum().backward()
    assert result.loss.isfinite().all()
    assert values.grad.isfinite().all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["values", "returns"])
def test_a_nonfinite_input_shows_in_its_own_token_alone(field, number):
    numbers = getattr(EXAMPLE, field).clone()
    numbers[1] = number
    assert value_clip(replace(EXAMPLE, **{field: numbers})).loss.isfinite().tolist() == [
        True,
        False,
        True,
    ]


def test_a_nan_old_value_shows_in_its_own_token_alone():
    old = torch.tensor([0.0, float("nan"), 1.0])
    assert value_clip(replace(EXAMPLE, old_values=old)).loss.isfinite().tolist() == [
        True,
        False,
        True,
    ]


def test_no_tokens_give_no_loss_and_the_same_metrics():
    result = value_clip(inputs(*[torch.zeros(0)] * 3))
    assert result.loss.shape == (0,)
    assert list(result.metrics) == list(value_clip(EXAMPLE).metrics)


def test_metrics_carry_no_gradient():
    result = value_clip(replace(EXAMPLE, values=EXAMPLE.values.clone().requires_grad_()))
    assert result.loss.requires_grad
    assert not any(metric.requires_grad for metric in result.metrics.values())


def test_gradient_equals_finite_differences():
    values, old, returns = torch.randn(
        3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    assert torch.autograd.gradcheck(
        lambda x: value_clip(inputs(x, old, returns)).loss, values.requires_grad_()
    )
