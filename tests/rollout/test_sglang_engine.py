"""The engine of SGLang over ``tests/fake_sglang``, which stands in for SGLang: SGLang itself
runs in no test.
"""

import asyncio
import atexit
import importlib
import multiprocessing
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from siirl_dask.commands.plan import describe_run
from siirl_dask.config import (
    Config,
    Dtype,
    Engine,
    ImagesConfig,
    ModelConfig,
    RolloutConfig,
    Sampler,
    SglangConfig,
    VllmConfig,
)
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.rollout import FinishReason, GenerationRequest, LocalQueue, Sampling, build_engine
from siirl_dask.rollout.preflight import check_engine
from siirl_dask.rollout.sglang_engine.engine import SglangEngine
from siirl_dask.rollout.sglang_engine.requests import read_generation, sampling_params
from siirl_dask.rollout.sglang_engine.settings import server_arguments
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.testing.engines import EngineTests
from siirl_dask.testing.reference_model import PROMPTS, assert_agrees_with_trainer
from tests.conftest import Finished, digits_overrides

STAND_IN = str(Path(__file__).parents[1] / "fake_sglang")
DEVICE = Device("w0")
CARD = Device("w0", DeviceKind.CUDA, 1)
FOUR = Sampling(max_tokens=4)


@pytest.fixture(scope="module", autouse=True)
def sglang():
    """The stand-in, with an attention for CPUs that counts as deterministic; SGLang 0.5.23 has
    none.
    """
    before = asyncio.get_event_loop_policy()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_IN)
        arguments = importlib.import_module("sglang.srt.server_args")
        patch.setattr(
            arguments,
            "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
            [*arguments.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, "torch_native"],
        )
        yield arguments
    asyncio.set_event_loop_policy(before)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def rollout_of(**settings):
    return RolloutConfig(
        **{"engine": Engine.sglang, "sampler": Sampler.sglang, "max_rows": 50, **settings}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("sglang") / "model", seed=1)


@pytest.fixture
def build(folder):
    """Build engines, and close them."""
    built = []

    def make(device=DEVICE, **settings):
        given = {
            "model": ModelConfig(path=str(folder), dtype=Dtype.float32),
            "rollout": rollout_of(**settings),
        }
        built.append(build_engine(device, Rank(), **given))
        return built[-1]

    yield make
    for engine in built:
        engine.close()


class TestSglangEngine(EngineTests):
    takes_min_p = False

    @classmethod
    def make_engine(cls, folder: Path) -> SglangEngine:
        return SglangEngine(ModelConfig(path=str(folder)), rollout_of(), DEVICE)

    def test_logprobs_equal_the_trainers_before_and_after_updates(self, engine, folder):
        assert_agrees_with_trainer(engine, folder, after=(0, 1))

    def test_a_tied_head_may_arrive_under_either_name(self, engine, folder):
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
        before = engine.generate(PROMPTS, range(6), FOUR)
        engine.load_weights(weights.items(), 1)
        assert engine.generate(PROMPTS, range(6), FOUR) == before

    def test_weights_that_are_not_finite_are_not_sampled_from(self, engine, folder):
        weights = {
            name: weight * float("nan")
            for name, weight in load_file(folder / "model.safetensors").items()
        }
        engine.load_weights(weights.items(), 5)
        for temperature in (0.0, 1.0):
            with pytest.raises(RunError, match="version 5"):
                engine.generate([[1, 2]], [0], replace(FOUR, temperature=temperature))


