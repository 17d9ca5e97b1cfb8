"""Every algorithm that is named learns: reward rises on a small task, through planner, workers
and data plane.
"""

import pytest
import yaml

from siirl_dask.config.file import shipped

ALGORITHMS = "siirl_dask.algorithms"
NODES = "siirl_dask.nodes"

SHIPPED = ["quickstart", "quickstart_dr_grpo", "quickstart_rloo", "quickstart_reinforce_plus_plus", "quickstart_ppo",
           "quickstart_dapo", "quickstart_gspo", "quickstart_cispo", "quickstart_cpgd"]  # fmt: skip
"""Configs by name."""

VALUES = {
    "lite_ppo": {"advantage_options": {"scale": "batch"}},
    "gpg": {"advantage": f"{ALGORITHMS}:gpg", "loss": f"{ALGORITHMS}:policy_gradient"},
    "max_rl": {"advantage": f"{ALGORITHMS}:max_rl"},
    "opo": {"advantage": f"{ALGORITHMS}:opo"},
    "pass_at_k": {"advantage": f"{ALGORITHMS}:pass_at_k"},
    "policy_gradient": {"loss": f"{ALGORITHMS}:policy_gradient"},
    "dual_clip": {"loss_options": {"dual_clip": 3.0}},
    "rloo_sequence_ratio": {
        "advantage": f"{ALGORITHMS}:rloo",
        "loss": f"{ALGORITHMS}:sequence_clip",
        "aggregation": f"{ALGORITHMS}:sequence_mean_token_sum",
    },
    "dppo": {"loss": f"{ALGORITHMS}:dppo"},
    "dro": {"loss": f"{ALGORITHMS}:dro", "loss_options": {"beta": 0.5}},
    "vespo": {"loss": f"{ALGORITHMS}:vespo"},
    "sapo": {"loss": f"{ALGORITHMS}:sapo"},
    "gmpo": {"loss": f"{ALGORITHMS}:gmpo", "aggregation": f"{ALGORITHMS}:sequence_mean_token_mean"},
    "entropy_bonus": {"entropy_coefficient": 1e-3},
    "truncated_is": {"correction": f"{ALGORITHMS}:truncated_is"},
    "masked_is": {"correction": f"{ALGORITHMS}:masked_is"},
    "reject_sequences": {
        "correction": f"{ALGORITHMS}:reject_sequences",
        "correction_options": {"low": 0.5, "high": 2.0},
    },
    "combined": {
        "correction": f"{ALGORITHMS}:combined",
        "correction_options": {
            "parts": [
                {"run": f"{ALGORITHMS}:reject_divergent", "with": {"limit": 0.1}},
                {"run": f"{ALGORITHMS}:mask_off_policy", "with": {"limit": 0.5}},
                {"run": f"{ALGORITHMS}:truncated_is", "with": {"level": "sequence"}},
            ],
        },
    },
}
"""Algorithms that differ from the quickstart in values only."""

_REFERENCE = {
    "build": "siirl_dask.training:build_reference",
    "with": {"model": "${model}", "trainer": "${trainer}", "rollout": "${rollout}"},
}
_COVARIANT = {"run": f"{NODES}:choose_covariant", "role": "policy", "after": "minibatches"}
_COLUMNS = {"after": "covariant", "with": {"columns": ["covariant"]}}

