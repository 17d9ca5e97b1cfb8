"""Checks on NPUs that are stood in for: ``tests/devices/test_fake_npu.py`` runs them, with the
plug-in.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch_npu

from siirl_dask.algorithms import ppo_clip
from siirl_dask.collectives import BACKENDS, backends
from siirl_dask.config import ModelConfig, ProfileLevel
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.devices import accelerator, fused
from siirl_dask.devices.operators import OPERATORS
from siirl_dask.devices.profiler import make_profiler
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.rows import LENGTHS, random_rows, signs
from siirl_dask.training import TrainBatch, build_critic, build_reference, build_trainer
from siirl_dask.training.model import operators
from siirl_dask.training.model.attention import packed_attention
from siirl_dask.training.optimizer import Optimizer
from siirl_dask.training.packing import Packing
from siirl_dask.worker.hardware.devices import assign, bind
from tests.settings import rollout_config, trainer_config

CPU, NPU = Device("w0"), Device("w0", DeviceKind.NPU, 0, "h/npu0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "model", seed=1)


@pytest.fixture
def counted():
    torch_npu.calls.clear()
    return torch_npu.calls


def test_workers_see_npus_take_one_each_and_bind_it(monkeypatch, counted):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "6,7")
    visible = accelerator.visible_devices()
    assert (visible.kind, [card.rpartition("/")[2] for card in visible.cards]) == (
        "npu",
        ["npu6", "npu7"],
    )
    assert set(visible.memory) == {64 * 2**30}
    first, second = assign({"a": visible, "b": visible}).values()
    assert (first.torch_name, second.torch_name) == ("npu:0", "npu:1")
    bind(second)
    assert torch.empty(1, device="npu").device == torch.device("npu", 1)
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert {"gloo", "hccl"} <= {*backends()}
    assert BACKENDS[DeviceKind.NPU] == "hccl"
    bind(first)
    assert counted["set_device"] == 2


def test_memory_is_told_and_freed_and_waited_for(counted):
    before = accelerator.allocated_bytes(DeviceKind.NPU, 0)
    held = torch.zeros(1000, device="npu:0")
    assert accelerator.allocated_bytes(DeviceKind.NPU, 0) - before == 4000
    free, total = accelerator.free_and_total(DeviceKind.NPU, 0)
    assert 4000 <= total - free < total == 64 * 2**30
    accelerator.free_cache("npu")
    accelerator.synchronize(held.device)
    assert (counted["empty_cache"], counted["synchronize"]) == (1, 1)
    assert accelerator.compute_capability(held.device) is None
    assert accelerator.name_of("npu", 0) == "Ascend910B2"


def test_what_an_npu_refuses_is_refused():
    one = torch.ones(2, 2, device="npu:0")
    for wrong in (lambda: one + torch.ones(2, 2), lambda: one + torch.ones(2, 2, device="npu:1")):
        with pytest.raises(RuntimeError, match="same device"):
            wrong()
    with pytest.raises(RuntimeError, match="DT_DOUBLE"):
        one.double() @ one.double()
    with pytest.raises(TypeError, match="npu"):
        one.numpy()
    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(one)
        for wrong, said in {
            one.double(): "float64",
            one.to(torch.uint8): "uint8",
            torch.ones(2): "device type cpu",
        }.items():
            with pytest.raises(RuntimeError, match=said):
                dist.all_reduce(wrong)
    finally:
        dist.destroy_process_group()


def learned(device, folder, dtype="float32"):
    """Scores before and after two updates, what they told, and the scores of a reference and a
    critic.
    """
    rows = random_rows(LENGTHS, range(len(LENGTHS)))
    model, trainer = ModelConfig(path=str(folder), dtype=dtype), trainer_config(lr=1e-4)
    policy = build_trainer(device, Rank(), model=model, trainer=trainer, rollout=rollout_config())
    before = policy.logprobs(rows).logprobs
    batch = TrainBatch(
        rows=rows, old_logprobs=before, advantages=signs(rows), rollout_logprobs=before
    )
    told = [
        policy.update([batch], partial(ppo_clip, clip_low=0.2, clip_high=0.2)) for _ in range(2)
    ]
    reference = build_reference(
        device, Rank(), model=model, trainer=trainer, rollout=rollout_config()
    )
    critic = build_critic(device, Rank(), model=model, trainer=trainer)
    scores = [
        before,
        policy.logprobs(rows).logprobs,
        reference.logprobs(rows).logprobs,
        critic.values(rows),
    ]
    return [each.cpu() for each in scores], [[each["loss"], each["grad_norm"]] for each in told]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_policies_references_and_critics_compute_as_on_a_cpu(folder, counted, dtype, bound):
    (on_cpu, told), (on_npu, also) = (learned(device, folder, dtype) for device in (CPU, NPU))
    for one, other in zip(on_cpu, on_npu, strict=True):
        torch.testing.assert_close(one, other, atol=bound, rtol=bound)
    torch.testing.assert_close(torch.tensor(told), torch.tensor(also), atol=bound, rtol=bound)
    fused = (
        "npu_rotary_mul",
        "npu_rms_norm",
        "npu_swiglu",
        "npu_fusion_attention",
        "npu_apply_adam_w",
    )
    assert all(counted[name] for name in fused), f"each is what an NPU takes: {counted}"


def test_its_own_profiler_writes_a_trace(tmp_path, counted):
    profiler = make_profiler(DeviceKind.NPU, ProfileLevel.memory)
    profiler.start()
    torch.ones(2, device="npu") + 1
    profiler.stop()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "aten::add" in (tmp_path / "trace.json").read_text()
    assert counted["profile.Level1"] == 1


def held(fused, reference, *shapes, dtype=torch.float32):
    """Compare an operator on the NPU with its reference on the CPU: what it computes, and its
    gradients.
    """
    numbers = torch.Generator().manual_seed(3)
    given = [torch.randn(shape, generator=numbers).to(dtype) for shape in shapes]
    results = []
    for device, compute in (("npu:0", fused), ("cpu", reference)):
        inputs = [each.to(device).requires_grad_() for each in given]
        output = compute(*inputs)
        (output.float() * torch.arange(output.shape[-1], device=device)).sum().backward()
        results.append([output.detach().cpu(), *(each.grad.cpu() for each in inputs)])
    for one, other in zip(*results, strict=True):
        bound = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(one, other, atol=bound * float(other.abs().max()), rtol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_norm_and_swiglu_are_held_to_their_references(dtype, counted):
    held(fused.rotary, operators.rotary, (1, 4, 6, 8), (1, 1, 6, 8), (1, 1, 6, 8), dtype=dtype)
    norms = (partial(norm, epsilon=1e-6) for norm in (fused.rms_norm, operators.rms_norm))
    held(*norms, (3, 5, 16), (16,), dtype=dtype)
    held(fused.swiglu, operators.swiglu, (3, 5, 16), (3, 5, 16), dtype=dtype)
    assert [counted[name] for name in ("npu_rotary_mul", "npu_rms_norm", "npu_swiglu")] == [1, 1, 1]


@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_rows_of_several_lengths_is_held_to_its_reference(window, counted):
    def attend(library, query, key, value):
        given = {
            "packing": Packing(((2, 3), (1, 7)), library=library),
            "scaling": 0.3,
            "sliding_window": window,
        }
        return packed_attention(torch.nn.Identity(), query, key, value, None, **given)[0]

    held(
        partial(attend, "torch_npu"),
        partial(attend, "torch"),
        (1, 4, 13, 8),
        (1, 2, 13, 8),
        (1, 2, 13, 8),
    )
    assert counted["npu_fusion_attention"] == 1


def test_adamw_is_held_to_torchs_step_by_step(counted):
    results = []
    for device in ("npu:0", "cpu"):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4).to(device))
        optimizer = Optimizer(
            {"weight": weight}, trainer_config(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95))
        )
        for step in range(4):
            optimizer.gradients.flat.copy_(torch.linspace(1, -2, 12) * (step + 1))
            optimizer.step()
        state = optimizer.state()["weight"]
        results.append([weight.detach().cpu(), *(each.cpu() for each in state.values())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-6)
    assert counted["npu_apply_adam_w"] == 4


def test_operators_are_said_once_and_given_ones_take_the_place_of_the_devices(
    folder, counted, caplog
):
    everything = dict.fromkeys(OPERATORS, "torch")
    operators._say.cache_clear()
    with caplog.at_level("INFO", "siirl_dask.training"):
        for given in ({}, {}, everything):
            trainer = trainer_config(operators=given)
            build_reference(
                NPU,
                Rank(),
                model=ModelConfig(path=str(folder)),
                trainer=trainer,
                rollout=rollout_config(),
            )
            taken = counted.pop("npu_rms_norm", 0)
            assert bool(taken) == (given == {})
    said = [record.message for record in caplog.records if record.message.startswith("operators: ")]
    assert len(said) == 2
    assert ", ".join(f"{name} by torch" for name in OPERATORS) in said[-1]
