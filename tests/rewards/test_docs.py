"""docs/rewards.md names every reward, option and key with its default, and its YAML makes DAGs."""

import inspect
import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml

import siirl_dask.rewards as rewards
from siirl_dask.config import RewardsConfig
from siirl_dask.planner import dag_from_spec
from siirl_dask.rewards import PASSED_IF_NAMED

TEXT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
NO_REWARDS = {"build_scorer", "score_of"}


def test_every_reward_is_named():
    functions = {
        name for name in rewards.__all__ if inspect.isfunction(getattr(rewards, name))
    } - NO_REWARDS
    assert functions == set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))


def test_every_option_has_the_default_that_is_shown():
    shown = re.findall(r"^\| `(\w+)` \| `\{([^}]*)\}` \|", TEXT, re.MULTILINE)
    assert len(shown) > 4
    for name, text in shown:
        parameters = inspect.signature(getattr(rewards, name)).parameters.values()
        options = yaml.safe_load("{" + text + "}")
        # scorers give it
        known = [
            p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in PASSED_IF_NAMED
        ]
        assert list(options) == known, name
        for option, value in options.items():
            default = inspect.signature(getattr(rewards, name)).parameters[option].default
            assert value in ("...", default), f"{name} {option}: {default}, not {value}"


def test_every_key_is_named_with_its_default():
    shown = dict(re.findall(r"^\| `rewards\.(\w+)` \| `?([^|`]+)`? \|", TEXT, re.MULTILINE))
    expected = {
        name: "none" if value is None else str(value)
        for name, value in asdict(RewardsConfig()).items()
    }
    assert {key: text.strip() for key, text in shown.items()} == expected
    assert list(shown) == [f.name for f in fields(RewardsConfig)]


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL))
def test_the_yaml_makes_a_dag(block, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def right(prompts, completions, **columns):\n    return [1.0]\nformat = right\n"
        "def compute_score(solution_str, ground_truth, scale, **columns):\n    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    spec = yaml.safe_load(block.replace("${rewards}", "{processes: 0}"))
    if "rewards" in spec:
        # as the shipped DAGs build it
        reward = {"run": spec["rewards"]["function"], "with": spec["rewards"]["options"]}
        arguments = {"rewards": {"processes": 0}, "reward": reward}
        scorer = {"build": "siirl_dask.rewards:build_scorer", "with": arguments}
        changes = spec.get("nodes", {}).get("reward", {})
        spec = {
            "roles": {"reward": scorer},
            "nodes": [
                {"name": "reward", "run": "siirl_dask.nodes:score", "role": "reward", **changes}
            ],
        }
    nodes = spec["nodes"]
    dag = dag_from_spec(spec["roles"], [{**node, "after": []} for node in nodes])
    assert "reward" in dag.nodes[0].contract.writes.names