GRAPHS = {
    "remax": {
        "rollout": {
            "temperature": 0.3
        },  # samples of a policy that is still random are all worse than its best
        "algorithm": {"advantage": f"{ALGORITHMS}:remax"},
        "nodes": {
            "rollout": {"run": f"{NODES}:generate_with_greedy"},
            "baselines": {
                "run": f"{NODES}:take_greedy_baselines",
                "role": "reward",
                "after": "reward",
                "rows": "grouped",
            },
            "old_logprobs": {"after": "baselines"},
            "advantage": {"after": "old_logprobs"},
        },
    },
    "kl_in_the_reward": {
        "roles": {
            "reference": _REFERENCE,
            "kl": {
                "build": f"{ALGORITHMS}:build_kl_controller",
                "with": {"coefficient": 1e-3, "target": 0.1},
            },
        },
        "nodes": {
            "reference_logprobs": {
                "run": f"{NODES}:reference_logprobs",
                "role": "reference",
                "after": "rollout",
                "rows": "balanced",
            },
            "kl": {
                "run": f"{NODES}:penalise_kl",
                "role": "kl",
                "after": ["old_logprobs", "reference_logprobs"],
            },
            "advantage": {"after": ["reward", "kl"]},
        },
    },
    "turns": {  # a row without the column `turns` is one
        "algorithm": {
            "advantage": f"{ALGORITHMS}:turn_returns",
            "advantage_options": {"discount": 0.9},
            "loss": f"{ALGORITHMS}:turn_clip",
            "loss_options": {"mean": True},
        },
        "nodes": {
            "advantage": {"run": f"{NODES}:estimate_turn_advantages"},
            "update": {"with": {"columns": ["token_turns"]}},
        },
    },
    "role_baselines": {
        "roles": {
            "baselines": {"build": f"{ALGORITHMS}:build_role_baselines", "with": {"decay": 0.95}}
        },
        "nodes": {
            "advantage": {
                "run": f"{NODES}:estimate_role_advantages",
                "role": "baselines",
                "with": {"by": [], "advantage": None},
            },
        },
    },
    "kl_cov": {
        "algorithm": {"loss": f"{ALGORITHMS}:kl_cov"},
        "nodes": {
            "covariant": _COVARIANT
            | {"with": {"minibatches": "${algorithm.minibatches}", "fraction": 0.01}},
            "update": _COLUMNS,
        },
    },
    "high_entropy": {
        "algorithm": {"correction": f"{ALGORITHMS}:keep_high_entropy"},
        "nodes": {
            "old_logprobs": {"with": {"entropies": True}},
            "forks": {
                "run": f"{NODES}:choose_high_entropy",
                "role": "policy",
                "after": "minibatches",
                "with": {"minibatches": "${algorithm.minibatches}", "fraction": 0.8},
            },
            "near": {
                "run": f"{NODES}:mask_second_moment",
                "role": "policy",
                "after": "forks",
                "with": {"minibatches": "${algorithm.minibatches}"},
            },
            "update": {"after": "near", "with": {"columns": ["high_entropy"]}},
        },
    },
    "optimal_token_baseline": {
        "algorithm": {"advantage": f"{ALGORITHMS}:optimal_token_baseline"},
        "nodes": {
            "old_logprobs": {"with": {"collision_probs": True}},
            "advantage": {
                "run": f"{NODES}:estimate_token_advantages",
                "with": {"whiten": False, "probabilities": True},
            },
        },
    },
    "gdpo": {
        "algorithm": {"advantage": f"{ALGORITHMS}:gdpo"},
        "nodes": {"advantage": {"with": {"parts": ["digits", "variety"]}}},
    },
    "clip_cov": {
        "algorithm": {"loss": f"{ALGORITHMS}:clip_cov"},
        "nodes": {
            "covariant": _COVARIANT
            | {
                "with": {
                    "minibatches": "${algorithm.minibatches}",
                    "fraction": 0.01,
                    "low": 1.0,
                    "high": 5.0,
                }
            },
            "update": _COLUMNS,
        },
    },
}
"""Algorithms that are another graph."""
REWARDS = {"gdpo": ["rewards.function=tests.e2e.rewards:digits_and_variety"]}
"""Rewards of algorithms that learn from another one."""


@pytest.fixture
def config_file(tmp_path):
    def find(name):
        if name in SHIPPED:
            return shipped(name)
        changes = {"algorithm": VALUES[name]} if name in VALUES else GRAPHS[name]
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"base": str(shipped("quickstart")), **changes}))
        return path

    return find


SLOW = {
    "role_baselines",
    "high_entropy",
    "gdpo",
    "optimal_token_baseline",
    "quickstart_rloo",
    "quickstart_cispo",
    "quickstart_cpgd",
}
"""Algorithms that `make test` leaves to `make test-slow`; it has their formulas
(tests/algorithms)."""
SWEEP = {*VALUES} - SLOW - {"reject_sequences"}
"""Algorithms that are left to `make sweep`: others differ from the quickstart in the same
places."""


def marks_of(name):
    return [pytest.mark.slow] * (name in SLOW) + [pytest.mark.sweep] * (name in SWEEP)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_of(name)) for name in [*SHIPPED, *VALUES, *GRAPHS]]
)
def test_reward_rises(name, config_file, train):
    placement = "{rollout: [0, 1], reward: [0, 1], policy: [0, 1]}"
    sizes = ["run.steps=8", "cluster.workers=2", "data.batch_size=16", "rollout.n=8"]
    fast = ["trainer.warmup_steps=0", "trainer.lr=4e-3"]
    own = REWARDS.get(name, [])
    finished = train(
        name, f"cluster.placement={placement}", *sizes, *fast, *own, config_file=config_file(name)
    )
    rewards = [record["metrics"]["reward/mean"] for record in finished.records()]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
    assert all(record["metrics"]["policy/grad_norm"] > 0 for record in finished.records())


def test_the_transformers_engines_log_probs_train_the_same_policy_without_a_pass_of_it(train):
    # the last bit of a log-prob depends on the rows generated with it, and so on rows that an idle
    # worker takes over
    sizes = [
        "run.steps=3",
        "cluster.workers=2",
        "cluster.placement={}",
        "rollout.work_stealing=false",
    ]
    passes = train("passes", *sizes)
    told = train("told", *sizes, f"algorithm.old_logprobs={NODES}:rollout_logprobs")
    first, same = passes.table("rollouts", 1), told.table("rollouts", 1)
    assert same.select(["response_ids", "rollout_logprobs"]).equals(
        first.select(["response_ids", "rollout_logprobs"])
    )
    assert same["old_logprobs"].equals(same["rollout_logprobs"])
    for expected, got in zip(passes.records(), told.records(), strict=True):
        for metric in ("reward/mean", "policy/loss", "policy/entropy", "policy/grad_norm"):
            assert got["metrics"][metric] == pytest.approx(
                expected["metrics"][metric], rel=1e-3, abs=1e-4
            ), metric
        assert "mismatch/kl" in expected["metrics"]
        assert "mismatch/kl" not in got["metrics"]
