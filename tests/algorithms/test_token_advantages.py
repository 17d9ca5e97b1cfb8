import math
from dataclasses import replace
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
    optimal_token_baseline,
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
    """Outcomes of rows of (unmasked, reward, value) tokens; masked tokens have no reward."""
    tokens = [token for row in rows for token in row]
    return TokenOutcomes(
        rewards=torch.tensor(
            [unmasked * reward for unmasked, reward, _ in tokens], dtype=torch.float32
        ),
        group_ids=torch.tensor([0] * len(rows) if groups is None else groups, dtype=torch.int64),
        offsets=torch.tensor([0, *map(len, rows)]).cumsum(0),
        mask=torch.tensor([unmasked for unmasked, _, _ in tokens], dtype=torch.bool),
        values=torch.tensor([value for _, _, value in tokens], dtype=torch.float32),
    )


EXAMPLE = pack([[(True, 0.0, 0.1), (True, 0.0, 0.2), (False, 0.0, 0.3), (True, 1.0, 0.4)]])


def gae_of_a_row(row, discount, gae_lambda):
    """The definition: the discounted sum of the deltas of the unmasked tokens."""
    tokens = [(reward, value) for unmasked, reward, value in row if unmasked]
    values = [value for _, value in tokens] + [0.0]
    deltas = [
        reward + discount * values[index + 1] - value
        for index, (reward, value) in enumerate(tokens)
    ]
    factor = discount * gae_lambda
    return [
        sum(factor**k * delta for k, delta in enumerate(deltas[index:]))
        for index in range(len(deltas))
    ]


def test_gae_hand_checked_values():
    result = GAE(EXAMPLE)
    assert_close(result.advantages, torch.tensor([0.50624, 0.592, 0.6, 0.6]))
    assert_close(result.returns, torch.tensor([0.60624, 0.792, 0.9, 1.0]))


def test_reinforce_plus_plus_hand_checked():
    result = reinforce_plus_plus(
        pack([[(True, 0.5, 0), (False, 0, 0), (True, 1.0, 0)]]), discount=0.5
    )
    assert_close(result.advantages, torch.tensor([1.0, 1.0, 1.0]))
    assert_close(result.returns, result.advantages)
    undiscounted = reinforce_plus_plus(pack([[(True, 0.5, 0), (True, 0, 0), (True, 1.0, 0)]]))
    assert_close(undiscounted.advantages, torch.tensor([1.5, 1.0, 1.0]))


def test_reinforce_plus_plus_baseline_hand_checked():
    rows = [[(True, 0.25, 0), (True, 0.75, 0)], [(True, 0.0, 0)], [(True, 3.0, 0)]]
    # sums 1, 0; a group of one keeps mean 0
    result = reinforce_plus_plus_baseline(pack(rows, groups=[0, 0, 1]))
    assert_close(result.advantages, torch.tensor([0.5, 0.5, -0.5, 3.0]))
    assert_close(result.returns, torch.tensor([1.0, 1.0, 0.0, 3.0]))


def test_a_row_that_is_all_masked_does_not_count_in_its_groups_mean():
    rows = [[(True, 1.0, 0)], [(True, 0.0, 0)], [], [(False, 0, 0)]]
    assert_close(
        reinforce_plus_plus_baseline(pack(rows)).advantages, torch.tensor([0.5, -0.5, 0.0])
    )


@given(rows=ROWS, discount=st.floats(0, 1), gae_lambda=st.floats(0, 1))
def test_gae_equals_its_definition_on_unmasked_tokens(rows, discount, gae_lambda):
    outcomes = pack(rows)
    result = gae(outcomes, discount=discount, gae_lambda=gae_lambda)
    expected = torch.tensor(
        [number for row in rows for number in gae_of_a_row(row, discount, gae_lambda)]
    )
    assert_close(result.advantages[outcomes.mask], expected, atol=1e-4, rtol=1e-4)
    assert_close(result.returns, result.advantages + outcomes.values, atol=1e-5, rtol=1e-5)


@given(rows=ROWS)
def test_gae_lambda_1_has_the_returns_of_reinforce_plus_plus(rows):
    outcomes = pack(rows)
    gae_returns = gae(outcomes, discount=0.9, gae_lambda=1.0).returns
    expected = reinforce_plus_plus(outcomes, discount=0.9).returns
    assert_close(gae_returns[outcomes.mask], expected[outcomes.mask], atol=1e-4, rtol=1e-4)


@every_advantage
@given(rows=ROWS)
def test_masked_tokens_change_nothing(advantage, rows):
    outcomes, unmasked_only = (
        pack(rows),
        pack([[token for token in row if token[0]] for row in rows]),
    )
    result, expected = advantage(outcomes), advantage(unmasked_only)
    assert torch.equal(result.advantages[outcomes.mask], expected.advantages)
    assert torch.equal(result.returns[outcomes.mask], expected.returns)


