"""Nodes that choose tokens over the mini-batches of all workers, by entropy and by distance from
the sampler.
"""

from functools import partial

import numpy as np
import pytest
import torch

from siirl_dask.nodes import choose_high_entropy, mask_second_moment, policy_logprobs
from siirl_dask.nodes.token_masks.thresholds import largest_float32
from siirl_dask.planner.contract import contract_of
from siirl_dask.training import TokenScores
from tests.nodes.test_learning_nodes import context, on_workers, rows


def random_table(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 30, 40).tolist()
    old = [(-rng.random(n) * 5).astype(np.float32) for n in lengths]
    return rows(
        response_ids=[[1] * n for n in lengths],
        response_mask=[(rng.random(n) < 0.9).tolist() for n in lengths],
        entropies=[rng.random(n).astype(np.float32).tolist() for n in lengths],
        old_logprobs=[one.tolist() for one in old],
        rollout_logprobs=[(one + rng.standard_t(2, len(one)) * 0.1).tolist() for one in old],
        advantage=[None if i == 3 else float(x) for i, x in enumerate(rng.normal(size=40))],
        minibatch=[i % 2 for i in range(40)],
    )


def tokens_of(table, minibatch, *names):
    """The unmasked tokens of a mini-batch's rows that have an advantage, a tuple of the named
    columns each.
    """
    for row, before in zip(table.to_pylist(), random_table(0).to_pylist(), strict=True):
        if row["minibatch"] == minibatch and row["advantage"] is not None:
            for at, counts in enumerate(before["response_mask"]):
                if counts:
                    yield tuple(row[name][at] for name in names)


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.31, 1.0])
def test_the_tokens_of_highest_entropy_are_marked(fraction):
    given = choose_high_entropy(context(), random_table(0), minibatches=2, fraction=fraction)
    for minibatch in (0, 1):
        tokens = list(tokens_of(given, minibatch, "entropies", "high_entropy"))
        ranked = sorted(tokens, reverse=True)
        lowest = np.quantile([entropy for entropy, _ in tokens], 1 - fraction)
        count = sum(entropy >= lowest for entropy, _ in tokens)
        assert [marked for _, marked in ranked] == [True] * count + [False] * (len(tokens) - count)
    assert given["high_entropy"].to_pylist()[3] is None
    masked = zip(given["high_entropy"].to_pylist(), given["response_mask"].to_pylist(), strict=True)
    assert not any(
        mark and not counts
        for marks, mask in masked
        if marks
        for mark, counts in zip(marks, mask, strict=True)
    )


def test_a_hand_checked_choice_with_ties_and_a_single_token():
    table = rows(
        response_ids=[[1, 2, 3], [4, 5]], entropies=[[0.5, 2.0, 0.0], [2.0, -1e-9]], advantage=[1.0, 1.0],
        minibatch=[0, 0],
    )  # fmt: skip
    given = choose_high_entropy(context(), table, minibatches=2)
    assert given["high_entropy"].to_pylist() == [[False, True, False], [True, False]], (
        "one of five, and its equal"
    )
    six = rows(
        response_ids=[[1] * 6], entropies=[[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]], advantage=[1.0], minibatch=[0]
    )  # fmt: skip
    # the quantile .7 is .45
    assert choose_high_entropy(context(), six, minibatches=1, fraction=0.3)["high_entropy"].to_pylist() == [
        [False, False, False, False, True, True]
    ]  # fmt: skip
    # the quantile .8 is .5 itself, which counts
    assert choose_high_entropy(context(), six, minibatches=1, fraction=0.2)["high_entropy"].to_pylist() == [
        [False, False, False, False, True, True]
    ]  # fmt: skip
    alone = rows(response_ids=[[1]], entropies=[[-1e-9]], advantage=[1.0], minibatch=[0])
    assert choose_high_entropy(context(), alone, minibatches=1)["high_entropy"].to_pylist() == [
        [True]
    ]


@pytest.mark.parametrize("limit", [0.001, 0.01, 0.02])
def test_the_furthest_tokens_are_masked_until_the_mean_is_below_the_limit(limit):
    given = mask_second_moment(context(), random_table(0), minibatches=2, limit=limit)
    for minibatch in (0, 1):
        names = ("old_logprobs", "rollout_logprobs", "response_mask")
        tokens = list(tokens_of(given, minibatch, *names))
        squares = sorted(
            ((np.float32(old) - np.float32(rollout)) ** 2, kept) for old, rollout, kept in tokens
        )
        near = [square for square, kept in squares if kept]
        assert 0 < len(near) < len(squares)
        assert [kept for _, kept in squares] == [True] * len(near) + [False] * (
            len(squares) - len(near)
        )
        assert np.mean(near) < limit
        assert np.mean([square for square, _ in squares[: len(near) + 1]]) >= limit
    assert given["response_mask"].to_pylist()[3] == random_table(0)["response_mask"].to_pylist()[3]


