"""Advantages of turns as a node: what falls on which turn and token, on one worker and on
several.
"""

from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.algorithms import (
    TurnAdvantages,
    gigpo,
    grpo,
    marft,
    marft_tokens,
    mt_grpo,
    turn_gae,
    turn_returns,
)
from siirl_dask.errors import DataError, PlanError, TrainingError
from siirl_dask.nodes import estimate_turn_advantages
from siirl_dask.planner import DAG, Node, Role, compile_chains
from siirl_dask.schema import TYPES
from siirl_dask.testing.rows import build_nothing
from tests.nodes.test_learning_nodes import context, on_workers, rows

seen = []


def rewards(outcomes):
    """The rewards of turns as advantages, and their discounted sums as returns."""
    seen.append(outcomes)
    return TurnAdvantages(
        advantages=outcomes.rewards, returns=turn_returns(outcomes, discount=1.0).returns
    )


def turns(*of_rows):
    return [
        [
            {"start": start, "stop": stop, "reward": reward, "state": state}
            for start, stop, reward, state in row
        ]
        for row in of_rows
    ]


def estimate(table, advantage=rewards, **options):
    return estimate_turn_advantages(context(), table, advantage=advantage, **options)


def two_turns(**others):
    """A row of two turns with the environment's token between them, and one that is a single
    turn.
    """
    given = {
        "group_id": [0, 0],
        "reward": [1.0, 0.5],
        "response_ids": [[1, 2, 9, 3], [4, 5]],
        "response_mask": [[True, True, False, True], [True, True]],
        "turns": turns([(0, 2, 0.25, 7), (3, 4, 0.75, 0)], [(0, 2, 0.5, 0)]),
    }
    return rows(**given | others)


def test_each_token_has_the_advantage_of_its_turn():
    table = estimate(two_turns())
    assert table["advantages"].to_pylist() == [[0.25, 0.25, 0, 0.75], [0.5, 0.5]]
    assert table["returns"].to_pylist() == [[1.0, 1.0, 0, 0.75], [0.5, 0.5]]
    assert table["token_turns"].to_pylist() == [[0, 0, -1, 1], [0, 0]]
    assert seen[-1].states.tolist() == [7, 0, 0]
    assert seen[-1].lengths.tolist() == [2, 1, 2]


def test_what_a_row_is_given_beyond_its_turns_is_on_the_last_one():
    table = estimate(two_turns(reward=[2.0, 0.5]))
    assert table["advantages"].to_pylist() == [[0.25, 0.25, 0, 1.75], [0.5, 0.5]]


def test_rounding_of_a_sum_is_no_reward():
    given = turns([(0, 2, 0.1, 0), (3, 4, 0.2, 0)], [(0, 2, 0.5, 0)])
    table = estimate(two_turns(reward=[0.1 + 0.2, 0.5], turns=given))
    assert table["advantages"].to_pylist()[0][3] == pytest.approx(np.float32(0.2), abs=0)


def test_without_turns_a_row_is_one():
    table = estimate(
        rows(group_id=[0], reward=[1.0], response_ids=[[1, 2]], response_mask=[[True, False]])
    )
    assert table["advantages"].to_pylist() == [[1, 0]]
    assert table["token_turns"].to_pylist() == [[0, -1]]


def test_penalties_of_tokens_count_in_their_turn():
    table = estimate(two_turns(kl_penalty=[[-0.125, -0.125, -8.0, -0.5], [0.0, -0.25]]))
    assert table["advantages"].to_pylist() == [[0, 0, 0, 0.25], [0.25, 0.25]]


def test_values_are_those_before_a_turns_first_token():
    table = two_turns(values=[[0.5, 9.0, 9.0, 0.25], [0.75, 9.0]])
    given = estimate(table, turn_gae)
    assert given["advantages"].to_pylist() == [[0.5, 0.5, 0, 0.5], [-0.25, -0.25]]
    assert given["returns"].to_pylist() == [[1, 1, 0, 0.75], [0.5, 0.5]]


