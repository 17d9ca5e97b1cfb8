"""A clean-up never deletes anything that a resume or a replay needs."""

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from siirl_storage import commit_parts, join, open_fs, stage_part, write_atomic
from siirl_storage.files import list_files

from siirl_dask.commands.clean import clean
from siirl_dask.config import ClusterConfig
from siirl_dask.errors import ConfigError, RunInProgress
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoint_model import folder_for_workers
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import Checkpoints, committed
from siirl_dask.runs.retention import Reason, find_leftovers, remove_leftovers, remove_old_stages
from siirl_dask.runs.stages import describe_stage, find_stages

ROWS = pa.table({"row_id": pa.array([0, 1], pa.int64())})
STAGE = "stages/rollout"
TABLES = ("rollouts", STAGE)


def store(url, step, attempt=1, committed=True, table="rollouts"):
    folder = join(url, table, f"step={step:06d}")
    part = stage_part(folder, attempt, 0, ROWS)
    if committed:
        spent = [STAGE] if table == "rollouts" else []
        about = describe_stage(
            step=step, table=table, digest="d", attempt=1, metrics={}, position=None, spent=spent
        )
        commit_parts(folder, attempt, [part], about)


def checkpoint(url, step, attempt):
    checkpoints = Checkpoints(attempt=attempt, keep=99)
    checkpoints.commit(checkpoints.folder(step), CheckpointState(step=step, roles=[]), {})


def steps_after(url, step):
    return [(stage.step, stage.table) for stage in find_stages(url, TABLES, step, ["d"])]


