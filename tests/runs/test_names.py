"""A run's name leads no function of the run to what another run has."""

from uuid import uuid4

import pyarrow as pa
import pytest
from hypothesis import given, settings
from siirl_storage import commit_parts, join, open_fs, stage_part, write_atomic
from siirl_storage.files import at, list_files

from siirl_dask.errors import DataError
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import Checkpoints, committed
from siirl_dask.runs.folder import remove_run
from siirl_dask.runs.samples.rollouts import open_newest, open_rollouts, query
from siirl_dask.runs.tables import remove_step, remove_steps, stored_steps
from siirl_dask.views.dashboard.neighbours import metrics_tail, runs_beside
from tests.names import NEIGHBOURS
from tests.written_runs import train_record, write_metrics

STEPS = (1, 2)


def rows(value):
    columns = {
        "row_id": [0, 1],
        "reward": [value, value],
        "answer": [f"{value}"] * 2,
        "worker": ["0", "1"],
    }
    # a column of the data may have this name; the folder's counts
    return pa.table({**columns, "step": [99, 99]})


def write_run(url, value):
    for table in ("rollouts", "stages/rollout"):
        for step in STEPS:
            folder = join(url, table, f"step={step:06d}")
            commit_parts(folder, 1, [stage_part(folder, 1, 0, rows(value))])
    write_metrics(url, [train_record(step, **{"reward/mean": value}) for step in STEPS])
    fs, path = open_fs(url)
    write_atomic(fs, at(path, "config.yaml"), b"")


def contents(url):
    fs, root = open_fs(url)
    return {name: fs.cat_file(at(root, name)) for name in list_files(fs, root)}


def check_read(url, value):
    """The rows and metrics that every reader of a run finds are its own."""
    asked = (
        "SELECT count(*) AS rows, min(reward) AS least, max(reward) AS most, min(answer) AS answer "
        "FROM rollouts"
    )
    # query() opens the run for each question: DuckDB takes longer for that than for the answers
    with open_rollouts(url) as rollouts:
        everything = rollouts.table(asked)
        by_step = rollouts.table(
            "SELECT step, count(*) AS rows, min(attempt) AS attempt FROM rollouts GROUP BY 1 "
            "ORDER BY 1"
        )
        of_one = rollouts.table("SELECT reward FROM rollouts WHERE step = 2")
    assert everything.to_pylist() == [
        {"rows": 4, "least": value, "most": value, "answer": f"{value}"}
    ]
    assert by_step.to_pylist() == [{"step": step, "rows": 2, "attempt": 1} for step in STEPS]
    assert of_one.to_pydict() == {"reward": [value, value]}
    with open_newest(url, STEPS) as rollouts:
        assert rollouts is not None
        rewards = rollouts.table(f"SELECT reward FROM {rollouts.of_steps([1])}").to_pydict()
    assert rewards == {"reward": [value, value]}
    assert [record["metrics"]["reward/mean"] for record in metrics_tail(url, 9)] == [value] * len(
        STEPS
    )
    assert stored_steps(url, "rollouts") == {*STEPS}


def commit_checkpoint(url, attempt, step):
    checkpoints = Checkpoints(attempt=attempt, keep=1)
    checkpoints.commit(checkpoints.folder(step), CheckpointState(step=step, roles=[]), {})


def check_apart(store, names, above):
    base = join(store, uuid4().hex, above)
    own, other = (join(base, name) for name in names)
    for value, url in ((0.5, own), (99.0, other)):
        write_run(url, value)
    for value, url in ((0.5, own), (99.0, other)):
        check_read(url, value)
    assert runs_beside(own) == [names[1]]
    for url in (other, own):
        attempt = take(url, 30.0, print)
        for step in STEPS:
            commit_checkpoint(url, attempt, step)
        assert committed(url) == [STEPS[-1]]  # the other one was pruned
    before = contents(other)
    remove_step(attempt, "stages/rollout", 1)
    remove_steps(own, ["rollouts"], 1)
    assert stored_steps(own, "rollouts") == {1}
    assert stored_steps(own, "stages/rollout") == {2}
    remove_run(own, ["rollouts"])
    assert contents(other) == before
    assert {name.partition("/")[0] for name in contents(own)} == {"attempts"}


EXAMPLES = {"local": 10, "memory": 25, "s3": 1}


@pytest.mark.parametrize("store_url", EXAMPLES, indirect=True)
def test_no_name_leads_to_what_another_run_has(store_url, request):
    kind = request.node.callspec.params["store_url"]

    @settings(max_examples=EXAMPLES[kind])
    @given(names=NEIGHBOURS, above=NEIGHBOURS)
    def check(names, above):
        check_apart(store_url, names, above[0])

    names = ("reward=7[1]*?", "reward=71XX")
    above = "step=5/worker=x/attempt=9/answer=z/a#b%25 c"
    check_apart(store_url, names, above)
    for value, name in zip((0.5, 99.0), names, strict=True):
        url = join(store_url, "asked", above, name)
        write_run(url, value)
        assert query(url, "SELECT max(reward) FROM rollouts").to_pydict() == {
            "max(reward)": [value]
        }
    check()


def test_a_part_that_is_gone_is_named(s3):
    url = join(s3, uuid4().hex)
    write_run(url, 0.5)
    fs, path = open_fs(join(url, "rollouts/step=000002/part-0001-00000.parquet"))
    with open_rollouts(url) as rollouts:
        fs.rm_file(path)
        with pytest.raises(DataError, match="part-0001-00000"):
            rollouts.table("SELECT avg(reward) FROM rollouts")
