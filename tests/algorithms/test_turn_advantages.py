"""Credit of turns: values by hand, and what no order, cut or neighbour may change."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.algorithms import (
    TurnOutcomes,
    dr_grpo,
    gigpo,
    grpo,
    magrpo,
    marft,
    marft_tokens,
    mt_grpo,
    turn_gae,
    turn_returns,
)
from tests.algorithms.test_advantages import outcomes_of as responses_of
from tests.algorithms.turns import Row, by_turn, in_segments, outcomes_of, permuted, turn

CENTRED = {"divide_by_std": False}
OWN = {
    "turn_returns": turn_returns,
    "turn_returns of the same turn": partial(turn_returns, same_turn=True),
    "gigpo": gigpo,
    "mt_grpo": mt_grpo,
    "turn_gae": partial(turn_gae, discount=0.9, gae_lambda=0.5),
}
TEAM = {"magrpo": partial(magrpo, discount=0.9), "marft": marft, "marft_tokens": marft_tokens}
every = pytest.mark.parametrize("advantage", [*OWN.values(), *TEAM.values()], ids=[*OWN, *TEAM])
NUMBERS = st.floats(-4, 4, width=16)
TURNS = st.builds(turn, NUMBERS, st.integers(0, 2), st.lists(NUMBERS, min_size=1, max_size=3))


@st.composite
def episodes(draw):
    """Rows of two groups with one to three episodes of one or two agents each."""
    rows, agents = [], draw(st.integers(1, 2))
    for group in range(2):
        for at in range(draw(st.integers(1, 3))):
            for agent in range(agents):
                turns = draw(st.lists(TURNS, min_size=1, max_size=3))
                rows.append(Row(group, 10 * group + at, tuple(turns), agent))
    return rows


def estimated(advantage, rows, **options):
    return advantage(outcomes_of(rows, values=True, **options))


def advantages(advantage, rows, **options):
    return advantage(outcomes_of(rows, **options)).advantages


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected).float(), atol=1e-6, rtol=0)


def test_returns_of_turns_by_hand():
    rows = [Row(0, 0, (turn(0), turn(1))), Row(0, 1, (turn(0.5),))]
    given = turn_returns(outcomes_of(rows), discount=0.5, **CENTRED)
    close(given.returns, [0.5, 1, 0.5])
    close(given.advantages, [0.5 - 2 / 3, 1 - 2 / 3, 0.5 - 2 / 3])
    std = (((0.5 - 2 / 3) ** 2 * 2 + (1 / 3) ** 2) / 2) ** 0.5 + 1e-6
    close(
        advantages(partial(turn_returns, discount=0.5), rows),
        [-1 / 6 / std, 1 / 3 / std, -1 / 6 / std],
    )


def test_a_turn_is_compared_with_its_number_and_a_lone_one_has_0():
    rows = [Row(0, 0, (turn(0), turn(1))), Row(0, 1, (turn(0.5),))]
    close(
        advantages(partial(turn_returns, discount=1.0, same_turn=True, **CENTRED), rows),
        [0.25, 0, -0.25],
    )


def test_gigpo_by_hand():
    # returns with discount .5: 1, 2 | 0, 0 | 3. State 7: 1 and 3, mean 2. State 8: 2 and 0. State 0
    # and a lone 9: none.
    rows = [
        Row(0, 0, (turn(0, 7), turn(2, 8))),
        Row(0, 1, (turn(0, 9), turn(0, 8))),
        Row(0, 2, (turn(3, 7), turn(0, 0))),
    ]
    given = gigpo(outcomes_of(rows), discount=0.5, weight=0.5, **CENTRED)
    close(given.returns, [1, 2, 0, 0, 3, 0])
    # episodes: 2, 0, 3, mean 5/3
    close(
        given.advantages,
        [1 / 3 - 0.5, 1 / 3 + 0.5, -5 / 3, -5 / 3 - 0.5, 4 / 3 + 0.5, 4 / 3],
    )
    scaled = gigpo(outcomes_of(rows), discount=0.5)
    std = ((1 / 9 + 25 / 9 + 16 / 9) / 2) ** 0.5 + 1e-6
    of_states = 1 / (2**0.5 + 1e-6)  # 1 and 3, or 2 and 0: 1 from their mean, std sqrt 2
    close(scaled.advantages[:2], [1 / 3 / std - of_states, 1 / 3 / std + of_states])


def test_states_are_compared_within_a_group_alone():
    rows = [Row(0, 0, (turn(1, 7),)), Row(1, 1, (turn(5, 7),)), Row(1, 2, (turn(1, 7),))]
    close(advantages(partial(gigpo, **CENTRED), rows), [1, 4, -4])


@given(rewards=st.lists(st.lists(NUMBERS, min_size=2, max_size=4), min_size=1, max_size=3))
def test_without_states_gigpo_is_grpo(rewards):
    rows = [
        Row(group, 10 * group + at, (turn(r),))
        for group, of in enumerate(rewards)
        for at, r in enumerate(of)
    ]
    assert torch.equal(advantages(gigpo, rows), grpo(responses_of(rewards)))
    assert torch.equal(advantages(partial(gigpo, **CENTRED), rows), dr_grpo(responses_of(rewards)))


def test_mt_grpo_by_hand():
    # outcomes 1 and 0, mean .5; first turns .2 and .6, mean .4
    rows = [Row(0, 0, (turn(0.2), turn(1))), Row(0, 1, (turn(0.6), turn(0)))]
    close(
        advantages(partial(mt_grpo, weight=0.5, **CENTRED), rows),
        [-0.2 + 0.25, 0.5, 0.2 - 0.25, -0.5],
    )
    of_outcome, of_turn = 0.5 / (0.5**0.5 + 1e-6), 0.2 / (0.08**0.5 + 1e-6)
    close(
        advantages(mt_grpo, rows),
        [of_outcome - of_turn, of_outcome, of_turn - of_outcome, -of_outcome],
    )


def test_an_outcome_is_no_turn_reward():
    # the second ends with its first turn
    rows = [Row(0, 0, (turn(0.2), turn(1))), Row(0, 1, (turn(5),))]
    close(advantages(partial(mt_grpo, **CENTRED), rows), [0 - 2, -2, 2])


def test_turns_of_one_agent_follow_each_other():
    rows = [Row(0, 0, (turn(0, values=[0.1, 9]), turn(1, values=[0.3])))]
    given = turn_gae(outcomes_of(rows, values=True), discount=0.9, gae_lambda=0.5)
    close(given.advantages, [0.9 * 0.3 - 0.1 + 0.45 * 0.7, 0.7])
    close(given.returns, [0.9 * 0.3 + 0.45 * 0.7, 1.0])


def test_the_reward_of_a_turn_without_tokens_goes_to_the_one_before():
    rows = [Row(0, 0, (turn(0, values=[0.1]), turn(1, values=[])))]
    given = turn_gae(outcomes_of(rows, values=True))
    close(given.advantages, [0.9, 0])
    close(marft_tokens(outcomes_of(rows, values=True)).advantages, [0.9])
    alone = outcomes_of([Row(0, 0, (turn(1, values=[]),))], values=True)
    assert turn_gae(alone).advantages.tolist() == [0]
    assert marft_tokens(alone).advantages.tolist() == []


MARFT = (
    partial(marft, discount=0.9, gae_lambda=0.5),
    partial(marft_tokens, discount=0.9, gae_lambda=0.5),
)


def test_marft_gives_the_numbers_of_its_own_buffer():
    # made with the action buffer of MARFT 1beacdb: two turns, two agents
    first = Row(0, 0, (turn(0, values=[0.1]), turn(0, values=[0.3])), agent=0)
    second = Row(0, 0, (turn(0, values=[0.2]), turn(1, values=[0.4])), agent=1)
    given = MARFT[0](outcomes_of([first, second], values=True))
    close(given.advantages, [0.178325, 0.33, 0.2185, 0.6])
    close(given.returns, [0.278325, 0.63, 0.4185, 1.0])


def test_marft_on_tokens_gives_the_numbers_of_its_own_buffer():
    # made with the token buffer of MARFT 1beacdb: agent 1 says 2 tokens, then 1; agent 2 says 1,
    # then 3
    first = Row(0, 0, (turn(0, values=[0.1, 0.2]), turn(0, values=[0.4])), agent=0)
    second = Row(0, 0, (turn(0, values=[0.3]), turn(1, values=[0.5, 0.6, 0.7])), agent=1)
    given = MARFT[1](outcomes_of([first, second], values=True))
    close(given.advantages, [0.132891, 0.117536, 0.101413, 0.105636, 0.11425, 0.165, 0.3])


def test_a_third_agent_gets_its_advantages_too():
    # siiRL writes those of every agent but the last under one name, so that the first ones get none
    rows = [Row(0, 0, (turn(float(agent == 2), values=[0.0]),), agent) for agent in range(3)]
    close(MARFT[0](outcomes_of(rows, values=True)).advantages, [0.45**2, 0.45, 1])


def test_magrpo_by_hand():
    # team rewards by round: 1 + 0, 0 + 2 | 0 + 0, 1 + 1 | 3 + 0 (one round). Returns with .5: 2, 2
    # | 1, 2 | 3
    rows = [
        *(Row(0, 0, (turn(a), turn(b)), agent) for agent, (a, b) in enumerate([(1, 0), (0, 2)])),
        *(Row(0, 1, (turn(a), turn(b)), agent) for agent, (a, b) in enumerate([(0, 1), (0, 1)])),
        *(Row(0, 2, (turn(a),), agent) for agent, a in enumerate([3, 0])),
    ]
    given = magrpo(outcomes_of(rows), discount=0.5)
    close(given.returns, [2, 2, 2, 2, 1, 2, 1, 2, 3, 3])
    close(given.advantages, [0, 0, 0, 0, -1, 0, -1, 0, 1, 1])


@given(rows=episodes(), cuts=st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_each_turn_is_in_the_round_of_its_number_in_its_part(rows, cuts):
    """Agents may take different numbers of turns: the last rounds are of those that go on."""
    rounds = outcomes_of(in_segments(rows, cuts[: len(rows)])).rounds()
    numbered = [sorted(at for at, turns in enumerate(of) for _ in turns) for of in rounds]
    expected = {}
    for row in rows:
        expected.setdefault(row.episode, []).extend(range(len(row.turns)))
    assert numbered == [sorted(numbers) for numbers in expected.values()]
    taken = sorted(turn for of in rounds for turns in of for turn in turns)
    assert taken == list(range(sum(len(row.turns) for row in rows)))


def test_a_team_is_rewarded_for_turns_that_one_agent_takes_alone():
    rows = [
        Row(0, 0, (turn(1), turn(0), turn(4)), agent=0),
        Row(0, 0, (turn(0),), agent=1),
    ]
    close(magrpo(outcomes_of(rows), discount=0.5).returns, [2, 2, 4, 2])


@pytest.mark.parametrize("advantage", OWN.values(), ids=OWN)
def test_agents_are_not_compared_with_each_other(advantage):
    """An agent whose rewards lie elsewhere moves no other agent's numbers."""
    alone = [Row(0, at, (turn(float(at), 1, [0.5]),), 0) for at in range(3)]
    other = [Row(0, at, (turn(100.0 - at, 1, [0.5]),), 1) for at in range(3)]
    given = advantage(outcomes_of([*alone, *other], values=True)).advantages
    assert torch.equal(given[:3], advantage(outcomes_of(alone, values=True)).advantages)


