"""``siirl-dask migrate`` writes the configuration that computes the other system's loss, and asks
where there is none.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from siirl_dask.algorithms import Outcomes, Totals
from siirl_dask.commands.migrate import migrate
from siirl_dask.commands.migrate.nulls import NULLS
from siirl_dask.config.file import load_config_file
from siirl_dask.driver.phases import dags
from tests.algorithms.surrogates import inputs

ACTOR = "actor_rollout_ref.actor"
VERL = ["python3", "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo"]
SIIRL = ["python3", "-m", "siirl.main_dag", "algorithm.adv_estimator=grpo"]
LOSS = f"{ACTOR}.policy_loss.loss_mode"
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
# a row of one token with A = 1 and one of three with A = -1, whose ratios are e^.5, e^-.5, e^.5
# and e^2, and e^(2/3) of the second row
ROWS = inputs(
    [-0.5, -1.5, -0.5, -1.0],
    [-1.0, -1.0, -1.0, -3.0],
    [1.0, -1.0, -1.0, -1.0],
    offsets=torch.tensor([0, 1, 4]),
)


@pytest.fixture
def migrated(tmp_path):
    """Return the nodes that come of words or of TRL's options, and what became of the options."""

    def convert(given):
        own = []
        if isinstance(given, dict):
            given = trl_words(tmp_path, given)
            own = ["data.url=x", "rewards.function=siirl_dask.rewards:exact_match"]
            own += ["rewards.options={}", "model.path=m"]
        done = migrate(given, 1000)
        if "loss_options: ???" in done.text:
            own.append("algorithm.loss_options={clip_low: 0.2, clip_high: 0.2}")
        target = tmp_path / "migrated.yaml"
        target.write_text(done.text)
        (train, _) = dags(load_config_file(target, own))
        return {node.name: node.options for node in train.nodes}, done

    return convert


def trl_words(folder, options):
    """Words of a file with TRL's options."""
    path = folder / "grpo.yaml"
    values = {"model_name_or_path": "m", "reward_funcs": "mine:f", **options}
    path.write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    return [str(path)]


