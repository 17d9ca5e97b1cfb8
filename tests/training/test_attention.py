"""Packed attention in one call for all rows, as on GPUs, against one call per length.

``varlen_attn`` needs a GPU, so a function of its signature that takes the rows one by one stands in
for it. ``flex_attention`` computes without gradients on a CPU.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from siirl_dask.config import Dtype
from siirl_dask.devices.accelerator import arithmetic_dtype
from siirl_dask.errors import ConfigError
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.rows import random_rows
from siirl_dask.training.model import attention, attention_kernels, flex, network
from siirl_dask.training.model.attention import attend_varlen, packed_attention, row_ends
from siirl_dask.training.model.attention_kernels import (
    FlashKernel,
    choose_kernel,
    kernel_of,
    takes_varlen,
)
from siirl_dask.training.model.flex import (
    FlexKernel,
    attend_flex,
    compiled_flex,
    row_mask,
    whole_blocks,
    why_not,
)
from siirl_dask.training.model.trial import rounding
from siirl_dask.training.packing import Packing
from tests.settings import trainer_config
from tests.training.roles import policy

RUNS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=5)


def reference_varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
):
    """Compute what torch documents for ``varlen_attn``. [T, H, D], [T, H_kv, D] twice -> [T, H, D].

    The window counts tokens before a token (-1: all) and after it.
    """
    left, right = window_size
    assert cu_seq_q is cu_seq_k
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    outputs = []
    for start, stop in pairwise(cu_seq_q.tolist()):
        q, k, v = (each[start:stop].transpose(0, 1) for each in (query, key, value))
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        mask = (distance >= -right) & ((distance <= left) | torch.tensor(left == -1))
        one = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(one.transpose(0, 1))
    return torch.cat(outputs)


def random_heads(runs, heads, seed=0):
    tokens, generator = (
        sum(count * length for count, length in runs),
        torch.Generator().manual_seed(seed),
    )
    return [
        torch.randn(1, each, tokens, 8, generator=generator, requires_grad=True)
        for each in (4, heads, heads)
    ]


@settings(deadline=None, max_examples=30)
@given(
    runs=RUNS,
    heads=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 10),
    scaling=st.none() | st.just(0.3),
)
def test_one_varlen_call_equals_a_call_per_length(runs, heads, window, scaling):
    packed = random_heads(runs, heads)
    expected, _ = packed_attention(
        torch.nn.Identity(),
        *packed,
        None,
        packing=Packing(tuple(runs)),
        scaling=scaling,
        sliding_window=window,
    )
    output = attend_varlen(reference_varlen, *packed, Packing(tuple(runs)), scaling, window)
    assert_close(output[None], expected)
    for one, other in zip(
        torch.autograd.grad(output.square().sum(), packed),
        torch.autograd.grad(expected.square().sum(), packed),
        strict=True,
    ):
        assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 3])
def test_the_varlen_attn_of_this_torch_accepts_the_arguments(window):
    """Meta tensors check the shapes without a GPU. torch 2.11 is not asked for ``enable_gqa``,
    which it lacks.
    """
    runs = ((2, 3), (1, 5))
    asked = {"scale": None, "window_size": (-1 if window is None else 2, 0), "enable_gqa": True}
    calls = []
    torchs = choose_kernel((8, 0), torch_has_flash=True)
    assert torchs is not None

    def kernel(*arguments, **options):
        calls.append((arguments[-1], options))
        return torchs.attend(
            *(each.to("meta") if torch.is_tensor(each) else each for each in arguments), **options
        )

    output = attend_varlen(kernel, *random_heads(runs, 2), Packing(runs), None, window)
    assert output.shape == (11, 4, 8)
    assert calls == [(5, asked)]


@pytest.mark.parametrize(
    ("dtype", "widths", "taken"),
    [
        (torch.bfloat16, (128, 128), True),
        (torch.float16, (64, 64), True),
        (torch.bfloat16, (256, 256), True),
        (torch.float32, (128, 128), False),
        (torch.bfloat16, (80, 80), False),
        (torch.bfloat16, (512, 512), False),
        (torch.bfloat16, (192, 128), False),
    ],
)
def test_varlen_attn_is_used_where_it_is_supported(dtype, widths, taken):
    assert takes_varlen(dtype, *widths) == taken
    for device in ("cpu", "xpu"):
        assert kernel_of(torch.device(device), dtype, *widths) is None


def as_flash_attn(*arguments, softmax_scale, causal, window_size):
    """``flash_attn_varlen_func`` of the flash_attn packages, which returns its output with what
    a backward needs.
    """
    assert causal
    grouped = arguments[0].shape[1] != arguments[1].shape[1]
    return (
        reference_varlen(
            *arguments, scale=softmax_scale, window_size=window_size, enable_gqa=grouped
        ),
        "log-sum-exp",
    )


@pytest.mark.parametrize(
    ("capability", "installed", "in_torch", "chosen"),
    [
        (
            (9, 0),
            ["flash_attn_interface", "flash_attn"],
            True,
            "FlashAttention-3 (flash_attn_interface)",
        ),
        ((9, 0), ["flash_attn"], True, "FlashAttention-2 (torch)"),
        ((8, 0), ["flash_attn_interface"], True, "FlashAttention-2 (torch)"),
        ((12, 0), ["flash_attn_interface"], True, "FlashAttention-2 (torch)"),
        ((8, 9), ["flash_attn"], False, "FlashAttention-2 (flash_attn)"),
        ((8, 9), [], False, None),
        ((7, 5), ["flash_attn_interface", "flash_attn"], True, None),
    ],
)
def test_the_best_kernel_that_is_installed_for_the_device_is_chosen(
    monkeypatch, capability, installed, in_torch, chosen
):
    for name in ("flash_attn_interface", "flash_attn"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in installed:
        monkeypatch.setitem(
            sys.modules, name, SimpleNamespace(flash_attn_varlen_func=as_flash_attn)
        )
    kernel = choose_kernel(capability, in_torch)
    assert (kernel and kernel.name) == chosen
    if kernel is not None and "torch" not in kernel.name:
        runs = ((2, 3), (1, 5))
        for window in (None, 2):
            expected = attend_varlen(
                reference_varlen, *random_heads(runs, 2), Packing(runs), None, window
            )
            assert_close(
                attend_varlen(kernel.attend, *random_heads(runs, 2), Packing(runs), None, window),
                expected,
            )


@pytest.fixture
def a_device(monkeypatch):
    """Stands for a GPU on which FlexAttention fails as it is told, if at all."""

    def make(capability, no_flex=None):
        properties = SimpleNamespace(major=capability[0], minor=capability[1], name="A device")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(attention_kernels, "why_not", lambda *tried: no_flex)
        # triton is not on every CPU
        monkeypatch.setattr(attention_kernels, "find_spec", lambda package: package)
        kernel_of.cache_clear()
        return torch.device("cuda:3")

    yield make
    kernel_of.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "widths", "no_flex", "said"),
    [
        (
            (8, 0),
            torch.bfloat16,
            (64, 64),
            None,
            "heads of 64 in bfloat16, is computed by FlashAttention-2 (torch)",
        ),
        (
            (8, 0),
            torch.float32,
            (64, 64),
            None,
            "heads of 64 in float32, is computed by FlexAttention (torch)",
        ),
        (
            (9, 0),
            torch.bfloat16,
            (192, 128),
            None,
            "heads of 192 in bfloat16, is computed by FlexAttention (torch)",
        ),
        (
            (7, 5),
            torch.float16,
            (64, 64),
            None,
            "heads of 64 in float16, is computed by FlexAttention (torch)",
        ),
        (
            (7, 0),
            torch.float32,
            (64, 64),
            "RuntimeError: too old",
            "heads of 64 in float32, is computed by torch's scaled_dot_product_attention, a call "
            "for each row length; FlexAttention does not run: RuntimeError: too old",
        ),
        (
            (9, 0),
            torch.bfloat16,
            (8, 8),
            None,
            "heads of 8 in bfloat16, is computed by torch's scaled_dot_product_attention, a call "
            "for each row length; FlexAttention does not run: it takes heads of 16 to 256",
        ),
    ],
)
def test_the_log_says_which_kernel_computes(
    a_device, caplog, capability, dtype, widths, no_flex, said
):
    device = a_device(capability, no_flex)
    with caplog.at_level("INFO"):
        for _ in range(2):
            chosen = kernel_of(device, dtype, *widths)
    assert caplog.messages == [f"packed attention on cuda:3 (A device), {said}"]
    assert (chosen is None) == ("scaled_dot" in said)


def test_flex_attention_is_left_alone_where_a_first_call_fails():
    """It has no backward on a CPU."""
    told = why_not(FlexKernel(flex_attention), torch.device("cpu"), torch.float32, 16, 16)
    assert told.startswith("NotImplementedError: FlexAttention does not support backward on CPU")
    assert why_not(FlexKernel(by_its_mask), torch.device("cpu"), torch.float32, 16, 24) is None


PACKINGS = (
    ((1, 1),),
    ((1, 5),),
    ((1, 128),),
    ((1, 5), (1, 143)),
    ((2, 128),),
    ((3, 100),),
    ((1, 700),),
    ((10, 7),),
)


@pytest.fixture
def no_graphs():
    """Starts and ends with nothing compiled; gives a backend of torch.compile that runs the
    graphs which it lists.
    """
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    backend.graphs = graphs
    torch.compiler.reset()
    yield backend
    torch.compiler.reset()


def flex_output(kernel, runs, width=64, window=None, softcap=None, learn=False):
    tokens = sum(count * length for count, length in runs)
    heads = [torch.randn(1, count, tokens, width, requires_grad=learn) for count in (6, 3, 3)]
    ends = row_ends(runs, torch.device("cpu"))
    with torch.set_grad_enabled(learn):
        output = attend_flex(kernel, *heads, ends, Packing(runs), None, window, softcap)
        expected, _ = packed_attention(
            torch.nn.Identity(), *heads, None, packing=Packing(runs), scaling=None, sliding_window=window,
            softcap=softcap,
        )  # fmt: skip
    return output, expected[0]


def test_flex_attention_is_compiled_once_for_all_lengths_and_within_its_own_limit(no_graphs):
    """torch's limit of 8 is for all kernels of a process; after it each layer would make a [T,
    T] matrix.
    """
    kernel = compiled_flex(no_graphs)
    for runs in PACKINGS:
        assert_close(*flex_output(kernel, runs), atol=1e-5, rtol=1e-5)
    assert len(no_graphs.graphs) == 1
    for width in range(16, 80, 4):
        assert_close(*flex_output(kernel, ((1, 300),), width, window=200), atol=1e-5, rtol=1e-5)
    assert len(no_graphs.graphs) > 8


def test_each_soft_cap_is_compiled_also_with_gradients(no_graphs, monkeypatch):
    """A soft cap that Dynamo makes an input of the kernel does not compile with gradients, which a
    GPU's have.

    torch refuses them on a CPU before it traces; its trace is the same on all devices.
    """
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *heads: None)
    kernel = compiled_flex(no_graphs)
    for softcap in (5.0, 30.0, 50.0):
        for runs in (((1, 500),), ((2, 400),)):
            assert_close(
                *flex_output(kernel, runs, softcap=softcap, learn=True), atol=1e-5, rtol=1e-5
            )
    assert len(no_graphs.graphs) == 3


def test_flex_attention_that_is_not_compiled_is_an_error_and_no_matrix_of_all_tokens(
    no_graphs, monkeypatch
):
    kernel = compiled_flex(no_graphs)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(ConfigError, match=r"without torch\.compile.*=torch"),
    ):
        flex_output(kernel, ((1, 300),))
    monkeypatch.setattr(flex, "_GRAPHS", 2)
    flex_output(kernel, ((1, 300),), 64)
    flex_output(kernel, ((1, 300),), 32, window=200)
    with pytest.raises(
        ConfigError, match=r"compiled 2 times .*trainer\.operators\.attention=torch"
    ):
        flex_output(kernel, ((1, 300),), 16, window=100)


@pytest.mark.parametrize(
    ("tokens", "whole"), [(1, 256), (256, 256), (257, 384), (384, 384), (16000, 16000)]
)
def test_flex_attention_gets_whole_blocks_and_never_a_single_one(tokens, whole):
    assert whole_blocks(tokens) == whole
    shapes = []

    def kernel(query, key, value, *, block_mask, **options):
        shapes.append((query.shape[2], key.shape[2], value.shape[2], *block_mask.seq_lengths))
        return query

    heads = [torch.randn(1, 1, tokens, 4) for _ in "qkv"]
    runs = ((1, tokens),)
    output = attend_flex(
        FlexKernel(kernel), *heads, row_ends(runs, torch.device("cpu")), Packing(runs), None, None
    )
    assert shapes == [(whole,) * 5]
    assert torch.equal(output, heads[0][0].transpose(0, 1))


def by_its_mask(query, key, value, *, block_mask, scale, enable_gqa):
    """Compute what torch documents for ``flex_attention``, from the mask's function alone."""
    mask = create_mask(block_mask.mask_mod, 1, 1, query.shape[2], key.shape[2], device="cpu")
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )


