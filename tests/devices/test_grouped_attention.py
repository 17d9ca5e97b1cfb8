"""Queries that share keys: which of torch's kernels gets them, by a stand-in for it that records
what it was given.
"""

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.devices import accelerator

SHAPES = ((2, 6, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8))


def heads(dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).to(device).requires_grad_() for shape in SHAPES]


@pytest.mark.parametrize("masked", [False, True])
def test_keys_for_each_query_give_what_shared_keys_give_and_their_gradients(monkeypatch, masked):
    mask = None
    if masked:
        mask = torch.zeros(5, 5).masked_fill_(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    outputs = []
    for takes in (True, False):
        monkeypatch.setattr(accelerator, "_takes_groups", lambda query, masked, takes=takes: takes)
        given = heads()
        output = accelerator.attend(*given, mask, causal=not masked, scale=0.3)
        outputs.append([output, *torch.autograd.grad(output.square().sum(), given)])
    for one, other in zip(*outputs, strict=True):
        assert_close(one, other)


class Query:
    """A tensor of which only type and device are asked."""

    def __init__(self, dtype, kind):
        self.dtype = dtype
        self.device = torch.device(kind)


@pytest.mark.parametrize(
    ("kind", "dtype", "masked", "shared"),
    [
        ("cuda", torch.bfloat16, False, True),
        ("cuda", torch.bfloat16, True, False),
        ("cuda", torch.float32, False, False),
        ("cpu", torch.float32, True, True),
    ],
)
def test_on_cuda_shared_keys_are_flash_attentions_alone(kind, dtype, masked, shared):
    """torch would else take its math kernel, with a float32 matrix of all scores: 15 GB for 32
    prompts of 2,048 tokens and 28 heads.
    """
    assert accelerator._takes_groups(Query(dtype, kind), masked=masked) is shared