# What it cannot do


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"sampler": Sampler.exact},
            r"engine=sglang with rollout\.sampler=exact: .*give rollout\.sampler=sglang",
        ),
        (
            {"sampler": Sampler.vllm},
            r"engine=sglang with rollout\.sampler=vllm: .*give rollout\.sampler=sglang",
        ),
        (
            {"tensor_parallel_size": 2},
            "with rollout.tensor_parallel_size=2: an SGLang engine is on one worker",
        ),
        (
            {"router_replay": True},
            "with rollout.router_replay=true: no routes are recorded in SGLang",
        ),
        ({"min_p": 0.1}, "with rollout.min_p=0.1: .*does not take it together with seeds"),
        (
            {"top_k": 1, "temperature": 0.5},
            "with rollout.top_k=1 and rollout.temperature=0.5: .*log-probs of temp",
        ),
        (
            {"vllm": VllmConfig(max_num_seqs=3)},
            "^rollout.vllm.max_num_seqs=3: only vLLM reads this, .*is sglang",
        ),
        (
            {"engine": Engine.auto},
            "sampler=sglang: it is part of SGLang, and rollout.engine is auto",
        ),
        (
            {"engine": Engine.vllm, "sampler": Sampler.exact, "sglang": SglangConfig(sleep=False)},
            "^rollout.sglang.sleep=False: only SGLang reads this, and rollout.engine is vllm",
        ),
    ],
)
def test_settings_that_sglang_cannot_do_are_refused_by_name(settings, text):
    with pytest.raises(ConfigError, match=text):
        rollout_of(**settings)


@pytest.mark.parametrize("share", [0, 1, 1.5])
def test_a_share_of_no_memory_or_of_all_is_refused(share):
    with pytest.raises(
        ConfigError,
        match=rf"sglang\.mem_fraction_static={share}: expected more than 0 and less than",
    ):
        SglangConfig(mem_fraction_static=share)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dtype": "half"}, r"engine_kwargs\.dtype: another key sets it"),
        ({"tp_size": 2}, r"engine_kwargs\.tp_size: another key sets it"),
        ({"dp_size": 2}, r"engine_kwargs\.dp_size: an SGLang engine is on one worker"),
        (
            {"preferred_sampling_params": {"top_k": 3}},
            r"preferred_sampling_params: requests have their own; leave it",
        ),
        ({"rl_on_policy_target": "fsdp"}, r"rl_on_policy_target: it rounds log-probs to bfloat16"),
        (
            {"max_runing_requests": 3},
            r"SGLang cannot run it with .*max_runing_requests.*unexpected keyword argument",
        ),
    ],
)
def test_arguments_that_sglang_does_not_take_are_refused_by_name(build, given, text):
    with pytest.raises(ConfigError, match=text):
        build(sglang=SglangConfig(engine_kwargs=given))


def test_without_sglang_a_run_is_planned_for_workers_that_have_it_and_one_that_lacks_it_says_so(
    build, monkeypatch, digits_task, tmp_path
):
    overrides = [
        *digits_overrides(digits_task, tmp_path / "run"),
        "rollout.engine=sglang",
        "rollout.sampler=sglang",
    ]
    file = load_config_file(shipped("quickstart.yaml"), overrides)
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert "rollout" in describe_run(file.config, *dags(file))
    with pytest.raises(
        ConfigError, match=r"rollout\.engine=sglang: SGLang is not installed; .*engines\.md#sglang"
    ):
        build()


def test_a_sglang_that_cannot_be_imported_or_lacks_something_is_one_clear_error(build, monkeypatch):
    module = importlib.import_module("sglang.srt.entrypoints.engine")
    monkeypatch.delattr(module.Engine, "begin_weight_update")
    with pytest.raises(
        ConfigError, match=r"SGLang 0\.5\.23 has no Engine\.begin_weight_update; expected 0\.5\.23"
    ):
        build()
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.engine", None)
    with pytest.raises(
        ConfigError, match=r"SGLang cannot be imported: .*sglang\.srt\.entrypoints\.engine"
    ):
        build()


