"""``siirl-dask eval``: it scores as the run did, refuses mistakes before anything starts, and
prints a table.
"""

import json
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from siirl_storage import open_fs

from siirl_dask.cli import main
from siirl_dask.config import ClusterConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError
from siirl_dask.observe import EvalResult, print_eval_result, write_eval_result
from siirl_dask.planner.spec.names import canonical
from siirl_dask.rewards import exact_match, weighted_sum
from siirl_dask.runs.checkpoint_model import folder_for_workers
from siirl_dask.runs.folder import write_identity
from siirl_dask.runs.reader import open_run
from siirl_dask.tasks.sorting import digit_fraction
from tests.conftest import digits_overrides


@pytest.fixture
def here(digits_task, tmp_path, monkeypatch):
    """A folder with a dataset, a model and the folder of a run that has no checkpoint yet."""
    monkeypatch.chdir(tmp_path)
    rows = {"prompt": ["Digits 1:"], "answer": [""], "info": [{"source": "a"}]}
    pq.write_table(pa.table(rows), tmp_path / "test.parquet")
    (tmp_path / "model").symlink_to(digits_task.model)
    recorded(digits_task, tmp_path / "run")
    return tmp_path


def recorded(task, url, text=""):
    """Write a run's folder as a run records itself; ``text`` is YAML over the quickstart's."""
    file = url.with_suffix(".yaml")
    file.write_text(f"base: {shipped('quickstart.yaml')}\n{text}")
    loaded = load_config_file(file, digits_overrides(task, url))
    write_identity(loaded.config, dags(loaded)[0], replace=False)


MODEL = ["model", "--data", "test.parquet"]
REFUSED = {
    "neither a run, with a config.yaml, nor a Hugging Face folder": ["nowhere", *MODEL[1:]],
    "run 'run' has no checkpoint": ["run", *MODEL[1:]],
    "no table at": ["model", "--data", "tset.parquet"],
    "has no column 'question'": [*MODEL, "data.prompt=question"],
    "no 'sorce' (there is: ['source']); did you mean 'source'?": [
        *MODEL,
        "validation.source_column=info.sorce",
    ],
    "override 'validation.k=[1,8]': validation.k=[1, 8]: 8 of": [
        *MODEL,
        "--n",
        "4",
        "--k",
        "1,8",
        "--temperature",
        "1",
    ],
    "validation.n=8 with validation.temperature=0": [*MODEL, "--n", "8", "--temperature", "0"],
    "validation.k[1]='x': expected a whole number": [*MODEL, "--k", "1,x"],
    "rollout.max_response_length=0: expected at least 1": [*MODEL, "--max-tokens", "0"],
    "did you mean 'exact_match'?": [*MODEL, "--reward", "siirl_dask.rewards:exact_mach"],
    "is a Hugging Face folder, and has no step 3": [*MODEL, "--step", "3"],
    "there is something at 'run' already: choose another --out": [*MODEL, "--out", "run"],
    "unknown group 'rolout'": [*MODEL, "rolout.n=3"],
    "model.path=other: eval takes 'other' as its first argument": [*MODEL, "model.path=other"],
    "--world x is for a run with environments": [*MODEL, "--world", "x"],
    "scores single responses, and episodes are": [
        *MODEL,
        "--reward",
        "m:f",
        "environments.environment=m:W",
    ],
    "data.url=other: eval takes 'other' as --data": [*MODEL, "data.url=other"],
}


@pytest.mark.parametrize(("said", "arguments"), REFUSED.items(), ids=REFUSED)
def test_a_mistake_is_refused_by_name_before_anything_starts(said, arguments, here, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["eval", *arguments])
    assert said in capsys.readouterr().err
    assert not (here / "evaluations").exists()


