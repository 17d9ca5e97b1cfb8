import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.algorithms import Outcomes, dr_grpo, grpo, opo, pass_at_k, remax, rloo

REWARDS = st.floats(-10, 10, width=32)
GROUPS = st.lists(st.lists(REWARDS, min_size=1, max_size=6), min_size=1, max_size=5)
OF_GROUPS = [grpo, dr_grpo, rloo, opo, pass_at_k]
every_advantage = pytest.mark.parametrize("advantage", OF_GROUPS)


def flat(groups, lengths=None):
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float32)
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group], dtype=torch.int64)
    lengths = torch.arange(1, len(rewards) + 1) if lengths is None else torch.tensor(lengths)
    return Outcomes(rewards=rewards, group_ids=ids, lengths=lengths)


def some(outcomes, rows):
    return Outcomes(rewards=outcomes.rewards[rows], group_ids=outcomes.group_ids[rows], lengths=outcomes.lengths[rows])


@pytest.mark.parametrize(
    ("advantage", "groups", "expected"),
    [
        (grpo, [[1, 0, 1, 0]], [0.866024, -0.866024, 0.866024, -0.866024]),
        (grpo, [[1, 0.5, 0, 0]], [1.305580, 0.261116, -0.783348, -0.783348]),
        (dr_grpo, [[1, 0.5, 0, 0]], [0.625, 0.125, -0.375, -0.375]),
        (rloo, [[1, 0.5, 0, 0]], [0.833333, 0.166667, -0.5, -0.5]),
        (pass_at_k, [[1, 0.5, 0, 0]], [0.5, 0, 0, 0]),
        (pass_at_k, [[0, 1, 1]], [0, 0, 0]),
        (pass_at_k, [[-3, -1]], [0, 2]),
        (grpo, [[0.7]], [0.6999993]),
        (dr_grpo, [[0.7]], [0.7]),
        (rloo, [[0.7]], [0]),
        (opo, [[0.7]], [0]),
        (pass_at_k, [[0.7]], [0]),
        (grpo, [[0.1, 0.1, 0.1]], [0, 0, 0]),
        (rloo, [[1, 0], [0.5], [2, 4]], [1, -1, 0, -2, 2]),
    ],
)
def test_hand_checked_values(advantage, groups, expected):
    torch.testing.assert_close(advantage(flat(groups)), torch.tensor(expected).float(), atol=1e-6, rtol=0)


def test_opo_weighs_rewards_by_length():
    # (1 * 1 + 0 * 3) / 4 = .25
    assert opo(flat([[1, 0]], lengths=[1, 3])).tolist() == [0.75, -0.25]
    assert opo(flat([[1, 0]], lengths=[0, 3])).tolist() == [1, 0]
    assert opo(flat([[1, 0]], lengths=[0, 0])).tolist() == [0, 0]


def test_remax_compares_with_the_greedy_response():
    outcomes = flat([[1, 0]])
    baselines = torch.tensor([0.25, 0.5])
    given = Outcomes(
        rewards=outcomes.rewards, group_ids=outcomes.group_ids, lengths=outcomes.lengths, baselines=baselines
    )
    assert remax(given).tolist() == [0.75, -0.5]


def test_remax_without_greedy_responses_says_what_to_add():
    with pytest.raises(ValueError, match="take_greedy_baselines"):
        remax(flat([[1, 0]]))


@every_advantage
@given(reward=REWARDS, count=st.integers(2, 9))
def test_equal_rewards_have_no_advantage_at_all(advantage, reward, count):
    assert advantage(flat([[reward] * count])).tolist() == [0.0] * count


@pytest.mark.parametrize("advantage", [dr_grpo, rloo])
@given(groups=GROUPS)
def test_a_group_sums_to_nothing(advantage, groups):
    outcomes = flat([group for group in groups if len(group) > 1])
    total = torch.zeros(len(groups)).index_add(0, outcomes.group_ids, advantage(outcomes))
    torch.testing.assert_close(total, torch.zeros(len(groups)), atol=1e-4, rtol=0)


@every_advantage
def test_no_rows_no_advantages(advantage):
    result = advantage(flat([]))
    assert (result.shape, result.dtype) == ((0,), torch.float32)


@every_advantage
@given(groups=GROUPS)
def test_a_group_gets_the_same_bits_alone_and_beside_others(advantage, groups):
    outcomes = flat(groups)
    together = advantage(outcomes)
    for group in range(len(groups)):
        mine = outcomes.group_ids == group
        assert torch.equal(advantage(some(outcomes, mine)), together[mine])


@every_advantage
@given(groups=GROUPS, data=st.data())
def test_row_order_changes_no_bit(advantage, groups, data):
    outcomes = flat(groups)
    order = torch.tensor(data.draw(st.permutations(range(len(outcomes.rewards)))))
    assert torch.equal(advantage(some(outcomes, order)), advantage(outcomes)[order])


@every_advantage
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_not_hidden(advantage, number):
    given = advantage(flat([[1.0, number], [number, -number, 0.0], [1.0, 0.0]]))
    assert given.isfinite().tolist() == [False, False, False, False, False, True, True]


def test_rewards_and_groups_of_other_lengths_are_refused():
    ids = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rewards \[2\] and group_ids \[3\]"):
        grpo(Outcomes(rewards=torch.zeros(2), group_ids=ids, lengths=ids))
    with pytest.raises(ValueError, match=r"baselines \[2\]: expected \[R\] each"):
        Outcomes(rewards=torch.zeros(3), group_ids=ids, lengths=ids, baselines=torch.zeros(2))
    with pytest.raises(ValueError, match=r"rewards \[3, 1\]"):
        Outcomes(rewards=torch.zeros(3, 1), group_ids=torch.zeros(3, 1), lengths=torch.zeros(3, 1))
