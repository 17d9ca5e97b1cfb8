import pytest
import torch
from torch.testing import assert_close

from siirl_dask.models.head import HeadOutput
from siirl_dask.training.model.logprobs import token_logprobs
from tests.training.made import Made

PLAIN = HeadOutput()
OUTPUTS = {
    "as it is": PLAIN,
    "with a factor": HeadOutput(factor=0.125),
    "bounded": HeadOutput(cap=1.5),
    "both": HeadOutput(factor=3.0, cap=2.0),
}


def random_inputs(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, dtype=dtype, requires_grad=True)
    offset = torch.randn(11, generator=generator, dtype=dtype, requires_grad=True) if bias else None
    return hidden, weight, offset, torch.randint(0, 11, (7,), generator=generator)


def plain(hidden, weight, bias, targets, temperature, output=PLAIN):
    logits = output.logits(torch.nn.functional.linear(hidden, weight, bias))
    scores = (logits / temperature).log_softmax(-1)
    collision = scores.exp().square().sum(-1)
    return (
        scores.gather(1, targets[:, None]).squeeze(1),
        -(scores.exp() * scores).sum(-1),
        collision,
    )


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_blocks_of_the_vocabulary_equal_the_full_computation(rows, bias, output):
    inputs = random_inputs(bias=bias)
    scores = token_logprobs(*inputs, temperature=0.7, output=output, rows=rows)
    for one, other in zip(scores, plain(*inputs, 0.7, output), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["log-probability", "entropy", "both"])
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_gradients_equal_finite_differences(which, output):
    *leaves, targets = random_inputs()

    def result(*tensors):
        logprobs, entropy, _ = token_logprobs(
            *tensors, targets, temperature=0.7, output=output, rows=3
        )
        return (logprobs, entropy, logprobs * entropy)[which]

    assert torch.autograd.gradcheck(result, leaves)


def test_bfloat16_hidden_states_give_float32_scores_and_gradients():
    hidden, weight, _, targets = random_inputs(torch.float32, bias=False)
    logprobs, entropy, _ = token_logprobs(hidden.bfloat16(), weight, None, targets, temperature=1.0)
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    logprobs.sum().backward()
    expected = torch.autograd.grad(plain(hidden, weight, None, targets, 1.0)[0].sum(), weight)[0]
    assert weight.grad.dtype == torch.float32
    assert_close(weight.grad, expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_a_float32_product_of_bfloat16_states_loses_no_digits(output, bias):
    hidden, weight, offset, targets = random_inputs(torch.float32, bias=bias)
    leaves = [weight, offset] if bias else [weight]
    states = hidden.detach().bfloat16().requires_grad_()
    exact = states.detach().float().requires_grad_()
    rounded = [leaf.detach().bfloat16().float().requires_grad_() for leaf in leaves]

    found = token_logprobs(
        states, weight, offset, targets, temperature=0.7, output=output, float32=True, rows=3
    )
    expected = plain(exact, rounded[0], rounded[1] if bias else None, targets, 0.7, output)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, atol=1e-5, rtol=0)
    in_bfloat16 = token_logprobs(states, weight, offset, targets, temperature=0.7, output=output)
    assert float((in_bfloat16[0] - expected[0]).detach().abs().max()) > 1e-4, (
        "both have as many digits"
    )

    gradients = torch.autograd.grad(found[0].sum(), [states, *leaves])
    wanted = torch.autograd.grad(expected[0].sum(), [exact, *rounded])
    assert_close(gradients[0], wanted[0].bfloat16())
    for one, other in zip(gradients[1:], wanted[1:], strict=True):
        assert_close(one, other, atol=1e-5, rtol=0)


TOKENS, WIDTH, VOCABULARY, ROWS = 48, 64, 1500, 100


def score_and_learn(dtype, weight_dtype):
    """The tensors that are made for log-probs and entropy, and their gradients."""
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=weight_dtype, requires_grad=True)
    with Made() as made:
        logprobs, entropy, _ = token_logprobs(
            hidden, weight, None, torch.arange(TOKENS), temperature=0.7, rows=ROWS
        )
        torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
    return made


def test_the_heads_gradient_is_made_once_and_nothing_else_is_larger_than_a_block():
    sizes = sorted(score_and_learn(torch.float32, torch.float32).sizes)
    assert sizes[-1] == VOCABULARY * WIDTH
    assert sizes[-2] <= ROWS * max(TOKENS, WIDTH)
