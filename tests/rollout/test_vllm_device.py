"""Tests of how vLLM is called on an accelerator, without one: a stand-in for ``vllm.LLM``
records the calls.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM
from vllm.config import LoadConfig
from vllm.device_allocator import cumem
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec

from siirl_dask.config import Dtype, Engine, LoraConfig, ModelConfig
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.devices.accelerator import VisibleDevices
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.models.routing import Routing
from siirl_dask.models.shapes import INDEX
from siirl_dask.rollout import GenerationRequest, LocalQueue, Sampling
from siirl_dask.rollout.vllm_engine import process as vllm_process
from siirl_dask.rollout.vllm_engine import process_groups
from siirl_dask.rollout.vllm_engine.engine import VllmEngine
from siirl_dask.rollout.vllm_engine.mends import free_while_asleep
from siirl_dask.rollout.vllm_engine.process_groups import EngineRanks
from siirl_dask.rollout.vllm_engine.routes import VllmRoutes
from siirl_dask.rollout.vllm_engine.settings import llm_arguments
from siirl_dask.rollout.vllm_engine.sleeping import VllmSleep, loose_tensors
from siirl_dask.tasks.tiny_model import tiny_model
from tests.settings import rollout_config

MODEL = ModelConfig(path="model", dtype=Dtype.bfloat16)


def settings_on(device, **rollout):
    return llm_arguments(
        MODEL, rollout_config(engine=Engine.vllm, **rollout), device, EngineRanks(Rank(), 1)
    )


@pytest.mark.parametrize("kind", [DeviceKind.CUDA, DeviceKind.NPU])
def test_an_accelerator_allows_sleep_graphs_and_a_share_of_memory(kind):
    alone = settings_on(Device("w", kind, 0, "card"))
    assert (alone["dtype"], alone["enable_sleep_mode"], alone["enforce_eager"]) == (
        "bfloat16",
        True,
        False,
    )
    assert (alone["gpu_memory_utilization"], alone["kv_cache_memory_bytes"]) == (0.9, None)
    assert "distributed_executor_backend" not in alone
    shared = settings_on(Device("w", kind, 0, "card", 4), gpu_memory_utilization=0.8, sleep_level=0)
    assert (shared["gpu_memory_utilization"], shared["enable_sleep_mode"]) == (0.2, False)
    planned = Device("w", kind, 0, "card", 1, 80 * 10**9, room=50 * 10**9, fill=30 * 10**9)
    derived = settings_on(planned)
    assert (derived["gpu_memory_utilization"], derived["kv_cache_memory_bytes"]) == (0.625, None), (
        "vLLM measures"
    )
    assert settings_on(planned, gpu_memory_utilization=0.3)["gpu_memory_utilization"] == 0.3
    half = settings_on(replace(planned, shared_by=2))
    assert (half["gpu_memory_utilization"], half["kv_cache_memory_bytes"]) == (0.625, 30 * 10**9)
    assert (
        settings_on(replace(planned, shared_by=2), kv_cache_memory="1GiB")["kv_cache_memory_bytes"]
        == 2**30
    )


def test_vllm_reads_transformers_files_where_those_of_mistrals_library_are_as_well(tmp_path):
    """They may be of another model, as beside weights that were trained on."""
    shard = "model-00001-of-00001.safetensors"
    for name in (shard, "consolidated.safetensors"):
        save_file({"a": torch.ones(1)}, tmp_path / name)
    index = {"metadata": {}, "weight_map": {"a": shard}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / "params.json").write_text("{}")
    given = settings_on(Device("w"))
    loader = DefaultModelLoader(LoadConfig(load_format=given["load_format"]))
    _, files, *_ = loader._prepare_weights(str(tmp_path), None, None, True, None)
    assert [Path(file).name for file in files] == [shard]
    assert given["config_format"] == "hf"


def test_a_cpu_allows_neither_sleep_nor_graphs():
    given = settings_on(Device("w"))
    assert (given["enable_sleep_mode"], given["enforce_eager"], given["kv_cache_memory_bytes"]) == (
        False,
        True,
        2**30,
    )


def test_a_single_rank_runs_on_a_device_other_than_the_first():
    executor = settings_on(Device("w", DeviceKind.CUDA, 3, "card"))["distributed_executor_backend"]
    assert issubclass(executor, UniProcExecutor)
    made = executor.__new__(executor)
    made.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device="cuda"))
    method, rank, local_rank = made._distributed_args()
    assert (rank, local_rank) == (0, 3)
    assert method.partition(":")[0] == UniProcExecutor._distributed_args(made)[0].partition(":")[0]
    assert method != made._distributed_args()[0], "two engines of a machine would meet in one place"


@pytest.mark.parametrize(
    ("cards", "pci"), [(("a", "a"), ("", "")), (("MIG-a", "MIG-b"), ("h/3b", "h/3b"))]
)
def test_an_engine_of_two_ranks_is_refused_on_one_gpu_and_on_two_slices_of_one(
    monkeypatch, cards, pci
):
    ranks = EngineRanks(Rank(), 1)
    ranks.size = 2
    devices = [
        Device("w", DeviceKind.CUDA, 0, card, pci=at) for card, at in zip(cards, pci, strict=True)
    ]
    monkeypatch.setattr(ranks, "gather", lambda own: [own, devices[1].gpu.encode()])
    with pytest.raises(ConfigError, match="two workers of an engine share the device"):
        ranks.check_devices(devices[0])
    monkeypatch.setattr(ranks, "gather", lambda own: [own, b"another"])
    ranks.check_devices(devices[0])


def engine_of_two(monkeypatch, seen, other_answers=b"sees them"):
    """Return the arguments of rank 0 of an engine on the cards a and b, whose process sees ``seen``."""
    ranks = EngineRanks(Rank(), 1)
    ranks.size = 2
    own = Device("w", DeviceKind.CUDA, 0, "a")
    answers = iter([b"b", b"b", other_answers])
    monkeypatch.setattr(ranks, "gather", lambda message: [message, next(answers)])
    monkeypatch.setattr(
        process_groups, "visible_devices", lambda: VisibleDevices(DeviceKind.CUDA, seen)
    )
    ranks.check_devices(own)
    return partial(llm_arguments, MODEL, device=own, ranks=ranks)


@pytest.mark.parametrize(
    ("seen", "other_answers", "disabled"),
    [
        (("a", "b", "c"), b"sees them", None),
        (("a",), b"sees them", True),
        (("a", "b"), b"", True),
    ],
)
def test_ranks_that_do_not_see_each_others_devices_sum_by_nccl(
    monkeypatch, seen, other_answers, disabled
):
    """vLLM's custom all-reduce asks whether the first t visible devices reach each other
    (``_can_p2p`` in custom_all_reduce.py), and fails with IndexError where a launcher shows each
    worker its own device alone.
    """
    arguments = engine_of_two(monkeypatch, seen, other_answers)
    rollout = rollout_config(engine=Engine.vllm, tensor_parallel_size=2)
    assert arguments(rollout).get("disable_custom_all_reduce") is disabled
    given = rollout_config(
        engine=Engine.vllm,
        tensor_parallel_size=2,
        engine_kwargs={"disable_custom_all_reduce": False},
    )
    assert arguments(given)["disable_custom_all_reduce"] is False


def test_random_states_of_the_workers_own_device_alone_are_restored(monkeypatch):
    """torch's ``fork_rng`` takes all devices by default, and warns of more than one at length."""
    taken = []
    eight = SimpleNamespace(
        device_count=lambda: 8,
        get_rng_state=taken.append,
        set_rng_state=lambda state, device: taken.append(device),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: eight)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with vllm_process.untouched():
            assert taken == [3]
    assert taken == [3, 3]


