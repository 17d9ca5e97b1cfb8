"""Episodes of several rows on any number of workers: the same advantages, mini-batches and
places, whoever has them.
"""

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.algorithms import grpo, policy_loss, ppo_clip, row_sums, sequence_mean_token_mean
from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.nodes import draw_minibatches, estimate_advantage, update_policy
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS, row_positions
from siirl_dask.nodes.packed_table import response_mask
from siirl_dask.planner import DAG, Node, Role, Rows, columns, compile_chains
from siirl_dask.planner.chain import Recv
from siirl_dask.schema import TYPES, fields
from siirl_dask.testing.local_pool import LocalPool
from siirl_dask.testing.rows import build_nothing

SAMPLES, MOST = 3, 4
WRITTEN = (
    "prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "old_logprobs", "reward", *EPISODE_COLUMNS
)  # fmt: skip


@columns(writes=fields(*WRITTEN), new_rows=True, passes=False)
def speak(ctx, table):
    """Play episodes of one to four rows, of which two agents each write some."""
    rows = []
    for position in table["group_id"].to_pylist():
        for number in range(SAMPLES):
            episode = position * SAMPLES + number
            drawn = np.random.default_rng(episode)
            for k in range(int(drawn.integers(1, MOST + 1))):
                said = int(drawn.integers(1, 6))
                rows.append(
                    {
                        "row_id": episode * MOST + k,
                        "group_id": position,
                        "tokens": said + 2,
                        "prompt_ids": [1, 2],
                        "response_ids": [7] * said,
                        "response_mask": [
                            True,
                            *[bool(bit) for bit in drawn.integers(0, 2, said - 1)],
                        ],
                        "rollout_logprobs": [-1.0] * said,
                        "old_logprobs": [-1.0] * said,
                        "reward": float(drawn.integers(0, 3)),
                        "episode_id": episode,
                        "segment": k // 2,
                        "agent": "ab"[k % 2],
                    }
                )
    names = ["row_id", "group_id", "tokens", *WRITTEN]
    return pa.table({name: pa.array([row[name] for row in rows], TYPES[name]) for name in names})


@columns(
    reads=["response_ids", "response_mask", "minibatch", "advantage"],
    optional=EPISODE_COLUMNS,
    writes={"starts": pa.int64(), "lengths": pa.int64()},
)
def place(ctx, table):
    mask, offsets = response_mask(table)
    spans = row_positions(ctx, table, row_sums(mask.long(), offsets)).spans
    return table.append_column("starts", pa.array(spans.starts.numpy())).append_column(
        "lengths", pa.array(spans.lengths.numpy())
    )


@pytest.fixture
def source(tmp_path):
    pq.write_table(
        pa.table({"prompt": list("abcdefgh"), "answer": list("abcdefgh")}),
        tmp_path / "data.parquet",
    )
    return Source(
        url=str(tmp_path / "data.parquet"), prompt="prompt", answer="answer", batch_size=8, seed=1
    )


def dag_with(last):
    roles = (Role("rollout", build_nothing), Role("policy", build_nothing))
    drawn = partial(draw_minibatches, minibatches=2, batch_size=8, n=SAMPLES)
    advantage = partial(estimate_advantage, advantage=grpo)
    nodes = (
        Node("play", speak, role="rollout"),
        Node("advantage", advantage, role="policy", after=("play",), rows=Rows.GROUPED),
        Node("minibatches", drawn, role="policy", after=("advantage",), rows=Rows.GROUPED),
        last,
    )
    return DAG(roles, nodes)


@pytest.mark.parametrize("workers", [2, 4])
def test_any_number_of_workers_has_the_same_episodes(source, tmp_path, workers):
    tables = []
    last = Node(
        "place",
        place,
        role="policy",
        after=("minibatches",),
        rows=Rows.BALANCED,
        save_as="rollouts",
    )
    for count in (1, workers):
        names = [f"w{number}" for number in range(count)]
        plan = compile_chains(
            dag_with(last), names, source_schema(open_source(source).schema, source)
        )
        with LocalPool(plan, source, str(tmp_path / str(count))) as pool:
            pool.run(1)
        tables.append(
            pq.read_table(tmp_path / str(count) / "rollouts" / "step=000001").sort_by("row_id")
        )
    names = ("row_id", "advantage", "minibatch", "starts", "lengths")
    alone, several = (table.select(names) for table in tables)
    assert several.equals(alone)
    assert max(alone["starts"].to_pylist()) > 0


def test_the_columns_that_tell_episodes_travel_to_the_update(source):
    loss = partial(policy_loss, surrogate=ppo_clip)
    fn = partial(update_policy, loss=loss, minibatches=2, aggregate=sequence_mean_token_mean)
    last = Node("update", fn, role="policy", after=("minibatches",), rows=Rows.BALANCED)
    plan = compile_chains(
        dag_with(last), ["w0", "w1"], source_schema(open_source(source).schema, source)
    )
    links = [
        link for chain in plan.chains.values() for link in chain.flat if isinstance(link, Recv)
    ]
    to_update = {
        name for link in links if link.edge.target == "update" for name in link.edge.schema.names
    }
    assert {*EPISODE_COLUMNS} <= to_update
