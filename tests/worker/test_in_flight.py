"""Weights that a node loads while it runs, on many workers in one process: each is loaded once."""

import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.planner import (
    DAG,
    ContractChanges,
    Lagged,
    Node,
    Recv,
    Role,
    Rows,
    RunNode,
    Stream,
    WeightSink,
    WeightSource,
    columns,
    compile_chains,
)
from siirl_dask.planner.weight_streams import why_no_broadcast
from siirl_dask.testing.local_pool import LocalPool

PLACES = {"engines": [0, 1], "trainer": [2]}
WORKERS = ("w0", "w1", "w2")


def build(device, rank):
    """Return a list of what the role's object gets: the steps of weights, and "sampled N"."""
    return []


def in_parts(ctx, table, *, max_bytes): ...


def from_parts(ctx, parts): ...


def changes(*, loads: tuple[int, ...]) -> ContractChanges:
    return ContractChanges(in_flight=any(loads))


@columns(depends_on_options=changes)
def sample(ctx, table, *, loads: tuple[int, ...]):
    """Load as many versions as ``loads`` has for the step, each when it has arrived."""
    weights = ctx.arriving_weights
    assert (weights is not None) == any(loads)
    deadline = time.monotonic() + 20
    for _ in range(loads[ctx.step - 1]):
        while not weights.arrived():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        weights.load()
    ctx.resource.append(f"sampled {ctx.step}")
    return table


@columns()
def learn(ctx, table):
    return table


@columns(
    writes={"value": pa.int64()},
    new_rows=True,
    passes=False,
    stream=WeightSource(in_parts),
)
def give(ctx, table):
    ids = pa.array([0, 1, 2], pa.int64())
    values = pa.array([ctx.step] * 3, pa.int64())
    return pa.table({"row_id": ids, "group_id": ids, "tokens": ids, "value": values})


@columns(reads=["value"], stream=WeightSink(from_parts))
def take_value(ctx, table):
    assert table["value"].to_pylist() == [ctx.step] * 3
    ctx.resource.append(ctx.step)
    return table


def dag(lag, loads):
    return DAG(
        (Role("engines", build), Role("trainer", build)),
        (
            Node("sample", sample, role="engines", options={"loads": loads}),
            Node("learn", learn, role="trainer", after="sample"),
            Node("give", give, role="trainer", after="learn"),
            Node("take", take_value, role="engines", after="give", rows=Rows.REPLICATED, lag=lag),
        ),
    )


@pytest.fixture
def source(tmp_path):
    rows = {"prompt": ["a", "b", "c", "d"], "answer": [""] * 4}
    pq.write_table(pa.table(rows), tmp_path / "data.parquet")
    return Source(
        url=str(tmp_path / "data.parquet"), prompt="prompt", answer="answer", batch_size=4, seed=0
    )


def run(plan, source, url, steps):
    with LocalPool(plan, source, url=str(url)) as pool:
        metrics = [pool.run(step) for step in range(1, steps + 1)]
        return [pool.resources(worker)["engines"] for worker in WORKERS[:2]], metrics


@pytest.mark.parametrize(
    ("lag", "loads", "expected"),
    [
        (1, (0, 1, 1, 1), ["sampled 1", 1, "sampled 2", 2, "sampled 3", 3, "sampled 4"]),
        (1, (0, 1, 0, 1), ["sampled 1", 1, "sampled 2", "sampled 3", 2, 3, "sampled 4"]),
        (2, (0, 0, 0, 1), ["sampled 1", "sampled 2", "sampled 3", 1, 2, "sampled 4"]),
        (2, (0, 1, 1, 1), ["sampled 1", 1, "sampled 2", 2, "sampled 3", 3, "sampled 4"]),
        (2, (0, 0, 2, 0), ["sampled 1", "sampled 2", 1, 2, "sampled 3", "sampled 4"]),
        (2, (0, 0, 1, 0), ["sampled 1", "sampled 2", 1, "sampled 3", "sampled 4", 2]),
    ],
)
def test_weights_are_loaded_once_while_the_node_runs_or_at_their_place(
    lag, loads, expected, source, tmp_path
):
    schema = source_schema(open_source(source).schema, source)
    plan = compile_chains(dag(lag, loads), WORKERS, schema, PLACES)
    found, metrics = run(plan, source, tmp_path, 4)
    assert found == [expected, expected]
    logged = [step.get("rollout/weights_in_flight") for step in metrics]
    assert [0 if metric is None else metric.value for metric in logged] == [
        2 * count for count in loads
    ], "of two workers"


def test_the_table_travels_whole_only_where_a_node_loads_while_it_runs(source):
    schema = source_schema(open_source(source).schema, source)
    streamed = compile_chains(dag(1, (0,)), WORKERS, schema, PLACES)
    whole = compile_chains(dag(1, (1,)), WORKERS, schema, PLACES)
    assert (streamed.streams, whole.streams) == ({"give": "take"}, {})
    (link,) = [link for link in whole.chains["w0"].links if isinstance(link, Lagged)]
    assert [type(inner) for inner in link.links[:2]] == [Recv, RunNode]
    give, take = (whole.flow[name] for name in ("give", "take"))
    reason = why_no_broadcast(give, take, whole.placement, whole.streams, whole.flow)
    assert "while it generates (rollout.in_flight)" in reason
    (link,) = [link for link in streamed.chains["w0"].links if isinstance(link, Lagged)]
    assert [type(inner) for inner in link.links] == [Stream]
