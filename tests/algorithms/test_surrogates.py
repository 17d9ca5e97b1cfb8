"""Properties that hold for every surrogate."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from siirl_dask.algorithms import (
    Totals,
    cispo,
    cpgd,
    gmpo,
    gspo,
    ppo_clip,
    sequence_clip,
    sequence_mean_token_mean,
)
from tests.algorithms.surrogates import EXAMPLE, SURROGATES, TWO_ROWS, inputs

every_surrogate = pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
READS = [
    (name, field)
    for name in SURROGATES
    for field in ("logprobs", "old_logprobs", "advantages")
    if (name, field) != ("policy_gradient", "old_logprobs")
]


def gradient(surrogate, tokens):
    """The gradient of the sum of token losses, [K]."""
    logprobs = tokens.logprobs.clone().requires_grad_()
    return torch.autograd.grad(surrogate(replace(tokens, logprobs=logprobs)).loss.sum(), logprobs)[
        0
    ]


@every_surrogate
def test_at_ratio_1_every_surrogate_is_the_policy_gradient(surrogate):
    """Before the first step a row's tokens move by its advantage. No token is covariant here."""
    offsets, advantages = torch.tensor([0, 3, 3, 5]), torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5])
    logprobs = torch.tensor([-0.5, -2.0, -0.1, -1.0, -3.0], requires_grad=True)
    on_policy = inputs(logprobs, logprobs.detach(), advantages, offsets=offsets)
    weights = sequence_mean_token_mean(offsets, Totals(tokens=5, rows=2))
    (surrogate(on_policy).loss * weights).sum().backward()
    assert_close(logprobs.grad, -advantages * weights)


@every_surrogate
def test_advantages_of_0_have_no_gradient(surrogate):
    logprobs = EXAMPLE.logprobs
    tokens = inputs(logprobs, logprobs, torch.zeros(4), offsets=TWO_ROWS)
    assert torch.equal(gradient(surrogate, tokens), torch.zeros(4))


@every_surrogate
def test_no_tokens_give_no_loss_and_the_same_metrics(surrogate):
    for offsets in ([0], [0, 0, 0]):
        result = surrogate(inputs(*[torch.zeros(0)] * 3, offsets=torch.tensor(offsets)))
        assert result.loss.shape == (0,)
        assert list(result.metrics) == list(surrogate(EXAMPLE).metrics)


@every_surrogate
def test_empty_rows_change_nothing(surrogate):
    without = surrogate(replace(EXAMPLE, offsets=TWO_ROWS))
    with_empty = surrogate(replace(EXAMPLE, offsets=torch.tensor([0, 0, 2, 2, 2, 4, 4])))
    assert torch.equal(with_empty.loss, without.loss)


@every_surrogate
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_other_rows_do_not_change_a_rows_loss(surrogate, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    old, moved, signs, covariant = torch.randn(4, sum(lengths), generator=generator)
    whole = inputs(old + moved, old, signs.sign(), offsets=torch.tensor([0, *lengths]).cumsum(0))
    whole = replace(whole, columns=whole.columns | {"covariant": covariant > 0})
    together = surrogate(whole)
    for start, end in zip(whole.offsets.tolist(), whole.offsets.tolist()[1:], strict=False):
        row = inputs(*(values[start:end] for values in (whole.logprobs, old, whole.advantages)))
        columns = {name: column[start:end] for name, column in whole.columns.items()}
        alone = surrogate(replace(row, columns=columns))
        assert_close(alone.loss, together.loss[start:end])


@every_surrogate
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_a_log_ratio_of_100_gives_finite_numbers(surrogate, advantage, log_ratio):
    far = inputs(
        [-1.0, -1.0 - max(-log_ratio, 0)], [-1.0, -1.0 - max(log_ratio, 0)], [advantage] * 2
    )
    far = replace(far, columns=far.columns | {"covariant": torch.tensor([True, True])})
    result = surrogate(far)
    assert result.loss.isfinite().all()
    assert all(metric.isfinite().all() for metric in result.metrics.values())
    assert gradient(surrogate, far).isfinite().all()


@pytest.mark.parametrize("covariant", [False, True])
@pytest.mark.parametrize("number", NOT_FINITE)
@pytest.mark.parametrize(("name", "field"), READS)
def test_a_nonfinite_input_shows_in_its_own_row_alone(name, field, number, covariant):
    values = getattr(EXAMPLE, field).clone()
    values[1] = number
    columns = EXAMPLE.columns | {"covariant": torch.tensor([False, covariant, False, False])}
    loss = SURROGATES[name](
        replace(EXAMPLE, **{field: values}, offsets=TWO_ROWS, columns=columns)
    ).loss
    assert not loss[1].isfinite()
    assert loss[2:].isfinite().all()


@every_surrogate
def test_metrics_have_one_number_per_token_and_no_gradient(surrogate):
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    result = surrogate(replace(EXAMPLE, logprobs=logprobs))
    assert result.loss.requires_grad
    assert not any(metric.requires_grad for metric in result.metrics.values())
    assert all(
        metric.shape == (4,) and metric.is_floating_point() for metric in result.metrics.values()
    )


@pytest.mark.parametrize(
    ("loss", "bounds"),
    [
        (ppo_clip, {"clip_low": -0.1}),
        (ppo_clip, {"clip_low": 1.5}),
        (ppo_clip, {"clip_high": -0.1}),
        (gspo, {"clip_low": -0.1}),
        (sequence_clip, {"clip_low": 1.5}),
        (sequence_clip, {"clip_high": -0.1}),
        (gmpo, {"clip_high": -0.1}),
        (cispo, {"clip_low": 1.5}),
        (cpgd, {"clip_low": 1.0}),
    ],
)
def test_impossible_bounds_are_refused(loss, bounds):
    with pytest.raises(ValueError, match="clip_low="):
        loss(EXAMPLE, **bounds)