def test_images_are_refused_before_the_start_and_by_the_engine(build, tmp_path):
    images, model = (
        ImagesConfig(column="picture"),
        ModelConfig(path=str(tiny_vlm(tmp_path / "vlm"))),
    )
    with pytest.raises(
        ConfigError, match=r"engine=sglang with images\.column.*: images are not passed to SGLang"
    ):
        check_engine(
            {"model": model, "rollout": rollout_of(), "images": images},
            ["0"],
            Config(images=images),
        )
    with pytest.raises(
        ConfigError, match=r"engine=sglang with images\.column.*: images are not passed to SGLang"
    ):
        build_engine(DEVICE, Rank(), model=model, rollout=rollout_of(), images=images)
    with pytest.raises(ConfigError, match=r"model\.path=.*a model that sees images"):
        build_engine(DEVICE, Rank(), model=model, rollout=rollout_of())
    with pytest.raises(ConfigError, match="a prompt shows 1 images"):
        build().serve(LocalQueue([GenerationRequest([1], 1, FOUR, images=("picture",))]))


def test_a_cpu_is_refused_where_sglang_has_no_deterministic_attention_for_it(
    build, sglang, monkeypatch
):
    choices = [
        name for name in sglang.DETERMINISTIC_ATTENTION_BACKEND_CHOICES if name != "torch_native"
    ]
    monkeypatch.setattr(sglang, "DETERMINISTIC_ATTENTION_BACKEND_CHOICES", choices)
    with pytest.raises(
        ConfigError, match=r"SGLang 0\.5\.23 has no deterministic attention for a CPU"
    ):
        build()
    with pytest.raises(
        ConfigError, match=r"attention_backend='torch_native': expected one that is .*: ascend, fa3"
    ):
        build(sglang=SglangConfig(attention_backend="torch_native"))


def test_a_request_whose_log_probs_sglang_does_not_tell_is_refused(build):
    with pytest.raises(ConfigError, match=r"a request asks for top_k=1 and temperature=0\.5"):
        build().generate([[1, 2]], [1], Sampling(max_tokens=2, top_k=1, temperature=0.5))


def test_a_request_that_may_not_fit_is_refused_and_not_cut(build):
    engine = build(sglang=SglangConfig(engine_kwargs={"max_total_tokens": 60}))
    assert engine.context_length == 54
    (whole,) = engine.generate([[1] * 44], [1], Sampling(max_tokens=10, temperature=0.0))
    assert whole.finish_reason is FinishReason.STOP or len(whole.token_ids) == 10
    with pytest.raises(
        ConfigError, match=r"max_response_length=11: with a prompt of 44 tokens more than the 54 "
    ):
        engine.generate([[1] * 44], [1], Sampling(max_tokens=11))


# What SGLang is asked


def test_seeds_of_any_size_reach_sglang_as_numbers_of_64_bits():
    def seed_of(seed):
        return sampling_params(GenerationRequest([1], seed, FOUR), [7])["sampling_seed"]

    assert [seed_of(seed) for seed in (0, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 5, -3)] == [
        0, 2**63 - 1, -(2**63), -1, 5, -3,
    ]  # fmt: skip


def test_an_engine_on_an_accelerator_gets_what_the_plan_leaves_and_may_sleep(sglang):
    choices = sglang.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    model = ModelConfig(path="model", dtype=Dtype.float32)
    half = ModelConfig(path="model", dtype=Dtype.bfloat16)
    card = replace(CARD, memory=80_000, room=20_000)
    planned = server_arguments(half, rollout_of(), card, choices)
    assert (planned["mem_fraction_static"], planned["base_gpu_id"], planned["device"]) == (
        0.25,
        1,
        "cuda",
    )
    assert (planned["enable_memory_saver"], planned["attention_backend"]) == (True, None)
    own = SglangConfig(
        mem_fraction_static=0.6, sleep=False, attention_backend="fa3", disable_radix_cache=True
    )
    given = server_arguments(half, rollout_of(sglang=own), replace(card, shared_by=2), choices)
    assert (given["mem_fraction_static"], given["enable_memory_saver"]) == (0.3, False)
    assert (given["attention_backend"], given["disable_radix_cache"]) == ("fa3", True)
    assert server_arguments(model, rollout_of(), card, choices)["attention_backend"] == "triton"


