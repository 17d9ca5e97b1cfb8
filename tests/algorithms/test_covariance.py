from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import clip_cov, covariances, kl_cov, ppo_clip
from tests.algorithms.surrogates import CLIP, EXAMPLE, inputs

CHOSEN = replace(EXAMPLE, columns={"covariant": torch.tensor([False, True, False, True])})


def test_their_mean_is_the_covariance():
    logprobs, advantages = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = covariances(logprobs, advantages, float(logprobs.mean()), float(advantages.mean()))
    assert_close(scores.mean(), torch.cov(torch.stack([logprobs, advantages]), correction=0)[0, 1])


def test_covariances_by_hand():
    scores = covariances(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -1.0]), -2.0, 0.5)
    assert_close(scores, torch.tensor([0.5, 1.5]))


def test_clip_cov_leaves_the_chosen_tokens_out():
    result = clip_cov(CHOSEN, **CLIP)
    assert_close(result.loss, torch.tensor([-1.28, 0.0, 1.648721, 0.0]))
    assert_close(result.metrics["covariant"], torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert result.metrics.keys() == {*ppo_clip(EXAMPLE).metrics, "covariant"}


def test_clip_cov_gives_the_chosen_tokens_no_gradient():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    clip_cov(replace(CHOSEN, logprobs=logprobs)).loss.sum().backward()
    assert_close(logprobs.grad, torch.tensor([-1.648721, 0.0, 1.648721, 0.0]))


def test_kl_cov_lets_the_chosen_tokens_pay():
    result = kl_cov(CHOSEN, coefficient=0.1)
    assert_close(result.loss, torch.tensor([-1.648721, -0.556531, 1.648721, 7.589056]))
    assert_close(result.metrics["covariant"], torch.tensor([0.0, 1.0, 0.0, 1.0]))


@pytest.mark.parametrize("surrogate", [clip_cov, kl_cov])
def test_gradient_is_that_of_finite_differences(surrogate):
    torch.manual_seed(0)
    old, advantages = -torch.rand(20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    columns = {"covariant": torch.arange(20) % 3 == 0}
    given = (old + 0.3 * torch.randn(20, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: surrogate(inputs(x, old, advantages, columns=columns)).loss, given)


@pytest.mark.parametrize("surrogate", [clip_cov, kl_cov])
def test_without_a_choice_it_says_what_to_add(surrogate):
    with pytest.raises(ValueError, match=r"column 'covariant' \(there are: \['age'\]\): add a node that runs"):
        surrogate(replace(EXAMPLE, columns={"age": torch.zeros(4)}))
