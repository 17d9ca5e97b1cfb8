"""The scripts in pipelines/ run, and spell the same DAG as the YAML."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask import grpo, ppo
from siirl_dask.cli import main
from siirl_dask.config.file import load, load_config_file, shipped
from siirl_dask.tasks.tiny_model import tiny_model
from tests.conftest import digits_overrides
from tests.recipes.keys import OTHER_VALUES, check_no_key_is_ignored, same_dag

PIPELINES = Path(__file__).parents[2] / "pipelines"


def script(name):
    spec = importlib.util.spec_from_file_location(name, PIPELINES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = {
    "grpo": "quickstart",
    "ppo": "quickstart_ppo",
    "dapo": "quickstart_dapo",
    "custom": "quickstart",
    "from_scratch": "quickstart",
}
"""Each with the config that its first lines name."""
LONGEST = {"grpo": 20, "ppo": 20, "dapo": 20, "custom": 50, "from_scratch": 70}
"""Lines of each: what does not fit belongs into the package."""


@pytest.mark.parametrize(("name", "recipe"), [("dapo", None), ("grpo", grpo), ("ppo", ppo)])
def test_a_script_trains_the_dag_that_its_config_spells(name, recipe):
    file = load_config_file(shipped(SCRIPTS[name]))
    assert same_dag(recipe or script(name).training)(file)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_fits_its_page(name):
    assert len((PIPELINES / f"{name}.py").read_text().splitlines()) < LONGEST[name]


REFUSED = {
    "dapo": (),
    "custom": ("advantage", "advantage_options", "loss", "loss_options"),
    "from_scratch": set(OTHER_VALUES) - {"minibatches"},
}
"""Keys of the algorithm that a script refuses, since it says itself what they would."""


@pytest.mark.parametrize("name", REFUSED)
def test_no_key_of_the_algorithm_is_ignored_by_a_script(name):
    check_no_key_is_ignored(script(name).training, load(shipped(SCRIPTS[name])), REFUSED[name])


def test_every_script_is_run_here():
    assert {path.stem for path in PIPELINES.glob("*.py")} == set(SCRIPTS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("dapo", "ppo") else ()) for name in SCRIPTS]
)
def test_the_script_runs_as_its_first_lines_say(name, digits_task, cluster_address, tmp_path):
    command = [sys.executable, str(PIPELINES / f"{name}.py"), str(shipped(SCRIPTS[name]))]
    settings = ["cluster.workers=1", "cluster.placement={}", "run.steps=1", f"cluster.address={cluster_address}"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*command, *digits_overrides(digits_task, tmp_path / "run"), *settings],
        capture_output=True, text=True, cwd=tmp_path, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run" / "rollouts" / "step=000001").glob("part-*"))) == 1


BROUGHT = {"grpo_gsm8k.yaml"}
"""Configs for data that is not made on the spot."""
SHIPPED = {path.name for path in shipped("quickstart.yaml").parent.glob("*.yaml")}


def check_plan(said):
    for word in ("rollout -> old_logprobs", "The chain of each worker", "validation", "kB", "local"):
        assert word in said


@pytest.mark.parametrize("config", sorted(SHIPPED - BROUGHT))
def test_plan_describes_every_shipped_config_and_starts_nothing(config, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["plan", str(shipped(config))])
    check_plan(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []


def test_the_config_for_gsm8k_plans_and_runs_on_rows_as_its_first_lines_say(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant:"
    tiny_model(tmp_path / "models" / "Qwen2.5-0.5B-Instruct", family="qwen2", chat_template=template)
    rows = [{"question": f"{at} + 1?", "answer": f"one more\n#### {at + 1}"} for at in range(8)]
    for name in ("train", "test"):
        path = tmp_path / "hub" / "main" / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    main(["plan", str(shipped("grpo_gsm8k.yaml"))])
    assert not (tmp_path / "data").exists()
    check_plan(capsys.readouterr().out)
    small = ["cluster.workers=2", "data.batch_size=4", "rollout.n=2", "rollout.max_response_length=4", "run.steps=1"]
    small += ["data.prepare_options={source: hub}"]
    small += ["rollout.engine=transformers", "algorithm.minibatches=1"]
    main(["run", str(shipped("grpo_gsm8k.yaml")), *small, "run.url=run", "observe.progress=false"])
    rollouts = pq.read_table(tmp_path / "run" / "rollouts" / "step=000001")
    assert rollouts.num_rows == 8
    assert set(rollouts["answer"].to_pylist()) <= {str(at + 1) for at in range(8)}
