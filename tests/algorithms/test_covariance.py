from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import clip_cov, covariances, kl_cov, ppo_clip
from tests.algorithms.surrogates import CLIP, EXAMPLE, inputs

COVARIANT = replace(EXAMPLE, columns={"covariant": torch.tensor([False, True, False, True])})


def test_the_mean_of_token_covariances_is_the_covariance():
    logprobs, advantages = torch.randn(
        2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    scores = covariances(logprobs, advantages, float(logprobs.mean()), float(advantages.mean()))
    assert_close(scores.mean(), torch.cov(torch.stack([logprobs, advantages]), correction=0)[0, 1])


def test_covariances_hand_checked():
    scores = covariances(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -1.0]), -2.0, 0.5)
    assert_close(scores, torch.tensor([0.5, 1.5]))


def test_clip_cov_gives_covariant_tokens_loss_0():
    result = clip_cov(COVARIANT, **CLIP)
    assert_close(result.loss, torch.tensor([-1.28, 0.0, 1.648721, 0.0]))
    assert_close(result.metrics["covariant"], torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert result.metrics.keys() == {*ppo_clip(EXAMPLE).metrics, "covariant"}


def test_clip_cov_gives_covariant_tokens_no_gradient():
    logprobs = EXAMPLE.logprobs.clone().requires_grad_()
    clip_cov(replace(COVARIANT, logprobs=logprobs)).loss.sum().backward()
    assert_close(logprobs.grad, torch.tensor([-1.648721, 0.0, 1.648721, 0.0]))


def test_kl_cov_penalises_covariant_tokens():
    result = kl_cov(COVARIANT, coefficient=0.1)
    assert_close(result.loss, torch.tensor([-1.648721, -0.556531, 1.648721, 7.589056]))
    assert_close(result.metrics["covariant"], torch.tensor([0.0, 1.0, 0.0, 1.0]))


@pytest.mark.parametrize("surrogate", [clip_cov, kl_cov])
def test_gradient_equals_finite_differences(surrogate):
    torch.manual_seed(0)
    old, advantages = -torch.rand(20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    columns = {"covariant": torch.arange(20) % 3 == 0}
    moved = (old + 0.3 * torch.randn(20, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: surrogate(inputs(x, old, advantages, columns=columns)).loss, moved
    )


@pytest.mark.parametrize("surrogate", [clip_cov, kl_cov])
def test_a_missing_column_names_the_node_to_add(surrogate):
    with pytest.raises(
        ValueError, match=r"column 'covariant' \(there are: \['age'\]\): add a node that runs"
    ):
        surrogate(replace(EXAMPLE, columns={"age": torch.zeros(4)}))