def loss_of(update):
    """The mini-batch's loss of ROWS by the options of a node that updates."""
    weights = update["aggregate"](ROWS.offsets, Totals(tokens=4, rows=2))
    return float((update["loss"](ROWS).loss * weights).sum())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # -1.2 and three times e^(2/3), over tokens, as verl 0.9 has it, and over rows
        ([*VERL, f"{LOSS}=gspo"], (-1.2 + 3 * 1.947734) / 4),
        ([*VERL, f"{LOSS}=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"], 0.373867),
        ([*SIIRL, f"{LOSS}=gspo", f"{ACTOR}.loss_agg_mode=token-mean"], 0.373867),
        # -1.2, .8, e^.5 and 3
        ([*VERL, f"{LOSS}=gspo", BYPASS], 1.062180),
        ([*VERL, f"{LOSS}=sapo", BYPASS], 1.062180),
        ([*VERL, "algorithm.adv_estimator=gpg"], 1.062180),
        ([*VERL, "algorithm.adv_estimator=gpg", f"{LOSS}=gpg"], -0.625),
        # weights e^.5, e^-.5, e^.5 and 5
        ({"loss_type": "cispo", "epsilon_high": 5.0}, -1.477449),
        ({"loss_type": "cispo", "epsilon_high": 1.28}, -0.547449),
        # -1.2 and (.8 + 1.5 + 1.5) / 3
        ({"loss_type": "grpo", "delta": 1.5}, 0.033333),
        # -1.1 and (.8 + 1.2 + 1.2) / 3: a delta below 1.2 bounds A > 0
        ({"loss_type": "grpo", "delta": 1.1}, -0.016667),
        ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, 1.160801),
    ],
)
def test_the_loss_is_the_other_systems(migrated, given, expected):
    nodes, _ = migrated(given)
    assert loss_of(nodes["update"]) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        ("k3+", "straight_through"),
        ("k1+", "straight_through"),
        ("k2+", "k2"),
        ("mse+", "k2"),
        ("low_var_kl", "k3_clipped"),
    ],
)
def test_verls_estimate_of_the_kl_has_the_same_gradient_here(migrated, kind, ours):
    nodes, _ = migrated([*VERL, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type={kind}"])
    assert nodes["update"]["loss"].keywords["kl"].__name__ == ours


@pytest.mark.parametrize("estimator", ["gdpo", "grpo_vectorized"])
def test_what_verl_divides_by_the_standard_deviation_whatever_it_is_told(migrated, estimator):
    name = "algorithm.norm_adv_by_std_in_grpo"
    words = [*VERL[:-1], f"algorithm.adv_estimator={estimator}", f"{name}=False"]
    nodes, done = migrated([*words, 'algorithm.gdpo_reward_keys=["reward"]'])
    advantage = nodes["advantage"]["advantage"]
    assert advantage.func.__name__ == estimator.partition("_")[0]
    assert advantage.keywords.get("divide_by_std", True)
    assert "whatever this says" in done.fates[name].note


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"], "sequence_mean_token_mean"),
        (
            [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", "critic.loss_agg_mode=token-mean"],
            "token_mean",
        ),
        (["critic.loss_agg_mode=seq-mean-token-sum"], "sequence_mean_token_sum"),
        ([], "token_mean"),
    ],
)
def test_verls_critic_is_averaged_as_the_policy_is_unless_it_is_told(migrated, words, expected):
    nodes, done = migrated([*VERL[:-1], "algorithm.adv_estimator=gae", *words])
    aggregate = nodes["update_critic"].get("aggregate")
    assert getattr(aggregate, "__name__", "token_mean") == expected
    assert not [name for name, fate in done.fates.items() if fate.lost]


@pytest.mark.parametrize(
    ("options", "open_key", "lost"),
    [
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "algorithm.loss", True),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "algorithm.loss", True),
        ({"loss_type": "luspo"}, "algorithm.loss", False),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "algorithm.loss_options", False),
        ({"loss_type": "cispo"}, "algorithm.loss_options", False),
    ],
)
def test_a_loss_of_trls_that_there_is_not_is_left_to_decide(tmp_path, options, open_key, lost):
    done = migrate(trl_words(tmp_path, options), 100)
    assert [one for one in done.report.splitlines() if f"{open_key}: " in one]
    assert f"{open_key.rpartition('.')[2]}: ???" in done.text
    assert bool([name for name, fate in done.fates.items() if fate.lost]) is lost


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"importance_sampling_level": "sequence", "delta": 2.0}, "delta"),
        ({"delta": 0.5}, "delta"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile"),
        (
            {
                "loss_type": "vespo",
                "use_vllm": "true",
                "vllm_importance_sampling_mode": "token_truncate",
            },
            "vllm_importance_sampling_mode",
        ),
    ],
)
def test_what_of_trls_has_no_counterpart_beside_the_others_is_named(migrated, options, name):
    _, done = migrated(options)
    assert [lost for lost, fate in done.fates.items() if fate.lost] == [name]


def test_trls_normalize_then_sum_is_gdpo_with_the_functions_for_parts(migrated):
    more = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": "[1.0, 0.5]"}
    functions = {"reward_funcs": "[mine.right, mine.short]", "scale_rewards": "none"}
    nodes, done = migrated({**more, **functions, "mask_truncated_completions": "true"})
    assert nodes["advantage"]["parts"] == ("right", "short")
    advantage = nodes["advantage"]["advantage"]
    assert advantage.keywords == {"epsilon": 1e-4, "weights": {"right": 1.0, "short": 0.5}}
    rewards = {"right": torch.tensor([1.0, 0.0]), "short": torch.tensor([0.0, 1.0])}
    rows = Outcomes(
        rewards=torch.zeros(2),
        group_ids=torch.zeros(2, dtype=torch.int64),
        lengths=torch.ones(2, dtype=torch.int64),
        parts=rewards,
    )
    # each kind +-.5 / (.707107 + 1e-4), their sum +-.353504, whose std over the batch is .499930
    assert advantage(rows).tolist() == pytest.approx([0.706965, -0.706965], abs=2e-6)
    assert not [name for name, fate in done.fates.items() if fate.lost]
    same = {"reward_funcs": "[mine.right, yours.right]", **more}
    _, done = migrated(same)
    assert "names of their own" in done.fates["multi_objective_aggregation"].lost