def test_weights_go_layer_by_layer_and_the_senders_stay_where_they_are(build, folder):
    engine, weights = build(), load_file(folder / "model.safetensors")
    scheduler = engine._engine.scheduler
    engine.load_weights(weights.items(), 1)
    layers = [
        {name.split(".")[2] for name in names if ".layers." in name} for names in scheduler.loads
    ]
    assert sorted(name for names in scheduler.loads for name in names) == sorted(weights)
    assert all(len(layer) <= 1 for layer in layers)
    assert len(scheduler.loads) < len(weights) / 2
    assert scheduler.flushes == 1
    assert not any(weight.is_shared() for weight in weights.values())


def test_no_more_rows_than_max_rows_are_under_way_and_progress_is_told(build):
    told = []
    engine = build(replace(DEVICE, progress=lambda: told.append(1)), max_rows=3)
    samples = engine.generate([[1, 2]] * 8, range(8), Sampling(max_tokens=40))
    assert engine._engine.scheduler.most == 3
    assert len(told) >= sum(-(-len(sample.token_ids) // 16) for sample in samples)


def test_a_queue_that_fails_leaves_nothing_under_way(build):
    engine = build()
    expected = engine.generate([[1, 2], [3]], [1, 2], FOUR)

    def fail(number, result):
        raise KeyError("gone")

    lengths = [1, 50, 50]
    requests = [
        GenerationRequest([1, 2], seed, Sampling(max_tokens=n)) for seed, n in enumerate(lengths)
    ]
    with pytest.raises(KeyError, match="gone"):
        engine.serve(LocalQueue(requests, fail))
    assert not engine._engine.scheduler.requests
    engine.sleep()
    assert engine.generate([[1, 2], [3]], [1, 2], FOUR) == expected


def test_a_load_that_fails_half_way_ends_the_engine(build, folder, monkeypatch):
    engine, weights = build(), load_file(folder / "model.safetensors")
    monkeypatch.setattr(
        engine._engine, "update_weights_from_tensor", lambda **_: (False, "out of memory")
    )
    with pytest.raises(RunError, match="SGLang could not load weights: out of memory"):
        engine.load_weights(weights.items(), 1)
    assert not engine.leave_groups()
    for use in (
        lambda: engine.generate([[1]], [1], FOUR),
        lambda: engine.load_weights(weights.items(), 2),
    ):
        with pytest.raises(RunError, match="cannot be used any more"):
            use()


@pytest.mark.parametrize(
    ("reason", "ids", "told", "text"),
    [
        (
            {"type": "abort", "message": "Aborted"},
            [3],
            [3],
            "ended a response otherwise than by its end",
        ),
        (
            {"type": "stop", "matched": "NaN happened"},
            [3],
            [3],
            r"not finite \(weights of version 9\)",
        ),
        (
            {"type": "length", "length": 1},
            [3],
            [3],
            "ended a response after 1 token, which may have 4",
        ),
        (
            {"type": "stop", "matched": 3},
            [3],
            [5],
            "log-probs of other tokens than it sampled, in request 7",
        ),
    ],
)
def test_what_sglang_reports_otherwise_is_an_error(reason, ids, told, text):
    meta = {
        "id": "7",
        "finish_reason": reason,
        "output_token_logprobs": [(-0.5, token, None) for token in told],
    }
    with pytest.raises(RunError, match=text):
        read_generation({"output_ids": ids, "meta_info": meta}, GenerationRequest([1], 0, FOUR), 9)


# Sleep


def test_weights_stay_unless_others_follow_and_are_not_used_when_they_are_gone(build, folder):
    engine, weights = build(CARD), load_file(folder / "model.safetensors")
    gone = engine._engine.scheduler.offload_tags
    expected = engine.generate(PROMPTS, range(6), FOUR)
    engine.sleep()
    engine.sleep()
    assert gone == {"kv_cache"}
    assert engine.generate(PROMPTS, range(6), FOUR) == expected
    engine.sleep()
    engine.sleep(weights_follow=True)
    assert gone == {"kv_cache", "weights"}
    with pytest.raises(RunError, match=r"let go of its weights .*rollout\.sglang\.sleep=false"):
        engine.generate([[1]], [1], FOUR)
    engine.load_weights(weights.items(), 1)
    assert gone == {"kv_cache"}
    assert engine.generate(PROMPTS, range(6), FOUR) == expected
    assert not gone


@pytest.mark.parametrize(("device", "sleep"), [(DEVICE, True), (CARD, False)])
def test_nothing_sleeps_on_a_cpu_or_without_sleep(build, device, sleep):
    engine = build(device, sglang=SglangConfig(sleep=sleep))
    assert not engine._engine.server_args.enable_memory_saver
    engine.sleep(weights_follow=True)
    assert engine.generate([[1]], [1], FOUR)


def test_the_plan_counts_a_cache_that_fills_and_weights_that_stay(folder):
    def planned(**settings):
        config = Config(rollout=rollout_of(sglang=SglangConfig(**settings)))
        options = {"model": ModelConfig(path=str(folder)), "rollout": config.rollout}
        return check_engine(options, ["0"], config).device

    assert (planned().fills, planned().share, planned().leaves) == ("KV cache", None, ("KV cache",))
    assert (
        planned().resting
        == planned().busy - planned().held["KV cache"] - planned().working["sampler"]
    )
    assert planned(sleep=False).leaves == ()
    assert planned(mem_fraction_static=0.3).share == 0.3


# Its processes, and this one


def test_only_sglangs_own_processes_end_with_it(build):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        engine = build()
        (own,) = engine._engine.get_all_child_pids()
        assert psutil.pid_exists(own)
        engine.close()
        engine.close()
        assert not psutil.pid_exists(own)
        assert other.poll() is None
        other.kill()


def test_an_engine_that_nobody_closes_ends_its_processes(folder):
    engine = SglangEngine(ModelConfig(path=str(folder)), rollout_of(), DEVICE)
    (own,) = engine._engine.get_all_child_pids()
    del engine
    assert not psutil.pid_exists(own)


def test_nothing_of_sglangs_ends_other_processes_when_this_one_exits(build, monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    shutdown = build()._engine.shutdown
    assert shutdown not in at_exit


def test_it_starts_in_a_daemon_and_the_process_stays_as_it_was(build, monkeypatch):
    monkeypatch.delitem(sys.modules, "sglang.srt.entrypoints.engine")
    policy, method = (
        asyncio.get_event_loop_policy(),
        multiprocessing.get_start_method(allow_none=True),
    )
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    build()
    assert multiprocessing.current_process().daemon is True
    assert multiprocessing.get_start_method(allow_none=True) == method
    assert asyncio.get_event_loop_policy() is policy


def test_nothing_imports_sglang_before_an_engine_is_built():
    code = (
        "import sys; from siirl_dask.models.broken_imports import hide; hide()\n"
        "import siirl_dask.rollout.sglang_engine.engine; print('sglang' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_a_whole_run_generates_and_loads_new_weights(digits_task, tmp_path, monkeypatch):
    own = tmp_path / "stand_in" / "sglang"
    own.parent.mkdir()
    shutil.copytree(Path(STAND_IN) / "sglang", own)
    with (own / "srt" / "server_args.py").open("a") as file:
        file.write('\nDETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")\n')
    monkeypatch.setattr(sys, "path", [str(own.parent), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(own.parent), prepend=":")
    overrides = [
        *digits_overrides(digits_task, tmp_path / "run"),
        "rollout.engine=sglang",
        "rollout.sampler=sglang",
        "run.steps=3",
        "cluster.workers=2",
        "cluster.placement={rollout: [0], reward: [0], policy: [1]}",
    ]
    file = load_config_file(shipped("quickstart.yaml"), overrides)
    finished = Finished(tmp_path / "run", run(file.config, *dags(file)))
    assert finished.summary.status == "complete"
    for step in (1, 3):
        for row in finished.table("rollouts", step).to_pylist():
            assert row["weights_version"] == step - 1
            assert row["old_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-4)