@settings(deadline=None, max_examples=30)
@given(
    runs=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 300)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 300),
)
def test_flex_attention_computes_the_blocks_that_rows_need_and_masks_no_whole_one(runs, window):
    tokens = sum(count * length for count, length in runs)
    mask = row_mask(row_ends(tuple(runs), torch.device("cpu")), tokens, window)
    seen = create_mask(mask.mask_mod, 1, 1, tokens, tokens, device="cpu")[0, 0]
    pad = -tokens % 128
    wide = torch.nn.functional.pad(seen, (0, pad, 0, pad))
    beyond = torch.nn.functional.pad(torch.zeros_like(seen), (0, pad, 0, 0), value=False)
    # queries after the last are never written
    beyond = torch.nn.functional.pad(beyond, (0, 0, 0, pad), value=True)
    some = in_blocks(wide).any(-1)
    whole = in_blocks(wide | beyond).all(-1)
    partial, full = (
        chosen(*each) for each in ((mask.kv_num_blocks, mask.kv_indices), full_blocks(mask))
    )
    assert not (partial & full).any()
    assert torch.equal(partial | full, some)
    assert torch.equal(full, whole & some & ~torch.eye(len(full), dtype=torch.bool))


def in_blocks(matrix):
    blocks = len(matrix) // 128
    return matrix.view(blocks, 128, blocks, 128).transpose(1, 2).flatten(2)


