"""Backends of metrics: each reads back what was written, goes on with the same run, and can neither
stop a run nor slow it down."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time

import duckdb
import pyarrow.parquet as pq
import pytest

from siirl_dask.config import Config, MetricsBackend
from siirl_dask.config.file import load_text
from siirl_dask.config.file.coerce import plain
from siirl_dask.errors import ConfigError
from siirl_dask.observe import MetricsLog, Record, Status
from siirl_dask.observe.backends import TrackedRun, Tracker, check_backends, identify
from siirl_dask.observe.backends.outlet import Outlet
from siirl_dask.planner import Phase

NEEDED = "data: {url: there}\nmodel: {path: there}\n"


def train(step, reward, **more):
    return Record(
        step=step,
        phase=Phase.TRAIN,
        seconds=1.5,
        metrics={"reward/mean": reward, "policy/kl": None, "pass@8": 0.5},
    )


def validation(step, reward):
    return Record(step=step, phase=Phase.VALIDATION, seconds=0.5, metrics={"reward/mean": reward})


def tracked(url, number="0123456789abcdef01234"):
    return TrackedRun(
        id=number, name="mine", url=str(url), project="tests", config={"trainer": {"lr": 1e-3}}
    )


def twice(backend, url):
    """Two starts of one run: the second one does step 2 again, and finishes."""
    for start in (1, 2):
        said = []
        tracker = Tracker([MetricsBackend(backend)], said.append)
        tracker.begin(tracked(url), None if start == 1 else 2)
        for record in [train(1, 0.25), validation(1, 0.75)] if start == 1 else []:
            tracker.write(record)
        tracker.write(train(2, 0.5))
        if start == 2:
            tracker.write(train(3, 1.0))
        tracker.end(Status.INTERRUPTED if start == 1 else Status.COMPLETE)
        assert said == []


def test_tensorboard_hides_what_is_done_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    twice("tensorboard", f"file://{tmp_path}/run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["pass@8", "reward/mean", "validation/reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("validation/reward/mean")] == [(1, 0.75)]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (1, 0.25),
        (2, 0.5),
        (3, 1.0),
    ]
    config, status = (
        [
            event.tensor_proto.string_val[0].decode()
            for event in events.Tensors(f"{tag}/text_summary")
        ]
        for tag in ("config", "status")
    )
    assert '"lr": 0.001' in config[0]
    assert status[-1] == "complete"


def test_parquet_has_each_value_once_also_those_of_earlier_starts(tmp_path):
    log = MetricsLog(str(tmp_path))
    for record in (train(1, 0.25), validation(1, 0.75), train(2, 0.125)):
        log.write(record)  # the backend was not chosen then
    tracker = Tracker([MetricsBackend.parquet], print)
    tracker.begin(tracked(tmp_path), 2)
    tracker.write(train(2, 0.5))
    tracker.end(Status.COMPLETE)
    rows = duckdb.sql(
        f"SELECT phase, step, value FROM '{tmp_path}/metrics.parquet' WHERE name = 'reward/mean'"
    )
    assert sorted(rows.fetchall()) == [
        ("train", 1, 0.25),
        ("train", 2, 0.5),
        ("validation", 1, 0.75),
    ]
    assert pq.read_metadata(tmp_path / "metrics.parquet").metadata[b"status"] == b"complete"


def test_parquet_is_written_to_a_store_as_well():
    import fsspec

    tracker = Tracker([MetricsBackend.parquet], print)
    tracker.begin(tracked("memory://runs/tracked"), None)
    tracker.write(train(1, 0.25))
    tracker.end(Status.FAILED)
    with fsspec.open("memory://runs/tracked/metrics.parquet") as file:
        assert pq.read_table(file).num_rows == 3


class Stubborn:
    """A backend that waits in its first write until it is let go, and may then raise."""

    def __init__(self, let_go, error=None):
        self.let_go, self.error, self.got, self.ended = let_go, error, [], None

    def begin(self, run):
        pass

    def rewind(self, step):
        self.got = [one for one in self.got if one < step]

    def write(self, record):
        self.let_go.wait()
        if self.error:
            raise self.error
        self.got.append(record["step"])

    def end(self, status):
        self.ended = status


def filled(backend, said, steps, most=10_000):
    outlet = Outlet("stubborn", lambda: backend, said.append, most)
    outlet.begin(tracked("anywhere"))
    began = time.monotonic()
    for step in range(1, steps + 1):
        outlet.write(train(step, 0.5))
    assert time.monotonic() - began < 30, "it waited for the backend"
    return outlet


def test_a_backend_that_hangs_slows_nothing_and_gets_all_once_it_goes_on():
    said, backend = [], Stubborn(threading.Event())
    outlet = filled(backend, said, 100)
    backend.let_go.set()
    outlet.rewind(50)
    outlet.end(Status.COMPLETE)
    outlet.wait(time.monotonic() + 30)
    assert backend.got == [*range(1, 50)]
    assert (backend.ended, said) == (Status.COMPLETE, [])


def test_a_backend_that_hangs_for_ever_is_left_when_the_run_ends():
    said, backend = [], Stubborn(threading.Event())
    outlet = filled(backend, said, 3)
    outlet.end(Status.COMPLETE)
    outlet.wait(time.monotonic() + 0.05)
    assert len(said) == 1
    assert (
        "stubborn gets no more metrics of this run: it had not sent everything when the run ended"
        in said[0]
    )
    backend.let_go.set()


def test_a_copy_brings_its_earlier_steps_to_backends_outside_of_its_folder(monkeypatch):
    """Also more of them than may wait."""
    inside, outside = Stubborn(threading.Event()), Stubborn(threading.Event())
    inside.let_go.set()
    outside.let_go.set()
    makers = {MetricsBackend.tensorboard: lambda: inside, MetricsBackend.wandb: lambda: outside}
    monkeypatch.setattr("siirl_dask.observe.backends._MAKERS", makers)
    said = []
    tracker = Tracker(list(makers), said.append)
    earlier = [train(step, 0.5) for step in range(1, 10_050)]
    tracker.begin(tracked("x"), 10_050, earlier)
    tracker.write(train(10_050, 0.5))
    tracker.end(Status.COMPLETE)
    assert said == []
    assert outside.got == list(range(1, 10_051))
    assert inside.got == [10_050]


def test_a_backend_that_lags_too_far_is_dropped_and_holds_no_more_memory():
    said, backend = [], Stubborn(threading.Event())
    outlet = filled(backend, said, 500, most=20)
    assert said == [said[0]]
    assert "it is 20 calls behind; metrics.jsonl has them all" in said[0]
    backend.let_go.set()
    outlet.wait(time.monotonic() + 30)
    assert len(backend.got) <= 1


@pytest.mark.parametrize(
    "error", [OSError("no route"), SystemExit(1), ValueError("x" * 9999)], ids=lambda e: str(e)[:8]
)
def test_what_a_backend_raises_is_said_once_and_it_is_dropped(error):
    said, backend = [], Stubborn(threading.Event(), error)
    backend.let_go.set()
    outlet = filled(backend, said, 50)
    outlet.end(Status.COMPLETE)
    outlet.wait(time.monotonic() + 30)
    assert len(said) == 1
    assert len(said[0]) < 700
    assert f"{type(error).__name__}: {str(error)[:50]}" in said[0]
    assert backend.ended is None


def test_a_backend_that_fails_costs_the_others_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    said = []
    tracker = Tracker([MetricsBackend.wandb, MetricsBackend.parquet], said.append)
    tracker.begin(tracked(tmp_path), None)
    tracker.write(train(1, 0.25))
    tracker.end(Status.COMPLETE)
    assert len(said) == 1
    assert said[0].startswith("wandb gets no more metrics of this run: ModuleNotFoundError")
    assert pq.read_table(tmp_path / "metrics.parquet").num_rows == 3


@pytest.mark.parametrize("name", [name for name in MetricsBackend if name != "parquet"])
def test_a_missing_package_is_refused_with_the_extra(name, monkeypatch, tmp_path):
    (tmp_path / name).mkdir()  # as wandb leaves one
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        ConfigError, match=rf"observe\.backends names {name}.*pip install 'siirl_dask\[{name}\]'"
    ):
        check_backends([name])


def test_every_backend_has_an_extra():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {str(name) for name in MetricsBackend} - {"parquet"} <= set(
        project["optional-dependencies"]
    )


def test_a_misspelt_backend_and_one_that_is_named_twice_are_refused():
    with pytest.raises(ConfigError, match=r"observe\.backends\[0\]='wandbb'.*did you mean 'wandb'"):
        load_text(NEEDED, "here", ["observe.backends=[wandbb]"])
    with pytest.raises(ConfigError, match=r"observe\.backends='wandb': expected a list"):
        load_text(NEEDED, "here", ["observe.backends=wandb"])
    with pytest.raises(ConfigError, match="'aim' more than once"):
        load_text(NEEDED, "here", ["observe.backends=[aim, parquet, aim]"])
    with pytest.raises(
        ConfigError, match=r"observe\.tensorboard.*it is called 'observe\.backends' now"
    ):
        load_text(NEEDED, "here", ["observe.tensorboard=true"])
    assert load_text(NEEDED, "here", ["observe.backends=[aim, parquet]"]).observe.backends == [
        "aim",
        "parquet",
    ]


def id_of(folder, *, new):
    return identify(str(folder), new=new).id


def test_a_runs_id_stays_until_the_run_is_new(tmp_path):
    first = id_of(tmp_path, new=True)
    assert re.fullmatch("[0-9a-z]{21}", first)
    assert id_of(tmp_path, new=False) == first
    assert (second := id_of(tmp_path, new=True)) != first
    for damaged in (b"", b"[]", b'{"id": "../../x"}', b'{"id": 7}'):
        (tmp_path / "tracking.json").write_bytes(damaged)
        assert id_of(tmp_path, new=False) not in (first, second)


def test_a_copy_of_a_run_that_is_still_there_is_another_run_of_the_backends(tmp_path):
    """Both go on, and would write into one."""
    first = id_of(tmp_path / "run", new=True)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copied = id_of(tmp_path / "copy", new=False)
    assert copied != first
    assert id_of(tmp_path / "copy", new=False) == copied
    assert id_of(tmp_path / "run", new=False) == first


def test_a_copy_on_another_machine_is_another_run_with_the_steps_so_far(tmp_path):
    """The record that came along names a machine on whose disk nothing can be seen from here."""
    first = id_of(tmp_path / "run", new=True)
    file = tmp_path / "run" / "tracking.json"
    record = json.loads(file.read_text())
    elsewhere = record | {"host": "elsewhere", "url": "/somewhere/run"}
    at_the_same_path = record | {"host": "elsewhere", "inode": record["inode"] + 1}
    for copied in (elsewhere, at_the_same_path):
        file.write_text(json.dumps(copied))
        on_a_disk_of_its_own = os.major(tmp_path.stat().st_dev) != 0
        if copied is at_the_same_path and not on_a_disk_of_its_own:
            continue  # it may be shared
        identity = identify(str(tmp_path / "run"), new=False)
        assert identity.id != first
        assert f"{copied['url']} on elsewhere" in identity.note
        assert f"{first!r} as id" in identity.note
        assert id_of(tmp_path / "run", new=False) == identity.id, "from then on it is itself"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"id": first}))
        assert id_of(tmp_path / "run", new=False) == first, "as the note says"


def test_one_folder_seen_from_two_machines_is_one_run(tmp_path):
    first = id_of(tmp_path, new=True)
    file = tmp_path / "tracking.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "elsewhere"}))
    assert id_of(tmp_path, new=False) == first


def test_a_run_of_a_store_that_cannot_be_read_from_here_counts_as_a_copy(tmp_path):
    first = id_of(tmp_path, new=True)
    file = tmp_path / "tracking.json"
    file.write_text(json.dumps({"id": first, "url": "nosuchstore://bucket/run"}))
    assert id_of(tmp_path, new=False) != first
    earlier_version = {"id": first, "url": str(tmp_path / "gone")}
    file.write_text(json.dumps(earlier_version))
    assert id_of(tmp_path, new=False) == first, "moved, as far as can be seen"


def test_a_run_that_was_moved_or_has_two_names_stays_the_same_run_of_the_backends(tmp_path):
    first = id_of(tmp_path / "run", new=True)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert id_of(tmp_path / "link", new=False) == first
    (tmp_path / "run").rename(tmp_path / "moved")
    assert id_of(tmp_path / "moved", new=False) == first
    (tmp_path / "run").mkdir()
    assert id_of(tmp_path / "run", new=True) != first
    assert id_of(tmp_path / "moved", new=False) == first


def test_settings_are_named_as_one_types_them():
    run = TrackedRun(id="0", name="mine", url="x", project="p", config=plain(Config()))
    assert run.settings()["trainer.fsdp.offload"] is False
    assert run.settings()["observe.backends"] == []