def test_trls_lower_bound_of_a_truncated_ratio_is_kept(migrated):
    name = "vllm_importance_sampling"
    bounds = {f"{name}_clip_min": 0.9, f"{name}_clip_max": 1.5}
    nodes, done = migrated({"use_vllm": "true", f"{name}_mode": "token_truncate", **bounds})
    weights = nodes["update"]["loss"].keywords["correction"]
    ratios = replace(ROWS, rollout_logprobs=ROWS.old_logprobs + torch.tensor([1.0, 0, -0.2, -1]))
    # e^-1, 1, e^.2 and e
    assert weights(ratios).tolist() == pytest.approx([0.9, 1.0, 1.221403, 1.5], abs=2e-6)
    assert not [lost for lost, fate in done.fates.items() if fate.lost]


def test_vespos_ratio_is_to_the_engine_where_trl_multiplies_the_two(migrated):
    nodes, _ = migrated({"loss_type": "vespo", "use_vllm": "true"})
    assert nodes["update"]["old_logprobs"] == "siirl_dask.nodes:rollout_logprobs"
    assert nodes["update"]["loss"].keywords["correction"] is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss_type": "vespo", "steps_per_generation": 4}, "the tokens of the step"),
        (
            {"loss_type": "cispo", "epsilon_high": 5, "steps_per_generation": 4},
            "tokens of the step",
        ),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "of each micro-batch"),
        ({"loss_type": "grpo", "entropy_coef": 0.1}, "TRL's bonus is a mean over tokens"),
        ({"entropy_coef": 0.1, "top_entropy_quantile": 0.2}, "the tokens of high entropy alone"),
        ({"loss_type": "grpo", "mask_truncated_completions": "true"}, "counts among TRL's rows"),
        (
            {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.2},
            "gradient of the row's",
        ),
        ({"importance_sampling_level": "sequence", "beta": 0.1}, "each token's KL by the row's"),
        (
            [
                *VERL[:-1],
                "algorithm.adv_estimator=optimal_token_baseline",
                "algorithm.rollout_correction.rollout_is=token",
            ],
            "weighs rows by squared weights",
        ),
        ([*VERL, f"{LOSS}=sapo", f"{ACTOR}.use_kl_loss=True"], "KL and entropy are averaged"),
        ([*VERL, f"{LOSS}=geo_mean", f"{ACTOR}.entropy_coeff=0.1"], "KL and entropy are averaged"),
    ],
)
def test_what_is_averaged_otherwise_is_asked_about(migrated, given, said):
    _, done = migrated(given)
    assert said in done.report


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"clip_max": "null", "clip_min": 0.5}, [0.0, 1.0, 1.221403, 20.085537]),
        ({"clip_max": "null"}, [0.135335, 1.0, 1.221403, 20.085537]),
        ({"clip_min": 0.5}, [0.0, 1.0, 1.221403, 0.0]),
        ({}, [0.135335, 1.0, 1.221403, 0.0]),
        ({"clip_max": "null", "cap": 1.1}, [0.135335, 1.0, 0.0, 0.0]),
    ],
)
def test_trls_null_is_no_upper_bound_and_nothing_is_three(migrated, bounds, expected):
    name = "vllm_importance_sampling"
    given = {f"{name}_{bound}": value for bound, value in bounds.items()}
    nodes, done = migrated({"use_vllm": "true", f"{name}_mode": "token_mask", **given})
    weights = nodes["update"]["loss"].keywords["correction"]
    # e^-2, 1, e^.2 and e^3
    ratios = replace(ROWS, rollout_logprobs=ROWS.old_logprobs + torch.tensor([2.0, 0, -0.2, -3]))
    assert weights(ratios).tolist() == pytest.approx(expected, abs=2e-6)
    assert not [lost for lost, fate in done.fates.items() if fate.lost]


