"""``siirl-dask migrate``: what has no counterpart and changes what is learned stops the run that
would train without it, and defaults are those of the program, the YAML file and the backend.
"""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.commands.migrate import migrate
from siirl_dask.commands.migrate.option import Use
from siirl_dask.commands.migrate.table import TABLE
from siirl_dask.commands.migrate.trl.options import TRL
from siirl_dask.config import ENGINES_LOGPROBS
from siirl_dask.config.file import load_config_file
from siirl_dask.errors import ConfigError
from siirl_dask.rewards import matches_format

GRPO = "algorithm.adv_estimator=grpo"
ACTOR = "actor_rollout_ref.actor"
DECIDING = sorted(
    name.replace("*", "anything")
    for part in TABLE.values()
    for option in part
    if option.decides and option.use is Use.NONE
    for name in option.names
)


def loaded(text, folder, decided=()):
    path = folder / "migrated.yaml"
    path.write_text(text)
    return load_config_file(path, decided).config


def script(folder, module, *words):
    path = folder / "run.sh"
    path.write_text(f"python3 -m {module} {' '.join(words)}\n")
    return str(path)


@pytest.mark.parametrize("name", DECIDING)
def test_no_file_trains_without_what_changes_what_is_learned(name, tmp_path):
    rows = ["data.train_files=/data/gsm8k/train.parquet", "trainer.total_training_steps=2"]
    assert loaded(migrate([GRPO, *rows]).text, tmp_path).run.steps == 2
    done = migrate([GRPO, *rows, f"{name}=true"])
    assert done.fates[name].lost
    with pytest.raises(ConfigError, match=r"a value is needed|Missing mandatory value"):
        loaded(done.text, tmp_path)
    for nothing in ("null", "false"):
        assert loaded(migrate([GRPO, *rows, f"{name}={nothing}"]).text, tmp_path).run.steps == 2


@pytest.mark.parametrize(
    ("option", "key", "instead"),
    [
        ("algorithm.adv_estimator=mine", "algorithm.advantage", "siirl_dask.algorithms:grpo"),
        (f"{ACTOR}.policy_loss.loss_mode=gvpo", "algorithm.loss", "siirl_dask.algorithms:ppo_clip"),
        (
            f"{ACTOR}.loss_agg_mode=mean",
            "algorithm.aggregation",
            "siirl_dask.algorithms:token_mean",
        ),
        (f"{ACTOR}.optim.lr_scheduler_type=wsd", "trainer.schedule", "constant"),
        (f"{ACTOR}.optim.optimizer=Lion", "trainer.optimizer", "adamw"),
        (f"{ACTOR}.fsdp_config.dtype=fp16", "model.dtype", "bfloat16"),
        ("trainer.v1.trainer_mode=separate_async", "rollout.max_staleness", "a value"),
    ],
)
def test_what_stands_in_for_another_is_offered_and_not_taken(option, key, instead, tmp_path):
    done = migrate([GRPO, "data.train_files=/data/gsm8k/train.parquet", option], 5_000)
    name = option.partition("=")[0]
    assert f"TO DECIDE: {key}: {option} has no counterpart" in done.report
    assert f"; write {instead} to train without it" in done.report
    with pytest.raises(ConfigError, match=f"{key}: a value is needed"):
        loaded(done.text, tmp_path)
    assert done.fates[name].lost


@pytest.mark.parametrize(
    ("module", "asks"),
    [
        ("verl.trainer.main_ppo", False),
        ("verl.trainer.main_ppo_sync", False),
        ("recipe.dapo.main_dapo", False),
        ("siirl.main_dag", False),
        ("recipe.sppo.main_sppo", True),
        ("recipe.prime.main_prime", True),
        ("recipe.spin.main_spin", True),
        ("recipe.spo.spo_main_ppo", True),
    ],
)
def test_a_program_with_an_algorithm_of_its_own_leaves_the_loss_open(module, asks, tmp_path):
    done = migrate([script(tmp_path, module, GRPO, "data.train_batch_size=8")], 100)
    assert (f"{module} is a program of its own, whose code is not read" in done.text) is asks
    assert ("  loss: ???" in done.text) is asks


