"""The scripts in pipelines/ run, and spell the same DAG as the YAML."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from siirl_dask.cli import dags, main
from siirl_dask.configfile import load, shipped
from tests.conftest import digits_overrides

PIPELINES = Path(__file__).parents[2] / "pipelines"


def script(name):
    spec = importlib.util.spec_from_file_location(name, PIPELINES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = {"grpo": "quickstart", "ppo": "quickstart_ppo", "dapo": "quickstart_dapo", "custom": "quickstart"}
"""Each with the config that its first lines name."""


@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo"])
def test_the_dag_of_the_script_equals_the_one_in_yaml(name):
    file = load(shipped(SCRIPTS[name]))
    training, validation = dags(file)
    pipeline = script(name)
    assert sorted(node.key for node in pipeline.training(file.config).nodes) == sorted(n.key for n in training.nodes)
    assert {role.key for role in pipeline.training(file.config).roles} == {role.key for role in training.roles}
    assert pipeline.validation(file.config).nodes == validation.nodes


def test_every_script_is_run_here():
    assert {path.stem for path in PIPELINES.glob("*.py")} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_runs_as_its_first_lines_say(name, digits_task, tmp_path):
    command = [sys.executable, str(PIPELINES / f"{name}.py"), str(shipped(SCRIPTS[name]))]
    settings = ["cluster.workers=1", "cluster.placement={}", "run.steps=1"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*command, *digits_overrides(digits_task, tmp_path / "run"), *settings],
        capture_output=True, text=True, cwd=tmp_path, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run" / "rollouts" / "step=000001").iterdir())) == 1


@pytest.mark.parametrize("config", sorted(path.name for path in shipped("quickstart.yaml").parent.glob("*.yaml")))
def test_plan_describes_every_shipped_config_and_starts_nothing(config, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["plan", str(shipped(config))])
    said = capsys.readouterr().out
    for word in ("rollout -> old_logprobs", "The chain of each worker", "validation", "kB", "local"):
        assert word in said
    assert list(tmp_path.iterdir()) == []
