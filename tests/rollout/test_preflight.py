"""Tests of engines on several workers that need no vLLM: placement, refused mistakes."""

import json
import shutil

import pytest

from siirl_dask.cli import main
from siirl_dask.commands.plan import describe_run
from siirl_dask.config import Config, Engine, ModelConfig, Sampler, WeightSync
from siirl_dask.config.file import dump, load_config_file, shipped
from siirl_dask.driver.checks.preflight import check
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.models.shapes import INDEX
from siirl_dask.rollout.specs import EngineRole, engine_spec
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.worker.peers.data_plane import DataSettings
from tests.conftest import digits_overrides
from tests.settings import rollout_config


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size=0: expected at least 1"),
        (
            {"tensor_parallel_size": 2, "engine": Engine.transformers},
            "tensor_parallel_size=2: .*transformers generates on one device",
        ),
        (
            {"sampler": Sampler.vllm, "engine": Engine.transformers},
            "sampler=vllm: .*part of vLLM, and rollout.engine is transformers; take "
            "rollout.sampler=exact",
        ),
        (
            {"engine_kwargs": {"tensor_parallel_size": 4}},
            r"vllm\.engine_kwargs\.tensor_parallel_size=4: .*give rollout\.tensor_parallel_size=4 "
            r"instead",
        ),
        ({"in_flight": True}, r"in_flight=true with rollout\.max_staleness=0 and .*steps_ahead=0"),
        (
            {
                "in_flight": True,
                "max_staleness": 1,
                "partial": True,
                "max_tokens_per_step": 128,
            },
            r"in_flight=true with .*max_staleness=1 and rollout\.steps_ahead=0",
        ),
        (
            {"in_flight": True, "max_staleness": 1, "sampler": Sampler.vllm},
            r"in_flight=true with rollout\.sampler=vllm: ",
        ),
        (
            {"in_flight": True, "max_staleness": 1, "router_replay": True},
            r"in_flight=true with rollout\.router_replay=true: ",
        ),
        (
            {"in_flight": True, "max_staleness": 1, "weight_sync": WeightSync.broadcast},
            r"in_flight=true with rollout\.weight_sync=broadcast: ",
        ),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, text):
    with pytest.raises(ConfigError, match=rf"rollout\.{text}"):
        rollout_config(**settings)


@pytest.mark.parametrize(
    ("settings", "longest", "said"),
    [
        ({}, 8191, None),
        ({}, 8192, "expected less than 8192; or take rollout.engine=vllm"),
        ({"floor_scale": 100}, 100, "Llama 4 scales attention from 100 tokens on"),
        ({"floor_scale": 100, "attn_temperature_tuning": False}, 200, None),
    ],
)
def test_rows_of_llama_4_that_padding_would_change_are_refused(tmp_path, settings, longest, said):
    config = Config(rollout=rollout_config(max_response_length=longest - 1))
    config.data.max_prompt_length = 1
    text = {"model_type": "llama4_text", **settings}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": text}))
    model = ModelConfig(path=str(tmp_path))
    role = EngineRole(model=model, rollout=config.rollout, config=config)
    if said is None:
        assert len(engine_spec("transformers").check(role)) == 1
        return
    with pytest.raises(ConfigError, match=said):
        engine_spec("transformers").check(role)


def test_rows_are_taken_over_also_where_workers_share_an_engine():
    def taken_over(**rollout):
        return DataSettings.of(
            Config(rollout=rollout_config(**rollout)), ["tcp://127.0.0.1:1"]
        ).stealing

    assert taken_over()
    assert not taken_over(work_stealing=False)
    assert taken_over(tensor_parallel_size=2)
    assert not taken_over(tensor_parallel_size=2, work_stealing=False)


def test_a_run_writes_down_no_key_that_was_left_out(tmp_path):
    (tmp_path / "config.yaml").write_text(dump(Config()))
    again = load_config_file(
        tmp_path / "config.yaml",
        ["rollout.tensor_parallel_size=2", "validation.n=8", "data.url=x", "model.path=y"],
    )
    assert again.config.validation.temperature is None


@pytest.fixture
def planned(digits_task, tmp_path):
    def plan(*overrides):
        given = ["rollout.engine=vllm", "rollout.tensor_parallel_size=2", *overrides]
        file = load_config_file(
            shipped("quickstart.yaml"), [*digits_overrides(digits_task, tmp_path / "run"), *given]
        )
        return describe_run(file.config, *dags(file))

    return plan


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["rollout.temperature=0.7", "rollout.top_k=9"],
            "rollout asks for temperature=0.7, .*top_k=9.*expected no top_p",
        ),
        (
            ["validation.temperature=0.5"],
            "validation asks for temperature=0.5, .*expected temperature 0 or 1",
        ),
    ],
)
def test_sampling_whose_log_probs_vllms_sampler_does_not_report_is_refused(
    planned, overrides, text
):
    with pytest.raises(
        ConfigError, match=rf"rollout\.sampler=vllm: {text}.*; or take rollout\.sampler=exact"
    ):
        planned("rollout.sampler=vllm", *overrides)
    planned(*overrides)
    planned(
        "rollout.sampler=vllm",
        overrides[0].replace("validation.temperature=0.5", "validation.temperature=1.0"),
    )


