"""Checks with MindSpeed and NPUs that are stood in for, each in a process of its own, which
MindSpeed patches.

``tests/devices/test_mindspeed.py`` runs them: ``python tests/fake_mindspeed/mindspeed_checks.py
CHECK MODEL``. It has learned on a CPU what they compare with.
"""

import sys
from functools import partial
from pathlib import Path

import torch

from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import Backend, Dtype, ModelConfig
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.devices import accelerator
from siirl_dask.errors import ConfigError
from siirl_dask.testing.rows import LENGTHS, random_rows, signs
from siirl_dask.training import TrainBatch, build_critic, build_reference, build_trainer
from tests.settings import rollout_config, trainer_config

NPU = Device("w0", DeviceKind.NPU, 0, "h/npu0")
ALL = dict.fromkeys(("rotary", "rms_norm", "swiglu", "attention"), "mindspeed")
OF_MODEL = {
    "transformer_impl": "local",
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
}
FUSED = ("npu_rotary_mul", "npu_rms_norm", "npu_swiglu", "npu_fusion_attention", "npu_apply_adam_w")


def build(make, folder, device, operators, dtype=Dtype.float32, **options):
    trainer = trainer_config(lr=1e-4, backend=Backend.megatron, operators=operators)
    return make(
        device, Rank(), model=ModelConfig(path=str(folder), dtype=dtype), trainer=trainer, **options
    )


def learned(folder, device, operators):
    """Scores before and after two updates, what they told, and the scores of a reference and a
    critic.
    """
    rows = random_rows(LENGTHS, range(len(LENGTHS)))
    policy = build(build_trainer, folder, device, operators, rollout=rollout_config())
    before = policy.logprobs(rows).logprobs
    batch = TrainBatch(
        rows=rows, old_logprobs=before, advantages=signs(rows), rollout_logprobs=before
    )
    told = [
        policy.update([batch], partial(ppo_clip, clip_low=0.2, clip_high=0.2)) for _ in range(2)
    ]
    reference = build(build_reference, folder, device, operators, rollout=rollout_config())
    critic = build(build_critic, folder, device, operators)
    scores = [
        before,
        policy.logprobs(rows).logprobs,
        reference.logprobs(rows).logprobs,
        critic.values(rows),
    ]
    return {"scores": scores, "told": [[each["loss"], each["grad_norm"]] for each in told]}


def equal(folder, device, operators):
    """Compare with what a process without MindSpeed has learned on a CPU; return the operators
    that were called.
    """
    import torch_npu  # in the processes that have one

    torch_npu.calls.clear()
    seen, expected = (
        learned(folder, device, operators),
        torch.load(Path(folder).with_name("expected.pt")),
    )
    for one, other in zip(seen["scores"], expected["scores"], strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.tensor(seen["told"]), torch.tensor(expected["told"]), atol=1e-5, rtol=1e-5
    )
    return {name for name in FUSED if torch_npu.calls[name]}


def learns_in_bfloat16(folder):
    """Learn in the type that ``model.dtype=auto`` takes on NPUs; the norm's kernel takes one
    type.
    """
    rows = random_rows(LENGTHS, range(len(LENGTHS)))
    policy = build(build_trainer, folder, NPU, ALL, Dtype.auto, rollout=rollout_config())
    before = policy.logprobs(rows).logprobs
    exact = torch.load(Path(folder).with_name("expected.pt"))["scores"][0]
    assert not torch.equal(before.cpu(), exact), "it computes in float32"
    torch.testing.assert_close(before.cpu(), exact, atol=7e-2, rtol=0)
    batch = TrainBatch(
        rows=rows, old_logprobs=before, advantages=signs(rows), rollout_logprobs=before
    )
    policy.update([batch], partial(ppo_clip, clip_low=0.2, clip_high=0.2))
    weights = policy.state()["model"]
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert not torch.equal(policy.logprobs(rows).logprobs, before), "an update changes nothing"


def refused(folder, operators):
    try:
        build(build_critic, folder, NPU, operators)
    except ConfigError as error:
        return str(error)
    raise AssertionError("not refused")


def npu_without_mindspeed(folder):
    assert equal(folder, NPU, {}) == {"npu_fusion_attention", "npu_apply_adam_w"}
    assert not any(name.startswith("mindspeed") for name in sys.modules)
    assert "which this process has imported already" in refused(folder, ALL)
    stage = build(build_critic, folder, NPU, {})._replica.stage
    config, layer = stage.config, stage.layers()[0]
    assert layer.mlp.linear_fc1.weight.shape[0] == 2 * config.ffn_hidden_size, (
        "FFN merge: gate and up are one matrix"
    )


def npu_with_everything(folder):
    sys.argv += ["--own-argument", "7"]
    assert equal(folder, NPU, ALL) == {*FUSED}
    assert sys.argv[-2:] == ["--own-argument", "7"]
    learns_in_bfloat16(folder)
    from mindspeed import megatron_adaptor

    assert not megatron_adaptor.TOO_LATE, "it is imported before megatron-core"
    flags = {"use_fused_rotary_pos_emb": True, "use_fused_rmsnorm": True, "use_fused_swiglu": True}
    flags |= {"use_flash_attn": True, "sparse_mode": 2}
    assert megatron_adaptor.repatched == [OF_MODEL | flags], (
        "once, for a policy, a reference and a critic"
    )
    assert accelerator.visible_devices().kind == "npu", "whatever torch.cuda says"


def npu_with_norms_alone(folder):
    given = {"rms_norm": "mindspeed", "attention": "torch", "adamw": "torch"}
    assert equal(folder, NPU, given) == {"npu_rms_norm"}
    from mindspeed import megatron_adaptor

    flags = {
        "use_fused_rotary_pos_emb": False,
        "use_fused_rmsnorm": True,
        "use_fused_swiglu": False,
    }
    flags |= {"use_flash_attn": False, "sparse_mode": 0}
    assert megatron_adaptor.repatched == [OF_MODEL | flags]
    said = refused(folder, {"rms_norm": "mindspeed", "swiglu": "mindspeed"})
    assert (
        "{'use_fused_swiglu': True}, and has patched it for another role with {'use_fused_swiglu': "
        "False}" in said
    )
    assert "cluster.placement" in said
    assert "another role of this process has it" in refused(folder, {})
    assert len(megatron_adaptor.repatched) == 1


if __name__ == "__main__":
    check, model = sys.argv[1:]
    del sys.argv[1:]
    globals()[check](model)
