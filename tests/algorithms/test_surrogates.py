"""What holds for every surrogate, extreme inputs first."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from siirl_dask.algorithms import Totals, cispo, cpgd, gmpo, gspo, ppo_clip, sequence_mean_token_mean
from tests.algorithms.surrogates import EXAMPLE, SURROGATES, TWO_ROWS, inputs

every_surrogate = pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
READS = [
    (name, where)
    for name in SURROGATES
    for where in ("logprobs", "old_logprobs", "advantages")
    if (name, where) != ("policy_gradient", "old_logprobs")
]


def gradient(surrogate, given):
    """Of the sum of token losses."""
    logprobs = given.logprobs.clone().requires_grad_()
    return torch.autograd.grad(surrogate(replace(given, logprobs=logprobs)).loss.sum(), logprobs)[0]


@every_surrogate
def test_before_the_first_step_all_are_the_policy_gradient(surrogate):
    """At ratio 1 each moves a row's tokens by its advantage, in a mean over its tokens; covariant ones apart."""
    offsets, advantages = torch.tensor([0, 3, 3, 5]), torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5])
    logprobs = torch.tensor([-0.5, -2.0, -0.1, -1.0, -3.0], requires_grad=True)
    on_policy = inputs(logprobs, logprobs.detach(), advantages, offsets=offsets)
    weights = sequence_mean_token_mean(offsets, Totals(tokens=5, rows=2))
    (surrogate(on_policy).loss * weights).sum().backward()
    assert_close(logprobs.grad, -advantages * weights)


@every_surrogate
def test_equal_rewards_move_nothing(surrogate):
    logprobs = EXAMPLE.logprobs
    nothing = inputs(logprobs, logprobs, torch.zeros(4), offsets=TWO_ROWS)
    assert torch.equal(gradient(surrogate, nothing), torch.zeros(4))


@every_surrogate
def test_no_tokens_give_no_loss_and_the_same_metrics(surrogate):
    for offsets in ([0], [0, 0, 0]):
        result = surrogate(inputs(*[torch.zeros(0)] * 3, offsets=torch.tensor(offsets)))
        assert result.loss.shape == (0,)
        assert list(result.metrics) == list(surrogate(EXAMPLE).metrics)


@every_surrogate
def test_rows_without_tokens_change_nothing(surrogate):
    without = surrogate(replace(EXAMPLE, offsets=TWO_ROWS))
    with_empty = surrogate(replace(EXAMPLE, offsets=torch.tensor([0, 0, 2, 2, 2, 4, 4])))
    assert torch.equal(with_empty.loss, without.loss)


@every_surrogate
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_a_row_has_the_same_loss_alone_and_beside_others(surrogate, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    old, moved, signs, chosen = torch.randn(4, sum(lengths), generator=generator)
    whole = inputs(old + moved, old, signs.sign(), offsets=torch.tensor([0, *lengths]).cumsum(0))
    whole = replace(whole, columns={"covariant": chosen > 0})
    together = surrogate(whole)
    for start, end in zip(whole.offsets.tolist(), whole.offsets.tolist()[1:], strict=False):
        row = inputs(*(values[start:end] for values in (whole.logprobs, old, whole.advantages)))
        alone = surrogate(replace(row, columns={"covariant": whole.columns["covariant"][start:end]}))
        assert_close(alone.loss, together.loss[start:end])


@every_surrogate
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("apart", [100.0, -100.0])
def test_a_log_ratio_of_100_gives_finite_numbers(surrogate, advantage, apart):
    far = inputs([-1.0, -1.0 - max(-apart, 0)], [-1.0, -1.0 - max(apart, 0)], [advantage] * 2)
    far = replace(far, columns={"covariant": torch.tensor([True, True])})
    result = surrogate(far)
    assert result.loss.isfinite().all()
    assert all(metric.isfinite().all() for metric in result.metrics.values())
    assert gradient(surrogate, far).isfinite().all()


@pytest.mark.parametrize("covariant", [False, True])
@pytest.mark.parametrize("number", NOT_FINITE)
@pytest.mark.parametrize(("name", "where"), READS)
def test_what_is_not_finite_is_not_hidden_and_stays_in_its_row(name, where, number, covariant):
    values = getattr(EXAMPLE, where).clone()
    values[1] = number
    chosen = {"covariant": torch.tensor([False, covariant, False, False])}
    loss = SURROGATES[name](replace(EXAMPLE, **{where: values}, offsets=TWO_ROWS, columns=chosen)).loss
    assert not loss[1].isfinite()
    assert loss[2:].isfinite().all()


@every_surrogate
def test_metrics_are_one_number_a_token_without_gradient(surrogate):
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    result = surrogate(replace(EXAMPLE, logprobs=logprobs))
    assert result.loss.requires_grad
    assert not any(metric.requires_grad for metric in result.metrics.values())
    assert all(metric.shape == (4,) and metric.is_floating_point() for metric in result.metrics.values())


@pytest.mark.parametrize(
    ("loss", "bounds"),
    [
        (ppo_clip, {"clip_low": -0.1}),
        (ppo_clip, {"clip_low": 1.5}),
        (ppo_clip, {"clip_high": -0.1}),
        (gspo, {"clip_low": -0.1}),
        (gmpo, {"clip_high": -0.1}),
        (cispo, {"clip_low": 1.5}),
        (cpgd, {"clip_low": 1.0}),
    ],
)
def test_bounds_that_bound_nothing_are_refused(loss, bounds):
    with pytest.raises(ValueError, match="clip_low="):
        loss(EXAMPLE, **bounds)
