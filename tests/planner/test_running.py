"""Plans on the real executor: separate branches run at once, and tables are no larger than
estimated.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.planner import DAG, Node, Role, Rows, TableSizes, columns, compile_chains, usage
from siirl_dask.schema import (
    GROUP_ID,
    MINIBATCH,
    PROMPT_IDS,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    ROW_ID,
    TOKENS,
    fields,
)
from siirl_dask.testing.local_pool import LocalPool
from siirl_dask.testing.rows import build_nothing

PROMPTS, N, PROMPT_TOKENS, RESPONSE_TOKENS, MINIBATCHES = 24, 4, 40, 100, 3
ROLES = tuple(Role(name, build_nothing) for name in "abc")
MEETINGS = {"at once": threading.Barrier(2), "in turn": threading.Barrier(2)}
SEEN: dict[tuple[str, str], int] = {}
"""Bytes of a node's input and output on a worker."""


@pytest.fixture
def source(tmp_path):
    rows = {"prompt": ["x" * 10 for _ in range(PROMPTS)], "answer": ["y"] * PROMPTS}
    pq.write_table(pa.table(rows), tmp_path / "data.parquet", row_group_size=5)
    return Source(
        url=str(tmp_path / "data.parquet"),
        prompt="prompt",
        answer="answer",
        batch_size=PROMPTS,
        seed=0,
    )


def run(dag, source, url, workers, placement):
    schema = source_schema(open_source(source).schema, source)
    plan = compile_chains(dag, workers, schema, placement)
    with LocalPool(plan, source, url=str(url)) as pool:
        pool.run()
    return plan


@columns()
def start(ctx, table):
    return table


@columns()
def meet(ctx, table, *, at: str, seconds: float):
    """Goes on only while another worker is in here as well."""
    MEETINGS[at].wait(timeout=seconds)
    return table


def diamond(at: str, seconds: float) -> DAG:
    meeting = partial(meet, at=at, seconds=seconds)
    nodes = [
        Node("start", start, role="a"),
        Node("left", meeting, role="b", after="start"),
        Node("right", meeting, role="c", after="start"),
        Node("join", start, role="a", after=("left", "right")),
    ]
    return DAG(ROLES, nodes)


def test_two_branches_on_disjoint_workers_are_run_at_once(source, tmp_path):
    run(diamond("at once", 30), source, tmp_path, ("w0", "w1"), {"a": [0], "b": [0], "c": [1]})


def test_two_branches_on_one_worker_are_not(source, tmp_path):
    """Show that the test above would notice it."""
    with pytest.raises(Exception, match="BrokenBarrierError"):
        run(diamond("in turn", 0.1), source, tmp_path, ("w0",), {})


def lists(lengths, kind):
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(np.zeros(offsets[-1]), kind))


def remember(ctx, node, *tables):
    SEEN[ctx.device.worker, node] = sum(table.nbytes for table in tables)


def uneven(ids, most, seed):
    """A few rows are long, most are short."""
    draws = np.random.default_rng(seed).random(10_000)[np.asarray(ids)]
    return np.where(draws > 0.8, most, np.where(draws > 0.7, 0, (draws * 5).astype(int)))


@columns(reads=["prompt"], writes=fields(PROMPT_IDS, TOKENS), new_rows=True)
def encode(ctx, table, *, seed: int):
    lengths = uneven(table[ROW_ID], PROMPT_TOKENS, seed)
    made = table.set_column(table.column_names.index(TOKENS), TOKENS, pa.array(lengths, pa.int64()))
    made = made.append_column(PROMPT_IDS, lists(lengths, pa.int32()))
    remember(ctx, "encode", table, made)
    return made


@columns(reads=[PROMPT_IDS], writes=fields(RESPONSE_IDS, ROLLOUT_LOGPROBS), expand="n")
def answer(ctx, table, *, n: int, seed: int):
    made = table.take(np.repeat(np.arange(table.num_rows), n))
    ids = (
        np.repeat(np.asarray(table[ROW_ID]), n) * n + np.tile(np.arange(n), table.num_rows)
    ).astype(np.int64)
    lengths = uneven(ids, RESPONSE_TOKENS, seed)
    tokens = np.asarray(made[TOKENS]) + lengths
    made = made.set_column(made.column_names.index(ROW_ID), ROW_ID, pa.array(ids))
    made = made.set_column(made.column_names.index(TOKENS), TOKENS, pa.array(tokens, pa.int64()))
    made = made.append_column(RESPONSE_IDS, lists(lengths, pa.int32()))
    made = made.append_column(ROLLOUT_LOGPROBS, lists(lengths, pa.float32()))
    remember(ctx, "answer", table, made)
    return made