@pytest.mark.parametrize(
    ("engine", "default"),
    [("dp", "constant"), ("megatron", "constant"), ("veomni", "cosine"), ("torchtitan", "linear")],
)
def test_the_schedule_is_the_default_of_the_backend_that_trains(engine, default, tmp_path):
    rows = "data.train_files=/data/gsm8k/train.parquet"
    words = [GRPO, rows, f"model_engine={engine}"]
    config = loaded(migrate(words, 5_000).text, tmp_path)
    assert config.trainer.schedule == default
    assert config.trainer.backend == ("megatron" if engine == "megatron" else "fsdp")
    given = [*words, f"{ACTOR}.optim.lr_scheduler_type=cosine", f"{ACTOR}.optim.lr_min=2e-7"]
    config = loaded(migrate([*given, f"{ACTOR}.optim.lr=1e-6"], 5_000).text, tmp_path)
    assert config.trainer.schedule == "cosine"
    assert config.trainer.min_lr_ratio == pytest.approx(0.2)


def test_verls_megatron_file_trains_with_megatron(tmp_path):
    words = ["--config-name=ppo_megatron_trainer", GRPO, "data.train_files=/data/gsm8k/a.parquet"]
    words.append(f"{ACTOR}.megatron.tensor_model_parallel_size=2")
    done = migrate([script(tmp_path, "verl.trainer.main_ppo", *words)], 5_000)
    config = loaded(done.text, tmp_path)
    assert config.trainer.backend == "megatron"
    assert config.trainer.megatron.tensor_parallel == 2


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"grad_clip": 0.5}, 0.5),
        ({"optim.clip_grad": 0.5}, 0.5),
        ({"optim.grad_clip": 0.5}, 0.5),
        ({"grad_clip": 0.5, "optim.clip_grad": 0.5}, 0.5),
        ({"grad_clip": 0.5, "optim.clip_grad": 1.0}, None),
    ],
)
def test_the_limit_of_the_gradient_has_three_names_and_one_value(limits, expected, tmp_path):
    words = [f"{ACTOR}.{name}={value}" for name, value in limits.items()]
    done = migrate([GRPO, "data.train_files=/data/gsm8k/train.parquet", *words], 5_000)
    if expected is None:
        assert "max_grad_norm: ???  # TO DECIDE: 0.5 (" in done.text
    else:
        assert loaded(done.text, tmp_path).trainer.max_grad_norm == expected


def test_rows_of_several_sources_are_scored_each_by_its_own(tmp_path):
    files = "data.train_files=[/data/gsm8k/train.parquet,/data/math/train.parquet]"
    config = loaded(migrate([GRPO, files], 5_000).text, tmp_path)
    assert config.rewards.function == "siirl_dask.rewards:by_source"
    rewards = config.rewards.options["rewards"]
    assert rewards["openai/gsm8k"] == "siirl_dask.rewards:gsm8k"
    assert rewards["DigitalLearningGmbH/MATH-lighteval"] == "siirl_dask.rewards:math_answer"
    assert "columns: [data_source]" in migrate([GRPO, files]).text
    filtered = migrate([GRPO, files, "algorithm.filter_groups.enable=True"], 5_000).text
    assert "rounds: 10, columns: [data_source]" in filtered, "the node that scores has them"


@pytest.mark.parametrize(
    ("path", "function"),
    [
        ("/data/gsm8k/train.parquet", "gsm8k"),
        ("/data/dapo-math-17k.parquet", "dapo_math"),
        ("/home/math/own/train.parquet", "???"),
        ("/data/train.parquet", "???"),
    ],
)
def test_the_manager_of_dapo_chooses_by_the_source_as_naive_does(path, function):
    for manager in ("naive", "dapo"):
        words = [GRPO, f"data.train_files={path}", f"reward_model.reward_manager={manager}"]
        text = migrate(words, 5_000).text
        shown = "???" if function == "???" else f'"siirl_dask.rewards:{function}"'
        assert f"  function: {shown}  #" in text, manager