class Recorder:
    """A stand-in for ``vllm.LLM``."""

    def __init__(self):
        core = SimpleNamespace(shutdown=lambda: None)
        self.calls = []
        self.holds_blocks = False
        """Whether keys and values cannot be forgotten."""
        self.llm_engine = SimpleNamespace(
            engine_core=core,
            model_config=SimpleNamespace(max_model_len=64),
            reset_encoder_cache=lambda: self.calls.append("forget images"),
        )

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags=None):
        self.calls.append(f"wake {' '.join(tags) if tags else 'all'}")

    def collective_rpc(self, method, kwargs):
        self.calls.append(f"{method.__name__} of {len(list(kwargs['weights_iterator']))}")

    def reset_prefix_cache(self):
        self.calls.append("forget prefixes")
        return not self.holds_blocks

    def apply_model(self, function):
        return [function(torch.nn.Module())]


class Recorded(VllmEngine):
    def _start(self, model, settings, given, kind):
        return Recorder()

    def calls(self):
        """Return the calls since the last time, and forget them."""
        said, self._llm.calls = self._llm.calls, []
        return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("vllm") / "model")


def recorded(folder, kind=DeviceKind.CUDA, **rollout):
    model = ModelConfig(path=str(folder), dtype=Dtype.float32)
    engine = Recorded(model, rollout_config(engine=Engine.vllm, **rollout), Device("w", kind))
    weights = load_file(folder / "model.safetensors")
    reload = [f"reload_weights of {len(weights)}", "forget prefixes"]
    return engine, weights, reload


