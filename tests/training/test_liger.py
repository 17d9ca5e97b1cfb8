"""Liger's kernels in a model's modules. They need a GPU; functions that compute what they
document stand in.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from siirl_dask.commands.plan import describe_run
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.training import layouts
from siirl_dask.training.layouts import operators_of
from siirl_dask.training.model import liger, network
from siirl_dask.training.model.liger import settle, use_liger
from siirl_dask.training.parallel import backend
from tests.settings import digits_overrides, trainer_config
from tests.training.roles import critic, policy

GPU = SimpleNamespace(type="cuda")


@pytest.fixture
def calls(monkeypatch):
    """Let liger_kernel be installed; gives the names of its functions that were called."""
    found = []

    def liger_rms_norm(hidden, weight, eps, offset=0.0, casting_mode="llama", in_place=True):
        assert (offset, casting_mode, in_place) == (0.0, "llama", False)
        found.append("norm")
        wide = hidden.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(
            hidden.dtype
        )

    def liger_swiglu(gate, up):
        found.append("swiglu")
        return silu(gate) * up

    functions = ModuleType("liger_kernel.transformers.functional")
    functions.liger_rms_norm, functions.liger_swiglu = liger_rms_norm, liger_swiglu
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, functions.__name__, functions)
    return found


@pytest.mark.parametrize(("family", "norms"), [("llama", 2), ("qwen2", 2), ("qwen3", 4)])
def test_every_norm_and_feed_forward_layer_of_this_model_computes_with_them_and_of_no_other(
    tmp_path, calls, family, norms
):
    folder = tiny_model(tmp_path / "model", family=family, layers=3)
    plain, fused = (AutoModelForCausalLM.from_pretrained(folder) for _ in "ab")
    use_liger(fused.modules(), GPU)
    tokens = torch.arange(12)[None] * 7
    outputs = [model(tokens, use_cache=False).logits for model in (plain, fused)]
    assert_close(*outputs)
    assert calls.count("norm") == 3 * norms + 1, "norms of each layer, and the last one"
    assert calls.count("swiglu") == 3
    for output in outputs:
        output.logsumexp(-1).sum().backward()
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)
    before = len(calls)
    AutoModelForCausalLM.from_pretrained(folder)(tokens)
    assert len(calls) == before


def test_a_kernel_that_computes_something_else_is_refused(tmp_path, calls, monkeypatch):
    functions = sys.modules["liger_kernel.transformers.functional"]
    monkeypatch.setattr(
        network, "use_liger", lambda modules, device, operators: use_liger(modules, GPU, operators)
    )
    folder = tiny_model(tmp_path / "model")
    policy(folder, trainer_config(liger=True))
    critic(folder, trainer_config(liger=True))
    assert {"norm", "swiglu"} <= {*calls}
    monkeypatch.setattr(functions, "liger_swiglu", lambda gate, up: gate * up)
    with pytest.raises(ConfigError, match=r"rms_norm by liger, swiglu by liger .* are off by"):
        policy(folder, trainer_config(liger=True))


def left_open(modules):
    open_ones = {"rms_norm": "auto", "swiglu": "auto", "adamw": "torch"}
    return settle(open_ones, modules, torch.device("cpu"))


def test_without_a_setting_liger_is_taken_where_its_kernels_compute_and_learn_as_torch_does(
    tmp_path, calls, monkeypatch, caplog
):
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model"))
    monkeypatch.setattr(liger, "find_spec", lambda name: object())
    assert left_open(model.modules()) == {"rms_norm": "liger", "swiglu": "liger", "adamw": "torch"}
    functions = sys.modules["liger_kernel.transformers.functional"]
    monkeypatch.setattr(
        functions, "liger_swiglu", lambda gate, up: silu(gate) * up.detach() + up - up.detach()
    )
    by_torch = {"rms_norm": "torch", "swiglu": "torch", "adamw": "torch"}
    with caplog.at_level("INFO"):
        assert left_open(model.modules()) == by_torch, (
            "its values are right, and its gradients are not"
        )
        assert left_open(torch.nn.Linear(2, 2).modules()) == by_torch
        monkeypatch.setattr(liger, "find_spec", lambda name: None)
        assert left_open(model.modules()) == by_torch
    off, none, absent = caplog.messages
    assert "does not run: AssertionError: its numbers are off by" in off
    assert "no feed-forward layer like Llama's" in none
    assert "liger-kernel is not installed (pip install 'siirl_dask[liger]')" in absent


def test_a_policy_without_a_setting_computes_with_what_its_trial_chose(
    tmp_path, calls, monkeypatch
):
    """The trial of a GPU on this device: a policy's backend asks for the operators of its kind
    of device.
    """
    monkeypatch.setattr(
        backend, "operators_of", lambda trainer, kind: operators_of(trainer, "cuda")
    )
    monkeypatch.setattr(liger, "find_spec", lambda name: object())
    monkeypatch.setattr(
        network, "use_liger", lambda modules, device, operators: use_liger(modules, GPU, operators)
    )
    folder = tiny_model(tmp_path / "model")
    policy(folder, trainer_config())
    assert {"norm", "swiglu"} <= {*calls}
    calls.clear()
    policy(folder, trainer_config(liger=False))
    policy(folder, trainer_config(operators={"rms_norm": "torch", "swiglu": "torch"}))
    assert not calls
    assert (
        "auto"
        not in operators_of(
            trainer_config(compile=True, operators={"attention": "torch"}), "cuda"
        ).values()
    )


def test_a_worker_without_a_gpu_and_a_model_without_such_layers_are_refused_by_name(
    tmp_path, calls
):
    with pytest.raises(ConfigError, match="need a GPU; this worker has cpu"):
        policy(tiny_model(tmp_path / "model"), trainer_config(liger=True))
    with pytest.raises(ConfigError, match="no norm and no feed-forward layer like Llama's"):
        use_liger(torch.nn.Linear(2, 2).modules(), GPU)


def test_a_package_that_cannot_be_imported_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(
        ConfigError, match=r"cannot be imported: .*pip install 'siirl_dask\[liger\]'"
    ):
        use_liger([], GPU)


@pytest.mark.parametrize(
    ("installed", "overrides", "said"),
    [
        (
            False,
            [],
            r"role 'policy': trainer.liger=true needs liger-kernel: pip install "
            r"'siirl_dask\[liger\]'",
        ),
        (True, ["cluster.device=cpu"], "need a GPU, and cluster.device=cpu: leave one out"),
        (True, [], "need a GPU, and torch sees none on this machine"),
        (True, ["trainer.compile=true"], "both fuse the same operations"),
        (True, ["cluster.device_memory=80GB"], None),
        (True, ["cluster.address=tcp://10.0.0.1:8786"], None),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    monkeypatch, digits_task, tmp_path, installed, overrides, said
):
    monkeypatch.setattr(layouts, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def plan():
        given = [*digits_overrides(digits_task, tmp_path / "run"), "trainer.liger=true", *overrides]
        file = load_config_file(shipped("quickstart.yaml"), given)
        return describe_run(file.config, *dags(file))

    if said is None:
        assert "== memory ==" in plan()
    else:
        with pytest.raises(ConfigError, match=said):
            plan()