@every_advantage
@given(rows=ROWS)
def test_other_groups_change_no_bit_of_a_groups_advantages(advantage, rows):
    together = advantage(pack(rows, groups=range(len(rows))))
    alone = [advantage(pack([row])) for row in rows]
    assert torch.equal(together.advantages, torch.cat([part.advantages for part in alone]))
    assert torch.equal(together.returns, torch.cat([part.returns for part in alone]))


@every_advantage
@pytest.mark.parametrize(
    "rows", [[], [[]], [[], []]], ids=["no rows", "an empty row", "empty rows"]
)
def test_no_tokens_give_an_empty_result(advantage, rows):
    result = advantage(pack(rows))
    assert (result.advantages.shape, result.advantages.dtype) == ((0,), torch.float32)
    assert (result.returns.shape, result.returns.dtype) == ((0,), torch.float32)


@every_advantage
def test_a_row_that_is_all_masked_has_advantage_0(advantage):
    result = advantage(pack([[(False, 0.0, 0.5), (False, 0.0, -1.0)]]))
    assert torch.equal(result.advantages, torch.zeros(2))


@every_advantage
def test_a_nonfinite_reward_shows_in_its_own_group_alone(advantage):
    result = advantage(
        pack([[(True, 0.0, 0.0), (True, float("nan"), 0.0)], [(True, 1.0, 0.0)]], groups=[0, 1])
    )
    assert result.advantages.isfinite().tolist() == [False, False, True]


def test_equal_rewards_of_a_group_have_advantage_0():
    result = reinforce_plus_plus_baseline(
        pack([[(True, 0.0, 0), (True, 0.1, 0)], [(True, 0.1, 0)]])
    )
    assert result.advantages.tolist() == [0, 0, 0]


def test_gae_without_values_names_the_node_to_add():
    with pytest.raises(ValueError, match="estimate_values"):
        gae(replace(EXAMPLE, values=None))


def test_shapes_that_do_not_fit_together_are_refused():
    tokens, ids, offsets = torch.zeros(3), torch.zeros(1, dtype=torch.int64), torch.tensor([0, 3])
    with pytest.raises(ValueError, match=r"rewards \[3\] and mask \[2\]: expected \[K\] each"):
        TokenOutcomes(rewards=tokens, group_ids=ids, offsets=offsets, mask=torch.ones(2).bool())
    with pytest.raises(
        ValueError, match=r"offsets \[2\] end at 4: expected \[2\] for 1 group_ids, and 3"
    ):
        TokenOutcomes(
            rewards=tokens, group_ids=ids, offsets=torch.tensor([0, 4]), mask=tokens.bool()
        )
    with pytest.raises(ValueError, match=r"offsets \[2\] end at 3: expected \[3\] for 2 group_ids"):
        TokenOutcomes(
            rewards=tokens, group_ids=torch.zeros(2).long(), offsets=offsets, mask=tokens.bool()
        )


@pytest.mark.parametrize("reward", [1.0, float("nan")])
def test_a_reward_on_a_masked_token_is_refused(reward):
    with pytest.raises(ValueError, match="1 rewards are on tokens where the mask is False"):
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
def test_whitening_is_over_the_unmasked_tokens_of_all_workers(values, split, seed):
    tokens = torch.tensor(values)
    mask = torch.rand(len(tokens), generator=torch.Generator().manual_seed(seed)) < 0.8
    mask[:2] = True
    parts = [(tokens[:split], mask[:split]), (tokens[split:], mask[split:])]
    total_moments = [
        sum(numbers) for numbers in zip(*(moments(*part) for part in parts), strict=True)
    ]
    unmasked = tokens[mask].double()
    expected = torch.zeros(len(tokens), dtype=torch.float64)
    expected[mask] = (unmasked - unmasked.mean()) / (unmasked.var() + 1e-8).sqrt()
    result = torch.cat([whitened(*part, total_moments) for part in parts])
    assert_close(result, expected.float(), atol=1e-3, rtol=1e-3)


def test_whitening_hand_checked():
    values, mask = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])
    assert moments(values, mask) == (2.0, 4.0, 10.0)
    # variance 2
    assert_close(whitened(values, mask, [2.0, 4.0, 10.0]), torch.tensor([-0.707107, 0.707107, 0.0]))


@pytest.mark.parametrize("values", [[], [5.0], [0.1] * 7], ids=["none", "one", "equal"])
def test_whitening_without_spread_gives_0(values):
    tokens, mask = torch.tensor(values), torch.ones(len(values)).bool()
    assert torch.equal(whitened(tokens, mask, moments(tokens, mask)), torch.zeros(len(values)))