@given(
    stored=st.integers(0, 8),
    saved=st.sets(st.integers(1, 8), max_size=3),
    again=st.sets(st.integers(1, 8), max_size=3),
    staged=st.sets(st.integers(1, 9)),
    keep=st.none() | st.integers(1, 9),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_from_every_checkpoint_a_resume_finds_the_same_stored_steps(
    tmp_path_factory, stored, saved, again, staged, keep
):
    url = str(tmp_path_factory.mktemp("run"))
    first = take(url, 30.0, print)
    for step in range(1, stored + 1):
        store(url, step)
    for step in saved:
        checkpoint(url, step, first)
    for step in again:
        store(url, step, attempt=2)
    for step in staged:
        store(url, step, table=STAGE)
    store(url, stored + 2, committed=False)
    before = {step: steps_after(url, step) for step in committed(url) or [0]}
    remove_leftovers(url, find_leftovers(url, keep_stages=keep))
    assert {step: steps_after(url, step) for step in committed(url) or [0]} == before
    assert find_leftovers(url, keep_stages=keep) == []
    twice = [path for path, _ in list_files(*open_fs(url)).items() if path.startswith(f"{STAGE}/")]
    assert not [path for path in twice if int(path[len(STAGE) + 6 :][:6]) <= max(stored, 0)], (
        "rows are stored twice"
    )


def test_each_leftover_has_its_reason_and_all_else_stays(tmp_path):
    url = str(tmp_path)
    attempt = take(url, 30.0, print)
    for step in (1, 2, 3):
        store(url, step)
    store(url, 2, attempt=2)
    store(url, 4, committed=False)
    store(url, 1, table="replay-1")
    store(url, 2, table=STAGE)
    store(url, 3, table=STAGE)
    store(url, 5, table=STAGE)
    checkpoint(url, 2, attempt)
    write_atomic(*open_fs(join(url, "checkpoints/step=000003-0001/policy/0.distcp")), b"x")
    found = {one.path: one.reason for one in find_leftovers(url, keep_stages=1, replays=True)}
    assert found == {
        "rollouts/step=000001/part-0001-00000.parquet": Reason.OLD,
        "rollouts/step=000001/_parts-0001.json": Reason.OLD,
        "rollouts/step=000002/part-0001-00000.parquet": Reason.SUPERSEDED,
        "rollouts/step=000002/_parts-0001.json": Reason.SUPERSEDED,
        "rollouts/step=000002/part-0002-00000.parquet": Reason.OLD,
        "rollouts/step=000002/_parts-0002.json": Reason.OLD,
        "rollouts/step=000004/part-0001-00000.parquet": Reason.UNFINISHED,
        "checkpoints/step=000003-0001/policy/0.distcp": Reason.UNFINISHED,
        "stages/rollout/step=000002/part-0001-00000.parquet": Reason.SPENT,
        "stages/rollout/step=000002/_parts-0001.json": Reason.SPENT,
        "stages/rollout/step=000003/part-0001-00000.parquet": Reason.SPENT,
        "stages/rollout/step=000003/_parts-0001.json": Reason.SPENT,
        "replay-1/step=000001/part-0001-00000.parquet": Reason.REPLAYED,
        "replay-1/step=000001/_parts-0001.json": Reason.REPLAYED,
    }
    remove_old_stages(url, 1)
    assert sorted(list_files(*open_fs(join(url, STAGE)))) == [
        *(
            f"step=00000{step}/{name}"
            for step in (3, 5)
            for name in ("_parts-0001.json", "part-0001-00000.parquet")
        ),
    ]
    assert sorted(
        path.name for path in (tmp_path / "rollouts").iterdir() if any(path.iterdir())
    ) == [
        "step=000003",
        "step=000004",
    ]


def test_a_run_that_is_under_way_is_not_cleaned_and_a_dry_run_deletes_nothing(tmp_path):
    url = str(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    store(url, 1, committed=False)
    with take(url, 1.0, print), pytest.raises(RunInProgress, match="is being trained"):
        clean(url, dry_run=False, keep_stages=None, replays=False)
    said = clean(url, dry_run=True, keep_stages=None, replays=False)
    assert "1 file," in said
    assert "would be deleted" in said
    assert (tmp_path / "rollouts/step=000001/part-0001-00000.parquet").exists()
    assert "deleted" in clean(url, dry_run=False, keep_stages=None, replays=False)
    assert clean(url, dry_run=True, keep_stages=None, replays=False) == "nothing to delete"
    with pytest.raises(ConfigError, match="holds no run"):
        clean(str(tmp_path / "nope"), dry_run=True, keep_stages=None, replays=False)


def test_the_weights_that_a_killed_evaluation_left_may_go_and_what_it_wrote_stays(tmp_path):
    url = str(tmp_path / "run")
    fs, root = open_fs(url)
    left, kept = (
        "evaluations/.model-0123456789abcdef/config.json",
        "evaluations/test-step000002/metrics.json",
    )
    for file in (left, kept):
        write_atomic(fs, f"{root}/{file}", b"{}")
    assert [(one.path, one.reason) for one in find_leftovers(url)] == [(left, Reason.UNFINISHED)]


@pytest.mark.parametrize("dry_run", [True, False])
def test_the_weights_of_an_evaluation_under_way_stay_and_go_when_it_was_killed(
    store_url, dry_run, monkeypatch
):
    """The evaluation gives signs of life while it goes on; one that was killed gives none, and
    leaves all it had.
    """
    monkeypatch.setattr("siirl_dask.runs.checkpoint_model._LEASE", 1.0)
    fs, root = open_fs(store_url)
    write_atomic(fs, f"{root}/config.yaml", b"")
    with folder_for_workers(
        ClusterConfig(address="tcp://10.0.0.1:8786"), f"{store_url}/evaluations"
    ) as folder:
        write_atomic(*open_fs(f"{folder}/config.json"), b"{}")
        record = next(path for path in fs.find(root) if path.endswith("0001.json"))
        clean(store_url, dry_run=dry_run, keep_stages=None, replays=False)
        assert open_fs(folder)[0].exists(open_fs(folder)[1])
        assert find_leftovers(store_url) == []
        left = fs.cat_file(record)
    write_atomic(*open_fs(f"{folder}/config.json"), b"{}")
    # a process of before that number came again
    write_atomic(fs, record, left.replace(b'"birth": "', b'"birth": "1'))
    clean(store_url, dry_run=False, keep_stages=None, replays=False)
    assert [name for name in fs.find(root) if "/.model-" in name] == []
