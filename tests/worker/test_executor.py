"""The executor on many workers in one process: contracts, joins, kept parts, failures."""

from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.errors import NodeError
from siirl_dask.planner import DAG, Node, Role, Rows, columns, compile_chains
from siirl_dask.testing.local_pool import LocalPool
from siirl_dask.testing.rows import build_nothing, fill, take
from siirl_dask.worker.stop import StopFlag

ROLES = (Role("rollout", build_nothing), Role("policy", build_nothing))
LAYOUTS = {
    "one": ("w0",),
    "colocated": ("w0", "w1", "w2"),
    "split": ("w0", "w1", "w2", "w3", "w4"),
}
PLACEMENTS = {"split": {"rollout": [0, 1], "policy": [2, 3, 4]}}


@columns(reads=["answer"], writes={"length": pa.int64()})
def measure(ctx, table):
    return table.append_column(
        "length", pa.array([len(a) for a in table["answer"].to_pylist()], pa.int64())
    )


@columns(reads=["response_ids", "length"], writes={"total": pa.int64()})
def combine(ctx, table):
    sums = [
        sum(ids) + n
        for ids, n in zip(
            table["response_ids"].to_pylist(), table["length"].to_pylist(), strict=True
        )
    ]
    return table.append_column("total", pa.array(sums, pa.int64()))


@columns(writes={"length": pa.int64()})
def forgets_its_column(ctx, table):
    return table


@columns(writes={"length": pa.int64()})
def gives_another_type(ctx, table):
    return table.append_column("length", pa.array([1.5] * table.num_rows))


@columns()
def gives_a_column_it_does_not_declare(ctx, table):
    return table.append_column("extra", pa.array([1] * table.num_rows))


@columns()
def loses_a_row(ctx, table):
    return table.slice(1)


@columns()
def gives_no_table(ctx, table):
    return None


@columns()
def divides_by_zero(ctx, table):
    raise ZeroDivisionError("that was it")


@pytest.fixture
def source(tmp_path):
    rows = {"prompt": [f"p{i}" for i in range(20)], "answer": ["x" * i for i in range(20)]}
    pq.write_table(pa.table(rows), tmp_path / "data.parquet", row_group_size=4)
    return Source(
        url=str(tmp_path / "data.parquet"), prompt="prompt", answer="answer", batch_size=10, seed=0
    )


def pool(source, tmp_path, nodes, layout="colocated"):
    schema = source_schema(open_source(source).schema, source)
    plan = compile_chains(DAG(ROLES, nodes), LAYOUTS[layout], schema, PLACEMENTS.get(layout))
    return LocalPool(plan, source, url=str(tmp_path / layout))


DIAMOND = (
    Node("there", partial(fill, tokens=7), role="rollout"),
    Node("measure", measure, role="rollout", after="there"),
    Node("take", take, role="policy", after="there", rows=Rows.BALANCED),
    Node(
        "combine",
        combine,
        role="policy",
        after=("measure", "take"),
        rows=Rows.GROUPED,
        save_as="kept",
    ),
)


def test_a_diamond_keeps_the_same_rows_on_any_layout(source, tmp_path):
    kept = {}
    for layout in LAYOUTS:
        with pool(source, tmp_path, DIAMOND, layout) as workers:
            for step in (1, 2, 3):
                workers.run(step)
        tables = [
            pq.read_table(tmp_path / layout / "kept" / f"step={step:06d}") for step in (1, 2, 3)
        ]
        kept[layout] = [table.sort_by("row_id") for table in tables]
    for layout in ("colocated", "split"):
        assert kept[layout] == kept["one"]
    for row in kept["one"][0].to_pylist():
        assert row["total"] == sum(row["row_id"] + 1000 + i for i in range(7)) + len(row["answer"])


def test_what_was_published_is_freed_by_the_end_of_the_step(source, tmp_path):
    with pool(source, tmp_path, DIAMOND, "split") as workers:
        workers.run()
        assert sum(buffer.traffic.total for buffer in workers.databuffers.values()) > 0
        assert {buffer.unacked_bytes for buffer in workers.databuffers.values()} == {0}


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (forgets_its_column, "did not give \\['length'\\]"),
        (gives_another_type, "gave 'length' as double: its contract says int64"),
        (
            gives_a_column_it_does_not_declare,
            "columns it does not declare: \\['extra'\\]; add them to its writes",
        ),
        (loses_a_row, "changed which rows there are: declare new_rows=True"),
        (gives_no_table, "gave a NoneType: expected a pyarrow Table"),
        (
            divides_by_zero,
            "node 'bad', train step 1, worker 'w\\d': ZeroDivisionError: that was it",
        ),
    ],
)
def test_a_node_that_breaks_its_contract_is_named_and_stops_everyone(source, tmp_path, fn, said):
    nodes = (
        Node("there", partial(fill, tokens=3), role="rollout"),
        Node("bad", fn, role="rollout", after="there", save_as="kept"),
        Node("after", take, role="policy", after="bad", rows=Rows.BALANCED),
    )
    with pool(source, tmp_path, nodes, "split") as workers, pytest.raises(NodeError, match=said):
        workers.run()


def test_the_first_reason_to_stop_is_the_one_that_is_told():
    flag = StopFlag()
    flag.check()
    flag.set("worker '3' died")
    flag.set("and then everything else did")
    with pytest.raises(Exception, match="worker '3' died"):
        flag.check()
