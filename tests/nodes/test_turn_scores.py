"""The node that scores turns one by one."""

import pyarrow as pa
import pytest

from siirl_dask.config import RewardsConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import PlanError, RewardError
from siirl_dask.nodes import score_turns
from siirl_dask.planner import DAG, Node, Role, compile_chains
from siirl_dask.rewards import build_scorer
from siirl_dask.schema import TYPES
from siirl_dask.testing.rows import build_nothing
from tests.nodes.letters import Letters
from tests.nodes.rewards import capricious, length
from tests.nodes.test_learning_nodes import context, rows
from tests.nodes.test_turn_advantage import turns


def words(*texts, reward=0.0):
    """Turns of a row with a dash of the environment's between them, and the row's tokens."""
    spans, start = [], 0
    for text in texts:
        spans.append((start, start + len(text), reward, 7))
        start += len(text) + 1
    return spans, [*map(ord, "-".join(texts))]


def table(*of_rows, **others):
    spans, ids = zip(*(words(*texts, reward=0.5) for texts in of_rows), strict=True)
    count = len(of_rows)
    given = {
        "response_ids": ids,
        "turns": turns(*spans),
        "reward": [0.5 * len(texts) for texts in of_rows],
    }
    made = rows(
        group_id=[0] * count, **{name: list(value) for name, value in (given | others).items()}
    )
    for name in ("prompt", "answer"):
        made = made.append_column(name, pa.array([f"{name} {at}" for at in range(count)]))
    return made


def scored(function, rows, columns=(), add=False, **rewards):
    scorer = build_scorer(Device("w"), Rank(), rewards=RewardsConfig(**rewards), reward=function)
    try:
        ctx = context(scorer)
        ctx.resources = {"rollout": Letters(), "reward": scorer}
        return score_turns(ctx, rows, columns=columns, add=add), ctx.metrics
    finally:
        scorer.close()


def of_turns(made):
    return [[turn["reward"] for turn in row] for row in made["turns"].to_pylist()]


@pytest.mark.parametrize("rewards", [{}, {"processes": 2}], ids=["worker", "pool"])
def test_each_turn_is_scored_by_its_own_text(rewards):
    made, metrics = scored(length, table(["a", "bcd"], ["ef"]), **rewards)
    assert of_turns(made) == [[1, 3], [2]]
    assert made["reward"].to_pylist() == [4, 2]
    assert made["turns"].to_pylist()[0][1] == {"start": 2, "stop": 5, "reward": 3.0, "state": 7}
    assert (metrics["reward/mean"].value, metrics["turn_reward/mean"].value) == (3, 2)


def test_the_environments_reward_stays_where_it_is_asked_to():
    made, _ = scored(length, table(["a", "bcd"], ["ef"]), add=True)
    assert of_turns(made) == [[1.5, 3.5], [2.5]]
    assert made["reward"].to_pylist() == [5, 2.5]


def test_the_function_gets_columns_and_the_turns_place():
    given = []

    def reward(**arguments):
        given.append(arguments)
        return arguments["turn"]

    made, _ = scored(
        reward, table(["a", "b"], ["c"], agent=["x", "y"]), columns=("turn", "turn_reward", "agent")
    )
    assert of_turns(made) == [[0, 1], [0]]
    assert given[1] == {
        "prompt": "prompt 0",
        "response": "b",
        "answer": "answer 0",
        "turn": 1,
        "turn_reward": 0.5,
        "agent": "x",
    }


def test_a_failed_turn_takes_its_rows_reward_if_that_is_allowed():
    made, metrics = scored(capricious, table(["ok", "raise"], ["ok"]), max_failures=1)
    assert of_turns(made)[0][1] is None
    assert made["reward"].to_pylist()[0] is None
    assert made["reward"].to_pylist()[1] is not None
    assert metrics["reward/failures"].value == 1


def test_a_turn_that_hangs_is_a_failure_that_names_it():
    with pytest.raises(RewardError, match=r"row 1 of step 1.*response 'hang'"):
        scored(capricious, table(["ok"], ["ok", "hang"]), processes=1, timeout=2.0)


def test_an_episode_that_failed_is_not_scored():
    made, _ = scored(length, table(["a"], ["bc"], reward=[None, 0.5]))
    assert of_turns(made) == [[0.5], [2]]
    assert made["reward"].to_pylist() == [None, 2]


def test_rows_without_turns_have_reward_0():
    made, _ = scored(length, table(["a"], [], response_ids=[[97], []]))
    assert made["reward"].to_pylist() == [1, 0]
    assert scored(length, table(["a"]).slice(0, 0))[0].num_rows == 0


def test_the_engine_must_be_on_the_nodes_workers():
    source = pa.schema(
        {name: TYPES[name] for name in ("response_ids", "turns", "reward")}
        | {"prompt": pa.string()}
    )
    source = source.append(pa.field("answer", pa.string()))
    roles = (Role("rollout", build_nothing), Role("reward", build_nothing))
    dag = DAG(roles, (Node("mine", score_turns, role="reward"),))
    compile_chains(dag, ["w", "v"], source)
    with pytest.raises(PlanError, match="rollout"):
        compile_chains(dag, ["w", "v"], source, {"rollout": [0], "reward": [0, 1]})
