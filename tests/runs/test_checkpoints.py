"""The layout of checkpoints: at any moment of writing and pruning, every committed checkpoint can be loaded."""

import json
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from siirl_storage import join, open_fs, write_atomic

from siirl_dask.errors import CheckpointError
from siirl_dask.runs.checkpoints import Checkpoints, State, checkpoint_url, committed, read_state, remove_all

PARTS = ("policy/__0_0.distcp", "policy/.metadata", "critic/__0_0.distcp")


class Killed(Exception):
    pass


class DyingFileSystem(MemoryFileSystem):
    """Dies after so many more changes; one file is written or removed at a time, as in an object store."""

    protocol = "dying"
    left = 0
    store: dict = {}  # noqa: RUF012  # fsspec's own way
    pseudo_dirs = [""]  # noqa: RUF012

    def live(self):
        if type(self).left == 0:
            raise Killed
        type(self).left -= 1

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self.live()
        super().pipe_file(path, value, mode=mode, **kwargs)

    def rm_file(self, path):
        self.live()
        super().rm_file(path)

    def rm(self, path, recursive=False, maxdepth=None):
        for file in sorted(self.find(path), reverse=True):
            self.rm_file(file)
        for folder in sorted(self.find(path, withdirs=True), reverse=True):
            self.rmdir(folder)


fsspec.register_implementation("dying", DyingFileSystem, clobber=True)


def write(kept, step, value):
    """A checkpoint as workers and driver write it: the parts hold what ``state.json`` says of them."""
    url = kept.claim(step)
    fs, path = open_fs(url)
    for part in PARTS:
        write_atomic(fs, f"{path}/{part}", str(value).encode())
    metrics = {"validation/reward": float(value)}
    kept.commit(url, State(step=step, roles=["critic", "policy"], metrics=metrics, positions={"train": value}))


def check_whole(url, step):
    value = read_state(url, step).positions["train"]
    fs, path = open_fs(checkpoint_url(url, step))
    assert [fs.cat_file(f"{path}/{part}") for part in PARTS] == [str(value).encode()] * len(PARTS)


starts = st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(0, 9), min_size=1, max_size=5)), max_size=5)


@settings(max_examples=80)
@given(starts, st.integers(1, 3), st.booleans())
def test_committed_checkpoints_survive_a_kill_at_any_moment(starts, keep, best):
    """Start a run again and again from its newest checkpoint, each time killed after some changes to the store."""
    url = f"dying://{uuid4().hex}/run"
    newest = 0
    for number, (changes, values) in enumerate(starts):
        kept = Checkpoints(url, f"attempt{number}", keep, "validation/reward" if best else None)
        DyingFileSystem.left = changes
        try:
            for step, value in enumerate(values, start=newest + 1):
                write(kept, step, value)
                newest = step
        except Killed:
            pass
        DyingFileSystem.left = 10**6
        there = committed(url)
        assert not newest or max(there) >= newest  # one that was committed when it died counts
        for step in there:
            check_whole(url, step)
        newest = max(there, default=0)


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid4().hex}/run"


def names(url):
    fs, path = open_fs(join(url, "checkpoints"))
    return sorted(str(found).rstrip("/").rpartition("/")[2] for found in fs.ls(path, detail=False))


def test_the_newest_stay_and_the_best_of_all(url):
    kept = Checkpoints(url, "a", 2, "validation/reward")
    for step, value in enumerate([3, 9, 9, 1, 2, 4], start=1):
        write(kept, step * 10, value)
    assert committed(url) == [20, 50, 60]
    remove_all(url)
    assert committed(url) == []


def test_another_attempt_writes_aside_of_what_the_one_before_began(url):
    before = Checkpoints(url, "a", 1).claim(5)
    write_atomic(*open_fs(f"{before}/policy/__0_0.distcp"), b"half")
    kept = Checkpoints(url, "b", 1)
    ahead = Checkpoints(url, "b", 1).claim(6)
    kept.commit(kept.claim(5), State(step=5, roles=[]))
    assert checkpoint_url(url, 5).endswith("/step=000005-b")
    assert names(url) == ["step=000005-b", "step=000006"]  # what was begun is gone, and what is under way is not
    kept.commit(ahead, State(step=6, roles=[]))
    assert names(url) == ["step=000006"]


def test_what_has_no_marker_is_never_given(url):
    claimed = Checkpoints(url, "a", 1).claim(5)
    write_atomic(*open_fs(f"{claimed}/state.json"), State(step=5, roles=[]).to_json())
    assert committed(url) == []
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 5"):
        checkpoint_url(url, 5)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"step": 6},
        {"roles": ["../elsewhere"]},
        {"roles": 5},
        {"positions": {"train": -1}},
        {"metrics": {"x": "y"}},
        {"states": {"kl": 1}},
        {"more": 1},
    ],
)
def test_a_state_that_says_what_none_can_is_refused_by_its_file(tmp_path, change):
    url = str(tmp_path)
    kept = Checkpoints(url, "a", 1)
    kept.commit(kept.claim(5), State(step=5, roles=["policy"]))
    file = tmp_path / "checkpoints" / "step=000005" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"state\.json is not a checkpoint's state"):
        read_state(url, 5)


def test_different_states_of_one_role_make_no_checkpoint():
    part = {"roles": ["policy"], "states": {"kl": '{"coefficient": 0.1}'}, "positions": {"train": 7}}
    other = {"roles": [], "states": {}, "positions": {"train": 3}}
    state = State.of(4, [part, other, part])
    assert (state.roles, state.states, state.positions) == (["policy"], {"kl": {"coefficient": 0.1}}, {"train": 7})
    with pytest.raises(CheckpointError, match="'kl' has not the same state everywhere"):
        State.of(4, [part, other | {"states": {"kl": '{"coefficient": 0.2}'}}])