def test_the_plan_says_which_workers_form_an_engine(planned):
    text = planned("cluster.workers=6", "cluster.placement={rollout: [0, 1, 4, 5], policy: [2, 3]}")
    assert "note: role 'rollout': 2 engines, 2 workers each: 0 and 1; 4 and 5" in text
    assert " engines, 2 workers each" not in planned("rollout.tensor_parallel_size=1")


@pytest.mark.parametrize(
    ("model", "size", "text"),
    [
        ({"heads": 3, "head_dim": 32}, 2, r"has 3 attention heads, which 2 workers cannot share"),
        ({"heads": 6, "kv_heads": 3}, 2, r"has 3 key and value heads, which"),
        (
            {"heads": 2, "intermediate": 65},
            2,
            r"has 65 numbers between the layers of its MLPs, which",
        ),
        (
            {"heads": 3},
            3,
            r"has 128 numbers between the layers of its MLPs, 264 tokens of its vocabulary, which "
            r"3 ",
        ),
    ],
)
def test_models_that_the_size_does_not_divide_are_refused_at_once(
    planned, tmp_path, model, size, text
):
    folder = tiny_model(tmp_path / "model", **model)
    overrides = [
        f"model.path={folder}",
        f"rollout.tensor_parallel_size={size}",
        f"cluster.workers={size}",
    ]
    with pytest.raises(
        ConfigError, match=rf"rollout\.tensor_parallel_size={size}: the model in .* {text}"
    ):
        planned(*overrides, "cluster.placement={}")


def test_workers_that_the_size_does_not_divide_are_refused(planned, capsys, digits_task, tmp_path):
    with pytest.raises(
        PlanError,
        match=r"role 'rollout': .*tensor_parallel_size=2, and the role has 3 workers: expected a mult",
    ):
        planned("cluster.workers=3", "cluster.placement={}")
    overrides = [
        *digits_overrides(digits_task, tmp_path / "run"),
        "rollout.engine=vllm",
        "cluster.workers=1",
    ]
    with pytest.raises(SystemExit):
        main(
            [
                "run",
                str(shipped("quickstart.yaml")),
                *overrides,
                "rollout.tensor_parallel_size=2",
                "cluster.placement={}",
            ]
        )
    assert "the role has 1 worker: expected a multiple of 2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_worker_holds_a_slice_of_the_weights_and_a_cache_of_its_own(digits_task, tmp_path):
    found = []
    for size in (1, 2):
        given = ["rollout.engine=vllm", f"rollout.tensor_parallel_size={size}", "cluster.workers=2"]
        overrides = [*given, "cluster.placement={}", "rollout.vllm.kv_cache_memory=1MiB"]
        file = load_config_file(
            shipped("quickstart.yaml"),
            [*digits_overrides(digits_task, tmp_path / "run"), *overrides],
        )
        phases = plan_phases(file.config, *dags(file), worker_names(file.config))
        found.append(check(file.config, phases).memory[0].roles["rollout"] - 2**20)
    assert found[1] == -(-found[0] // 2)


def role_of(engine, folder):
    """Return what an engine's spec checks, and the spec."""
    model = ModelConfig(path=str(folder))
    sampler = Sampler.exact
    if engine == "sglang":
        sampler = Sampler.sglang
    rollout = rollout_config(engine=Engine(engine), sampler=sampler)
    role = EngineRole(model=model, rollout=rollout, config=Config(model=model, rollout=rollout))
    return role, engine_spec(Engine(engine))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("name", ["exp[1]", "a*b", "a?b"])
def test_a_folder_in_which_an_engine_reads_a_pattern_is_refused(tmp_path, engine, name):
    role, spec = role_of(engine, tiny_model(tmp_path / name))
    if engine == "transformers":
        spec.check(role)
    else:
        with pytest.raises(ConfigError, match=r"in the path of a model as a pattern"):
            spec.check(role)


@pytest.mark.parametrize(
    ("option", "value", "refused"),
    [
        ("load_format", "mistral", True),
        ("load_format", "auto", True),
        ("load_format", "dummy", True),
        ("load_format", "safetensors", False),
        ("config_format", "auto", True),
        ("config_format", "hf", False),
    ],
)
def test_options_by_which_vllm_reads_other_files_than_the_trainer_are_refused(
    tmp_path, option, value, refused
):
    """Where a folder has files of Mistral's library as well, "auto" takes these."""
    role, spec = role_of("vllm", tmp_path)
    role.rollout.vllm.engine_kwargs[option] = value
    if not refused:
        spec.check(role)
        return
    with pytest.raises(ConfigError, match=f"engine_kwargs.{option}='{value}': vLLM would not read"):
        spec.check(role)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("other", ["model.fp16.safetensors", "consolidated.safetensors"])
@pytest.mark.parametrize("indexed", [True, False])
def test_other_weights_that_an_engine_would_load_as_well_are_refused(
    tmp_path, engine, other, indexed
):
    folder = tiny_model(tmp_path / "model")
    shutil.copy(folder / "model.safetensors", folder / other)
    if indexed:
        index = {"metadata": {}, "weight_map": {"lm_head.weight": "model.safetensors"}}
        (folder / INDEX).write_text(json.dumps(index))
    role, spec = role_of(engine, folder)
    if engine == "transformers" or indexed:
        spec.check(role)
    else:
        with pytest.raises(ConfigError, match=f"would load {other} as well as model.safetensors"):
            spec.check(role)