def test_features_of_images_that_older_weights_have_made_are_forgotten(folder):
    engine, weights, reload = recorded(folder)
    engine.processor = object()  # as of an engine whose prompts may show images
    engine.load_weights(weights.items(), 1)
    assert engine.calls() == [*reload, "forget images"]


def test_keys_of_older_weights_that_stay_end_the_use_of_the_engine(folder):
    """vLLM would answer later prompts from them."""
    engine, weights, _ = recorded(folder)
    engine._llm.holds_blocks = True
    with pytest.raises(RunError, match="keeps keys and values"):
        engine.load_weights(weights.items(), 1)
    with pytest.raises(RunError, match="cannot be used any more"):
        engine.load_weights(weights.items(), 2)


def generate(engine):
    engine.generate([], [], Sampling(max_tokens=1))
    return engine.calls()


def test_the_recorder_has_the_methods_that_vllm_has():
    names = ("sleep", "wake_up", "collective_rpc", "reset_prefix_cache", "apply_model")
    assert all(hasattr(LLM, name) for name in names)


def test_a_kernel_that_chooses_experts_itself_is_refused_by_the_settings_that_help():
    """vLLM has such for the newest GPUs, and raises a ValueError that names no setting."""
    mixture = MoERunner.__new__(MoERunner)
    torch.nn.Module.__init__(mixture)
    mixture.layer_name = "model.layers.0.mlp.experts"
    kernel = SimpleNamespace(is_monolithic=True)
    mixture.routed_experts = SimpleNamespace(quant_method=kernel)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], num_blocks=2)
    runner = SimpleNamespace(
        kv_cache_config=cache,
        vllm_config=SimpleNamespace(kv_transfer_config=None),
        model=torch.nn.Sequential(mixture),
    )
    worker = SimpleNamespace(model_runner=runner)
    llm = SimpleNamespace(collective_rpc=lambda attach: attach(worker))
    with pytest.raises(ConfigError, match=r"router_replay=true: .* kernel .*moe_backend=triton"):
        VllmRoutes(llm, Routing(layers=(0,), experts=4, chosen=2))


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_no_others_follow_are_kept_whatever_was_loaded_before(folder, level):
    engine, weights, _ = recorded(folder, sleep_level=level)
    for version in (None, 1):
        if version:
            engine.load_weights(weights.items(), version)
            engine.calls()
        engine.sleep()
        assert engine.calls() == ["sleep 1"]
        assert generate(engine) == ["wake all"]
        assert generate(engine) == []


@pytest.mark.parametrize("level", [1, 2])
def test_weights_wake_to_be_loaded_and_the_cache_to_generate(folder, level):
    """The trainer gives its weights while it still holds them: a cache that fills the rest would
    not fit beside it.
    """
    engine, weights, reload = recorded(folder, sleep_level=level)
    for version in (1, 2):  # also before any were loaded
        engine.sleep(weights_follow=True)
        engine.sleep(weights_follow=True)
        engine.sleep()
        assert engine.calls() == [f"sleep {level}"]
        engine.load_weights(weights.items(), version)
        assert engine.calls() == ["wake weights", *reload]
        assert generate(engine) == ["wake kv_cache"]
        assert generate(engine) == []


def test_it_sleeps_again_between_a_load_and_the_next_generation(folder):
    engine, weights, _ = recorded(folder)
    engine.sleep(weights_follow=True)
    engine.load_weights(weights.items(), 1)
    engine.calls()
    engine.sleep()
    assert engine.calls() == ["sleep 1"]
    assert generate(engine) == ["wake all"]


def test_freed_weights_are_never_sampled_from(folder):
    engine, weights, _ = recorded(folder)
    engine.sleep(weights_follow=True)
    with pytest.raises(
        RunError, match=r"let go of its weights .* or give rollout\.vllm\.sleep_level=1"
    ):
        generate(engine)
    engine.load_weights(weights.items(), 1)
    generate(engine)