def test_a_source_counts_more_than_the_name_of_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"data_source": ["math", "math"]}), "math.parquet")
    text = migrate([GRPO, "data.train_files=math.parquet"]).text
    assert 'function: "siirl_dask.rewards:dapo_math"' in text, "verl's table says so"
    pq.write_table(pa.table({"data_source": ["openai/gsm8k", "hiyouga/geometry3k"]}), "a.parquet")
    text = migrate([GRPO, "data.train_files=a.parquet"]).text
    assert 'function: "siirl_dask.rewards:by_source"' in text


def test_geometry_is_nine_tenths_the_answer_and_one_the_format(tmp_path):
    done = migrate([GRPO, "data.train_files=/data/geo3k/train.parquet"], 5_000)
    config = loaded(done.text, tmp_path)
    assert config.rewards.function == "siirl_dask.rewards:weighted_sum"
    assert config.rewards.options["weights"] == {"right": 0.9, "format": 0.1}
    pattern = config.rewards.options["rewards"]["format"]["with"]["pattern"]
    thought = "<think>two\nlines</think> so \\boxed{3}."
    assert matches_format("", thought, "3", pattern=pattern) == 1.0
    assert matches_format("", "so \\boxed{3}.", "3", pattern=pattern) == 0.0


FULLY_ASYNC = [
    GRPO,
    "data.train_files=/data/gsm8k/train.parquet",
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    f"{ACTOR}.ppo_mini_batch_size=32",
    "async_training.require_batches=2",
    "async_training.trigger_parameter_sync_step=4",
    "rollout.total_rollout_steps=51200",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=4",
    "trainer.n_gpus_per_node=12",
]


def test_a_step_is_what_is_trained_on_between_two_loads_of_weights(tmp_path):
    warm = f"{ACTOR}.optim.lr_warmup_steps=10"
    text = migrate([*FULLY_ASYNC, warm, "async_training.staleness_threshold=0.1"]).text
    with pytest.raises(ConfigError, match=r"cluster\.placement: a value is needed"):
        loaded(text, tmp_path)
    assert "rollout: [12, ..., 15]" in text
    config = loaded(text, tmp_path, ["cluster.placement={}"])
    assert config.data.batch_size == 4 * 2 * 32
    assert config.algorithm.minibatches == 4 * 2
    assert config.run.steps == 51200 // 256
    assert config.rollout.max_staleness == 1
    assert config.trainer.warmup_steps == 10 * 2, "two mini-batches in each of their steps"
    assert config.cluster.workers == 16
    assert config.algorithm.old_logprobs == ENGINES_LOGPROBS


@pytest.mark.parametrize("option", ["algorithm.rollout_correction.bypass_mode",
                                    "async_training.use_rollout_log_probs"])  # fmt: skip
def test_the_old_logprobs_of_a_program_ahead_are_the_engines_unless_it_says_otherwise(option):
    assert ENGINES_LOGPROBS in migrate(FULLY_ASYNC).text
    assert ENGINES_LOGPROBS not in migrate([*FULLY_ASYNC, f"{option}=False"]).text


def test_one_step_off_generates_one_step_ahead_on_devices_of_its_own(tmp_path):
    module = "verl.experimental.one_step_off_policy.main_ppo"
    words = [GRPO, "data.train_files=/data/gsm8k/train.parquet", "trainer.n_gpus_per_node=6"]
    words += ["rollout.nnodes=1", "rollout.n_gpus_per_node=2", "data.train_batch_size=64"]
    text = migrate([script(tmp_path, module, *words)], 6_400).text
    config = loaded(text, tmp_path, ["cluster.placement={}"])
    assert config.cluster.workers == 8
    assert config.rollout.max_staleness == 1
    assert config.data.batch_size == 64
    assert config.algorithm.old_logprobs == ENGINES_LOGPROBS


TRL_DECIDING = sorted(
    name.replace("*", "anything")
    for option in TRL
    if option.decides
    for name in option.names
    if name != "datasets"
)


@pytest.fixture
def trl(tmp_path):
    """Return what comes of options of TRL, as a YAML file of `trl grpo`."""

    def convert(**options):
        path = tmp_path / "grpo.yaml"
        common = {
            "model_name_or_path": "org/model",
            "dataset_name": "/data/rows.parquet",
            "reward_funcs": ["think_format_reward"],
            "max_steps": 8,
            "vllm_max_model_length": 1024,
            "lora_target_modules": "all-linear",
        }
        path.write_text(json.dumps(common | options))
        return migrate([str(path), "num_processes=1"])

    return convert