def test_a_run_is_scored_by_the_reward_of_its_dag(digits_task, tmp_path):
    options = {"rewards": {"right": "siirl_dask.rewards:exact_match"}, "weights": {"right": 2.0}}
    role = {"build": "siirl_dask.rewards:build_scorer", "with": {"rewards": "${rewards}"}}
    role["with"]["reward"] = {"run": "siirl_dask.rewards:weighted_sum", "with": options}
    nodes = {"reward": {"with": {"columns": ["answer"]}}}
    recorded(
        digits_task,
        tmp_path / "own",
        f"roles: {json.dumps({'reward': role})}\nnodes: {json.dumps(nodes)}\n",
    )
    found = open_run(str(tmp_path / "own")).scoring()
    expected = partial(weighted_sum, rewards={"right": exact_match}, weights={"right": 2.0})
    assert canonical(found.reward) == canonical(expected)
    assert found.columns == ("answer",)
    assert found.reward(prompt="", response="a", answer="a")["reward"] == 2.0
    recorded(digits_task, tmp_path / "plain")
    assert open_run(str(tmp_path / "plain")).scoring().reward is digit_fraction


def test_a_run_whose_reward_is_not_here_asks_for_one(digits_task, tmp_path):
    recorded(digits_task, tmp_path / "run")
    file = tmp_path / "run" / "dag.json"
    file.write_text(
        file.read_text().replace("siirl_dask.tasks.sorting:digit_fraction", "__main__:my_reward")
    )
    with pytest.raises(ConfigError, match=r"no function 'my_reward'.*name one with --reward"):
        open_run(str(tmp_path / "run")).scoring()
    file.write_text('{"roles": {}, "nodes": []}')
    with pytest.raises(ConfigError, match="has no reward function: name one with --reward"):
        open_run(str(tmp_path / "run")).scoring()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConfigError])
def test_weights_for_workers_on_other_hosts_do_not_outlive_an_evaluation_that_ends_early(
    error, store_url
):
    def end_early():
        with folder_for_workers(ClusterConfig(address="tcp://10.0.0.1:8786"), store_url) as folder:
            fs, path = open_fs(folder)
            assert not fs.exists(path)
            fs.makedirs(path, exist_ok=True)
            for name in ("config.json", "model.safetensors"):
                fs.pipe_file(f"{path}/{name}", b"{}")
            raise error

    fs, path = open_fs(store_url)
    fs.makedirs(path, exist_ok=True)
    fs.pipe_file(f"{path}/own", b"")
    with pytest.raises(error):
        end_early()
    assert [name.rpartition("/")[2] for name in fs.find(path)] == ["own"]


EVAL_RESULT = EvalResult(
    model="run",
    step=7,
    data="test.parquet",
    reward="m:f",
    prompts={"a": 3, "b/c": 2, None: 1},
    samples=48,
    n=8,
    k=[1, 8],
    temperature=1.0,
    top_p=1.0,
    max_tokens=16,
    seed=0,
    failures=0,
    dropped_prompts=0,
    truncated=0.5,
    metrics={"mean@8": 0.123456, "pass@8": 0.5, "pass@8/a": 1.0, "pass@8/b/c": 0.25, "maj@8": 0.75},
)


def test_numbers_are_shown_by_source_and_none_is_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    print_eval_result(EVAL_RESULT, "out")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]
    assert lines == [
        ["source", "prompts", "mean@8", "pass@8", "maj@8"],
        ["a", "3", "-", "1.0000", "-"],
        ["b/c", "2", "-", "0.2500", "-"],
        ["all", "6", "0.1235", "0.5000", "0.7500"],
        ["every", "sample", "and", "metrics.json:", "out"],
    ]


def test_the_file_holds_every_number_unrounded(tmp_path):
    write_eval_result(str(tmp_path), EVAL_RESULT)
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found["metrics"] == EVAL_RESULT.metrics
    assert found["prompts"] == {"all": 6, "sources": {"a": 3, "b/c": 2}}
    assert (found["step"], found["k"]) == (7, [1, 8])
