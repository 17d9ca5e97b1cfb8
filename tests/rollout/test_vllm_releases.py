"""vllm-ascend and the vLLM that it goes with, where they differ from vLLM 0.32; stand-ins follow
their source.
"""

from types import SimpleNamespace

import pytest

from siirl_dask.config import Engine
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.devices import traits_of
from siirl_dask.errors import ConfigError
from siirl_dask.rollout import engine_spec
from siirl_dask.rollout.vllm_engine import installation
from tests.settings import rollout_config

NPU = Device("w", DeviceKind.NPU, 0, "card")


@pytest.fixture
def releases():
    pytest.importorskip(
        "vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it"
    )
    from siirl_dask.rollout.vllm_engine import process

    process.prepare()
    from siirl_dask.rollout.vllm_engine import releases

    return releases


def test_weights_are_loaded_by_the_runner_where_the_worker_has_no_method_for_it(releases):
    from vllm.config import VllmConfig

    loaded = []
    runner = SimpleNamespace(
        reload_weights=lambda weights_iterator: loaded.append(("runner", list(weights_iterator)))
    )
    of_ascend = SimpleNamespace(model_runner=runner, vllm_config=VllmConfig())
    releases.reload_weights(of_ascend, weights_iterator=iter("ab"))
    own = SimpleNamespace(
        reload_weights=lambda weights_iterator: loaded.append(("worker", list(weights_iterator)))
    )
    releases.reload_weights(own, weights_iterator=iter("c"))
    assert loaded == [("runner", ["a", "b"]), ("worker", ["c"])]


def test_a_sampler_that_was_built_without_the_mode_gets_it(releases):
    sampler = SimpleNamespace(
        logprobs_mode="raw_logprobs",
        topk_topp_sampler=SimpleNamespace(logprobs_mode="raw_logprobs"),
    )
    releases.use_logprobs_mode(
        SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler)), "processed_logits"
    )
    assert (sampler.logprobs_mode, sampler.topk_topp_sampler.logprobs_mode) == (
        "processed_logits",
    ) * 2


def test_a_scheduler_and_a_mapper_of_either_release_are_read(releases):
    old = SimpleNamespace(kv_cache_manager=SimpleNamespace(usage=0.25))
    assert releases.cache_usage(old) == 0.25
    assert releases.cache_usage(SimpleNamespace(get_kv_cache_usage=lambda: 0.5)) == 0.5
    renames, everything = object(), object()
    assert releases.renames_of(SimpleNamespace(get_rename_mapper=lambda: renames)) is renames
    assert releases.renames_of(everything) is everything


def test_on_an_npu_weights_keep_the_layout_in_which_they_are_loaded(releases):
    from siirl_dask.rollout.vllm_engine.process_groups import EngineRanks
    from siirl_dask.rollout.vllm_engine.settings import llm_arguments
    from tests.rollout.test_vllm_device import MODEL

    def arguments(device, **own):
        rollout = rollout_config(
            engine=Engine.vllm, engine_kwargs={"additional_config": own} if own else {}
        )
        return llm_arguments(MODEL, rollout, device, EngineRanks(Rank(), 1)).get(
            "additional_config"
        )

    assert arguments(NPU) == {"weight_nz_mode": 0}
    assert arguments(NPU, weight_nz_mode=0, enable_cpu_binding=True) == {
        "weight_nz_mode": 0,
        "enable_cpu_binding": True,
    }
    assert arguments(Device("w")) is None
    with pytest.raises(
        ConfigError, match=r"additional_config: weight_nz_mode=1: new weights need .*leave it out"
    ):
        arguments(NPU, weight_nz_mode=1)


def test_ranks_meet_by_the_backend_of_their_devices_and_not_by_what_vllms_platform_says(
    releases, monkeypatch
):
    from siirl_dask.rollout.vllm_engine import engine

    joined = []
    made = object.__new__(engine.VllmEngine)
    made._world, made._on_cpu = engine.EngineWorld(), False
    made._ranks = SimpleNamespace(join=joined.append, host="127.0.0.1")
    monkeypatch.setattr(engine, "_build", lambda path, settings, note: None)
    for kind in DeviceKind:
        made._start(SimpleNamespace(path="model"), {}, "", kind)
    assert joined == ["gloo", "nccl", "hccl"]


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        (
            {"vllm": "0.32.0", "vllm-ascend": "0.23.0"},
            r"vllm 0\.32\.0 and vllm-ascend 0\.23\.0 do not go together",
        ),
        ({"vllm": "0.23.0+empty", "vllm-ascend": "0.23.0.post1"}, None),
        ({"vllm": "0.32.0"}, None),
    ],
)
def test_a_plugin_of_vllm_of_another_release_is_refused(monkeypatch, installed, said):
    def version(package):
        if package not in installed:
            raise installation.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(installation, "version", version)
    monkeypatch.setattr(installation, "find_spec", lambda name: name)
    assert traits_of(DeviceKind.NPU).vllm == "vllm-ascend"
    if said is None:
        assert engine_spec(Engine.auto).name == Engine.vllm
        return
    with pytest.raises(ConfigError, match=said):
        engine_spec(Engine.auto)
    with pytest.raises(ConfigError, match=said):
        engine_spec(Engine.vllm).installation.check()
    engine_spec(Engine.transformers).installation.check()