def full_blocks(mask):
    return mask.full_kv_num_blocks, mask.full_kv_indices


def chosen(counts, indices):
    """Return which blocks of keys each block of queries has, [B, B]."""
    found = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        found[row, indices[0, 0, row, :count].long()] = True
    return found


@settings(deadline=None, max_examples=20)
@given(runs=RUNS, heads=st.sampled_from([1, 2, 4]), window=st.none() | st.integers(1, 10))
def test_one_call_of_flex_attention_equals_a_call_per_length(runs, heads, window):
    packed = random_heads(runs, heads)
    expected, _ = packed_attention(
        torch.nn.Identity(),
        *packed,
        None,
        packing=Packing(tuple(runs)),
        scaling=0.3,
        sliding_window=window,
    )
    ends = row_ends(tuple(runs), torch.device("cpu"))
    output = attend_flex(FlexKernel(by_its_mask), *packed, ends, Packing(tuple(runs)), 0.3, window)
    assert_close(output[None], expected)
    given, wanted = (
        torch.autograd.grad(each.square().sum(), packed) for each in (output, expected)
    )
    for one, other in zip(given, wanted, strict=True):
        assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(deadline=None, max_examples=15)
@given(
    runs=RUNS,
    window=st.none() | st.integers(1, 10),
    softcap=st.none() | st.sampled_from([0.5, 30.0]),
    sinks=st.booleans(),
    data=st.data(),
)
def test_soft_caps_and_sinks_are_those_of_a_softmax_over_all_scores(
    runs, window, softcap, sinks, data
):
    """GPUs compute them with torch's flex_attention, a CPU from a matrix of scores."""
    heads = data.draw(st.sampled_from([1, 2, 4]))
    packed = random_heads(runs, heads)
    extra = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True) if sinks else None
    packing = Packing(tuple(runs))
    output, _ = packed_attention(
        torch.nn.Identity(), *packed, None, packing=packing, scaling=0.3, sliding_window=window, softcap=softcap,
        s_aux=extra,
    )  # fmt: skip
    expected = naive_attention(runs, *packed, 0.3, window, softcap, extra)
    assert_close(output[0], expected)
    leaves = [*packed, extra] if sinks else packed
    found, wanted = (
        torch.autograd.grad(each.square().sum(), leaves) for each in (output, expected)
    )
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, atol=1e-4, rtol=1e-4)
    ends = row_ends(tuple(runs), torch.device("cpu"))
    wide = [torch.nn.functional.pad(each, (0, 8)).detach() for each in packed]
    with torch.no_grad():
        by_flex = attend_flex(
            FlexKernel(flex_attention), *wide, ends, packing, 0.3, window, softcap, extra
        )
    assert_close(by_flex[..., :8], expected)