@every
@given(rows=episodes(), data=st.data())
def test_row_order_changes_no_bit(advantage, rows, data):
    order = data.draw(st.permutations(range(len(rows))))
    other, ids = permuted(rows, order)
    expected = by_turn(rows, estimated(advantage, rows))
    assert by_turn(other, estimated(advantage, other, ids=ids), ids) == expected


@every
@given(rows=episodes(), cuts=st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_cutting_a_part_into_segments_changes_no_bit(advantage, rows, cuts):
    whole, cut = (
        estimated(advantage, rows),
        estimated(advantage, in_segments(rows, cuts[: len(rows)])),
    )
    assert torch.equal(whole.advantages, cut.advantages)
    assert torch.equal(whole.returns, cut.returns)


@every
@given(rows=episodes())
def test_a_group_is_the_same_alone(advantage, rows):
    together = by_turn(rows, estimated(advantage, rows))
    for group in range(2):
        at = [place for place, row in enumerate(rows) if row.group == group]
        own = [rows[place] for place in at]
        assert by_turn(own, estimated(advantage, own, ids=at), at) == {
            key: numbers for key, numbers in together.items() if key[0] in at
        }


@every
def test_no_turns_give_empty_results(advantage):
    empty = advantage(outcomes_of([], values=True))
    assert (empty.advantages.shape, empty.returns.shape) == ((0,), (0,))
    without = advantage(outcomes_of([Row(0, 0, ())], values=True))
    assert without.advantages.shape == (0,)


@pytest.mark.parametrize("advantage", [turn_returns, gigpo, mt_grpo, magrpo])
@given(reward=NUMBERS, count=st.integers(2, 5))
def test_equal_episodes_have_advantage_0_exactly(advantage, reward, count):
    rows = [Row(0, at, (turn(reward, 3),)) for at in range(count)]
    assert advantages(advantage, rows).tolist() == [0.0] * count


@pytest.mark.parametrize("advantage", [turn_returns, gigpo, mt_grpo, magrpo])
def test_a_reward_that_is_not_finite_stays_in_its_group(advantage):
    rows = [
        Row(group, 10 * group + at, (turn(float(at), 1),)) for group in range(2) for at in range(2)
    ]
    rows[0] = Row(0, 0, (turn(float("nan"), 1),))
    finite = advantages(advantage, rows).isfinite().tolist()
    assert finite == [False, False, True, True]


@pytest.mark.parametrize("advantage", [turn_gae, marft, marft_tokens])
def test_without_a_critic_the_node_to_add_is_named(advantage):
    with pytest.raises(ValueError, match="estimate_values"):
        advantage(outcomes_of([Row(0, 0, (turn(1),))]))


def test_shapes_that_do_not_fit_are_refused():
    good = outcomes_of([Row(0, 0, (turn(1), turn(2)))], values=True)
    fields = {
        name: getattr(good, name)
        for name in ("rows", "offsets", "rewards", "states", "lengths", "values")
    }
    with pytest.raises(
        ValueError, match=r"offsets \[2\] end at 1: expected \[2\] for 1 rows, and 2"
    ):
        TurnOutcomes(**fields | {"offsets": torch.tensor([0, 1])})
    with pytest.raises(ValueError, match=r"values \[3\]: expected \[2\]"):
        TurnOutcomes(**fields | {"values": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"states \[1\]"):
        TurnOutcomes(**fields | {"states": torch.zeros(1).long()})
