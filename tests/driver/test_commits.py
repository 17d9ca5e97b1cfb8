"""A stage goes as soon as a table further on is committed, whichever of the two came first, and
only by who may.
"""

import pyarrow as pa
import pytest
from siirl_storage import join, open_fs, read_record, stage_part
from siirl_storage.files import list_files

from siirl_dask.driver.iterations import StagedTable
from siirl_dask.driver.log import RunLog
from siirl_dask.driver.recovery.commits import Commits
from siirl_dask.errors import Fenced
from siirl_dask.observe import Progress
from siirl_dask.planner import Cut, Iteration, Phase
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoints import Checkpoints

STAGE, TABLE = "stages/rollout", "rollouts"
ROWS = pa.table({"row_id": pa.array([0, 1], pa.int64())})


@pytest.fixture
def attempt(tmp_path):
    return take(str(tmp_path / "run"), 0.2, print)


@pytest.fixture
def commits(attempt, digits_config):
    log = RunLog(digits_config, attempt, Progress(1, enabled=False))
    cuts = {TABLE: Cut(None, "advantage", TABLE, (STAGE,)), STAGE: Cut(None, "rollout", STAGE)}
    return Commits(Checkpoints(attempt=attempt, keep=1), log, "digest", cuts)


def staged(attempt, table, step=1):
    part = stage_part(join(attempt.url, table, f"step={step:06d}"), attempt.number, 0, ROWS)
    return StagedTable(Iteration(Phase.TRAIN, step, step), table, [part], {}, None)


def there(attempt, table):
    return sorted(list_files(*open_fs(join(attempt.url, table))))


@pytest.mark.parametrize("order", [(STAGE, TABLE), (TABLE, STAGE)])
def test_rows_are_stored_once_when_both_tables_have_come(attempt, commits, order):
    for table in order:
        commits.commit(staged(attempt, table))
    commits.commit(staged(attempt, STAGE, 2))
    assert there(attempt, TABLE) == [
        f"step=000001/{name}" for name in ("_parts-0001.json", "part-0001-00000.parquet")
    ]
    assert there(attempt, STAGE) == [
        f"step=000002/{name}" for name in ("_parts-0001.json", "part-0001-00000.parquet")
    ]
    assert read_record(join(attempt.url, TABLE, "step=000001")).about["spent"] == [STAGE]


def test_a_start_that_was_taken_over_commits_nothing_and_deletes_no_stage(attempt, commits):
    commits.commit(staged(attempt, STAGE))
    later = staged(attempt, TABLE)
    take(attempt.url, 30.0, print)
    with pytest.raises(Fenced):
        commits.commit(later)
    assert len(there(attempt, STAGE)) == 2
    assert read_record(join(attempt.url, TABLE, "step=000001")) is None


def test_a_stage_that_a_worker_is_still_writing_is_left_alone_until_it_is_whole(attempt, commits):
    coming = staged(attempt, STAGE)  # another worker's part is on its way into the same folder
    commits.commit(staged(attempt, TABLE))
    assert len(there(attempt, STAGE)) == 1
    commits.commit(coming)
    assert there(attempt, STAGE) == []
