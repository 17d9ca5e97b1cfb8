"""Rewards of rows that are finished while others are generated: begun early, the same bits, the
same errors.
"""

import functools
import time
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.config import RewardsConfig
from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.errors import NodeError, RewardError
from siirl_dask.nodes import score
from siirl_dask.planner import DAG, Node, Role, Rows, columns, compile_chains
from siirl_dask.planner.inputs import PlanInputs
from siirl_dask.rewards import build_scorer
from siirl_dask.schema import PROMPT, RESPONSE, ROW_ID, fields
from siirl_dask.testing.local_pool import LocalPool
from siirl_dask.testing.rows import build_nothing
from tests.worker import overlapping

PLACEMENTS = {
    "1": (1, {}),
    "2": (2, {}),
    "2+2": (4, {"rollout": [0, 1], "reward": [0, 1], "policy": [2, 3]}),
}
WRITES = fields(RESPONSE) | {"length": pa.int64()}


def respond(ctx, table, made):
    """Hand over the rows in the order that the run's seed gives, then return them all."""
    rows = table.append_column(RESPONSE, pa.array([f"response {row}" for row in made], pa.string()))
    rows = rows.append_column("length", pa.array([row % 5 for row in made], pa.int64()))
    order = np.random.default_rng(ctx.run_seed).permutation(rows.num_rows)
    if ctx.hand_over is not None:
        for at in order.tolist():
            ctx.hand_over(rows.slice(at, 1))
    return rows


@columns(reads=[PROMPT], writes=WRITES, early=[RESPONSE, "length"])
def generate(ctx, table):
    return respond(ctx, table, table[ROW_ID].to_pylist())


@columns(reads=[PROMPT], writes=WRITES, early=[RESPONSE, "length"])
def generate_until_a_reward_was_asked_for(ctx, table):
    """The last row ends after the first one's reward began: it would never end if rewards waited
    for it.
    """
    rows = respond(ctx, table, table[ROW_ID].to_pylist())
    assert overlapping.CALLED.acquire(timeout=60), (
        "no reward was asked for while rows were generated"
    )
    return rows


@columns(reads=[PROMPT], writes=WRITES, early=[RESPONSE, "length"])
def generate_and_fail(ctx, table):
    respond(ctx, table, table[ROW_ID].to_pylist())
    raise RuntimeError("the engine is gone")


@columns(reads=[PROMPT], writes=WRITES, early=[RESPONSE, "length"])
def generate_and_change(ctx, table):
    """It returns other rows than it hands over."""
    respond(ctx, table, [row + 1 for row in table[ROW_ID].to_pylist()])
    return respond(
        ctx.__class__(0, 0, ctx.rank, ctx.device, None), table, table[ROW_ID].to_pylist()
    )


@functools.wraps(score)
def score_shouted(ctx, table, **options):
    """It gives ``score`` other responses than its input has, and so others than were handed
    over.
    """
    shouted = pa.array([text.upper() for text in table[RESPONSE].to_pylist()], table[RESPONSE].type)
    scored = score(
        ctx, table.set_column(table.column_names.index(RESPONSE), RESPONSE, shouted), **options
    )
    return scored.set_column(scored.column_names.index(RESPONSE), RESPONSE, table[RESPONSE])


@columns(reads=[RESPONSE, "reward"])
def learn(ctx, table):
    return table