def naive_attention(runs, query, key, value, scaling, window, softcap, sinks):
    """Attend row by row, token by token. [1, H, T, D], [1, H_kv, T, D] twice -> [T, H, D]."""
    key, value = (each.repeat_interleave(4 // each.shape[1], dim=1) for each in (key, value))
    outputs, start = [], 0
    for length in (length for count, length in runs for _ in range(count)):
        for at in range(start, start + length):
            first = start if window is None else max(start, at - window + 1)
            scores = (
                torch.einsum("hd,hkd->hk", query[0, :, at], key[0, :, first : at + 1]) * scaling
            )
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            total = scores.exp().sum(1, keepdim=True)
            if sinks is not None:
                total = total + sinks.exp()[:, None]
            outputs.append(
                torch.einsum("hk,hkd->hd", scores.exp() / total, value[0, :, first : at + 1])
            )
        start += length
    return torch.stack(outputs)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_all_layers_share_a_mask_of_torchs_flex_attention_and_log_probs_are_those_of_the_loop(
    monkeypatch, tmp_path
):
    trainer = policy(tiny_model(tmp_path / "model", seed=1, layers=3), trainer_config())
    rows = random_rows([(2, 1), (2, 2), (1, 150)])
    expected = trainer.logprobs(rows).logprobs
    made = []
    monkeypatch.setattr(attention, "kernel_of", lambda *heads, plain: FlexKernel(flex_attention))
    monkeypatch.setattr(flex, "row_mask", lambda *given: made.append(row_mask(*given)) or made[-1])
    assert_close(trainer.logprobs(rows).logprobs, expected, atol=1e-5, rtol=1e-5)
    assert len(made) == 1


def test_all_layers_of_a_micro_batch_share_one_tensor_of_row_ends(monkeypatch, tmp_path):
    """A layer that built its own would copy it to the device and wait for that."""
    seen = []

    def kernel(query, key, value, ends, *others, **options):
        seen.append(ends)
        return reference_varlen(query, key, value, ends, *others, **options)

    trainer = policy(tiny_model(tmp_path / "model", seed=1, layers=3), trainer_config())
    monkeypatch.setattr(
        attention, "kernel_of", lambda *heads, plain: FlashKernel("a test's", kernel)
    )
    made = []
    monkeypatch.setattr(
        network, "ends_for_kernels", lambda *given: made.append(row_ends(*given)) or made[-1]
    )
    trainer.logprobs(random_rows([(2, 1), (2, 2), (1, 4)]))
    assert [ends.tolist() for ends in made] == [[0, 3, 7, 12]]
    assert len(seen) == 3
    assert all(ends is made[0] for ends in seen)
    assert attention.ends_for_kernels(((1, 2),), torch.device("cpu")) is None


@pytest.mark.parametrize("library", ["flash", "flex"])
def test_a_network_in_bfloat16_is_built_with_a_kernel_for_that_alone(
    monkeypatch, tmp_path, library
):
    """It is tried in float32, which FlashAttention refuses, and for which FlexAttention would be
    compiled.
    """
    asked = []

    def kernel_of(device, dtype, width, value_width, chosen, *, plain):
        if chosen == "torch":
            return None
        asked.append(dtype)
        if dtype != torch.bfloat16:
            raise ConfigError(f"trainer.operators.attention={chosen}: it does not run")
        return FlashKernel("a test's", reference_varlen)

    monkeypatch.setattr(attention, "kernel_of", kernel_of)
    folder = tiny_model(tmp_path / "model", seed=1, layers=1)
    config = trainer_config(operators={"attention": library})
    trainer = policy(folder, config, dtype=Dtype.bfloat16)
    assert asked == [torch.bfloat16], "it is chosen, refused or compiled as the network is built"
    trainer.logprobs(random_rows([(2, 1), (2, 2), (1, 4)]))
    assert asked == [torch.bfloat16] * 2


@pytest.mark.parametrize("autocast", [False, True])
def test_the_compute_dtype_is_that_of_scaled_dot_product_attention(autocast):
    rotated = torch.randn(1, 2, 3, 8)  # float32 under autocast as well
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert (
            arithmetic_dtype(rotated)
            == scaled_dot_product_attention(rotated, rotated, rotated).dtype
        )


@pytest.mark.parametrize(("dtype", "of_largest"), [(torch.float32, 1e-3), (torch.bfloat16, 0.04)])
def test_the_tolerance_of_packed_logits_is_a_few_last_digits_of_their_dtype(dtype, of_largest):
    for largest in (0.5, 1.0, 23.0):
        digit = torch.finfo(dtype).eps * largest
        assert 3 * digit < rounding(largest, dtype) <= of_largest * max(1.0, largest)
