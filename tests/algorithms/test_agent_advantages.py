"""Advantages of several agents: values by hand, and what no order, cut or neighbour may change."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.algorithms import AgentOutcomes, dr_mas, grpo, hierarchical_grpo
from tests.algorithms.test_advantages import outcomes_of as responses_of
from tests.algorithms.turns import Row, outcomes_of, permuted

CENTRED = {"divide_by_std": False}
NAMES = ("proposer", "solver")
HIERARCHICAL = partial(hierarchical_grpo, proposer="proposer")
every = pytest.mark.parametrize(
    "advantage",
    [dr_mas, HIERARCHICAL, partial(HIERARCHICAL, mean_of_answers=True)],
    ids=["dr_mas", "hierarchical_grpo", "hierarchical_grpo with the mean of answers"],
)
REWARDS = st.floats(-4, 4, width=16)


def agents_of(rows, rewards, ids=None, proposals=None):
    return AgentOutcomes(
        rows=outcomes_of(rows, ids=ids).rows,
        rewards=torch.tensor(rewards, dtype=torch.float32),
        names=NAMES,
        proposals=torch.tensor(
            [row.episode for row in rows] if proposals is None else proposals, dtype=torch.int64
        ),
    )


def proposal(group, number, answers):
    """A row of the proposer, and those of the solvers that answer it, in one episode."""
    return [
        Row(group, number, ()),
        *(Row(group, number, (), agent=1, part=at) for at in range(answers)),
    ]


@st.composite
def trees(draw):
    """Rows and rewards of two prompts with proposals and their answers."""
    rows = []
    for group in range(2):
        for number in range(draw(st.integers(1, 3))):
            rows += proposal(group, 10 * group + number, draw(st.integers(0, 3)))
    return rows, draw(st.lists(REWARDS, min_size=len(rows), max_size=len(rows)))


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected).float(), atol=1e-6, rtol=0)


def test_each_agent_has_its_own_statistics():
    rows = [Row(0, at, (), agent) for at in range(2) for agent in range(2)]
    close(dr_mas(agents_of(rows, [1, 10, 0, 30]), **CENTRED), [0.5, -10, -0.5, 10])
    half = 0.5 / (0.5**0.5 + 1e-6)
    close(
        dr_mas(agents_of(rows, [1, 10, 0, 30])),
        [half, -10 / (200**0.5 + 1e-6), -half, 10 / (200**0.5 + 1e-6)],
    )


@given(rewards=st.lists(st.lists(REWARDS, min_size=1, max_size=5), min_size=1, max_size=3))
def test_with_one_agent_it_is_grpo(rewards):
    rows = [
        Row(group, 10 * group + at, ()) for group, of in enumerate(rewards) for at in range(len(of))
    ]
    given = dr_mas(agents_of(rows, [reward for of in rewards for reward in of]))
    assert torch.equal(given, grpo(responses_of(rewards)))


def test_proposers_are_compared_with_proposers_and_solvers_under_one_proposal():
    rows = [*proposal(0, 0, 2), *proposal(0, 1, 2)]
    rewards = [0, 1, 0, 4, 5, 7]
    close(HIERARCHICAL(agents_of(rows, rewards), **CENTRED), [-2, 0.5, -0.5, 2, -1, 1])
    # the answers' means are .5 and 6, beside the proposals' own 0 and 4
    close(
        HIERARCHICAL(agents_of(rows, rewards), mean_of_answers=True, **CENTRED),
        [-4.75, 0.5, -0.5, 4.75, -1, 1],
    )


def test_proposals_need_not_be_episodes():
    rows = [Row(0, 0, ()), *(Row(0, 1 + at, (), agent=1) for at in range(4)), Row(0, 9, ())]
    given = HIERARCHICAL(
        agents_of(rows, [0, 1, 3, 10, 20, 1], proposals=[7, 7, 7, 8, 8, 8]), **CENTRED
    )
    close(given, [-0.5, -1, 1, -5, 5, 0.5])


@every
def test_an_episode_counts_once_however_many_segments_it_has(advantage):
    """SkyRL #1492 and #1507: the advantage of an episode belongs to all its rows, and its reward
    to none alone.
    """
    whole = [Row(0, 0, ()), Row(0, 1, ()), Row(0, 2, ())]
    given = advantage(agents_of(whole, [1, 0, 0]))
    cut = [Row(0, 0, ()), Row(0, 0, ()), Row(0, 0, ()), Row(0, 1, ()), Row(0, 2, ())]
    close(advantage(agents_of(cut, [0, 0, 1, 0, 0])), [given[0]] * 3 + [given[1], given[2]])


@every
@given(tree=trees(), data=st.data())
def test_row_order_changes_no_bit(advantage, tree, data):
    rows, rewards = tree
    order = data.draw(st.permutations(range(len(rows))))
    other, ids = permuted(rows, order)
    given = advantage(agents_of(other, [rewards[at] for at in order], ids=ids))
    assert torch.equal(given, advantage(agents_of(rows, rewards))[list(order)])


@every
@given(tree=trees())
def test_a_group_is_the_same_alone(advantage, tree):
    rows, rewards = tree
    together = advantage(agents_of(rows, rewards))
    for group in range(2):
        at = [place for place, row in enumerate(rows) if row.group == group]
        own = advantage(
            agents_of([rows[place] for place in at], [rewards[place] for place in at], ids=at)
        )
        assert torch.equal(own, together[at])


@every
def test_no_rows_give_an_empty_result(advantage):
    assert advantage(agents_of([], [])).shape == (0,)


def test_what_a_hierarchy_needs_is_named():
    outcomes = agents_of(proposal(0, 0, 1), [0, 1])
    with pytest.raises(
        ValueError, match=r"proposer='boss': expected one of the agents \['proposer', 'solver'\]"
    ):
        hierarchical_grpo(outcomes, proposer="boss")
    with pytest.raises(ValueError, match="name its column in the node's 'proposal'"):
        HIERARCHICAL(AgentOutcomes(rows=outcomes.rows, rewards=outcomes.rewards, names=NAMES))