def test_a_hand_checked_mask():
    # squares: .25, 0, .01, 1; the mean of the first three is .0867, of all .315
    table = rows(
        response_ids=[[1, 2], [3, 4]], old_logprobs=[[-1.0, -1.0], [-1.0, -1.0]],
        rollout_logprobs=[[-1.5, -1.0], [-0.9, -2.0]], advantage=[1.0, 1.0], minibatch=[0, 0],
    )  # fmt: skip
    masks = {
        limit: mask_second_moment(context(), table, minibatches=1, limit=limit)[
            "response_mask"
        ].to_pylist()
        for limit in (1e-9, 0.04, 0.1, 0.32)
    }
    assert masks == {
        1e-9: [[False, True], [False, False]],
        0.04: [[False, True], [True, False]],
        0.1: [[True, True], [True, False]],
        0.32: [[True, True], [True, True]],
    }
    far = rows(
        response_ids=[[1, 2]], old_logprobs=[[-1.0, -1.0]], rollout_logprobs=[[-3.0, -3.0]], advantage=[1.0],
        minibatch=[0],
    )  # fmt: skip
    assert mask_second_moment(context(), far, minibatches=1)["response_mask"].to_pylist() == [
        [False, False]
    ]


def test_tokens_of_the_policy_itself_are_never_masked():
    table = random_table(0)
    same = table.set_column(
        table.column_names.index("rollout_logprobs"), "rollout_logprobs", table["old_logprobs"]
    )
    given = mask_second_moment(context(), same, minibatches=2, limit=1e-6)
    assert given["response_mask"].to_pylist() == same["response_mask"].to_pylist()


@pytest.mark.parametrize("choose", [choose_high_entropy, mask_second_moment])
def test_any_number_of_workers_chooses_the_same_tokens(choose):
    table = random_table(0)
    node = partial(choose, minibatches=2)
    whole = node(context(), table)
    split, _ = on_workers(node, [table.slice(0, 7), table.slice(7, 0), table.slice(7)])
    assert split.equals(whole)


@pytest.mark.parametrize("number", [0.0, 1e-45, 0.1, 1.0, 3.4028235e38])
def test_the_threshold_is_exact(number):
    asked = []

    def holds(threshold):
        asked.append(threshold)
        return threshold <= np.float32(number)

    assert largest_float32(holds) == np.float32(number)
    assert len(asked) <= 32
    assert largest_float32(lambda threshold: False) is None


@pytest.mark.parametrize(("choose", "options"), [(choose_high_entropy, {"fraction": 0.0}),
                                                 (choose_high_entropy, {"fraction": 1.5}),
                                                 (mask_second_moment, {"limit": 0.0})])  # fmt: skip
def test_impossible_options_are_refused_before_a_run(choose, options):
    with pytest.raises(ValueError, match="expected more than 0"):
        contract_of(choose).trial(minibatches=1, **options)


class Scorer:
    def logprobs(self, packed):
        return TokenScores(
            torch.tensor([-1.0, -2.0, -3.0]),
            torch.tensor([0.5, 1.5, 2.5]),
            torch.tensor([0.25, 0.5, 0.75]),
        )


@pytest.mark.parametrize(
    ("column", "expected"),
    [("entropies", [[0.5, 1.5], [2.5]]), ("collision_probs", [[0.25, 0.5], [0.75]])],
)
def test_other_scores_come_of_the_pass_that_log_probs_come_of_and_where_asked_for(column, expected):
    table = rows(prompt_ids=[[1], [2]], response_ids=[[3, 4], [5]])
    scored = policy_logprobs(context(Scorer()), table, **{column: True})
    assert scored["old_logprobs"].to_pylist() == [[-1.0, -2.0], [-3.0]]
    assert scored[column].to_pylist() == expected
    assert column not in policy_logprobs(context(Scorer()), table).column_names
    assert column in contract_of(partial(policy_logprobs, **{column: True})).writes.names
    assert column not in contract_of(policy_logprobs).writes.names