def test_adapters_wake_the_weights_that_the_host_kept_and_are_named_in_each_request(
    folder, monkeypatch
):
    """Nobody loads the folder's weights again where adapters alone come: at level 2 they would
    be lost.
    """
    model, put = ModelConfig(path=str(folder), dtype=Dtype.bfloat16), []
    rollout = rollout_config(engine=Engine.vllm)
    engine = Recorded(
        model, rollout, Device("w", DeviceKind.CUDA), lora=LoraConfig(rank=2, alpha=4)
    )
    where = "siirl_dask.rollout.vllm_engine.adapter_layers.put_adapters"
    monkeypatch.setattr(where, lambda model, **given: put.append(given))
    engine._llm.llm_engine.add_request = lambda *args, lora_request: put.append(lora_request)
    name, shape = next(
        (name, shape) for name, shape in engine._parameters.shapes.items() if "q_proj" in name
    )
    layer = name.removesuffix(".weight")
    adapters = {
        f"{layer}.lora_A.weight": torch.ones(2, shape[1]),
        f"{layer}.lora_B.weight": torch.ones(shape[0], 2),
    }
    queue = LocalQueue([GenerationRequest([1], 0, Sampling(max_tokens=1))] * 2)
    engine._admit(LocalQueue([GenerationRequest([1], 0, Sampling(max_tokens=1))]), {})
    engine.sleep(weights_follow=True)
    engine.load_adapters(adapters.items(), 2.0, 1)
    engine._admit(queue, {})
    assert engine.calls() == ["sleep 1", "wake weights", "forget prefixes"]
    before, (given), *after = put
    assert before is None
    assert (list(given["adapters"]), given["scaling"]) == ([name], 2.0)
    assert [request.lora_int_id for request in after] == [1, 1]


class Forgetful:
    """vLLM, with a sleep of level 2 as an accelerator's allocator has it: what was in the
    model's memory is gone.
    """

    def __init__(self, llm):
        self._llm = llm
        self.apply_model = llm.apply_model

    def sleep(self, level):
        assert level == 2
        self._llm.apply_model(forget)

    def wake_up(self, tags=None):
        pass


def forget(model):
    with torch.inference_mode():
        for tensor in (*model.parameters(), *loose_tensors(model)):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def test_new_weights_after_level_2_bring_back_everything_that_a_model_needs(folder):
    """No weights have anything of buffers such as rotary embeddings, nor of tensors that are
    plain attributes.
    """
    rows, sampling = ([[1, 2], [3, 4, 5]], [1, 2]), Sampling(max_tokens=6)
    rollout = rollout_config(engine=Engine.vllm, max_rows=4, kv_cache_memory="64MiB")
    engine = VllmEngine(ModelConfig(path=str(folder)), rollout, Device("w"))
    try:
        before = engine.generate(*rows, sampling)
        engine._sleep = VllmSleep(Forgetful(engine._llm), 2, Device("w", DeviceKind.CUDA))
        assert len(list(engine._llm.apply_model(lambda model: list(loose_tensors(model)))[0])) > 0
        engine.sleep(weights_follow=True)
        engine.load_weights(load_file(folder / "model.safetensors").items(), 1)
        assert engine.generate(*rows, sampling) == before
    finally:
        engine.close()


class Driver:
    """Memory that is mapped or not, with vLLM's functions for it in cumem_allocator.cpp: one that
    the driver refuses leaves an error there, with which nothing is allocated any more.
    """

    def __init__(self):
        self.mapped = set()
        self.error = False

    def create_and_map(self, handle):
        self.mapped.add(handle)

    def free(self, allocator, pointer):
        handle = allocator.python_free_callback(pointer)
        if handle in self.mapped:
            self.mapped.remove(handle)
        else:
            self.error = True


def test_an_engine_that_is_closed_while_it_sleeps_leaves_vllms_allocator_without_an_error(
    monkeypatch,
):
    """A run ends while engines sleep; the next one in the process builds another engine."""
    driver = Driver()
    allocator = cumem.CuMemAllocator()
    monkeypatch.setattr(cumem, "cumem_available", True)
    monkeypatch.setattr(cumem, "create_and_map", driver.create_and_map)
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", lambda: allocator)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for _ in range(2):  # each engine asks for it
        free_while_asleep()
    for pointer in (1, 2):
        handle = (0, 2**21, pointer, 0)
        allocator.python_malloc_callback(handle)
        driver.create_and_map(handle)
    driver.mapped.clear()
    for data in allocator.pointer_to_data.values():
        data.is_asleep = True
    handle = (0, 2**21, 3, 0)
    allocator.python_malloc_callback(handle)
    driver.create_and_map(handle)
    for pointer in (1, 3, 2):
        driver.free(allocator, pointer)
    assert not driver.error
    assert (driver.mapped, allocator.pointer_to_data) == (set(), {})


@pytest.mark.parametrize(("kind", "level"), [(DeviceKind.CUDA, 0), (DeviceKind.CPU, 2)])
def test_it_stays_awake_on_a_cpu_and_at_level_0(folder, kind, level):
    engine, weights, reload = recorded(folder, kind, sleep_level=level)
    engine.sleep()
    assert engine.calls() == generate(engine) == []
    if kind is not DeviceKind.CPU:  # there it packs the head anew as well
        engine.load_weights(weights.items(), 1)
        engine.sleep(weights_follow=True)
        assert engine.calls() == reload