@pytest.mark.parametrize("name", TRL_DECIDING)
def test_nothing_of_trls_that_changes_what_is_learned_is_left_out_unseen(name, trl, tmp_path):
    adapters = {"use_peft": True, "lora_dropout": 0.0}
    assert loaded(trl(**adapters).text, tmp_path).run.steps == 8
    done = trl(**adapters, **{name: "text"})
    assert done.fates[name].lost
    with pytest.raises(ConfigError, match=r"a value is needed|Missing mandatory value"):
        loaded(done.text, tmp_path)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"optim": "adafactor"}, "trainer.optimizer"),
        ({"fp16": True}, "model.dtype"),
        ({"repetition_penalty": 1.1}, "rollout.temperature"),
        ({"use_peft": True, "lora_bias": "all"}, "trainer.lora.rank"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "x"}, "algorithm.correction"),
    ],
)
def test_a_value_of_trls_that_there_is_not_is_asked_about(options, key, trl):
    assert f"TO DECIDE: {key}: " in trl(**options).report


@pytest.mark.parametrize("options", [{"optim": "adamw_torch_fused"}, {"repetition_penalty": 1.0},
                                     {"use_peft": True, "lora_bias": "none"}])  # fmt: skip
def test_a_value_of_trls_that_is_as_here_is_not(options, trl, tmp_path):
    assert loaded(trl(**options).text, tmp_path).run.steps == 8


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [("constant", 0), ("constant_with_warmup", 3), ("linear", 3), ("cosine", 3)],
)
def test_a_constant_rate_of_transformers_has_no_warm_up(schedule, steps, trl, tmp_path):
    config = loaded(trl(lr_scheduler_type=schedule, warmup_steps=3).text, tmp_path)
    assert config.trainer.warmup_steps == steps


def test_rslora_is_an_alpha_that_is_larger_by_the_root_of_the_rank(trl, tmp_path):
    given = {"use_peft": True, "lora_r": 16, "lora_alpha": 8}
    plain = loaded(trl(**given).text, tmp_path).trainer.lora
    assert plain.alpha / plain.rank == 8 / 16
    by_root = loaded(trl(**given, use_rslora=True).text, tmp_path).trainer.lora
    assert by_root.alpha / by_root.rank == 8 / 16**0.5


@pytest.mark.parametrize(
    ("options", "asks"),
    [({}, True), ({"lora_dropout": 0.0}, False), ({"lora_dropout": 0.1}, True)],
)
def test_the_dropout_of_trls_adapters_is_named_also_where_it_is_the_default(options, asks, trl):
    report = trl(use_peft=True, **options).report
    assert ("adapters have no dropout here" in report) is asks


def test_the_layers_that_peft_chooses_are_asked_for(trl, tmp_path):
    text = trl(use_peft=True, lora_target_modules=None).text
    assert "targets: ???  # TO DECIDE: none are given, so peft chooses" in text
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets: Missing mandatory value"):
        loaded(text, tmp_path)
    assert loaded(trl(lora_target_modules=None).text, tmp_path).trainer.lora.rank == 0


def test_a_revision_of_a_model_of_the_hub_is_that_revision(trl, tmp_path):
    text = trl(model_revision="abc123").text
    assert loaded(text, tmp_path).model.path == "hf://org/model@abc123"
    assert loaded(trl(model_revision="main").text, tmp_path).model.path == "hf://org/model"


