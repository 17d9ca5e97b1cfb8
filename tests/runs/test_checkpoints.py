"""The layout of checkpoints: at any moment of writing and pruning, every committed checkpoint
can be loaded.
"""

import json
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from siirl_storage import open_fs, write_atomic
from siirl_storage.digests import FileDigest

from siirl_dask.errors import CheckpointError, DamagedCheckpoint, Fenced
from siirl_dask.runs.attempt import Attempt
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import (
    Checkpoints,
    checkpoint_url,
    committed,
    find_checkpoint,
    find_checkpoints,
    read_state,
    remove_all,
)
from siirl_dask.runs.owner import Owner

PARTS = ("policy/__0_0.distcp", "policy/.metadata", "critic/__0_0.distcp")


class Killed(Exception):
    pass


class DyingFileSystem(MemoryFileSystem):
    """Dies after so many more changes; one file is written or removed at a time, as in an object
    store.
    """

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


def begin(url, number):
    """Attempt ``number`` at the run, begun by a process that is gone."""
    owner = Owner.here(30.0)
    fs, path = open_fs(f"{url}/attempts/{number:04d}.json")
    write_atomic(fs, path, owner.to_json())
    return Attempt(url, number, owner)


def put_parts(url, value):
    """The files that the workers write and report to the driver."""
    fs, path = open_fs(url)
    for part in PARTS:
        write_atomic(fs, f"{path}/{part}", str(value).encode())
    return dict.fromkeys(PARTS, FileDigest.of(str(value).encode()))


def write(kept, step, value):
    """A checkpoint as workers and driver write it: the parts hold what ``state.json`` says of
    them.
    """
    url = kept.folder(step)
    metrics = {"validation/reward": float(value)}
    state = CheckpointState(
        step=step, roles=["critic", "policy"], metrics=metrics, positions={"train": value}
    )
    kept.commit(url, state, put_parts(url, value))


def check_whole(url, step):
    value = read_state(url, step).positions["train"]
    fs, path = open_fs(checkpoint_url(url, step))
    assert [fs.cat_file(f"{path}/{part}") for part in PARTS] == [str(value).encode()] * len(PARTS)
    find_checkpoint(url, step).verify()


starts = st.lists(
    st.tuples(st.integers(0, 60), st.lists(st.integers(0, 9), min_size=1, max_size=5)), max_size=5
)


@settings(max_examples=80)
@given(starts, st.integers(1, 3), st.booleans())
def test_committed_checkpoints_survive_a_kill_at_any_moment(starts, keep, best):
    """Start a run again and again from its newest checkpoint, each time killed after some
    changes to the store.
    """
    url = f"dying://{uuid4().hex}/run"
    newest = 0
    for number, (changes, values) in enumerate(starts):
        DyingFileSystem.left = changes
        try:
            attempt = begin(url, number + 1)
            kept = Checkpoints(
                attempt=attempt,
                keep=keep,
                keep_best="validation/reward" if best else None,
                done=newest,
            )
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


def test_the_newest_stay_and_the_best_of_all(url):
    kept = Checkpoints(attempt=begin(url, 1), keep=2, keep_best="validation/reward")
    for step, value in enumerate([3, 9, 9, 1, 2, 4], start=1):
        write(kept, step * 10, value)
    assert committed(url) == [20, 50, 60]
    remove_all(url)
    assert committed(url) == []


def test_a_start_that_was_taken_over_commits_nothing_and_deletes_nothing(url):
    old = Checkpoints(attempt=begin(url, 1), keep=1)
    write(old, 1, 1)
    late = old.folder(2)
    half = put_parts(late, 2)
    new = Checkpoints(attempt=begin(url, 2), keep=1, done=1)
    with pytest.raises(Fenced, match=r"taken over by process .* attempt 1, gave no sign of life"):
        old.commit(late, CheckpointState(step=2, roles=["critic", "policy"]), half)
    assert committed(url) == [1]
    write(new, 2, 22)
    write(new, 3, 33)
    assert committed(url) == [3]
    check_whole(url, 3)


class Late(Attempt):
    """A start that is cut off between its last look at the attempts and its next request, and
    then goes on.
    """

    def check(self):
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        Attempt.check(self)
        meanwhile()


def test_a_commit_that_comes_late_loses_to_the_start_that_took_over(url):
    """The old start is cut off after it saw that nobody else is there; the new one commits two
    steps meanwhile.
    """
    attempt = Late(url, 1, begin(url, 1).owner)
    old = Checkpoints(attempt=attempt, keep=1)
    late = old.folder(2)
    half = put_parts(late, 2)

    def take_over():
        kept = Checkpoints(attempt=begin(url, 2), keep=2)
        write(kept, 1, 11)
        write(kept, 2, 22)

    attempt.meanwhile = take_over
    with pytest.raises(Fenced):
        old.commit(late, CheckpointState(step=2, roles=["critic", "policy"]), half)
    # not even the second look helps: the folder was voided before it was emptied
    attempt.check = lambda: None
    with pytest.raises(Fenced, match="was voided by a later start of this run"):
        old.commit(late, CheckpointState(step=2, roles=["critic", "policy"]), {})
    assert committed(url) == [1, 2]
    for step in (1, 2):
        check_whole(url, step)


def test_a_start_whose_file_a_later_one_removes_while_it_is_written_ends_as_taken_over(
    tmp_path, monkeypatch
):
    """On a local disk a file is written aside first; the later start empties the folder before
    it is renamed.
    """
    url = str(tmp_path)
    old = Checkpoints(attempt=begin(url, 1), keep=1)
    late = old.folder(2)
    half = put_parts(late, 2)
    rename = Path.replace

    def replace(aside, path):
        monkeypatch.setattr(Path, "replace", rename)
        for step in (1, 2):
            write(Checkpoints(attempt=begin(url, 2), keep=2), step, 10 + step)
        return aside.replace(path)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(Fenced, match="taken over by process"):
        old.commit(late, CheckpointState(step=2, roles=["critic", "policy"]), half)
    assert committed(url) == [1, 2]