def chain(**others):
    """An episode of two agents, two rounds: each has a row a turn, the second one a segment. The
    team's reward is 1.
    """
    given = {
        "group_id": [0] * 4,
        "row_id": [0, 1, 2, 3],
        "episode_id": [0] * 4,
        "segment": [0, 0, 1, 1],
        "agent": ["x", "a", "x", "a"],  # x acts before a: the order is that of rows, not of names
        "reward": [0.0, 0.0, 1.0, 1.0],
        "response_ids": [[1, 2], [3], [4], [5, 6, 7]],
        "values": [[0.1, 0.2], [0.3], [0.4], [0.5, 0.6, 0.7]],
    }
    table = rows(**{name: value for name, value in (given | others).items() if name != "row_id"})
    return table.set_column(0, "row_id", pa.array((given | others)["row_id"], TYPES["row_id"]))


TOKENS = partial(marft_tokens, discount=0.9, gae_lambda=0.5)
TURNS = partial(marft, discount=0.9, gae_lambda=0.5)


def test_a_chain_of_agents_gives_marfts_numbers():
    given = estimate(chain(), TOKENS, team=True)["advantages"].to_pylist()
    expected = [[0.132891, 0.117536], [0.105636], [0.101413], [0.11425, 0.165, 0.3]]
    assert [pytest.approx(row, abs=1e-6) for row in expected] == given
    # at action level the values are .1, .3, .4, .5
    given = estimate(chain(), TURNS, team=True)["advantages"].to_pylist()
    last = 1 - 0.5
    third = 0.9 * 0.5 - 0.4 + 0.45 * last
    second = 0.9 * 0.4 - 0.3 + 0.45 * third
    first = 0.9 * 0.3 - 0.1 + 0.45 * second
    flat = [number for row in given for number in row]
    assert flat == pytest.approx([first] * 2 + [second] + [third] + [last] * 3, abs=1e-6)


def test_a_team_of_which_each_member_has_another_reward_is_none():
    with pytest.raises(
        DataError, match=r"episode 0 has the rewards \[0.5, 1.0\]: with team=true expected one"
    ):
        estimate(chain(reward=[0.0, 0.0, 1.0, 0.5]), TURNS, team=True)


def test_a_teams_reward_may_be_cut_otherwise_in_each_members_rows():
    """The sums differ by what float32 rounds: less than any reward, but not equal after rounding
    to five places.
    """
    given = estimate(chain(reward=[20000.1, 20000.3, 0.2, 0.0]), TURNS, team=True)
    assert given["returns"].to_pylist()[-1] == pytest.approx([20000.3] * 3)


def test_without_a_team_each_agent_is_paid_for_itself():
    assert estimate(chain(reward=[0.0, 0.0, 1.0, 2.0]))["returns"].to_pylist() == [
        [1, 1],
        [2],
        [1],
        [2, 2, 2],
    ]


def test_an_episode_one_of_whose_rows_failed_is_left_out_whole():
    table = rows(
        group_id=[0] * 4,
        episode_id=[0, 0, 1, 2],
        agent=["a", "b", "a", "a"],
        reward=[4.0, None, 1.0, 0.0],
        response_ids=[[1]] * 4,
    )
    given = estimate(table, partial(turn_returns, divide_by_std=False))
    assert given["advantages"].to_pylist() == [None, None, [0.5], [-0.5]]
    assert given["token_turns"].to_pylist() == [None, None, [0], [0]]


def test_whitening_counts_a_turn_once_and_covers_all_workers():
    table = rows(group_id=[0, 1], reward=[1.0, 3.0], response_ids=[[1, 2, 3], [4]])
    node = partial(estimate_turn_advantages, advantage=rewards, whiten=True)
    whole = node(context(), table)
    assert whole["advantages"].to_pylist() == [
        pytest.approx([-(0.5**0.5)] * 3),
        pytest.approx([0.5**0.5]),
    ]
    split, _ = on_workers(node, [table.slice(0, 1), table.slice(1), table.slice(0, 0)])
    assert split.equals(whole)


