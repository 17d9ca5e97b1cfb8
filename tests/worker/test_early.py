"""Rows that a node hands over while it makes others give the same tables, on any placement, from
whatever thread.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.coordinator.databuffer.limits import BufferLimits
from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.errors import NodeError
from siirl_dask.planner import DAG, Node, Role, Rows, columns, compile_chains
from siirl_dask.schema import (
    ANSWER,
    GROUP_ID,
    RESPONSE_IDS,
    REWARD,
    ROLLOUT_LOGPROBS,
    ROW_ID,
    TYPES,
    fields,
)
from siirl_dask.testing.local_pool import LocalPool
from siirl_dask.testing.rows import build_nothing

ROLES = (Role("rollout", build_nothing), Role("policy", build_nothing))
PLACEMENT = {"rollout": [0, 1], "policy": [2, 3, 4]}
WORKERS = tuple(f"w{number}" for number in range(5))
HOSTS = {"w0": "a", "w1": "a", "w2": "b", "w3": "b", "w4": "c"}
LIMITS = BufferLimits(early_message=2000)
EARLY = (RESPONSE_IDS, ROLLOUT_LOGPROBS)


def sample(row):
    random = np.random.default_rng(row)
    length = int(random.lognormal(5, 1))
    return random.integers(0, 1000, length).astype(np.int32), random.normal(size=length).astype(
        np.float32
    )


def with_samples(table, samples):
    for name, values in zip(EARLY, zip(*samples, strict=True), strict=True):
        table = table.append_column(name, pa.array(list(values), TYPES[name]))
    return table


@columns(reads=[ANSWER], writes=fields(*EARLY), early=EARLY, new_rows=True)
def sample_in_threads(ctx, table, *, change):
    """Rows end in an order that nobody knows, in several threads; ``change`` falsifies one that
    was handed over.
    """
    rows = table.take(np.repeat(np.arange(table.num_rows), 8))
    ids = table[ROW_ID].to_numpy().repeat(8) * 8 + np.tile(np.arange(8), table.num_rows)
    rows = rows.set_column(rows.column_names.index(ROW_ID), ROW_ID, pa.array(ids))
    done = threading.Semaphore(0)

    def make(at):
        made = sample(int(ids[at]))
        if ctx.hand_over is not None:
            early = rows.slice(at, 1).select([ROW_ID, GROUP_ID])
            ctx.hand_over(with_samples(early, [(made[0], made[1] + (1 if change else 0))]))
        done.release()
        return made

    with ThreadPoolExecutor(4) as threads:
        samples = list(threads.map(make, range(len(ids))))
    tokens = pa.array([len(made[0]) for made in samples], pa.int64())
    rows = with_samples(rows, samples)
    ctx.log("handed", float(ctx.hand_over is not None))
    return rows.set_column(rows.column_names.index("tokens"), "tokens", tokens)


@columns(reads=[ANSWER], writes=fields(REWARD))
def score(ctx, table):
    return table.append_column(REWARD, pa.array(np.arange(table.num_rows) * 0.5, pa.float32()))


@columns(reads=[RESPONSE_IDS], writes={"total": pa.float64(), "owner": pa.string()})
def learn(ctx, table):
    """The sum depends on the order of the rows, and so on their owner."""
    total = float(
        sum((np.float32(sum(ids)) for ids in table[RESPONSE_IDS].to_pylist()), np.float32(0))
    )
    table = table.append_column("total", pa.array([total] * table.num_rows, pa.float64()))
    return table.append_column("owner", pa.array([ctx.device.worker] * table.num_rows, pa.string()))


@columns(reads=[RESPONSE_IDS, ROLLOUT_LOGPROBS, REWARD, "total", "owner"])
def join(ctx, table):
    return table


def dag(*, change=False):
    return DAG(
        ROLES,
        (
            Node("rollout", partial(sample_in_threads, change=change), role="rollout"),
            Node("reward", score, role="rollout", after="rollout"),
            Node("learn", learn, role="policy", after="rollout", rows=Rows.BALANCED),
            Node(
                "join",
                join,
                role="policy",
                after=("reward", "learn"),
                rows=Rows.GROUPED,
                save_as="rows",
            ),
        ),
    )


@pytest.fixture
def source(tmp_path):
    rows = [f"row {number}" for number in range(12)]
    pq.write_table(
        pa.table({"prompt": rows, "answer": rows}), tmp_path / "data.parquet", row_group_size=4
    )
    return Source(
        url=str(tmp_path / "data.parquet"), prompt="prompt", answer="answer", batch_size=6, seed=0
    )


def run(source, url, prefetch, hosts=HOSTS, **options):
    plan = compile_chains(
        dag(**options), WORKERS, source_schema(open_source(source).schema, source), PLACEMENT, hosts
    )
    with LocalPool(plan, source, url=str(url), prefetch=prefetch, limits=LIMITS) as pool:
        metrics = [pool.run(step) for step in (1, 2)]
        held = [buffer._early.allowance.used for buffer in pool.databuffers.values()]
    assert held == [0] * len(held)
    tables = [pq.read_table(url / "rows" / f"step={step:06d}").sort_by("row_id") for step in (1, 2)]
    return tables, metrics


@pytest.mark.parametrize("hosts", [HOSTS, None], ids=["apart", "one host"])
def test_a_run_gives_the_same_rows_with_and_without_prefetch(source, tmp_path, hosts):
    expected, without = run(source, tmp_path / "off", False, hosts)
    got, early = run(source, tmp_path / "on", True, hosts)
    assert all(table.equals(other) for table, other in zip(got, expected, strict=True))
    assert [step["bytes/early"].value for step in without] == [0, 0]
    assert [step["handed"].value for step in without] == [0, 0]
    assert all(step["bytes/early"].value > 0 for step in early)


def test_rows_travel_early_between_hosts_and_not_within_one_unless_the_user_says_so(
    source, tmp_path
):
    assert run(source, tmp_path / "apart", None)[1][0]["handed"].value == 1
    assert run(source, tmp_path / "here", None, None)[1][0]["handed"].value == 0


def test_a_node_that_changes_a_row_it_handed_over_is_named(source, tmp_path):
    with pytest.raises(
        NodeError, match=r"node 'rollout' handed over row \d+ early and gave another"
    ):
        run(source, tmp_path, True, change=True)
