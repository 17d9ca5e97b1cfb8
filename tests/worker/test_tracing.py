"""Recording: bounded, nothing where it is off, and the chain's spans explain its time."""

import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.observe.trace.bottleneck import find_bottleneck
from siirl_dask.observe.trace.trace_table import read_spans, trace_table
from siirl_dask.planner import DAG, Iteration, Node, Phase, Role, Rows, columns, compile_chains
from siirl_dask.testing.local_pool import LocalPool
from siirl_dask.testing.rows import build_nothing, fill, take
from siirl_dask.trace import Lane, Recorder
from siirl_dask.worker.monitoring.task_progress import TaskProgress
from siirl_dask.worker.monitoring.tracing import ClockOffset, Tracing, clock_id
from siirl_dask.worker.peers.data_plane import DataSettings
from siirl_dask.worker.run_spec import RunSpec

SLOW = 1.5  # seconds, of which a machine with other work takes less than a twentieth from a task


@columns()
def slow_on_one_worker(ctx, table):
    """Compute for a while on worker 'w1'."""
    until = time.monotonic() + SLOW * (ctx.device.worker == "w1")
    while time.monotonic() < until:
        pass
    return table


@pytest.fixture
def pool(tmp_path):
    """Two workers that generate, one of them slow, and two that take their rows."""
    rows = {"prompt": [f"p{i}" for i in range(8)], "answer": ["x"] * 8}
    pq.write_table(pa.table(rows), tmp_path / "data.parquet")
    source = Source(
        url=str(tmp_path / "data.parquet"), prompt="prompt", answer="answer", batch_size=8, seed=0
    )
    nodes = (
        Node("rollout", fill, role="rollout", options={"tokens": 3}),
        Node("judge", slow_on_one_worker, role="rollout", after="rollout"),
        Node("update", take, role="policy", after="judge", rows=Rows.BALANCED),
    )
    roles = (Role("rollout", build_nothing), Role("policy", build_nothing))
    schema = source_schema(open_source(source).schema, source)
    placement = {"rollout": [0, 1], "policy": [2, 3]}
    plan = compile_chains(DAG(roles, nodes), ("w0", "w1", "w2", "w3"), schema, placement)
    return LocalPool(plan, source, url=str(tmp_path), trace=True)


def test_a_slow_worker_is_named_and_those_who_wait_for_it_say_so(pool):
    with pool as workers:
        workers.run(1)
        drained = {name: recorder.drain() for name, recorder in workers.traces.items()}
    found = find_bottleneck(
        read_spans((1, trace_table(own, name, "here", 0)) for name, own in drained.items())
    )
    assert (found.slowest.node, found.slowest.worker) == ("judge", "w1")
    assert found.slowest.share > 0.5
    assert (found.uneven.node, found.uneven.worker) == ("judge", "w1")
    times = {worker.worker: worker for worker in found.workers}
    for name in ("w2", "w3"):
        assert times[name].waits["judge->update", "w1"] > SLOW / 2 * 1e9
        assert times[name].received > 0
    assert times["w1"].explained > 0.95


def test_what_is_recorded_between_two_drains_is_bounded_and_what_is_lost_is_told():
    recorder = Recorder(most=100)
    for number in range(1000):
        recorder.add(Lane.TRANSFER, "send", f"{number}", time.monotonic_ns())
        recorder.count(Lane.ENGINE, "requests", 0)  # each one counts, as the edge of a slice
    drained = recorder.drain()
    assert len(drained) == 101
    assert drained[-1].name == "dropped"
    assert drained[-1].amount > 900
    assert drained[-2].amount == 0
    assert recorder.drain() == []


def test_counts_are_thinned_and_keep_the_ends_of_what_an_engine_had(monkeypatch):
    clock = iter(range(0, 10**15, 10**9))
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(clock))
    recorder = Recorder()
    for value in [*range(1, 3000), 0, 5, 0]:
        recorder.count(Lane.ENGINE, "requests", value)
    points = [(entry.start, entry.amount) for entry in recorder.drain()]
    assert points == sorted(points)
    assert len(points) <= 128
    assert [value for _, value in points][-3:] == [0, 5, 0]


def test_a_recorder_that_is_off_records_nothing():
    recorder = Recorder(enabled=False)
    progress = TaskProgress(recorder)
    with (
        recorder.task(),
        recorder.span(Lane.COMPUTE, "node", "rollout") as one,
        progress.waiting(),
        progress.stage("it"),
    ):
        one.amount = 5
        progress.beat()
        progress.engine_has(3)
        recorder.add(Lane.STORAGE, "write", "rollouts", 0)
    assert recorder.drain() == []


def test_waits_of_an_object_that_another_run_goes_on_with_are_recorded_by_that_run():
    first, second = TaskProgress(Recorder()), TaskProgress(Recorder())
    first.forward_to(second)
    with second.trace.span(Lane.COMPUTE, "node", "update"), first.waiting():
        assert second.read()[2]
    waits = [entry.name for entry in second.trace.drain() if entry.lane is Lane.WAIT]
    assert waits == ["update"]
    assert not [entry for entry in first.trace.drain() if entry.lane is Lane.WAIT]


def tracing(url, **given):
    settings = {"attempt": 3, "trace": True, **given}
    members = {"7": "tcp://a", "8": "tcp://b"}
    spec = RunSpec(
        run="it",
        url=str(url),
        seed=0,
        members=members,
        phases=b"",
        builds_from="train",
        threads=1,
        data=DataSettings(),
        retry_seconds=0.0,
        **settings,
    )
    return Tracing(spec, "8")


def run_step(traced, step, phase=Phase.TRAIN):
    with traced.task():
        traced.begin(Iteration(phase, step, step))
        with traced.recorder.span(Lane.COMPUTE, "node", f"{phase}"):
            pass


def test_the_part_of_a_step_has_all_its_iterations_and_the_number_of_the_start(tmp_path):
    traced = tracing(tmp_path)
    run_step(traced, 4)
    run_step(traced, 4, Phase.VALIDATION)
    run_step(traced, 5)
    traced.finish()
    traced.close()
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.parquet")}
    assert set(files) == {f"trace/step=00000{step}/part-0003-00001.parquet" for step in (4, 5)}
    names = [
        span.name
        for file in files.values()
        for span in read_spans([(4, pq.read_table(file, partitioning=None))])
        if span.lane is Lane.COMPUTE
    ]
    assert sorted(names) == ["train", "train", "validation"]


def test_without_a_trace_nothing_is_written(tmp_path):
    traced = tracing(tmp_path, trace=False)
    run_step(traced, 1)
    traced.finish()
    assert [*tmp_path.iterdir()] == []


def test_a_store_that_takes_no_part_does_not_stop_the_run(tmp_path, caplog):
    (tmp_path / "trace").write_text("no folder")
    traced = tracing(tmp_path)
    for step in (1, 2, 3):
        run_step(traced, step)
        traced.finish()
    assert caplog.text.count("is not written") == 1


def test_one_late_heartbeat_does_not_move_a_worker_s_clock():
    offset = ClockOffset()
    for delay in (0.5, 0.5, 7.0, 0.5, 0.5, 0.5):
        offset.add_sample(delay)
    wall = offset.nanoseconds - (time.time_ns() - time.monotonic_ns())
    assert abs(wall - 0.5e9) < 0.05e9
    assert clock_id() == clock_id()
