from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from siirl_dask.algorithms import (
    TokenOutcomes,
    gae,
    moments,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    whitened,
)

GAE = partial(gae, discount=0.9, gae_lambda=0.8)
ADVANTAGES = {
    "gae": GAE,
    "reinforce_plus_plus": partial(reinforce_plus_plus, discount=0.9),
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
every_advantage = pytest.mark.parametrize("advantage", ADVANTAGES.values(), ids=ADVANTAGES)
TOKENS = st.tuples(st.booleans(), st.floats(-2, 2, width=32), st.floats(-2, 2, width=32))
ROWS = st.lists(st.lists(TOKENS, max_size=5), min_size=1, max_size=5)


def pack(rows, groups=None):
    """Rows of (counts, reward, value); a token that does not count has no reward."""
    tokens = [token for row in rows for token in row]
    return TokenOutcomes(
        rewards=torch.tensor([counts * reward for counts, reward, _ in tokens], dtype=torch.float32),
        group_ids=torch.tensor([0] * len(rows) if groups is None else groups, dtype=torch.int64),
        offsets=torch.tensor([0, *map(len, rows)]).cumsum(0),
        mask=torch.tensor([counts for counts, _, _ in tokens], dtype=torch.bool),
        values=torch.tensor([value for _, _, value in tokens], dtype=torch.float32),
    )


EXAMPLE = pack([[(True, 0.0, 0.1), (True, 0.0, 0.2), (False, 0.0, 0.3), (True, 1.0, 0.4)]])


def gae_of_a_row(row, discount, gae_lambda):
    """By the definition: the discounted sum of the deltas of the tokens that count."""
    counted = [(reward, value) for counts, reward, value in row if counts]
    values = [value for _, value in counted] + [0.0]
    deltas = [reward + discount * values[at + 1] - value for at, (reward, value) in enumerate(counted)]
    factor = discount * gae_lambda
    return [sum(factor**k * delta for k, delta in enumerate(deltas[at:])) for at in range(len(deltas))]


def test_gae_hand_checked_values():
    result = GAE(EXAMPLE)
    assert_close(result.advantages, torch.tensor([0.50624, 0.592, 0.6, 0.6]))
    assert_close(result.returns, torch.tensor([0.60624, 0.792, 0.9, 1.0]))


def test_reinforce_plus_plus_by_hand():
    result = reinforce_plus_plus(pack([[(True, 0.5, 0), (False, 0, 0), (True, 1.0, 0)]]), discount=0.5)
    assert_close(result.advantages, torch.tensor([1.0, 1.0, 1.0]))
    assert_close(result.returns, result.advantages)
    undiscounted = reinforce_plus_plus(pack([[(True, 0.5, 0), (True, 0, 0), (True, 1.0, 0)]]))
    assert_close(undiscounted.advantages, torch.tensor([1.5, 1.0, 1.0]))


def test_reinforce_plus_plus_baseline_by_hand():
    rows = [[(True, 0.25, 0), (True, 0.75, 0)], [(True, 0.0, 0)], [(True, 3.0, 0)]]
    result = reinforce_plus_plus_baseline(pack(rows, groups=[0, 0, 1]))  # sums 1, 0; a group of one keeps mean 0
    assert_close(result.advantages, torch.tensor([0.5, 0.5, -0.5, 3.0]))
    assert_close(result.returns, torch.tensor([1.0, 1.0, 0.0, 3.0]))


def test_a_row_without_a_token_that_counts_is_no_part_of_its_groups_mean():
    rows = [[(True, 1.0, 0)], [(True, 0.0, 0)], [], [(False, 0, 0)]]
    assert_close(reinforce_plus_plus_baseline(pack(rows)).advantages, torch.tensor([0.5, -0.5, 0.0]))


@given(rows=ROWS, discount=st.floats(0, 1), gae_lambda=st.floats(0, 1))
def test_gae_is_its_definition_on_the_tokens_that_count(rows, discount, gae_lambda):
    outcomes = pack(rows)
    result = gae(outcomes, discount=discount, gae_lambda=gae_lambda)
    expected = torch.tensor([number for row in rows for number in gae_of_a_row(row, discount, gae_lambda)])
    assert_close(result.advantages[outcomes.mask], expected, atol=1e-4, rtol=1e-4)
    assert_close(result.returns, result.advantages + outcomes.values, atol=1e-5, rtol=1e-5)


@given(rows=ROWS)
def test_with_gae_lambda_1_returns_are_those_of_reinforce(rows):
    outcomes = pack(rows)
    with_critic = gae(outcomes, discount=0.9, gae_lambda=1.0).returns
    without = reinforce_plus_plus(outcomes, discount=0.9).returns
    assert_close(with_critic[outcomes.mask], without[outcomes.mask], atol=1e-4, rtol=1e-4)


@every_advantage
@given(rows=ROWS)
def test_tokens_that_do_not_count_change_nothing(advantage, rows):
    with_them, without = pack(rows), pack([[token for token in row if token[0]] for row in rows])
    result, expected = advantage(with_them), advantage(without)
    assert torch.equal(result.advantages[with_them.mask], expected.advantages)
    assert torch.equal(result.returns[with_them.mask], expected.returns)


@every_advantage
@given(rows=ROWS)
def test_a_group_gets_the_same_bits_alone_and_beside_others(advantage, rows):
    together = advantage(pack(rows, groups=range(len(rows))))
    alone = [advantage(pack([row])) for row in rows]
    assert torch.equal(together.advantages, torch.cat([part.advantages for part in alone]))
    assert torch.equal(together.returns, torch.cat([part.returns for part in alone]))


@every_advantage
@pytest.mark.parametrize("rows", [[], [[]], [[], []]], ids=["no rows", "an empty row", "empty rows"])
def test_no_tokens_no_advantages(advantage, rows):
    result = advantage(pack(rows))
    assert (result.advantages.shape, result.advantages.dtype) == ((0,), torch.float32)
    assert (result.returns.shape, result.returns.dtype) == ((0,), torch.float32)


@every_advantage
def test_a_row_whose_tokens_do_not_count_is_defined(advantage):
    result = advantage(pack([[(False, 0.0, 0.5), (False, 0.0, -1.0)]]))
    assert torch.equal(result.advantages, torch.zeros(2))


@every_advantage
def test_what_is_not_finite_is_not_hidden_and_stays_in_its_group(advantage):
    result = advantage(pack([[(True, 0.0, 0.0), (True, float("nan"), 0.0)], [(True, 1.0, 0.0)]], groups=[0, 1]))
    assert result.advantages.isfinite().tolist() == [False, False, True]


def test_equal_rewards_of_a_group_have_no_advantage():
    result = reinforce_plus_plus_baseline(pack([[(True, 0.0, 0), (True, 0.1, 0)], [(True, 0.1, 0)]]))
    assert result.advantages.tolist() == [0, 0, 0]


def test_gae_without_values_says_what_to_add():
    given = TokenOutcomes(
        rewards=EXAMPLE.rewards, group_ids=EXAMPLE.group_ids, offsets=EXAMPLE.offsets, mask=EXAMPLE.mask
    )
    with pytest.raises(ValueError, match="estimate_values"):
        gae(given)


def test_what_does_not_fit_together_is_refused():
    some, ids, offsets = torch.zeros(3), torch.zeros(1, dtype=torch.int64), torch.tensor([0, 3])
    with pytest.raises(ValueError, match=r"rewards \[3\] and mask \[2\]: expected \[K\] each"):
        TokenOutcomes(rewards=some, group_ids=ids, offsets=offsets, mask=torch.ones(2).bool())
    with pytest.raises(ValueError, match=r"offsets \[2\] end at 4: expected \[2\] for 1 group_ids, and 3"):
        TokenOutcomes(rewards=some, group_ids=ids, offsets=torch.tensor([0, 4]), mask=some.bool())
    with pytest.raises(ValueError, match=r"offsets \[2\] end at 3: expected \[3\] for 2 group_ids"):
        TokenOutcomes(rewards=some, group_ids=torch.zeros(2).long(), offsets=offsets, mask=some.bool())


@pytest.mark.parametrize("reward", [1.0, float("nan")])
def test_a_reward_that_would_never_arrive_is_refused(reward):
    with pytest.raises(ValueError, match="1 rewards are on tokens that do not count"):
        TokenOutcomes(
            rewards=torch.tensor([0.0, reward]),
            group_ids=torch.tensor([0]),
            offsets=torch.tensor([0, 2]),
            mask=torch.tensor([True, False]),
        )


@given(
    values=st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=30),
    split=st.integers(0, 30),
    seed=st.integers(0, 99),
)
def test_whitening_is_over_all_workers_tokens_that_count(values, split, seed):
    given = torch.tensor(values)
    mask = torch.rand(len(given), generator=torch.Generator().manual_seed(seed)) < 0.8
    mask[:2] = True
    parts = [(given[:split], mask[:split]), (given[split:], mask[split:])]
    summed = [sum(numbers) for numbers in zip(*(moments(*part) for part in parts), strict=True)]
    counted = given[mask].double()
    expected = torch.zeros(len(given), dtype=torch.float64)
    expected[mask] = (counted - counted.mean()) / (counted.var() + 1e-8).sqrt()
    result = torch.cat([whitened(*part, summed) for part in parts])
    assert_close(result, expected.float(), atol=1e-3, rtol=1e-3)


def test_whitening_by_hand():
    values, mask = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])
    assert moments(values, mask) == (2.0, 4.0, 10.0)
    assert_close(whitened(values, mask, [2.0, 4.0, 10.0]), torch.tensor([-0.707107, 0.707107, 0.0]))  # variance 2


@pytest.mark.parametrize("values", [[], [5.0], [0.1] * 7], ids=["none", "one", "equal"])
def test_whitening_without_spread_gives_0(values):
    given, mask = torch.tensor(values), torch.ones(len(values)).bool()
    assert torch.equal(whitened(given, mask, moments(given, mask)), torch.zeros(len(values)))


def test_whitening_of_nothing_that_counts_gives_0():
    given, mask = torch.tensor([5.0, 1.0]), torch.zeros(2).bool()
    assert torch.equal(whitened(given, mask, moments(given, mask)), torch.zeros(2))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_whitening_does_not_hide_what_is_not_finite(number):
    given, mask = torch.tensor([1.0, number, 2.0]), torch.ones(3).bool()
    assert whitened(given, mask, moments(given, mask)).isnan().all()
