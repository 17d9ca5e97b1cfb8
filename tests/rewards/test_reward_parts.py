"""A dict of rewards becomes a column that moves between workers, is saved as Parquet and can be
queried with SQL.
"""

from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.config import RewardsConfig
from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.nodes import score
from siirl_dask.planner import DAG, Node, Role, Rows, columns, compile_chains
from siirl_dask.rewards import build_scorer, matches_format, weighted_sum
from siirl_dask.runs.samples.rollouts import query
from siirl_dask.schema import ROW_ID, fields
from siirl_dask.testing.local_pool import LocalPool
from tests.rewards.functions import share_right

FORMAT = partial(matches_format, pattern=r"\d+")


def build_nothing(device, rank):
    return None


@columns(reads=["prompt"], writes=fields("response"))
def answer_alike(ctx, table):
    """Give even rows the right answer and odd rows a wrong one in another format; row 3 cannot
    be scored.
    """
    ids = table[ROW_ID].to_pylist()
    return table.append_column(
        "response", pa.array(["fails" if i == 3 else "odd" if i % 2 else "7" for i in ids])
    )


@columns(reads=["reward", "reward_parts"])
def look(ctx, table):
    return table


@pytest.fixture
def source(tmp_path):
    rows = {"prompt": ["p"] * 8, "answer": ["7"] * 8}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet", row_group_size=2)
    return Source(
        url=str(tmp_path / "rows.parquet"), prompt="prompt", answer="answer", batch_size=8, seed=0
    )


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("processes", [0, 1])
def test_parts_move_to_other_workers_and_are_saved_and_queried(
    source, tmp_path, workers, processes
):
    reward = partial(
        weighted_sum,
        rewards={"right": share_right, "format": FORMAT},
        weights={"right": 1.0, "format": 0.5},
    )
    rewards = RewardsConfig(processes=processes, max_failures=1)
    roles = (
        Role("scorer", partial(build_scorer, rewards=rewards, reward=reward)),
        Role("other", build_nothing),
    )
    nodes = (
        Node("answers", answer_alike, role="other"),
        Node("reward", score, role="scorer", after="answers"),
        Node("look", look, role="other", after="reward", rows=Rows.BALANCED, save_as="rollouts"),
    )
    names = [str(i) for i in range(workers)]
    placement = {"scorer": [workers - 1]}
    plan = compile_chains(
        DAG(roles, nodes), names, source_schema(open_source(source).schema, source), placement
    )
    with LocalPool(plan, source, url=str(tmp_path / "run")) as pool:
        metrics = pool.run(step=1)
        pool.resources(names[-1])["scorer"].close()
    assert metrics["reward/format"].value == pytest.approx(4 / 7)
    assert (metrics["reward/failures"].value, metrics["reward/mean"].weight) == (1, 7)
    rows = {
        row["row_id"]: row
        for row in pq.read_table(tmp_path / "run" / "rollouts" / "step=000001").to_pylist()
    }
    assert dict(rows[0]["reward_parts"]) == {"reward": 1.5, "right": 1.0, "format": 1.0}
    assert dict(rows[1]["reward_parts"]) == {"reward": 0.0, "right": 0.0, "format": 0.0}
    assert (rows[3]["reward"], rows[3]["reward_parts"]) == (None, [])
    counted = query(
        str(tmp_path / "run"),
        "SELECT count(*) AS n, sum(reward_parts['format']) AS s FROM rollouts",
    )
    assert counted.to_pylist() == [{"n": 8, "s": 4.0}]
