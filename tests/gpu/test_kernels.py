"""Kernels of a device: attention over packed rows in one call, and Liger's norms and
feed-forward layers.
"""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import Dtype, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import DeviceKind, Rank
from siirl_dask.devices import accelerator
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.rows import random_rows, signs
from siirl_dask.training import TrainBatch, build_trainer
from siirl_dask.training.model.attention import Scores, _attend_runs, packed_attention
from siirl_dask.training.model.attention_kernels import kernel_of
from siirl_dask.training.packing import Packing
from tests.gpu import devices

pytestmark = pytest.mark.gpu
RUNS = ((3, 40), (1, 128), (2, 300), (1, 777))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("dtype", "width", "value_width"),
    [
        (torch.bfloat16, 64, 64),
        (torch.float32, 64, 64),
        (torch.bfloat16, 80, 80),
        (torch.bfloat16, 192, 128),
    ],
)
def test_attention_over_packed_rows_equals_a_call_for_each_length(
    tell, dtype, width, value_width, window
):
    device, tokens = (
        torch.device(devices.device().torch_name),
        sum(count * length for count, length in RUNS),
    )
    torch.manual_seed(0)
    shapes = ((4, width), (2, width), (2, value_width))
    heads = [
        torch.randn(1, count, tokens, each, dtype=dtype, device=device) for count, each in shapes
    ]
    weights = torch.randn(tokens, 4, value_width, device=device)

    def learned(attend):
        given = [each.clone().requires_grad_() for each in heads]
        output = attend(*given)
        return [output, *torch.autograd.grad((output.float() * weights).sum(), given)]

    def packed(*given):
        return packed_attention(
            torch.nn.Identity(), *given, None, packing=Packing(RUNS), sliding_window=window
        )[0][0]

    expected = learned(lambda *given: _attend_runs(*given, RUNS, Scores(window=window)))
    for one, other in zip(learned(packed), expected, strict=True):
        scale = max(1.0, float(other.abs().max()))
        assert_close(one.float() / scale, other.float() / scale, atol=TOLERANCE[dtype], rtol=0)
    kernel = kernel_of(device, dtype, width, value_width)
    tell(
        f"{dtype}, heads of {width} and {value_width}: "
        f"{kernel.name if kernel else 'a call for each length'}"
    )


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_soft_caps_and_sinks_over_packed_rows_are_those_of_a_matrix_of_scores(
    tell, dtype, softcap, window
):
    """A sink is a score of each head without a value."""
    device, tokens = (
        torch.device(devices.device().torch_name),
        sum(count * length for count, length in RUNS),
    )
    torch.manual_seed(0)
    heads = [torch.randn(1, count, tokens, 64, dtype=dtype, device=device) for count in (4, 2, 2)]
    heads.append(torch.randn(4, dtype=dtype, device=device))
    weights = torch.randn(tokens, 4, 64, device=device)

    def learned(attend):
        given = [each.clone().requires_grad_() for each in heads]
        output = attend(*given)
        return [output, *torch.autograd.grad((output.float() * weights).sum(), given)]

    def packed(query, key, value, sinks):
        output, _ = packed_attention(
            torch.nn.Identity(), query, key, value, None, packing=Packing(RUNS), sliding_window=window,
            softcap=softcap, s_aux=sinks,
        )  # fmt: skip
        return output[0]

    def by_scores(query, key, value, sinks):
        return _attend_runs(
            query, key, value, RUNS, Scores(window=window, softcap=softcap, sinks=sinks)
        )

    for one, other in zip(learned(packed), learned(by_scores), strict=True):
        scale = max(1.0, float(other.abs().max()))
        assert_close(one.float() / scale, other.float() / scale, atol=TOLERANCE[dtype], rtol=0)
    kernel = kernel_of(device, dtype, 64, 64, plain=False)
    tell(f"soft caps and sinks, {dtype}: {kernel.name if kernel else 'a matrix of scores'}")


def test_a_step_that_a_graph_cannot_hold_leaves_the_device_as_it_was():
    device = torch.device(devices.device().torch_name)
    if not accelerator.has_graphs(device):
        pytest.skip("no graphs on this device")
    stream = torch.cuda.current_stream(device)
    numbers = torch.zeros(4, device=device)
    with pytest.raises(RuntimeError, match="captur"):
        accelerator.graph_capture(device)(lambda: float(numbers.sum()))
    assert torch.cuda.current_stream(device) == stream
    torch.cuda.empty_cache()
    replay = accelerator.graph_capture(device)(lambda: numbers.add_(1))
    replay()
    assert numbers.tolist() == [3.0] * 4  # two steps before, and the replay


@pytest.mark.gpu(packages=["liger_kernel"])
@pytest.mark.parametrize("backend", ["torch", "fsdp"])
@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_a_policy_with_ligers_kernels_learns_as_one_without(tmp_path, dtype, backend):
    if devices.kind() is not DeviceKind.CUDA:
        pytest.skip("Liger's kernels need a GPU")
    folder = tiny_model(tmp_path / "model", seed=1, hidden=128, layers=4, heads=4, kv_heads=2)

    def learn(liger):
        trainer = build_trainer(
            devices.device(),
            Rank(),
            model=ModelConfig(path=str(folder), dtype=dtype),
            trainer=TrainerConfig(lr=1e-4, backend=backend, liger=liger),
            rollout=RolloutConfig(),
        )
        rows = random_rows([(30, 98), (1, 60), (20, 110)])
        scored = trainer.logprobs(rows).logprobs
        batch = TrainBatch(
            rows=rows, old_logprobs=scored, rollout_logprobs=scored, advantages=signs(rows)
        )
        metrics = trainer.update([batch], partial(ppo_clip, clip_low=0.2, clip_high=0.2))
        return trainer.logprobs(rows).logprobs, metrics["grad_norm"]

    (plain, norm), (fused, same) = learn(False), learn(True)
    tolerance = 1e-3 if dtype is Dtype.float32 else 7e-2
    assert_close(fused, plain, atol=tolerance, rtol=0)
    assert same == pytest.approx(norm, rel=tolerance)
