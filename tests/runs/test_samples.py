"""The newest samples for those who look on: few rows, of whole steps, from few folders, whatever
the store.
"""

import pytest
from siirl_storage import open_fs

from siirl_dask.errors import DataError
from siirl_dask.runs.samples.sample_rows import Choice, newest_samples, whole_sample
from siirl_dask.runs.trace import read_newest
from siirl_dask.views.dashboard.neighbours import metrics_tail, runs_beside
from tests.runs.test_questions import NASTY, row, save
from tests.runs.test_trace import put


@pytest.fixture
def run(tmp_path):
    """Steps of eight samples, of which the third is not whole."""
    steps = {
        number: [
            row(number, at, 1.0 if at < 4 else at / 8, at + 2, text=NASTY, ratio=1.5)
            for at in range(8)
        ]
        for number in (1, 2, 3)
    }
    url = save(tmp_path / "run", steps)
    next((tmp_path / "run" / "rollouts" / "step=000003").glob("_parts-*.json")).unlink()
    return url


def test_each_choice_gives_the_rows_that_it_names(run):
    newest = newest_samples(run, range(1, 5), Choice.NEWEST)
    assert [(one.step, one.row_id) for one in newest] == [
        (step, at) for step in (2, 1) for at in range(8)
    ]
    assert newest[0].prompt == f"question 0 {NASTY}"
    assert {one.reward for one in newest_samples(run, [1, 2], Choice.BEST, 8)} == {1.0}
    worst = newest_samples(run, [1, 2], Choice.WORST, 3)
    assert [one.reward for one in worst] == [0.5, 0.5, 0.625]
    equal = newest_samples(run, [2], Choice.EQUAL)
    assert [one.row_id for one in equal] == [0, 1, 2, 3]
    assert newest_samples(run, [3, 4], Choice.NEWEST) == [], (
        "a step that is not whole does not count"
    )


def test_texts_are_cut_and_a_whole_sample_has_its_tokens(tmp_path):
    rows = [row(1, at, 0.5, 9000 if at else 3, text="long " * 200_000) for at in range(2)]
    url = save(tmp_path / "run", {1: rows}, parts=1)
    assert all(len(one.response) <= 300 for one in newest_samples(url, [1], Choice.NEWEST))
    short, long = (whole_sample(url, 1, at) for at in range(2))
    assert (len(short.token_ids), len(short.sampled), len(short.trained)) == (3, 3, 3)
    assert long.cut
    assert len(long.token_ids) == len(long.sampled) == 8192
    assert len(long.row.response) <= 2**16
    assert whole_sample(url, 1, 99) is None
    assert whole_sample(url, 7, 0) is None


def test_no_more_bytes_are_read_than_allowed_and_damage_is_told(run, tmp_path):
    from siirl_dask.runs.samples.rollouts import open_newest

    with open_newest(run, [1, 2], most_bytes=1) as rollouts:
        assert list(rollouts.files) == [2]
        assert len(rollouts.files[2]) == 1
    for part in (tmp_path / "run" / "rollouts" / "step=000002").glob("*.parquet"):
        part.write_bytes(b"x" * part.stat().st_size)
    with pytest.raises(DataError, match="failed"):
        newest_samples(run, [2], Choice.NEWEST)


def test_a_run_without_rewards_or_groups_has_samples_all_the_same(tmp_path):
    rows = [
        {name: value for name, value in row(1, at, 0.5, 3).items() if name != "reward"}
        for at in range(4)
    ]
    url = save(tmp_path / "run", {1: rows})
    assert len(newest_samples(url, [1], Choice.BEST)) == 4
    assert newest_samples(url, [1], Choice.EQUAL) == []


def test_traces_runs_beside_and_metrics_are_read_from_any_store(store_url):
    url = f"{store_url}/mine"
    for step in (4, 5, 6):
        put(url, step, 0)
    assert read_newest(url, range(3, 8), most_bytes=2**20, most_parts=2).steps == [5, 6]
    assert read_newest(url, [9], most_bytes=2**20, most_parts=2).spans == []
    fs, root = open_fs(store_url)
    line = b'{"step": %d, "phase": "train", "seconds": 1.0, "metrics": {"reward/mean": 0.5}}\n'
    for name in ("mine", "other", "older"):
        fs.makedirs(f"{root}/{name}", exist_ok=True)
        fs.pipe_file(
            f"{root}/{name}/metrics.jsonl", b"".join(line % step for step in range(1, 101))
        )
    fs.makedirs(f"{root}/data", exist_ok=True)
    assert runs_beside(url) == ["older", "other"]
    tail = metrics_tail(f"{store_url}/other", 10)
    assert len(tail) == 10
    assert tail[-1]["step"] == 100
    assert metrics_tail(f"{store_url}/nothing", 10) == []


def test_a_folder_that_cannot_be_reached_is_an_error_of_one_kind():
    for read in (
        lambda: newest_samples("nosuch://x/run", [1], Choice.NEWEST),
        lambda: read_newest("nosuch://x/run", [1], most_bytes=1, most_parts=1),
        lambda: runs_beside("nosuch://x/run"),
        lambda: metrics_tail("nosuch://x/run", 3),
    ):
        with pytest.raises(DataError):
            read()
