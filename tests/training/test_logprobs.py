import pytest
import torch
from torch.testing import assert_close

from siirl_dask.training.model.logprobs import token_logprobs


def random_inputs(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, dtype=dtype, requires_grad=True)
    offset = torch.randn(11, generator=generator, dtype=dtype, requires_grad=True) if bias else None
    return hidden, weight, offset, torch.randint(0, 11, (7,), generator=generator)


def plain(hidden, weight, bias, targets, temperature):
    scores = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return scores.gather(1, targets[:, None]).squeeze(1), -(scores.exp() * scores).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_chunks_equal_the_full_computation(chunk, bias):
    inputs = random_inputs(bias=bias)
    for one, other in zip(token_logprobs(*inputs, temperature=0.7, chunk=chunk), plain(*inputs, 0.7), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["log-probability", "entropy", "both"])
def test_gradients_equal_finite_differences(which):
    *leaves, targets = random_inputs()

    def result(*tensors):
        logprobs, entropy = token_logprobs(*tensors, targets, temperature=0.7, chunk=3)
        return (logprobs, entropy, logprobs * entropy)[which]

    assert torch.autograd.gradcheck(result, leaves)


def test_bfloat16_hidden_states_give_float32_scores_and_gradients():
    hidden, weight, _, targets = random_inputs(torch.float32, bias=False)
    logprobs, entropy = token_logprobs(hidden.bfloat16(), weight, None, targets, temperature=1.0)
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    logprobs.sum().backward()
    expected = torch.autograd.grad(plain(hidden, weight, None, targets, 1.0)[0].sum(), weight)[0]
    assert weight.grad.dtype == torch.float32
    assert_close(weight.grad, expected, atol=0.1, rtol=0.1)


def test_logits_are_never_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr("siirl_dask.training.model.logprobs._CHUNK_BYTES", 4 * 11 * 2)
    sizes = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: sizes.append(len(a[0])) or linear(*a))
    logprobs, _ = token_logprobs(*random_inputs(torch.float32), temperature=1.0)
    logprobs.sum().backward()
    assert max(sizes) == 2
