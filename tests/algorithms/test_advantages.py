from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.algorithms import (
    Outcomes,
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    max_rl,
    opo,
    pass_at_k,
    remax,
    rloo,
)
from siirl_dask.testing.local_pool import ThreadPeers

REWARDS = st.floats(-10, 10, width=32)
GROUPS = st.lists(st.lists(REWARDS, min_size=1, max_size=6), min_size=1, max_size=5)
PASS_AT_K_STD = partial(pass_at_k, divide_by_std=True)
GRPO_BATCH = partial(grpo, scale="batch")
PER_GROUP = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "pass_at_k": pass_at_k,
    "pass_at_k divided by std": PASS_AT_K_STD,
}
GPG_STD = partial(gpg, divide_by_std=True)
PER_BATCH = {"grpo over the batch": GRPO_BATCH, "gpg": gpg, "gpg divided by std": GPG_STD}
every_advantage = pytest.mark.parametrize(
    "advantage", [*PER_GROUP.values(), *PER_BATCH.values()], ids=[*PER_GROUP, *PER_BATCH]
)
every_group_advantage = pytest.mark.parametrize("advantage", PER_GROUP.values(), ids=PER_GROUP)
every_batch_advantage = pytest.mark.parametrize("advantage", PER_BATCH.values(), ids=PER_BATCH)


def outcomes_of(groups, lengths=None):
    """Outcomes of groups of rewards, one list per group; lengths count up from 1 unless given."""
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float32)
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group], dtype=torch.int64)
    lengths = torch.arange(1, len(rewards) + 1) if lengths is None else torch.tensor(lengths)
    return Outcomes(rewards=rewards, group_ids=ids, lengths=lengths)


def select_rows(outcomes, rows):
    return Outcomes(
        rewards=outcomes.rewards[rows],
        group_ids=outcomes.group_ids[rows],
        lengths=outcomes.lengths[rows],
        parts={name: rewards[rows] for name, rewards in outcomes.parts.items()},
    )


def on_workers(advantage, outcomes, owners, workers):
    """The advantages of all rows, when ``owners`` [groups] says which worker holds each group."""
    peers = ThreadPeers(workers)
    masks = [
        torch.tensor(owners, dtype=torch.int64)[outcomes.group_ids] == worker
        for worker in range(workers)
    ]
    parts = [
        replace(select_rows(outcomes, mask), all_sum=peers.at(rank).all_sum)
        for rank, mask in enumerate(masks)
    ]
    result = torch.full_like(outcomes.rewards, float("nan"))
    with ThreadPoolExecutor(workers) as threads:
        for mask, advantages in zip(masks, threads.map(advantage, parts), strict=True):
            result[mask] = advantages
    return result


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
        (
            partial(grpo, epsilon=1e-4),
            [[1, 0, 1, 0]],
            [0.865875, -0.865875, 0.865875, -0.865875],
        ),  # .5 / .5774503
        (
            GRPO_BATCH,
            [[1, 0], [1, 1]],
            [0.999998, -0.999998, 0, 0],
        ),  # mean .75, variance .75 / 3: std .5
        (partial(GRPO_BATCH, epsilon=0.5), [[1, 0], [1, 1]], [0.5, -0.5, 0, 0]),
        (
            GRPO_BATCH,
            [[1, 0], [3]],
            [0.327327, -0.327327, 1.963960],
        ),  # mean 4 / 3, variance 7 / 3; a group of one: 3
        (GRPO_BATCH, [[0.7]], [0.6999993]),
        (GRPO_BATCH, [[2], [2]], [1.999998, 1.999998]),  # no spread: std 1
        (PASS_AT_K_STD, [[1, 0.5, 0, 0]], [1.044464, 0, 0, 0]),  # .5 / .478714
        (PASS_AT_K_STD, [[-3, -1]], [0, 1.414213]),
        (partial(PASS_AT_K_STD, epsilon=0.5), [[1, 0.5, 0, 0]], [0.510875, 0, 0, 0]),
        (PASS_AT_K_STD, [[0.7]], [0]),
        (
            gpg,
            [[1, 0], [1, 1], [0, 0], [0.5, 0]],
            [1, -1, 0, 0, 0, 0, 0.5, -0.5],
        ),  # two groups of four: alpha 2
        (gpg, [[1, 0], [0, 0.5]], [0.5, -0.5, -0.25, 0.25]),
        (gpg, [[0.7], [1, 1]], [1.4, 0, 0]),
        (GPG_STD, [[1, 0, 1, 0], [1, 1]], [1.732048, -1.732048, 1.732048, -1.732048, 0, 0]),
        (
            partial(GPG_STD, epsilon=1e-4),
            [[1, 0, 1, 0]],
            [0.865875, -0.865875, 0.865875, -0.865875],
        ),
    ],
)
def test_hand_checked_values(advantage, groups, expected):
    torch.testing.assert_close(
        advantage(outcomes_of(groups)), torch.tensor(expected).float(), atol=1e-6, rtol=0
    )


