"""``siirl-dask migrate``: what verl and siiRL have becomes a configuration that plans, and
nothing goes missing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.cli import main
from siirl_dask.commands.migrate import migrate
from siirl_dask.commands.migrate.option import Use
from siirl_dask.commands.migrate.table import TABLE, markdown, option_of
from siirl_dask.config.file import load, load_config_file
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.errors import ConfigError

FILES = Path(__file__).parent / "migrate_files"
ROWS = 40_315
CALL = "python3 -m verl.trainer.main_ppo"


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    """Return the configuration that comes of words, loaded and planned, with what became of the
    options. ``decided`` are the values of keys that are left open.
    """
    monkeypatch.setenv("HOME", "/home/me")

    def convert(*words, rows=ROWS, decided=()):
        done = migrate([str(word) for word in words], rows)
        path = tmp_path / "migrated.yaml"
        path.write_text(done.text)
        for word in decided:
            group, _, key = word.partition("=")[0].partition(".")
            assert f"  {key}: ???  # TO DECIDE" in done.text, (group, key)
        file = load_config_file(path, decided)
        plan_phases(file.config, *dags(file), worker_names(file.config), assume_columns=True)
        return file.config, done

    return convert


def test_siirls_script_for_npus_says_the_same_here(config_of):
    config, done = config_of(FILES / "siirl_npu.sh")
    assert config.cluster.workers == 16
    assert config.run.steps == 300 * (ROWS // 1024)
    assert config.data.url == "/home/me/data/datasets/deepscaler/train.parquet"
    assert config.data.answer == "reward_model.ground_truth"
    assert (config.data.batch_size, config.algorithm.minibatches, config.rollout.n) == (1024, 4, 5)
    assert config.trainer.max_tokens_per_micro_batch == 4 * 4096
    assert (config.trainer.max_grad_norm, config.trainer.park) == (0.3, True)
    assert (config.algorithm.kl_coefficient, config.algorithm.kl) == (
        0.01,
        "siirl_dask.algorithms:k3_clipped",
    )
    assert config.algorithm.loss_options == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3}
    assert (config.rollout.tensor_parallel_size, config.rollout.vllm.enforce_eager) == (4, True)
    assert config.observe.backends == ["tensorboard"]
    assert config.run.url.endswith("ckpts/qwen2.5-7b_grpo_deepscaler_hybrid_1nodes")
    assert not [name for name, fate in done.fates.items() if fate.lost]


def test_verls_script_of_dapo_becomes_its_dag_and_names_what_is_not_here(config_of):
    config, done = config_of(FILES / "verl_dapo.sh")
    assert config.cluster.workers == 16
    assert [source.url for source in config.data.sources.values()] == [
        "/data/dapo-math-17k.parquet",
        "/data/more.parquet",
    ]
    assert config.algorithm.loss_options == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10}
    assert config.algorithm.minibatches == 16
    assert config.trainer.warmup_steps == 10 * 16, "training steps there, optimizer steps here"
    assert config.trainer.fsdp.sequence_parallel == 8
    assert config.trainer.max_tokens_per_micro_batch == 22 * 1024
    assert (config.validation.n, config.validation.temperature) == (4, 1)
    assert config.rewards.function == "siirl_dask.rewards:dapo_math"
    assert config.model.path == "/home/me/models/Qwen2.5-32B"
    assert (
        "nodes:\n  rollout: {with: {rounds: 7}}\n  reward: {with: {buffer: 4096, factor: 1}}"
        in done.text
    )
    lost = {name for name, fate in done.fates.items() if fate.lost}
    assert lost == {
        "data.gen_batch_size",
        "actor_rollout_ref.model.override_config.attention_dropout",
    }


def test_a_yaml_file_of_ppo_gets_its_critic_and_its_divergence_in_the_reward(config_of):
    config, done = config_of(FILES / "verl_ppo.yaml")
    assert config.algorithm.advantage_options == {"discount": 1, "gae_lambda": 0.95}
    assert (config.algorithm.minibatches, config.algorithm.epochs) == (4, 2)
    assert config.algorithm.aggregation == "siirl_dask.algorithms:sequence_mean_token_mean"
    assert (config.trainer.lr, config.trainer.warmup_steps) == (2e-6, 10 * 4 * 2)
    assert (config.trainer.schedule, config.trainer.min_lr_ratio, config.trainer.total_steps) == (
        "cosine",
        0.1,
        800,
    )
    assert (config.critic.lr, config.critic.weight_decay) == (1e-5, 0.01)
    assert config.model.path == "hf://Qwen/Qwen2.5-0.5B-Instruct"
    assert (config.run.steps, config.rollout.temperature) == (100, 0.7)
    assert config.run.url.endswith("checkpoints/mine/ppo")
    assert "penalise_kl" in done.text
    assert "clip: 0.4" in done.text
    assert "no divergence" not in done.fates["algorithm.use_kl_in_reward"].note
    assert done.fates["trainer.val_before_train"].lost
    assert not done.fates["trainer.resume_from_path"].lost, "null asks for nothing"


@pytest.mark.parametrize(
    "estimator",
    [
        "grpo",
        "rloo",
        "opo",
        "gpg",
        "remax",
        "grpo_passk",
        "gae",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    ],
)
@pytest.mark.parametrize(
    "kl", ["", "actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True"]
)
def test_every_estimator_plans_with_and_without_a_reference(config_of, estimator, kl):
    config, _ = config_of(f"algorithm.adv_estimator={estimator}", *([kl] if kl else []))
    assert bool(config.algorithm.kl_coefficient) == ("loss" in kl)


def test_arguments_of_the_chat_template_are_the_models(config_of):
    config, done = config_of(
        "actor_rollout_ref.model.path=m", "+data.apply_chat_template_kwargs.enable_thinking=False"
    )
    assert config.model.template == {"enable_thinking": False}
    assert not [name for name, fate in done.fates.items() if fate.lost]


def test_adapters_to_begin_with_are_taken_where_their_rank_is_given(config_of):
    model = "actor_rollout_ref.model"
    config, _ = config_of(f"{model}.lora_rank=8", f"{model}.lora_adapter_path=/adapters")
    assert (config.trainer.lora.rank, config.trainer.lora.path) == (8, "/adapters")
    config, done = config_of(f"{model}.lora_adapter_path=/adapters")
    assert config.trainer.lora.path is None
    assert "trainer.lora.rank" in str(done.fates[f"{model}.lora_adapter_path"].lost)


@pytest.mark.parametrize(
    ("more", "optimizer"),
    [
        ("critic.optim.optimizer=AdamW", "muon"),
        ("actor_rollout_ref.model.lora_rank=8", "adamw"),
        ("actor_rollout_ref.actor.strategy=megatron", "adamw"),
    ],
)
def test_muon_is_muon_where_there_are_whole_matrices(config_of, more, optimizer):
    name = "actor_rollout_ref.actor.optim.optimizer"
    decided = ["trainer.optimizer=adamw"] if optimizer == "adamw" else []
    grpo = "algorithm.adv_estimator=grpo"
    config, done = config_of(grpo, f"{name}=Muon", more, decided=decided)
    assert (config.trainer.optimizer, config.critic.optimizer) == (optimizer, "adamw")
    assert bool(done.fates[name].lost) == (optimizer == "adamw")
    _, done = config_of(grpo, f"{name}=Adafactor", decided=["trainer.optimizer=adamw"])
    assert done.fates[name].lost == "there is no such optimizer: AdamW or Muon"


def test_megatrons_layout_is_megatrons_here(config_of):
    actor, model = "actor_rollout_ref.actor", "actor_rollout_ref.model"
    layout = [
        f"{actor}.megatron.tensor_model_parallel_size=2",
        f"{actor}.megatron.pipeline_model_parallel_size=4",
    ]
    unknown = [f"{actor}.megatron.param_offload=True", f"{model}.lora_rank=8"]
    words = ["algorithm.adv_estimator=grpo", f"{actor}.strategy=megatron", *layout, *unknown]
    config, done = config_of(*words, decided=["trainer.backend=megatron"])
    assert (config.trainer.backend, config.trainer.lora.rank, config.trainer.park) == (
        "megatron",
        0,
        False,
    )
    assert (config.trainer.megatron.tensor_parallel, config.trainer.megatron.pipeline_parallel) == (
        2,
        4,
    )
    assert {name for name, fate in done.fates.items() if fate.lost} == {
        word.partition("=")[0] for word in unknown
    }


@pytest.mark.parametrize(("cut", "spread"), [([], 8), (["expert_tensor_parallel_size=1"], 4)])
def test_megatrons_experts_are_spread_over_as_many_ranks_as_share_them(config_of, cut, spread):
    megatron = "actor_rollout_ref.actor.megatron"
    layout = [
        "tensor_model_parallel_size=2",
        "expert_model_parallel_size=4",
        "sequence_parallel=True",
        *cut,
    ]
    options = [f"{megatron}.{option}" for option in layout]
    config, done = config_of(
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.strategy=megatron", *options
    )
    assert (config.trainer.megatron.expert_parallel, config.trainer.megatron.sequence_parallel) == (
        spread,
        True,
    )
    assert not any(fate.lost for fate in done.fates.values())


@pytest.mark.parametrize(
    "mode",
    [
        "vanilla",
        "gspo",
        "geo_mean",
        "sapo",
        "cispo",
        "gpg",
        "clip_cov",
        "kl_cov",
        "dppo_tv",
        "dppo_kl",
        "dro",
    ],
)
def test_every_loss_plans(config_of, mode):
    config_of(
        "algorithm.adv_estimator=grpo", f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}"
    )


def test_verls_gdpo_gets_the_kinds_of_reward_with_their_weights(config_of):
    words = ["algorithm.adv_estimator=gdpo", "trainer.total_training_steps=2"]
    keys = 'algorithm.gdpo_reward_keys=["accuracy", "format"]'
    config, done = config_of(*words, keys, "algorithm.gdpo_reward_weights=[1.0, 0.5]")
    assert config.algorithm.advantage == "siirl_dask.algorithms:gdpo"
    assert config.algorithm.advantage_options == {
        "divide_by_std": True,
        "weights": {"accuracy": 1.0, "format": 0.5},
    }
    assert "advantage: {with: {parts: [accuracy, format]}}" in done.text
    assert not [name for name, fate in done.fates.items() if fate.lost]
    assert (
        "2 kinds"
        in migrate([*words, keys, "algorithm.gdpo_reward_weights=[1]"])
        .fates["algorithm.gdpo_reward_weights"]
        .lost
    )
    assert "the parts of the reward" in migrate(words).report


def test_dro_has_its_beta_or_asks_for_it(config_of):
    loss = "actor_rollout_ref.actor.policy_loss"
    words = ["algorithm.adv_estimator=grpo", f"{loss}.loss_mode=dro"]
    config, done = config_of(*words, f"{loss}.dro_beta=0.3")
    assert config.algorithm.loss == "siirl_dask.algorithms:dro"
    assert config.algorithm.loss_options == {"beta": 0.3}
    assert not [name for name, fate in done.fates.items() if fate.lost]
    assert "a dro_beta above 0" in migrate(words).report


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_has_the_clip_ratios_as_limits(config_of, divergence):
    actor = "actor_rollout_ref.actor"
    words = [f"{actor}.policy_loss.loss_mode=dppo_{divergence}", f"{actor}.clip_ratio_low=0.1"]
    config, _ = config_of("algorithm.adv_estimator=grpo", *words, f"{actor}.clip_ratio_high=0.3")
    assert config.algorithm.loss == "siirl_dask.algorithms:dppo"
    assert config.algorithm.loss_options == {
        "low": 0.1,
        "high": 0.3,
        "divergence": divergence,
        "cap": 3.0,
    }


@pytest.mark.parametrize("mode", ["geo_mean", "sapo", "vanilla"])
def test_losses_of_rows_are_aggregated_by_rows_whatever_the_script_asks_for(config_of, mode):
    actor = "actor_rollout_ref.actor"
    config, _ = config_of(
        f"{actor}.policy_loss.loss_mode={mode}", f"{actor}.loss_agg_mode=token-mean"
    )
    by = "token_mean" if mode == "vanilla" else "sequence_mean_token_mean"
    assert config.algorithm.aggregation == f"siirl_dask.algorithms:{by}"


def test_defaults_that_differ_and_change_results_are_written_out(config_of):
    config, done = config_of("algorithm.adv_estimator=grpo")
    written = {
        "data.batch_size": 1024, "rollout.n": 1, "algorithm.minibatches": 4, "trainer.weight_decay": 0.01,
        "data.max_prompt_length": 512, "rollout.max_response_length": 512, "algorithm.epochs": 1,
        "rollout.temperature": 1.0, "trainer.gradient_checkpointing": True, "checkpoint.every": 0,
    }  # fmt: skip
    for key, value in written.items():
        group, name = key.split(".")
        assert getattr(getattr(config, group), name) == value
        assert key in done.defaulted
        assert "verl's default" in next(
            line for line in done.text.splitlines() if line.strip().startswith(f"{name}:")
        )
    assert config.algorithm.loss_options["dual_clip"] == 3


def test_verls_bypass_mode_takes_the_engines_log_probs_and_needs_no_correction(config_of):
    prefix = "algorithm.rollout_correction"
    config, done = config_of(
        f"{prefix}.bypass_mode=True", f"{prefix}.rollout_is=token", "trainer.total_training_steps=2"
    )
    assert config.algorithm.old_logprobs == "siirl_dask.nodes:rollout_logprobs"
    assert config.algorithm.correction is None
    assert "the sampler already" in done.fates[f"{prefix}.rollout_is"].lost
    config, _ = config_of(
        f"{prefix}.bypass_mode=False",
        f"{prefix}.rollout_is=token",
        "trainer.total_training_steps=2",
    )
    assert config.algorithm.old_logprobs == "siirl_dask.nodes:policy_logprobs"
    assert config.algorithm.correction == "siirl_dask.algorithms:truncated_is"


CORRECTIONS = [
    ("token", "2.0", None, None, "truncated_is", {"cap": 2.0}),
    ("token", "0.5_5.0", None, None, "masked_is", {"low": 0.5, "high": 5.0}),
    ("sequence", "4.0", None, None, "truncated_is", {"cap": 4.0, "level": "sequence"}),
    ("null", None, "seq_mean_k1", "0.5_4.0", "reject_sequences", {"low": 0.25, "high": 2.0}),
    ("null", None, "seq_mean_k1", "4.0", "reject_sequences", {"low": 0.25, "high": 4.0}),
    ("null", None, "seq_sum_k1", "0.5_4.0", "reject_sequences", {"low": 0.25, "high": 2.0, "over": "sum"}),
    ("null", None, "token_k1", "0.5_4.0", "reject_tokens", {"low": 0.25, "high": 2.0}),
    ("null", None, "seq_max_k3", "0.1", "reject_divergent",
     {"limit": 0.1, "estimate": "siirl_dask.algorithms:k3", "over": "max"}),
    ("sequence", "0.5_2.0", "token_k2,seq_mean_k1", "0.1,0.5_2.0", "combined", {"parts": [
        {"run": "siirl_dask.algorithms:masked_is", "with": {"low": 0.5, "high": 2.0, "level": "sequence"}},
        {"run": "siirl_dask.algorithms:reject_divergent",
         "with": {"limit": 0.1, "estimate": "siirl_dask.algorithms:k2", "over": "token"}},
        {"run": "siirl_dask.algorithms:reject_sequences", "with": {"low": 0.5, "high": 2.0}},
    ]}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "bounds", "masks", "limits", "function", "options"), CORRECTIONS
)
def test_verls_rollout_correction_becomes_weights_and_masks(
    config_of, weights, bounds, masks, limits, function, options
):
    """verl rejects by the engine's probability over the policy's: bounds of k1 are the inverse
    ones here.
    """
    asked = {"is": weights, "is_threshold": bounds, "rs": masks, "rs_threshold": limits}
    words = [
        f"algorithm.rollout_correction.rollout_{name}={value}"
        for name, value in asked.items()
        if value
    ]
    config, done = config_of(
        "algorithm.adv_estimator=grpo", *words, "trainer.total_training_steps=2"
    )
    assert config.algorithm.correction == f"siirl_dask.algorithms:{function}"
    assert config.algorithm.correction_options == options
    assert not [name for name, fate in done.fates.items() if fate.lost]


@pytest.mark.parametrize(
    ("masks", "limits", "said"),
    [
        ("seq_max_k1", "0.5_2.0", "nothing is rejected by 'seq_max_k1'"),
        ("row_mean_k1", "0.5_2.0", "nothing is rejected by 'row_mean_k1'"),
        ("token_k3", "0.5_2.0", "an upper bound alone"),
        ("token_k3", "2.0_0.5_1", "is no bound"),
        ("token_k1", "2.0_0.5", "a lower bound above 0 and up to"),
        ("token_k3,token_k2,token_k1", "0.1,0.2", "2 thresholds for 3 kinds"),
    ],
)
def test_a_rejection_that_verl_does_not_have_is_named(masks, limits, said):
    name = "algorithm.rollout_correction.rollout_rs"
    assert said in migrate([f"{name}={masks}", f"{name}_threshold={limits}"], 10).fates[name].lost


def test_verls_reinforce_in_bypass_mode_is_cispo_without_a_lower_bound(config_of):
    prefix = "algorithm.rollout_correction"
    words = [
        f"{prefix}.bypass_mode=True",
        f"{prefix}.loss_type=reinforce",
        "trainer.total_training_steps=2",
    ]
    config, _ = config_of("algorithm.adv_estimator=grpo", *words)
    assert config.algorithm.loss == "siirl_dask.algorithms:policy_gradient"
    config, done = config_of(
        *words, f"{prefix}.rollout_is=token", f"{prefix}.rollout_is_threshold=3.0"
    )
    assert config.algorithm.loss == "siirl_dask.algorithms:cispo"
    assert config.algorithm.loss_options == {"clip_low": 1.0, "clip_high": 2.0}
    assert not [name for name, fate in done.fates.items() if fate.lost]
    rows = f"{prefix}.rollout_is=sequence"
    _, done = config_of(*words, rows, decided=["algorithm.loss=siirl_dask.algorithms:ppo_clip"])
    assert "a cap of at least 1" in done.fates[f"{prefix}.loss_type"].lost


def names_of(use):
    return [
        name
        for part in TABLE.values()
        for option in part
        if option.use is use
        for name in option.names
    ]


KWARGS = "reward_model.reward_kwargs"
VARIANTS = [
    ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "actor_rollout_ref.actor.strategy=megatron",
     "critic.strategy=megatron"],
    ["algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True", "profiler.enable=True",
     "reward_model.overlong_buffer.enable=True"],
    ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
     "algorithm.rollout_correction.rollout_is=token", "global_profiler.tool=npu", "global_profiler.steps=[2]"],
    ["actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
     "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True"],
    ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.adv_estimator=reinforce_plus_plus"],
    ["algorithm.adv_estimator=gdpo", "actor_rollout_ref.actor.policy_loss.loss_mode=dro"],
    ["custom_reward_function.path=mine.py"],
    ["reward.custom_reward_function.path=mine.py"],
    ["algorithm.adv_estimator=grpo", "async_training.require_batches=2"],
    [f"{KWARGS}.overlong_buffer_cfg.{one}" for one in ("enable=True", "len=8", "penalty_factor=1")],
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in names_of(Use.RULE) if "*" not in name])
def test_what_the_table_says_has_a_counterpart_is_read_by_a_rule(name):
    fates = (
        migrate([*one, f"{name}={value}"], 10).fates[name]
        for one in VARIANTS
        for value in ("2", "true")
    )
    assert any(not fate.note.startswith("not read with") for fate in fates)


@pytest.mark.parametrize("value", ["2", "true"])
@pytest.mark.parametrize("one", VARIANTS, ids=range(len(VARIANTS)))
def test_every_option_beside_all_others_has_a_fate(one, value):
    names = [name for name in names_of(Use.RULE) if "*" not in name]
    fixed = {word.partition("=")[0] for word in one}
    done = migrate([*one, *(f"{name}={value}" for name in names if name not in fixed)], 10)
    for name in names:
        fate = done.fates[name]
        assert fate.keys or fate.lost or fate.note, name


@pytest.mark.parametrize("size", ["0", "0.5", "-4"])
@pytest.mark.parametrize(
    "name", ["actor_rollout_ref.actor.ppo_mini_batch_size", "data.train_batch_size"]
)
def test_a_batch_of_no_prompt_is_named(name, size):
    fate = migrate([f"{name}={size}"], 10).fates[name]
    assert "expected at least 1" in fate.lost


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.sampled_from([name.replace("*", "x") for use in Use for name in names_of(use)])
        | st.from_regex(r"(trainer|data|actor_rollout_ref\.actor)\.[a-z_]{1,12}", fullmatch=True),
        st.sampled_from(
            ["2", "0.5", "true", "false", "text", "[1, 2]", "null", "-1", "${oc.env:X}", "1e-6"]
        ),
        min_size=1,
    )
)
def test_each_option_ends_in_exactly_one_list(options):
    done = migrate(
        ["algorithm.adv_estimator=grpo", *(f"{name}={value}" for name, value in options.items())],
        10,
    )
    assert set(options) <= set(done.fates)
    for name in options:
        fate = done.fates[name]
        assert bool(fate.keys) + bool(fate.lost) + bool(fate.note and not fate.keys) == 1, (
            name,
            fate,
        )
        assert name in done.report
        assert not fate.lost or f"#   {name}=" in done.text


def script(tmp_path, text):
    path = tmp_path / "run.sh"
    path.write_text(text)
    return str(path)


def test_sglang_is_asked_for_by_name_since_its_sampler_is_not_exact(config_of, tmp_path):
    config, done = config_of(script(tmp_path, f"{CALL} actor_rollout_ref.rollout.name=sglang\n"))
    assert config.rollout.engine == "auto"
    assert "sglang draws tokens with a sampler of its own; auto stands in" in done.report


def test_variables_of_a_script_are_replaced_and_those_it_does_not_set_are_asked_for(
    config_of, tmp_path, monkeypatch
):
    path = script(tmp_path, f"A=${{A:-7}}\n{CALL} algorithm.adv_estimator=grpo data.train_batch_size=$((A * 2)) \\\n"
                  " actor_rollout_ref.actor.ppo_mini_batch_size=$A "
                  "actor_rollout_ref.model.path=$MODEL/x \\\n"
                  " trainer.nnodes=$NODES trainer.project_name=$(date +%s)\n")  # fmt: skip
    monkeypatch.setenv("MODEL", "/models")
    done = migrate([path], ROWS)
    assert "$MODEL is not set in the script" in done.report
    assert "add the variable as NAME=value" in done.fates["trainer.nnodes"].lost
    assert "what `$(date +%s)` prints is not known" in done.report
    assert "TO DECIDE: cluster.workers: trainer.nnodes is $NODES" in done.report
    assert re.search(r"workers: \?\?\?  # TO DECIDE", done.text), "never verl's own default"
    assert re.search(r"project: \?\?\?  # TO DECIDE", done.text)
    given = ["NODES=3", "trainer.project_name=mine"]
    config, _ = config_of(path, *given)
    assert (config.data.batch_size, config.algorithm.minibatches, config.model.path) == (
        14,
        2,
        "/models/x",
    )
    config, _ = config_of(path, "A=5", *given, "actor_rollout_ref.rollout.n=4")
    assert (config.data.batch_size, config.cluster.workers, config.rollout.n) == (10, 24, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo hello\n", "no call of verl or siiRL in it"),
        (
            f"{CALL} data.train_batch_size=1\n{CALL} data.train_batch_size=2\n",
            "calls in the lines 1, 2: expected one",
        ),
        ("python -m verl.trainer.main_ppo epochs=3\n", "no option of verl or siiRL"),
    ],
)
def test_scripts_without_one_call_are_refused(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        migrate([script(tmp_path, text)])


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        ("--config-path=./config --config-name=mine", True),
        ("--config-path=$HERE --config-name='gsm8k_multiturn_grpo'", True),
        ("--config-name mine.yaml", True),
        ("-cp conf -cn mine", True),
        ("--config-name=ppo_trainer", False),
        ("--config-path=config --config-name='ppo_megatron_trainer.yaml'", False),
    ],
)
def test_a_configuration_file_that_is_not_read_is_asked_for_in_the_file_that_is_written(
    tmp_path, words, asks
):
    done = migrate([script(tmp_path, f"HERE=/x\n{CALL} {words} data.train_batch_size=8\n")])
    assert ("the options in that YAML file are not read" in done.text) is asks
    assert done.text.count("TO DECIDE: --config") + done.text.count("TO DECIDE: -c") == int(asks)
    assert "is no option" not in done.report
    assert ("comes with verl" in done.report) is not asks
    assert "batch_size: 8" in done.text


def test_what_is_taken_out_of_their_defaults_is_named(tmp_path):
    done = migrate([script(tmp_path, f"{CALL} data.train_batch_size=8 data.seed=3 ~data.seed\n")])
    assert "data.seed" not in done.fates
    assert "~data.seed" not in done.report
    done = migrate([script(tmp_path, f"{CALL} data.train_batch_size=8 ~algorithm.kl_ctrl\n")])
    assert "~algorithm.kl_ctrl: takes a default of theirs out" in done.report


def test_other_files_are_refused_with_what_is_expected(tmp_path):
    ours = tmp_path / "ours.yaml"
    ours.write_text("base: dags/grpo.yaml\nrollout: {n: 4}\n")
    with pytest.raises(ConfigError, match="looks like a configuration of siirl_dask already"):
        migrate([str(ours)])
    with pytest.raises(ConfigError, match=r"none\.sh: .*No such file"):
        migrate([str(tmp_path / "none.sh")])
    ours.write_text("trainer: [\n")
    with pytest.raises(ConfigError, match=r"ours\.yaml:2: not YAML"):
        migrate([str(ours)])
    with pytest.raises(ConfigError, match="--rows 0"):
        migrate(["data.train_batch_size=1"], rows=0)


def test_a_misspelt_option_is_named_with_the_nearest_one():
    lost = migrate(["data.train_batch_size=8", "actor_rollout_ref.rollout.tempratur=1"]).fates
    assert lost["actor_rollout_ref.rollout.tempratur"].lost


def test_the_command_writes_a_file_that_plans_and_never_over_one(tmp_path, capsys):
    out = tmp_path / "mine.yaml"
    main(
        [
            "migrate",
            str(FILES / "siirl_npu.sh"),
            "--rows",
            "40315",
            "-o",
            str(out),
            "trainer.nnodes=2",
        ]
    )
    assert "NO COUNTERPART" not in capsys.readouterr().err
    assert load(out, ["data.url=a", "model.path=b", "validation.url=null"]).cluster.workers == 32
    with pytest.raises(SystemExit, match="2"):
        main(["migrate", str(FILES / "siirl_npu.sh"), "-o", str(out)])
    assert "it exists already" in capsys.readouterr().err
    main(
        [
            "migrate",
            "--",
            "python3",
            "-m",
            "verl.trainer.main_ppo",
            "algorithm.adv_estimator=gae",
            "trainer.foo=1",
        ]
    )
    said = capsys.readouterr()
    assert "siirl_dask:dags/ppo.yaml" in said.out
    assert "1 has NO COUNTERPART:\n  trainer.foo=1" in said.err
    assert "TO DECIDE: run.steps" in said.err, "no dataset was there to count"


def test_routes_are_replayed_where_engines_have_one_worker(config_of, tmp_path):
    replay = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    path = script(
        tmp_path, f"{CALL} algorithm.adv_estimator=grpo data.train_batch_size=8 {replay}\n"
    )
    size = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    config, _ = config_of(path, f"{size}=1")
    assert config.rollout.router_replay
    for others in ([f"{size}=2"], [f"{size}=1", "actor_rollout_ref.rollout.enforce_eager=False"]):
        config, done = config_of(path, *others)
        assert not config.rollout.router_replay
        assert (
            "in engines of one worker, with enforce_eager"
            in done.fates[replay.partition("=")[0]].lost
        )


def test_the_page_shows_the_table():
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    assert markdown() in page
    assert option_of("actor_rollout_ref.actor.optim.lr").ours == "trainer.lr"