SCRIPT = (
    "from trl import GRPOConfig, GRPOTrainer\n"
    "def one(prompts, completions, **more):\n    return [1.0 for _ in completions]\n"
    "if __name__ == '__main__':\n"
    "    args = GRPOConfig(per_device_train_batch_size=4, num_generations=4, max_steps=2)\n"
    "    GRPOTrainer('org/m', one, args, train_dataset='rows.parquet').train()\n"
)


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        ("accelerate launch --num_processes 6", 6),
        ("accelerate launch --num_processes 6 --num_machines 2", 6),
        ("accelerate launch --config_file zero.yaml", 16),
        ("accelerate launch --config_file zero.yaml --num_processes 4", 4),
        ("torchrun --nproc_per_node 8", 8),
        ("torchrun --nnodes 2 --nproc_per_node 8", 16),
        ("torchrun --nnodes=2 --nproc-per-node=8", 16),
        ("deepspeed --num_nodes 3 --num_gpus 2", 6),
        ("torchrun --nnodes 1:4 --nproc_per_node 8", None),
        ("torchrun --nproc_per_node auto", None),
        ("accelerate launch --config_file elsewhere.yaml", None),
    ],
)
def test_processes_are_those_of_all_hosts(launcher, processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "zero.yaml").write_text("num_machines: 2\nnum_processes: 16\n")
    done = migrate([*launcher.split(), "train.py"], 100)
    lines = [line.strip() for line in done.text.splitlines()]
    workers = next(line for line in lines if line.startswith("workers: "))
    prompts = next(line for line in lines if line.startswith("batch_size: "))
    if processes is None:
        assert workers.startswith("workers: ???  # TO DECIDE: num_processes is ")
        assert prompts.startswith("batch_size: ???  # TO DECIDE: ")
    else:
        assert workers.startswith(f"workers: {processes}  #")
        assert prompts.startswith(f"batch_size: {processes}  #"), "4 rows of one prompt each"


@pytest.mark.parametrize(("name", "workers"), [("zero3", 8), ("single_gpu", 1), ("mine.yaml", 5)])
def test_the_accelerate_file_of_trl_grpo_counts_its_processes(name, workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("num_processes: 5\n")
    options = {"model_name_or_path": "org/m", "dataset_name": "/rows.parquet", "max_steps": 4}
    (tmp_path / "grpo.yaml").write_text(json.dumps(options | {"accelerate_config": name}))
    text = migrate(["trl", "grpo", "--config", "grpo.yaml", "--num_generations", "2"]).text
    assert f"  workers: {workers}  #" in text
    assert f"  workers: {workers}  #" in migrate(["grpo.yaml", "num_generations=2"]).text


@pytest.mark.parametrize(("rows", "steps"), [(640, "20"), (None, "20"), (160, "???")])
def test_training_that_runs_out_of_epochs_before_its_steps_is_asked_about(rows, steps):
    words = [
        "data.train_batch_size=32",
        "trainer.total_training_steps=20",
        "trainer.total_epochs=2",
    ]
    text = migrate([GRPO, "data.train_files=/data/gsm8k/train.parquet", *words], rows).text
    assert f"  steps: {steps}  #" in text
    assert ("says 20, and 2 epochs of 160 rows end after 10" in text) is (rows == 160)


@pytest.mark.parametrize("group", ["reward_model", "reward"])
def test_the_penalty_of_long_responses_is_verls(group, tmp_path):
    """At 900 tokens, of 1000 with a buffer of 200: -(900 - 800) / 200 x 0.5 = -0.25."""
    prefix = f"{group}.reward_kwargs.overlong_buffer_cfg"
    rows = [GRPO, "data.train_files=/data/gsm8k/train.parquet", "data.max_response_length=1200"]
    kwargs = [f"{group}.reward_kwargs.max_resp_len=1000", f"{prefix}.len=200"]
    off = loaded(migrate([*rows, *kwargs], 5_000).text, tmp_path)
    assert off.rollout.max_response_length == 1200
    assert "penalise_overlong" not in migrate([*rows, *kwargs], 5_000).text, "false by default"
    on = [*rows, *kwargs, f"{prefix}.enable=True", f"{prefix}.penalty_factor=0.5"]
    text = migrate(on, 5_000).text
    assert "{max_length: 1000, buffer: 200, factor: 0.5}" in text
    same = [word.replace("=1000", "=1200") for word in on]
    assert 'max_length: "${rollout.max_response_length}", buffer: 200' in migrate(same, 5_000).text
    assert "factor: 0}" in migrate(on[:-1], 5_000).text, "the factor is 0 by default there"