def dag(reward, *, node=score, source=generate, extra=("length",), **rewards):
    build = partial(build_scorer, rewards=RewardsConfig(**rewards), reward=reward)
    roles = (Role("rollout", build_nothing), Role("reward", build), Role("policy", build_nothing))
    return DAG(
        roles,
        (
            Node("rollout", source, role="rollout"),
            Node("reward", node, role="reward", after="rollout", options={"columns": extra}),
            Node("learn", learn, role="policy", after="reward", rows=Rows.BALANCED, save_as="rows"),
        ),
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    url = tmp_path_factory.mktemp("data") / "data.parquet"
    rows = [f"row {number}" for number in range(60)]
    pq.write_table(pa.table({"prompt": rows, "answer": rows}), url, row_group_size=20)
    return Source(url=str(url), prompt="prompt", answer="answer", batch_size=20, seed=0)


def run(source, url, graph, *, overlap=True, placement="1", seed=0, steps=1):
    """Return each step's table and metrics."""
    workers, placed = PLACEMENTS[placement]
    names = tuple(f"w{number}" for number in range(workers))
    plan = compile_chains(
        graph,
        names,
        source_schema(open_source(source).schema, source),
        placed or None,
        overlap=overlap,
    )
    with LocalPool(plan, source, url=str(url), seed=seed) as pool:
        try:
            metrics = [pool.run(step) for step in range(1, steps + 1)]
        finally:
            for worker in names:
                if scorer := pool.resources(worker).get("reward"):
                    scorer.close()
    read = (
        pq.read_table(url / "rows" / f"step={step:06d}").sort_by(ROW_ID)
        for step in range(1, steps + 1)
    )
    return list(read), metrics


def numbers(metrics):
    """The metrics, with all that they are made of, but for seconds, bytes and what tells of the
    overlap.
    """
    apart = ("seconds/", "step_seconds", "bytes/", "rows/")
    return {name: metric for name, metric in metrics.items() if not name.startswith(apart)}


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    """Steps of a run on one worker that scores in the worker itself, when all rows are there."""
    graph = dag(overlapping.digest, max_failures=20)
    return run(source, tmp_path_factory.mktemp("expected"), graph, overlap=False, steps=2)


@pytest.mark.parametrize(
    ("placement", "rewards"),
    [("1", {"processes": 1}), *((placement, {}) for placement in PLACEMENTS)],
)
def test_rewards_are_the_same_to_the_bit_with_and_without_overlap(
    source, tmp_path, expected, placement, rewards
):
    reward = overlapping.digest if rewards else overlapping.digest_async
    for overlap in (True,) if rewards else (True, False):  # a process takes a second to start
        graph = dag(reward, max_failures=20, **rewards)
        tables, metrics = run(
            source,
            tmp_path / str(overlap),
            graph,
            overlap=overlap,
            placement=placement,
            seed=7,
            steps=2,
        )
        assert all(got.equals(other) for got, other in zip(tables, expected[0], strict=True))
        assert all(("rows/scored_early" in step) is overlap for step in metrics)
        if placement == "1":
            assert [numbers(step) for step in metrics] == [numbers(step) for step in expected[1]]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), concurrency=st.integers(1, 5))
def test_the_order_in_which_rows_are_finished_changes_nothing(
    source, tmp_path_factory, expected, seed, concurrency
):
    graph = dag(overlapping.digest_async, max_failures=20, concurrency=concurrency)
    (table,), _ = run(source, tmp_path_factory.mktemp("rows"), graph, seed=seed)
    assert table.equals(expected[0][0])


def test_a_row_is_scored_while_others_are_generated(source, tmp_path):
    graph = dag(
        overlapping.tells_of_its_calls, source=generate_until_a_reward_was_asked_for, extra=()
    )
    (table,), (metrics,) = run(source, tmp_path, graph)
    assert table["reward"].to_pylist() == [1.0] * 20
    assert metrics["reward/failures"].value == 0


def test_a_reward_that_fails_early_is_named_in_its_own_node_with_its_row(source, tmp_path):
    with pytest.raises(
        RewardError, match=r"reward raises raised RuntimeError.*row \d+ of step 1.*max_failures=2"
    ) as told:
        run(source, tmp_path, dag(overlapping.raises, extra=(), processes=1, max_failures=2))
    assert "node 'reward'" in told.value.__notes__[0]


def test_a_generation_that_fails_ends_the_rewards_that_are_under_way(source, tmp_path):
    began = time.monotonic()
    with pytest.raises(NodeError, match=r"node 'rollout'.*the engine is gone"):
        run(
            source,
            tmp_path,
            dag(overlapping.never_returns, source=generate_and_fail, extra=(), processes=2),
        )
    assert time.monotonic() - began < 300


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"source": generate_and_change}, True),
        ({"node": score_shouted}, True),
        ({"node": score}, False),
    ],
    ids=["the row is another", "the node gives score other rows", "unchanged"],
)
def test_rows_that_changed_after_they_were_handed_over_are_scored_as_they_are(
    source, tmp_path, caplog, changed, says
):
    early, late = (
        run(
            source,
            tmp_path / str(overlap),
            dag(overlapping.digest_async, max_failures=20, **changed),
            overlap=overlap,
        )
        for overlap in (True, False)
    )
    assert early[0][0].equals(late[0][0])
    assert ("all of them are scored again" in caplog.text) is says


def test_workers_plan_the_same_overlap_as_the_driver(source):
    schema = source_schema(open_source(source).schema, source)
    for overlap in (True, False):
        plan = compile_chains(
            dag(overlapping.digest, processes=1), ("a", "b"), schema, overlap=overlap
        )
        assert PlanInputs.of(plan).compile(["a", "b"]).chains == plan.chains