def test_where_two_starts_have_committed_a_step_the_later_one_counts(url):
    write(Checkpoints(attempt=begin(url, 1), keep=2), 5, 1)
    write(Checkpoints(attempt=begin(url, 1), keep=2), 6, 1)
    new = Checkpoints(attempt=begin(url, 2), keep=2, done=4)
    assert read_state(url, 5).positions == {"train": 1}
    write(new, 5, 2)
    assert committed(url) == [5], (
        "what the earlier start committed of later steps belongs to another history"
    )
    check_whole(url, 5)
    assert read_state(url, 5).positions == {"train": 2}


def test_pruning_leaves_the_folders_of_a_later_start_alone(url):
    old = Checkpoints(attempt=begin(url, 1), keep=1)
    write(old, 1, 1)
    new = Checkpoints(attempt=begin(url, 2), keep=1, done=1)
    put_parts(new.folder(2), 2)
    with pytest.raises(Fenced):
        old.attempt.check()
    with pytest.raises(Fenced):
        old.commit(old.folder(2), CheckpointState(step=2, roles=[]), {})
    fs, path = open_fs(new.folder(2))
    assert [fs.cat_file(f"{path}/{part}") for part in PARTS] == [b"2"] * len(PARTS)


def test_what_has_no_record_is_never_given(url):
    folder = Checkpoints(attempt=begin(url, 1), keep=1).folder(5)
    write_atomic(*open_fs(f"{folder}/state.json"), CheckpointState(step=5, roles=[]).to_json())
    assert committed(url) == []
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 5"):
        checkpoint_url(url, 5)


def test_a_file_that_is_shorter_than_was_written_is_not_committed(url):
    kept = Checkpoints(attempt=begin(url, 1), keep=1)
    files = put_parts(kept.folder(1), 10)
    fs, path = open_fs(kept.folder(1))
    write_atomic(fs, f"{path}/{PARTS[0]}", b"1")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 1 bytes, and 2 were written"):
        kept.commit(kept.folder(1), CheckpointState(step=1, roles=[]), files)
    assert committed(url) == []


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("file", [*PARTS, "state.json"])
def test_every_flipped_bit_is_noticed(url, file):
    write(Checkpoints(attempt=begin(url, 1), keep=1), 5, 123456)
    found = find_checkpoint(url, 5)
    found.verify()
    fs, path = open_fs(f"{found.url}/{file}")
    data = fs.cat_file(path)
    for bit in range(0, len(data) * 8, 11):
        write_atomic(fs, path, flipped(data, bit))
        with pytest.raises(DamagedCheckpoint, match="has the SHA-256"):
            found.verify()
    fs.rm_file(path)
    with pytest.raises(DamagedCheckpoint, match="is gone"):
        found.verify()


def test_a_flipped_bit_in_the_record_is_noticed_or_changes_nothing(url):
    write(Checkpoints(attempt=begin(url, 1), keep=1), 5, 123456)
    record = find_checkpoint(url, 5).record
    fs, path = open_fs(f"{checkpoint_url(url, 5)}/COMMITTED")
    data = fs.cat_file(path)
    for bit in range(0, len(data) * 8, 5):
        write_atomic(fs, path, flipped(data, bit))
        (found,) = find_checkpoints(url)
        if found.record != record:
            with pytest.raises(DamagedCheckpoint):
                found.verify()


def test_a_checkpoint_of_an_earlier_version_is_still_read(tmp_path):
    for name, marker in (
        ("step=000005", True),
        ("step=000006", False),
        ("step=000006-3f2a9c0d1e4b", True),
    ):
        folder = f"{tmp_path}/checkpoints/{name}"
        write_atomic(
            *open_fs(f"{folder}/state.json"),
            CheckpointState(step=int(name[5:11]), roles=["policy"]).to_json(),
        )
        if marker:
            write_atomic(
                *open_fs(f"{folder}/COMMITTED"),
                json.dumps({"version": 1, "step": int(name[5:11])}).encode(),
            )
    assert committed(str(tmp_path)) == [5, 6]
    assert read_state(str(tmp_path), 6).roles == ["policy"]
    find_checkpoint(str(tmp_path), 6).verify()
    write(Checkpoints(attempt=begin(str(tmp_path), 1), keep=2, done=6), 7, 7)
    assert committed(str(tmp_path)) == [6, 7]


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
    write(Checkpoints(attempt=begin(url, 1), keep=1), 5, 1)
    file = tmp_path / "checkpoints" / "step=000005-0001" / "state.json"
    (file.parent / "COMMITTED").write_text('{"version": 1, "step": 5}')  # without digests
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"state\.json is not a checkpoint's state"):
        read_state(url, 5)


def test_different_states_of_one_role_make_no_checkpoint():
    part = {
        "roles": ["policy"],
        "states": {"kl": '{"coefficient": 0.1}'},
        "positions": {"train": 7},
    }
    other = {"roles": [], "states": {}, "positions": {"train": 3}}
    state = CheckpointState.of(4, [part, other, part])
    assert (state.roles, state.states, state.positions) == (
        ["policy"],
        {"kl": {"coefficient": 0.1}},
        {"train": 7},
    )
    with pytest.raises(CheckpointError, match="'kl' has not the same state everywhere"):
        CheckpointState.of(4, [part, other | {"states": {"kl": '{"coefficient": 0.2}'}}])