def test_whitening_of_masked_tokens_alone_gives_0():
    tokens, mask = torch.tensor([5.0, 1.0]), torch.zeros(2).bool()
    assert torch.equal(whitened(tokens, mask, moments(tokens, mask)), torch.zeros(2))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_whitening_of_a_nonfinite_number_makes_all_nan(number):
    tokens, mask = torch.tensor([1.0, number, 2.0]), torch.ones(3).bool()
    assert whitened(tokens, mask, moments(tokens, mask)).isnan().all()


def with_probabilities(outcomes, logprobs, collision):
    return replace(
        outcomes, logprobs=torch.tensor(logprobs).float(), collision=torch.tensor(collision).float()
    )


def optimal_baseline_by_definition(rows, groups, zero_tail):
    """Baseline and rewards to come of each unmasked token, row after row, of (unmasked, reward,
    logprob, collision).
    """
    learned = [[token[1:] for token in row if token[0]] for row in rows]

    def to_come(row, place):
        return sum(reward for reward, _, _ in learned[row][place:])

    def energy(row, place):
        return sum(
            1 - 2 * math.exp(logprob) + collision
            for _, logprob, collision in learned[row][: place + 1]
        )

    found = []
    for row, tokens in enumerate(learned):
        group = [
            other for other in range(len(rows)) if groups[other] == groups[row] and learned[other]
        ]
        for place in range(len(tokens)):
            there = [other for other in group if len(learned[other]) > place]
            weights = [energy(other, place) for other in there]
            baseline = sum(
                to_come(other, place) * weight for other, weight in zip(there, weights, strict=True)
            )
            baseline /= sum(weights) + 1e-8
            alone = len(there) == 1 if zero_tail else len(group) == 1
            found.append((0.0 if alone else baseline, to_come(row, place)))
    return found


def test_the_optimal_token_baseline_hand_checked():
    outcomes = with_probabilities(
        pack(
            [
                [(True, 0, 0), (True, 1.0, 0)],
                [(True, 0, 0)],
                [(True, 0, 0), (False, 0, 0), (True, 0, 0)],
            ]
        ),
        logprobs=[math.log(0.5), math.log(0.25), math.log(0.5), math.log(0.75), 0.0, math.log(0.5)],
        collision=[0.5, 0.25, 0.375, 0.625, 1.0, 0.5],
    )
    # squared scores 0.5, 0.75 | 0.375 | 0.125, -, 0.5; energies 0.5, 1.25 | 0.375 | 0.125, 0.625
    first, second = 0.5 / 1.0, 1.25 / 1.875
    found = optimal_token_baseline(outcomes)
    assert_close(
        found.advantages, torch.tensor([1 - first, 1 - second, -first, -first, 0.0, -second])
    )
    assert_close(found.returns, torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0]))


PROBABLE = st.tuples(
    st.booleans(),
    st.floats(-2, 2, width=32),
    st.floats(-3, -0.25, width=32),
    st.floats(0.125, 1, width=32),
)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(PROBABLE, max_size=5)), min_size=1, max_size=6),
    st.booleans(),
)
def test_the_optimal_token_baseline_is_that_of_the_definition_at_every_place(rows, zero_tail):
    groups = [group for group, _ in rows]
    tokens = [[(unmasked, reward, 0.0) for unmasked, reward, _, _ in row] for _, row in rows]
    flat = [token for _, row in rows for token in row]
    # no squared score is negative: a sum of squares is at least the square of the chosen
    # probability
    collision = [max(collision, math.exp(2 * logprob)) for _, _, logprob, collision in flat]
    outcomes = with_probabilities(
        pack(tokens, groups), [logprob for _, _, logprob, _ in flat], collision
    )
    squares = iter(collision)
    exact = [
        [(unmasked, reward, logprob, next(squares)) for unmasked, reward, logprob, _ in row]
        for _, row in rows
    ]
    expected = optimal_baseline_by_definition(exact, groups, zero_tail)
    found = optimal_token_baseline(outcomes, zero_tail=zero_tail)
    mask = outcomes.mask
    wanted = torch.tensor([to_come - baseline for baseline, to_come in expected])
    assert_close(found.advantages[mask], wanted, atol=1e-4, rtol=1e-4)
    assert_close(
        found.returns[mask],
        torch.tensor([to_come for _, to_come in expected]),
        atol=1e-5,
        rtol=1e-5,
    )
    assert not found.advantages[~mask].any()


def test_the_optimal_token_baseline_without_probabilities_names_the_nodes_options():
    with pytest.raises(ValueError, match=r"probabilities=True .* collision_probs=True"):
        optimal_token_baseline(EXAMPLE)
