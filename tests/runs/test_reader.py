"""``open_run``: reads what a run left in its folder, without torch and Dask, and refuses what it
cannot read.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from siirl_storage import commit_parts, stage_part

from siirl_dask import open_run
from siirl_dask.cli import main
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.errors import CheckpointError, ConfigError, DataError
from siirl_dask.observe import MetricsLog, Record, Status, Summary, write_summary
from siirl_dask.planner import Phase, dag_from_spec
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import Checkpoints, read_state
from siirl_dask.runs.folder import read_identity, write_identity
from tests.conftest import digits_overrides


@pytest.fixture
def folder(digits_task, tmp_path):
    """The folder of a run of two steps with a validation, as a run leaves it."""
    url = tmp_path / "run"
    file = load_config_file(shipped("quickstart.yaml"), digits_overrides(digits_task, url))
    write_identity(file.config, dags(file)[0], replace=False)
    log = MetricsLog(str(url))
    log.write(Record(step=0, phase=Phase.VALIDATION, seconds=0.5, metrics={"reward/mean": 0.25}))
    for step in (1, 2):
        log.write(
            Record(
                step=step,
                phase=Phase.TRAIN,
                seconds=1.5,
                metrics={"reward/mean": step / 4, "tokens": 8.0},
            )
        )
        part = url / "rollouts" / f"step={step:06d}" / "part-00000-of-00001.parquet"
        part.parent.mkdir(parents=True)
        pq.write_table(
            pa.table({"row_id": [0, 1], "reward": [0.0, step / 2], "response_ids": [[1], [2, 3]]}),
            part,
        )
    summary = Summary(
        run_id="it",
        status=Status.COMPLETE,
        steps=2,
        workers=1,
        seconds=3.5,
        samples_per_second=1.0,
        error=None,
    )
    write_summary(str(url), summary)
    with take(str(url), 30.0, print) as attempt:
        checkpoints = Checkpoints(attempt=attempt, keep=2)
        checkpoints.commit(checkpoints.folder(2), CheckpointState(step=2, roles=["policy"]), {})
    return url


def test_a_run_is_read_back_from_its_folder(folder):
    run = open_run(str(folder))
    assert (run.config.run.url, run.config.rollout.n) == (str(folder), 4)
    assert run.config_with(["rollout.n=2"]).rollout.n == 2
    assert [node.name for node in dag_from_spec(**run.dag).nodes] == [
        node["name"] for node in run.dag["nodes"]
    ]
    assert (run.steps, run.checkpoints, run.checkpoint_step()) == ([1, 2], [2], 2)
    assert run.summary.status is Status.COMPLETE
    assert run.metrics.to_pydict() == {
        "step": [0, 1, 2],
        "phase": ["validation", "train", "train"],
        "seconds": [0.5, 1.5, 1.5],
        "reward/mean": [0.25, 0.25, 0.5],
        "tokens": [None, 8.0, 8.0],
    }
    assert run.rollouts().num_rows == 4
    best = run.rollouts(
        "SELECT step, max(reward) AS best FROM rollouts GROUP BY step ORDER BY step"
    )
    assert best.to_pydict() == {"step": [1, 2], "best": [0.5, 1.0]}


def test_the_documented_example_runs_without_torch_and_dask(folder):
    page = Path(__file__).parents[2] / "docs" / "runs.md"
    example = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1]
    assert all(
        name in example
        for name in ("config", "dag", "steps", "checkpoints", "metrics", "summary", "rollouts")
    )
    heavy = ("torch", "dask", "distributed", "transformers")
    code = "import json, sys\n" + example.replace('"runs/mine"', "sys.argv[1]")
    code += f"print(json.dumps([name for name in {heavy} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for url in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(ConfigError, match="holds no run: expected a folder with a config"):
            open_run(str(url))
    with pytest.raises(ConfigError, match="Protocol not known: nope"):
        open_run("nope://run")


def replace(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_a_config_of_another_version_is_refused_and_samples_are_read(folder):
    replace(folder / "config.yaml", "steps_ahead:", "ahead:")
    said = (
        r"config\.yaml: unknown key 'rollout\.ahead'; it is called .*\. Another version of "
        r"siirl_dask wrote"
    )
    for read in (lambda: open_run(str(folder)).config, lambda: read_identity(str(folder))):
        with pytest.raises(ConfigError, match=said):
            read()
    assert open_run(str(folder)).rollouts().num_rows == 4


def test_a_checkpoint_of_another_version_is_refused_and_named(folder):
    place = folder / "checkpoints" / "step=000002-0001"
    replace(place / "state.json", '"version": 1', '"version": 2')
    (place / "COMMITTED").write_text('{"version": 1, "step": 2}')  # without digests
    with pytest.raises(
        CheckpointError, match=r"version 2, expected 1: written by another siirl_dask"
    ):
        read_state(str(folder), 2)


def test_a_summary_of_another_version_is_read_as_far_as_known(folder):
    replace(folder / "summary.json", '"steps"', '"of_a_later_version": 1, "steps"')
    assert open_run(str(folder)).summary.steps == 2
    replace(folder / "summary.json", '"complete"', '"paused"')
    with pytest.raises(
        DataError, match=r"summary\.json is not a run's summary: ValueError: 'paused'"
    ):
        _ = open_run(str(folder)).summary


def test_a_damaged_dag_is_refused_and_named(folder):
    (folder / "dag.json").write_text('{"roles": ')
    with pytest.raises(ConfigError, match=r"dag\.json is not a run's DAG: JSONDecodeError"):
        _ = open_run(str(folder)).dag


def test_absent_files_of_a_run_are_named(folder):
    for name in ("summary.json", "metrics.jsonl"):
        (folder / name).unlink()
    run = open_run(str(folder))
    with pytest.raises(
        DataError, match=r"summary\.json does not exist: the run is under way, was killed"
    ):
        _ = run.summary
    with pytest.raises(
        DataError, match=r"metrics\.jsonl does not exist: no step of this run has finished"
    ):
        _ = run.steps
    with pytest.raises(ConfigError, match=r"has no checkpoint of step 7 \(there are: \[2\]\)"):
        run.checkpoint_step(7)


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELEC 1", "the query failed: Parser Error"),
        ("SELECT rewrad FROM rollouts", r"the query failed: Binder Error(.|\n)*reward"),
        ("SELECT * FROM rolouts", r"the query failed: Catalog Error(.|\n)*rollouts"),
        (
            "-- nothing",
            "expected one SELECT, and nothing that writes or changes settings, not '-- nothing'",
        ),
        ("SELECT CAST('x' AS INT) FROM rollouts", "the query failed: Conversion Error"),
    ],
)
def test_a_wrong_query_is_a_data_error_that_says_why(folder, sql, said):
    with pytest.raises(DataError, match=said):
        open_run(str(folder)).rollouts(sql)


def test_only_whole_steps_are_read_and_the_others_named(folder, capsys):
    """Step 3 is begun; of step 4 there are two starts' parts, and only the later one's are
    committed.
    """
    rows, rollouts = (
        pa.table({"row_id": [0], "reward": [1.0], "response_ids": [[1]]}),
        f"{folder}/rollouts",
    )
    stage_part(f"{rollouts}/step=000003", 2, 0, rows)
    for attempt in (2, 3):
        commit_parts(
            f"{rollouts}/step=000004",
            attempt,
            [stage_part(f"{rollouts}/step=000004", attempt, 0, rows)],
        )
    stage_part(f"{rollouts}/step=000004", 2, 1, rows)
    run, count = (
        open_run(str(folder)),
        "SELECT step, count(*) AS n FROM rollouts GROUP BY step ORDER BY step",
    )
    assert run.rollouts(count).to_pydict() == {"step": [1, 2, 4], "n": [2, 2, 1]}
    assert run.rollouts(count, incomplete=True).to_pydict() == {
        "step": [1, 2, 3, 4],
        "n": [2, 2, 1, 1],
    }
    main(["rollouts", str(folder)])
    assert (
        capsys.readouterr().err
        == "steps that are not whole, and left out (--incomplete): 3 (1 part)\n"
    )
    main(["rollouts", str(folder), "--incomplete", count])
    assert "and counted: 3 (1 part)" in capsys.readouterr().err
    (folder / "rollouts" / "step=000004" / "part-0003-00000.parquet").unlink()
    assert run.rollouts(count).to_pydict() == {"step": [1, 2], "n": [2, 2]}, (
        "a start that was fenced is read instead"
    )
    (folder / "rollouts" / "step=000004" / "_parts-0003.json").write_text("{}")
    with pytest.raises(
        DataError, match=r"step=000004/_parts-0003\.json is not a usable record of parts"
    ):
        run.rollouts()


def test_of_a_line_of_a_start_that_was_fenced_the_later_start_s_counts(folder):
    """It woke up after the later start had written the step, and its line comes last."""
    MetricsLog(str(folder), None, 3).write(
        Record(step=2, phase=Phase.TRAIN, seconds=1.0, metrics={"tokens": 3.0})
    )
    MetricsLog(str(folder), None, 2).write(
        Record(step=2, phase=Phase.TRAIN, seconds=1.0, metrics={"tokens": 2.0})
    )
    assert open_run(str(folder)).metrics.to_pydict()["tokens"] == [None, 8.0, 3.0]


def test_a_query_of_a_run_without_samples_is_refused(folder):
    for part in folder.glob("rollouts/*/*"):
        part.unlink()
    with pytest.raises(
        DataError, match="holds no rollouts: expected the folder of a run that has finished a step"
    ):
        open_run(str(folder)).rollouts()
    with pytest.raises(DataError, match="Protocol not known: nope"):
        type(open_run(str(folder)))("nope://run").rollouts()