def test_opo_weighs_rewards_by_length():
    # (1 * 1 + 0 * 3) / 4 = .25
    assert opo(outcomes_of([[1, 0]], lengths=[1, 3])).tolist() == [0.75, -0.25]
    assert opo(outcomes_of([[1, 0]], lengths=[0, 3])).tolist() == [1, 0]
    assert opo(outcomes_of([[1, 0]], lengths=[0, 0])).tolist() == [0, 0]


def test_remax_compares_with_the_greedy_response():
    outcomes = replace(outcomes_of([[1, 0]]), baselines=torch.tensor([0.25, 0.5]))
    assert remax(outcomes).tolist() == [0.75, -0.5]


def test_remax_without_baselines_names_the_nodes_to_add():
    with pytest.raises(ValueError, match="take_greedy_baselines"):
        remax(outcomes_of([[1, 0]]))


def with_parts(groups, **parts):
    """Outcomes of the groups of rewards with further kinds of reward, a number a row."""
    kinds = {name: torch.tensor(rewards, dtype=torch.float32) for name, rewards in parts.items()}
    return replace(outcomes_of(groups), parts=kinds)


def test_gdpo_tells_rows_apart_that_earned_different_rewards_of_the_same_sum():
    outcomes = with_parts(
        [[1, 1, 0], [2, 0, 1]], accuracy=[1, 0, 0, 1, 0, 0], format=[0, 1, 0, 1, 0, 1]
    )
    # group 0: both (2, -1, -1) / 3 / .577350 = (1.154701, -.577350, -.577350), the second in
    # another order group 1: the same, and (1, -2, 1) / 3 / .577350 = (.577350, -1.154701, .577350)
    sums = torch.tensor([0.577350, 0.577350, -1.154701, 1.732051, -1.732051, 0.0])
    torch.testing.assert_close(gdpo(outcomes), sums / sums.std(), atol=1e-5, rtol=0)
    weighed = torch.tensor(
        [1.154701, -0.577350, -0.577350, 1.154701, -0.577350, -0.577350]
    ) + 0.5 * torch.tensor([-0.577350, 1.154701, -0.577350, 0.577350, -1.154701, 0.577350])
    given = gdpo(outcomes, weights={"format": 0.5})
    torch.testing.assert_close(given, weighed / weighed.std(), atol=1e-5, rtol=0)
    centred = torch.tensor([2, -1, -1, 2, -1, -1]) / 3 + torch.tensor([-1, 2, -1, 1, -2, 1]) / 3
    given = gdpo(outcomes, divide_by_std=False)
    torch.testing.assert_close(given, centred / centred.std(), atol=1e-5, rtol=0)


def test_gdpo_of_one_reward_is_grpo_standardised_over_the_batch():
    outcomes = with_parts([[1, 0, 0], [3, 5]], only=[1, 0, 0, 3, 5])
    whole = grpo(outcomes)
    torch.testing.assert_close(gdpo(outcomes), (whole - whole.mean()) / (whole.std() + 1e-6))