@columns(writes=fields(MINIBATCH))
def draw(ctx, table):
    made = table.append_column(
        MINIBATCH, pa.array(np.asarray(table[GROUP_ID]) % MINIBATCHES, pa.int32())
    )
    remember(ctx, "draw", table, made)
    return made


@columns(reads=[PROMPT_IDS, RESPONSE_IDS, ROLLOUT_LOGPROBS], optional=[MINIBATCH])
def learn(ctx, table, *, name: str):
    remember(ctx, name, table)
    return table


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout", ["apart", "together", "one"])
def test_tables_are_no_larger_than_estimated(source, tmp_path, seed, layout):
    nodes = [
        Node("encode", partial(encode, seed=seed), role="a"),
        Node("answer", partial(answer, n=N, seed=seed), role="a", after="encode"),
        Node("spread", partial(learn, name="spread"), role="b", after="answer"),
        Node(
            "grouped", partial(learn, name="grouped"), role="c", after="answer", rows=Rows.GROUPED
        ),
        Node("draw", draw, role="b", after="answer", rows=Rows.BALANCED),
        Node("learn", partial(learn, name="learn"), role="b", after="draw", rows=Rows.BALANCED),
        Node("all", partial(learn, name="all"), role="c", after="learn", rows=Rows.REPLICATED),
    ]
    workers, placement = {
        "apart": (
            ("w0", "w1", "w2", "w3", "w4", "w5", "w6"),
            {"a": [0, 1], "b": [2, 3, 4], "c": [5, 6]},
        ),
        "together": (("w0", "w1", "w2", "w3"), {"a": [0, 1], "b": [0, 1, 2], "c": [1, 3]}),
        "one": (("w0",), {}),
    }[layout]
    SEEN.clear()
    plan = run(DAG(ROLES, nodes), source, tmp_path, workers, placement)
    sizes = TableSizes(
        prompts=PROMPTS,
        prompt_tokens=PROMPT_TOKENS,
        response_tokens=RESPONSE_TOKENS,
        widths={"prompt": 14, "answer": 5},
        minibatches=MINIBATCHES,
    )
    estimated = usage(plan, sizes)
    assert set(SEEN) == {
        (worker, node.name) for node in nodes for worker in plan.placement[node.role]
    }
    for (worker, node), seen in SEEN.items():
        assert seen <= estimated[worker].tables, (worker, node)
    assert all(not one.unknown for one in estimated.values())
    largest = max(SEEN.values())
    assert max(one.tables for one in estimated.values()) < 12 * largest, "a bound that is no use"


def test_more_workers_need_less_each_and_longer_responses_more(source, tmp_path):
    nodes = [
        Node("encode", partial(encode, seed=0), role="a"),
        Node("answer", partial(answer, n=N, seed=0), role="a", after="encode"),
        Node("learn", partial(learn, name="learn"), role="b", after="answer", rows=Rows.BALANCED),
    ]
    schema = source_schema(open_source(source).schema, source)

    def most(workers: int, **changed: int) -> int:
        half = workers // 2
        placement = {"a": range(half), "b": range(half, workers)}
        plan = compile_chains(
            DAG(ROLES, nodes), [f"w{i}" for i in range(workers)], schema, placement
        )
        given = {"prompts": 512, "prompt_tokens": 64, "response_tokens": 256} | changed
        return max(one.tables for one in usage(plan, TableSizes(**given)).values())

    assert most(2) > most(4) > most(16) > most(64)
    assert most(4, response_tokens=512) > most(4)
    assert most(4, prompts=1024) > 1.9 * most(4)


@columns(writes=fields("response"))
def say(ctx, table): ...


@pytest.mark.parametrize("token_bytes", [1, 3, 8])
def test_texts_are_bounded_by_their_bytes_a_token(token_bytes):
    plan = compile_chains(
        DAG(ROLES, (Node("say", say, role="a"),)), ["w0"], pa.schema({"prompt": pa.string()})
    )

    def tables(token_bytes):
        sizes = TableSizes(prompts=8, prompt_tokens=3, response_tokens=5, token_bytes=token_bytes)
        return usage(plan, sizes)["w0"].tables

    assert tables(token_bytes) - tables(0) == 8 * 5 * token_bytes
