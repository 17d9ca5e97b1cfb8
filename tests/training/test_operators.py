"""The table of fused operators: what is chosen by device, what a configuration may say, and
references in torch.
"""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from siirl_dask.commands.plan import describe_run
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.config.megatron import MEGATRON_OPERATORS
from siirl_dask.devices.operators import OPERATORS, choose_operators
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.training import layouts
from siirl_dask.training.model import operators
from siirl_dask.training.model.liger import is_feed_forward, is_norm
from tests.settings import digits_overrides, trainer_config


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_references_compute_what_the_models_own_layers_do(tmp_path, family):
    """So what is held to a reference is held to transformers."""
    folder, called = tiny_model(tmp_path / "model", family=family, layers=2), []
    plain, ours = (AutoModelForCausalLM.from_pretrained(folder) for _ in "ab")

    def counted(*given):
        called.append("rotary")
        return operators.rotary(*given)

    for module in ours.modules():
        if is_norm(module):
            module.forward = lambda hidden, own=module: operators.rms_norm(
                hidden, own.weight, own.variance_epsilon
            )
        elif is_feed_forward(module):
            module.forward = lambda hidden, own=module: own.down_proj(
                operators.swiglu(own.gate_proj(hidden), own.up_proj(hidden))
            )
        elif (forward := operators.rotating(module, counted)) is not None:
            module.forward = forward
    tokens = torch.arange(12)[None] * 7
    outputs = [model(tokens, use_cache=False).logits for model in (plain, ours)]
    assert_close(*outputs)
    for output in outputs:
        output.logsumexp(-1).sum().backward()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)
    assert len(called) == 4, "queries and keys of each layer, and of no other model"


def test_a_device_has_its_own_library_unless_another_is_given():
    assert set(choose_operators({}, "cpu", liger=False).values()) == {"torch"}
    assert set(choose_operators({}, "npu", liger=False).values()) == {"torch_npu"}
    on_gpu = choose_operators({"swiglu": "liger"}, "cuda", liger=False)
    assert on_gpu == {**dict.fromkeys(OPERATORS, "torch"), "attention": "auto", "swiglu": "liger"}
    assert choose_operators({}, "cuda", liger=True)["rms_norm"] == "liger"
    assert choose_operators({"swiglu": "torch"}, "cuda", liger="auto") == {
        **dict.fromkeys(OPERATORS, "torch"),
        "attention": "auto",
        "rms_norm": "auto",
    }
    assert set(choose_operators({}, "cpu", liger="auto").values()) == {"torch"}, (
        "numbers of CPUs stay as they are"
    )
    assert (
        "auto"
        not in choose_operators(
            {"attention": "torch"}, "cuda", liger="auto", libraries=MEGATRON_OPERATORS
        ).values()
    )
    assert choose_operators({"adamw": "torch"}, "npu", liger=False)["adamw"] == "torch"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"operators": {"rotery": "torch"}},
            r"trainer.operators.rotery: expected .*did you mean 'rotary'",
        ),
        (
            {"operators": {"rms_norm": "lige"}},
            r"operators.rms_norm=lige: expected one of torch, .*mean 'liger'",
        ),
        (
            {"operators": {"adamw": "liger"}},
            r"operators.adamw=liger: expected one of torch, torch_npu",
        ),
        (
            {"operators": {"swiglu": "torch"}, "liger": True},
            "trainer.liger=true, which stands for liger",
        ),
    ],
)
def test_names_that_are_unknown_or_contradict_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        trainer_config(**settings)


@pytest.mark.parametrize(
    ("installed", "overrides", "said"),
    [
        (
            False,
            [],
            r"trainer.operators.swiglu=torch_npu needs torch_npu: pip install 'siirl_dask\[npu\]'",
        ),
        (True, [], "runs on npu alone, and workers here have cpu"),
        (True, ["cluster.device_memory=64GB"], None),
    ],
)
def test_a_library_that_cannot_run_is_refused_before_anything_starts(
    monkeypatch, digits_task, tmp_path, installed, overrides, said
):
    monkeypatch.setattr(layouts, "find_spec", lambda name: object() if installed else None)

    def plan():
        own = overrides or ["cluster.device=cpu"]
        given = [
            *digits_overrides(digits_task, tmp_path / "run"),
            "trainer.operators.swiglu=torch_npu",
            *own,
        ]
        file = load_config_file(shipped("quickstart.yaml"), given)
        return describe_run(file.config, *dags(file))

    if said is None:
        assert "== memory ==" in plan()
    else:
        with pytest.raises(ConfigError, match=said):
            plan()
