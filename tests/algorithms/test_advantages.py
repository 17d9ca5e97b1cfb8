import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.algorithms import dr_grpo, grpo

REWARDS = st.floats(-10, 10, width=32)
GROUPS = st.lists(st.lists(REWARDS, min_size=1, max_size=6), min_size=1, max_size=5)


def flat(groups):
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float32)
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    return rewards, ids


@pytest.mark.parametrize(
    ("advantage", "groups", "expected"),
    [
        (grpo, [[1, 0, 1, 0]], [0.866024, -0.866024, 0.866024, -0.866024]),
        (grpo, [[1, 0.5, 0, 0]], [1.305580, 0.261116, -0.783348, -0.783348]),
        (dr_grpo, [[1, 0.5, 0, 0]], [0.625, 0.125, -0.375, -0.375]),
        (grpo, [[0.7]], [0.6999993]),
        (dr_grpo, [[0.7]], [0.7]),
        (grpo, [[0.1, 0.1, 0.1]], [0, 0, 0]),
    ],
)
def test_hand_checked_values(advantage, groups, expected):
    torch.testing.assert_close(advantage(*flat(groups)), torch.tensor(expected).float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("advantage", [grpo, dr_grpo])
def test_no_rows_no_advantages(advantage):
    result = advantage(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert (result.shape, result.dtype) == ((0,), torch.float32)


@pytest.mark.parametrize("advantage", [grpo, dr_grpo])
@given(groups=GROUPS)
def test_a_group_gets_the_same_bits_alone_and_beside_others(advantage, groups):
    rewards, ids = flat(groups)
    together = advantage(rewards, ids)
    for group in range(len(groups)):
        alone = advantage(rewards[ids == group], ids[ids == group])
        assert torch.equal(alone, together[ids == group])


@pytest.mark.parametrize("advantage", [grpo, dr_grpo])
@given(groups=GROUPS, data=st.data())
def test_row_order_changes_no_bit(advantage, groups, data):
    rewards, ids = flat(groups)
    order = torch.tensor(data.draw(st.permutations(range(len(rewards)))))
    assert torch.equal(advantage(rewards[order], ids[order]), advantage(rewards, ids)[order])


def test_a_reward_that_is_not_finite_is_not_hidden():
    rewards, ids = flat([[1.0, float("nan")], [1.0, 0.0]])
    assert grpo(rewards, ids).isfinite().tolist() == [False, False, True, True]


def test_rewards_and_groups_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match=r"rewards \[2\] and group_ids \[3\]"):
        grpo(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