@st.composite
def tables(draw):
    """Two groups of episodes with turns, states and values, and their episodes cut into segments
    or not.
    """
    given = {
        name: []
        for name in (
            "group_id",
            "episode_id",
            "segment",
            "reward",
            "response_ids",
            "turns",
            "values",
        )
    }
    numbers = st.floats(-2, 2, width=16)
    for group in range(3):
        for at in range(draw(st.integers(1, 3))):
            for segment in range(draw(st.integers(1, 2))):
                lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
                ends = np.cumsum([0, *lengths]).tolist()
                spans = [
                    {
                        "start": start,
                        "stop": stop,
                        "reward": draw(numbers),
                        "state": draw(st.integers(0, 2)),
                    }
                    for start, stop in pairwise(ends)
                ]
                row = [group, 10 * group + at, segment, draw(numbers), [1] * ends[-1], spans]
                for name, value in zip(
                    given, [*row, [draw(numbers) for _ in range(ends[-1])]], strict=True
                ):
                    given[name].append(value)
    return rows(**given)


@pytest.mark.parametrize(
    "advantage",
    [gigpo, mt_grpo, turn_returns, marft, marft_tokens, turn_gae],
    ids=lambda fn: fn.__name__,
)
@settings(max_examples=12)
@given(table=tables(), data=st.data())
def test_any_order_of_rows_on_any_workers_gives_the_same_bits(advantage, table, data):
    node = partial(estimate_turn_advantages, advantage=advantage)
    whole = node(context(), table).sort_by("row_id")
    owners = np.array(data.draw(st.lists(st.integers(0, 1), min_size=3, max_size=3)))
    order = data.draw(st.permutations(range(table.num_rows)))
    mixed = table.take(order)
    parts = [
        mixed.filter(pa.array(owners[mixed["group_id"].to_numpy()] == worker))
        for worker in range(2)
    ]
    split, _ = on_workers(node, parts)
    assert split.sort_by("row_id").equals(whole)


def test_spans_that_do_not_fit_are_refused():
    with pytest.raises(
        DataError, match="expected spans within 'response_ids', one after the other"
    ):
        estimate(two_turns(turns=turns([(0, 2, 0.0, 0), (1, 4, 0.0, 0)], [(0, 2, 0.0, 0)])))
    with pytest.raises(DataError, match="expected spans within"):
        estimate(two_turns(turns=turns([(0, 2, 0.0, 0), (3, 4, 0.0, 0)], [(0, 3, 0.0, 0)])))
    with pytest.raises(DataError, match="2 tokens are learned from and in none of 'turns'"):
        estimate(two_turns(turns=turns([(0, 2, 0.0, 0), (3, 4, 0.0, 0)], [])))


def test_an_advantage_of_another_shape_is_refused():
    def wrong(outcomes):
        return TurnAdvantages(advantages=outcomes.rewards[:1], returns=outcomes.rewards[:1])

    with pytest.raises(
        DataError,
        match=r"the advantage gave \[1\]: expected \[3\], a number for each turn, or \[5\]",
    ):
        estimate(two_turns(), wrong)


def test_an_advantage_that_is_not_finite_names_the_row():
    with pytest.raises(
        TrainingError, match="advantages and returns not finite on worker 'w' in row 1 of 2"
    ):
        estimate(two_turns(reward=[1.0, float("nan")]))


def test_a_row_without_tokens_or_turns_is_no_error():
    table = two_turns(
        response_ids=[[1, 2, 9, 3], []],
        response_mask=[[True, True, False, True], []],
        turns=turns([(0, 2, 0.25, 7), (3, 4, 0.75, 0)], []),
    )
    assert estimate(table)["advantages"].to_pylist() == [[0.25, 0.25, 0, 0.75], []]
    assert estimate(two_turns().slice(0, 0)).num_rows == 0


def compiled(**options):
    roles = [Role("learner", build_nothing)]
    node = Node("advantage", estimate_turn_advantages, role="learner", options=options)
    source = pa.schema(
        {name: TYPES[name] for name in ("reward", "group_id", "response_ids", "turns")}
    )
    return compile_chains(DAG(roles, [node]), ["w"], source)


def test_options_that_cannot_work_are_refused_before_a_run():
    compiled(advantage=gigpo)
    trial = estimate_turn_advantages.__contract__.trial
    for advantage in (gigpo, mt_grpo, turn_returns, marft, marft_tokens, turn_gae):
        trial(advantage=advantage)
    with pytest.raises(AttributeError):
        trial(advantage=grpo)  # a function of rows
    with pytest.raises(PlanError, match="has no option 'advantag'"):
        compiled(advantag=gigpo)