def test_gdpo_without_spread_is_0_and_a_broken_reward_shows_everywhere():
    assert gdpo(with_parts([[1, 1], [0, 0]], a=[1, 1, 0, 0], b=[2, 2, 2, 2])).tolist() == [
        0,
        0,
        0,
        0,
    ]
    assert (
        gdpo(with_parts([[1, 0], [0, 1]], a=[1, float("inf"), 0, 1], b=[0, 1, 0, 1])).isnan().all()
    )
    assert gdpo(with_parts([], a=[])).shape == (0,)


@pytest.mark.parametrize("owners", [[0, 0], [0, 1], [1, 1]])
def test_gdpo_does_not_depend_on_the_number_of_workers(owners):
    outcomes = with_parts([[1, 1, 0], [2, 0, 1]], a=[1, 0, 0, 1, 0, 0], b=[0, 1, 0, 1, 0, 1])
    torch.testing.assert_close(on_workers(gdpo, outcomes, owners, 2), gdpo(outcomes))


def test_gdpo_names_what_is_missing():
    with pytest.raises(ValueError, match=r"parts: \[accuracy, format\]"):
        gdpo(outcomes_of([[1, 0]]))
    with pytest.raises(ValueError, match=r"'c' is none of the parts \['a'\]"):
        gdpo(with_parts([[1, 0]], a=[1, 0]), weights={"c": 1.0})
    with pytest.raises(ValueError, match=r"epsilon=0: expected more than 0"):
        gdpo(with_parts([[1, 0]], a=[1, 0]), epsilon=0)
    with pytest.raises(ValueError, match=r"rewards \[2\] and a \[1\]"):
        with_parts([[1, 0]], a=[1])


def test_max_rl_weighs_a_prompt_by_one_over_its_share_of_successes():
    advantages = max_rl(outcomes_of([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0], [1, 1], [0.5, 1], [0.7]]))
    expected = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0, -1 / 3, 1 / 3, 0]
    torch.testing.assert_close(advantages, torch.tensor(expected))
    broken = max_rl(outcomes_of([[1, 0], [1, float("nan")]]))
    assert broken.isfinite().tolist() == [True, True, False, False]
    assert max_rl(outcomes_of([])).shape == (0,)


@given(rights=st.integers(0, 8), wrongs=st.integers(0, 8))
def test_max_rls_gradient_is_the_mean_score_of_the_successes_less_that_of_all(rights, wrongs):
    """The paper's estimator, and its control variate: each success has 1 / K, and each sample -1
    / N.
    """
    group = [1] * rights + [0] * wrongs
    expected = [reward / max(1, rights) - 1 / len(group) if rights else 0.0 for reward in group]
    given = max_rl(outcomes_of([group] if group else []))
    torch.testing.assert_close(given / max(1, len(group)), torch.tensor(expected))


def test_max_rl_refuses_rewards_that_are_no_share_of_success():
    with pytest.raises(ValueError, match="1 of 2 rewards are below 0"):
        max_rl(outcomes_of([[1, -1]]))


@every_advantage
@given(reward=REWARDS, count=st.integers(2, 9))
def test_equal_rewards_have_advantage_0_exactly(advantage, reward, count):
    assert advantage(outcomes_of([[reward] * count])).tolist() == [0.0] * count


@pytest.mark.parametrize("advantage", [dr_grpo, rloo])
@given(groups=GROUPS)
def test_the_advantages_of_a_group_sum_to_0(advantage, groups):
    outcomes = outcomes_of([group for group in groups if len(group) > 1])
    total = torch.zeros(len(groups)).index_add(0, outcomes.group_ids, advantage(outcomes))
    torch.testing.assert_close(total, torch.zeros(len(groups)), atol=1e-4, rtol=0)