def test_trl_refuses_to_truncate_by_no_bound_and_so_does_migrate(migrated):
    name = "vllm_importance_sampling"
    given = {"use_vllm": "true", f"{name}_mode": "token_truncate", f"{name}_clip_max": "null"}
    _, done = migrated(given)
    assert "give one of them" in done.fates[f"{name}_clip_max"].lost
    nodes, done = migrated({**given, f"{name}_clip_min": 0.9})
    ratios = replace(ROWS, rollout_logprobs=ROWS.old_logprobs + torch.tensor([1.0, 0, -0.2, -1]))
    weights = nodes["update"]["loss"].keywords["correction"]
    assert weights(ratios).tolist() == pytest.approx([0.9, 1.0, 1.221403, 2.718282], abs=2e-6)


@pytest.mark.parametrize(
    ("alpha", "steps", "base", "kept"),
    [
        (0.6, 64, "grpo_average", {"ema_decay: 0.4", "ema_every: 64"}),
        (1, 64, "grpo_average", {"ema_decay: 0", "ema_every: 64"}),
        (1, 1, "grpo_average", {"siirl_dask.nodes:reference_logprobs"}),
        (0, 64, "grpo_kl", set()),
        (1.5, 64, "grpo_average", {"ema_decay: 0.4", "TO DECIDE: trainer.ema_decay"}),
    ],
)
def test_a_reference_that_trl_moves_moves_as_far(migrated, alpha, steps, base, kept):
    given = {"ref_model_mixup_alpha": alpha, "ref_model_sync_steps": steps}
    nodes, done = migrated({"beta": 0.1, "sync_ref_model": "true", **given})
    assert f"dags/{base}.yaml" in done.text
    assert all(text in done.text for text in kept)
    assert ("ema_" in done.text) == any("ema_" in text for text in kept)
    assert "reference_logprobs" in nodes


EVERY_NULL = [
    ("TRL", name, value) for name, value in NULLS["TRL"].items() if not name.startswith("vllm_")
]
EVERY_NULL += [("verl", name, value) for name, value in NULLS["verl"].items()]


@pytest.mark.parametrize(("system", "name", "value"), EVERY_NULL)
def test_null_is_what_it_stands_for_and_not_the_default(migrated, system, name, value):
    shown = "false" if value is False else ".inf"
    more = {"beta": 0.1} if system == "TRL" else ["actor_rollout_ref.actor.strategy=megatron"]
    if name.startswith("critic"):
        more = ["algorithm.adv_estimator=gae", "critic.strategy=megatron"]
    texts = []
    for written in ("null", shown):
        words = {name: written, **more} if system == "TRL" else [*VERL, *more, f"{name}={written}"]
        _, done = migrated(words)
        assert name in done.fates
        texts.append(done.text)
    assert texts[0] == texts[1]
    absent = more if system == "TRL" else [*VERL, *more]
    _, done = migrated(absent)
    assert texts[0] != done.text


def test_a_null_threshold_of_verls_leaves_its_weights_out(migrated):
    weighs = "algorithm.rollout_correction.rollout_is"
    nodes, _ = migrated([*VERL, f"{weighs}=token", f"{weighs}_threshold=null"])
    assert nodes["update"]["loss"].keywords["correction"] is None
    nodes, _ = migrated([*VERL, f"{weighs}=token"])
    assert nodes["update"]["loss"].keywords["correction"] is not None


@pytest.mark.parametrize("number", [".inf", ".nan", "1e999"])
def test_what_is_no_finite_number_is_asked_about(migrated, tmp_path, number):
    words = trl_words(tmp_path, {"num_generations": number, "max_completion_length": "null"})
    done = migrate(words, 1000)
    assert "rollout.n: num_generations is" in done.report
    assert "max_response_length: ???" in done.text
    assert done.fates["max_completion_length"].lost


@pytest.mark.parametrize(("epochs", "said"), [(1, "1 epoch x"), (2, "2 epochs x")])
def test_one_epoch_is_not_several(tmp_path, epochs, said):
    for given in (
        trl_words(tmp_path, {"num_train_epochs": epochs}),
        [*VERL, f"trainer.total_epochs={epochs}"],
    ):
        assert f"run.steps: {said}" in migrate(given).report