@every_advantage
def test_no_rows_give_an_empty_result(advantage):
    result = advantage(outcomes_of([]))
    assert (result.shape, result.dtype) == ((0,), torch.float32)


@every_group_advantage
@given(groups=GROUPS)
def test_other_groups_change_no_bit_of_a_groups_advantages(advantage, groups):
    outcomes = outcomes_of(groups)
    together = advantage(outcomes)
    for group in range(len(groups)):
        members = outcomes.group_ids == group
        assert torch.equal(advantage(select_rows(outcomes, members)), together[members])


@every_advantage
@given(groups=GROUPS, data=st.data())
def test_row_order_changes_no_bit(advantage, groups, data):
    outcomes = outcomes_of(groups)
    order = torch.tensor(data.draw(st.permutations(range(len(outcomes.rewards)))))
    assert torch.equal(advantage(select_rows(outcomes, order)), advantage(outcomes)[order])


@every_batch_advantage
@given(groups=GROUPS, data=st.data())
def test_scaling_over_the_batch_does_not_depend_on_the_number_of_workers(advantage, groups, data):
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(groups), max_size=len(groups)))
    outcomes = outcomes_of(groups)
    torch.testing.assert_close(on_workers(advantage, outcomes, owners, 3), advantage(outcomes))


@pytest.mark.parametrize("advantage", [*PER_GROUP.values(), gpg, GPG_STD])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_reward_shows_in_its_own_group_alone(advantage, number):
    advantages = advantage(outcomes_of([[1.0, number], [number, -number, 0.0], [1.0, 0.0]]))
    assert advantages.isfinite().tolist() == [False, False, False, False, False, True, True]


@given(
    groups=st.lists(st.lists(REWARDS, min_size=2, max_size=6), min_size=1, max_size=5),
    agreeing=st.integers(0, 5),
)
def test_groups_of_equal_rewards_do_not_shrink_gpgs_step(groups, agreeing):
    """Summed over the batch and divided by its groups, advantages are those of the groups that
    disagree alone.
    """
    disagreeing = [group for group in groups if len(set(group)) > 1]
    alone, diluted = outcomes_of(disagreeing), outcomes_of([*disagreeing, *[[1.0, 1.0]] * agreeing])
    mean_alone = gpg(alone).abs().sum() / max(1, len(disagreeing))
    mean_diluted = gpg(diluted).abs().sum() / max(1, len(disagreeing) + agreeing)
    torch.testing.assert_close(mean_diluted, mean_alone)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_reward_makes_a_batch_scale_nan_in_every_row(number):
    assert GRPO_BATCH(outcomes_of([[1.0, number], [-number, number], [1.0, 0.0]])).isnan().all()


@pytest.mark.parametrize("advantage", [grpo, GRPO_BATCH, pass_at_k, GPG_STD])
@pytest.mark.parametrize("epsilon", [0, -1e-6, float("nan")])
def test_an_epsilon_of_0_or_less_is_refused(advantage, epsilon):
    with pytest.raises(ValueError, match=r"epsilon=.*: expected more than 0"):
        advantage(outcomes_of([[1, 1]]), epsilon=epsilon)


def test_an_unknown_scale_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="scale='none': expected 'group' or 'batch'; dr_grpo"):
        grpo(outcomes_of([[1, 0]]), scale="none")


def test_tensors_of_different_shapes_are_refused():
    ids = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rewards \[2\] and group_ids \[3\]"):
        grpo(Outcomes(rewards=torch.zeros(2), group_ids=ids, lengths=ids))
    with pytest.raises(ValueError, match=r"baselines \[2\]: expected \[R\] each"):
        Outcomes(rewards=torch.zeros(3), group_ids=ids, lengths=ids, baselines=torch.zeros(2))
    with pytest.raises(ValueError, match=r"rewards \[3, 1\]"):
        Outcomes(rewards=torch.zeros(3, 1), group_ids=torch.zeros(3, 1), lengths=torch.zeros(3, 1))
