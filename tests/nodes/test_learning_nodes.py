"""Tests of advantages, penalties, the choice of tokens and batches for trainers, on one worker
and on several.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from siirl_dask.algorithms import (
    KLController,
    TokenLoss,
    dr_grpo,
    gae,
    gdpo,
    gpg,
    grpo,
    k1,
    policy_loss,
    ppo_clip,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
)
from siirl_dask.config import ENGINES_LOGPROBS
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import DataError, PlanError, TrainingError
from siirl_dask.nodes import (
    choose_covariant,
    estimate_advantage,
    estimate_token_advantages,
    mask_truncated,
    penalise_kl,
    penalise_overlong,
    rollout_logprobs,
    take_greedy_baselines,
    update_critic,
    update_policy,
)
from siirl_dask.planner import DAG, Node, Role, compile_chains
from siirl_dask.planner.contract import contract_of
from siirl_dask.schema import TYPES
from siirl_dask.testing.local_pool import ThreadPeers
from siirl_dask.testing.rows import build_nothing


def rows(**columns):
    count = len(next(iter(columns.values())))
    identity = {
        name: pa.array(range(count), pa.int64()) for name in ("row_id", "group_id", "tokens")
    }
    given = {name: pa.array(values, TYPES.get(name)) for name, values in columns.items()}
    return pa.table({**identity, **given})


def context(resource=None, *, rank=0, size=1, peers=None):
    ctx = Context(step=1, run_seed=0, rank=Rank(rank, size), device=Device("w"), resource=resource)
    ctx.peers = ctx.peers if peers is None else peers.at(rank)
    return ctx


def on_workers(node, parts, resources=None):
    """Run the node on one worker for each part, at the same time; return the joined output and
    the contexts.
    """
    peers = ThreadPeers(len(parts))
    resources = resources or [None] * len(parts)
    contexts = [
        context(resource, rank=rank, size=len(parts), peers=peers)
        for rank, resource in enumerate(resources)
    ]
    with ThreadPoolExecutor(len(parts)) as threads:
        return pa.concat_tables(threads.map(node, contexts, parts)), contexts


GROUPS = [0, 0, 0, 1, 1, 1]
RESPONSES = [[1, 2], [3], [4, 5, 6], [7], [], [8, 9]]


def test_a_row_without_a_reward_has_no_advantage_and_does_not_count():
    table = rows(group_id=GROUPS, reward=[1.0, None, 0.0, None, 1.0, 3.0], response_ids=RESPONSES)
    given = estimate_advantage(context(), table, advantage=grpo)["advantage"].to_pylist()
    assert given == pytest.approx([0.7071, None, -0.7071, None, -0.7071, 0.7071], abs=1e-4)


@pytest.mark.parametrize(
    ("advantage", "others", "expected"),
    [
        (partial(grpo, scale="batch"), [2.0, 1.0, 3.0], 0.5 / 1.3**0.5),  # variance 5.2 / 4
        (gpg, [2.0, 2.0, 2.0], 0.5 * 2),  # one group of two has no advantage
    ],
)
def test_an_advantage_over_the_batch_sees_the_rows_of_all_workers(advantage, others, expected):
    table = rows(group_id=GROUPS, reward=[1.0, None, 0.0, *others], response_ids=RESPONSES)
    node = partial(estimate_advantage, advantage=advantage)
    whole = node(context(), table)
    split, _ = on_workers(node, [table.slice(0, 3), table.slice(3, 3), table.slice(0, 0)])
    assert split.equals(whole)
    assert whole["advantage"].to_pylist()[:3] == pytest.approx(
        [expected, None, -expected], abs=1e-4
    )


def test_token_rewards_count_in_the_rows_advantage():
    penalty = [[-0.25] * len(response) for response in RESPONSES]
    seen = []

    def advantage(outcomes):
        seen.append(outcomes)
        return outcomes.rewards

    table = rows(group_id=GROUPS, reward=[1.0] * 6, response_ids=RESPONSES, kl_penalty=penalty)
    given = estimate_advantage(context(), table, advantage=advantage)["advantage"].to_pylist()
    assert given == [0.5, 0.75, 0.25, 0.75, 1.0, 0.5]
    assert seen[0].lengths.tolist() == [2, 1, 3, 1, 0, 2]


def test_the_greedy_response_is_the_baseline_and_does_not_train():
    table = rows(
        group_id=GROUPS,
        greedy=[False, False, True] * 2,
        reward=[1.0, 0.25, 0.5, 1.0, 0.5, None],
        response_ids=RESPONSES,
    )
    sampled = take_greedy_baselines(context(), table)
    assert sampled["row_id"].to_pylist() == [0, 1, 3, 4]
    assert estimate_advantage(context(), sampled, advantage=remax)["advantage"].to_pylist() == [
        0.5,
        -0.25,
        None,
        None,
    ]


def test_a_group_without_its_greedy_response_is_refused():
    table = rows(group_id=[0, 0, 1], greedy=[False, True, False], reward=[1.0] * 3)
    with pytest.raises(ValueError, match=r"groups \[1\] have no greedy response"):
        take_greedy_baselines(context(), table)


def test_the_reward_falls_on_the_last_token_in_the_mask():
    mask = [[True, True], [False], [True, True, False], [True], [], [True, False]]
    seen = []

    def advantage(outcomes):
        seen.append(outcomes)
        return gae(outcomes)

    table = rows(
        reward=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        response_ids=RESPONSES,
        response_mask=mask,
        values=[[0.0] * len(response) for response in RESPONSES],
    )
    given = estimate_token_advantages(context(), table, advantage=advantage, whiten=False)
    assert seen[0].rewards.tolist() == [0, 1, 0, 0, 3, 0, 4, 6, 0]
    assert given["advantages"].to_pylist()[2][:2] == [3.0, 3.0]


def test_whitening_covers_the_tokens_of_all_workers():
    table = rows(group_id=GROUPS, reward=[1.0, None, 0.0, 2.0, 1.0, 3.0], response_ids=RESPONSES)
    node = partial(estimate_token_advantages, advantage=reinforce_plus_plus_baseline)
    whole = node(context(), table)
    split, _ = on_workers(node, [table.slice(0, 3), table.slice(3, 3), table.slice(0, 0)])
    assert split.equals(whole)
    assert whole["advantages"].to_pylist()[1] is None
    tokens = np.concatenate([row for row in whole["advantages"].to_pylist() if row])
    assert tokens.mean() == pytest.approx(0, abs=1e-6)
    assert tokens.std() == pytest.approx(1, abs=0.2)


def test_the_kl_coefficient_adapts_alike_on_all_workers():
    old = [[-1.0] * len(response) for response in RESPONSES]
    reference = [[-1.5] * len(response) for response in RESPONSES]
    table = rows(response_ids=RESPONSES, old_logprobs=old, reference_logprobs=reference)
    alone = KLController(0.1, target=0.1, horizon=100)
    whole = penalise_kl(context(alone), table, kl=k1)
    controllers = [KLController(0.1, target=0.1, horizon=100) for _ in range(2)]
    split, _ = on_workers(
        partial(penalise_kl, kl=k1), [table.slice(0, 2), table.slice(2)], controllers
    )
    assert split.equals(whole)
    assert whole["kl_penalty"].to_pylist()[0] == pytest.approx([-0.05, -0.05])
    assert [c.coefficient for c in controllers] == [alone.coefficient] * 2
    assert alone.coefficient == pytest.approx(0.1 * (1 + 0.2 * 6 / 100))


def test_a_response_near_the_limit_gets_a_lower_reward():
    table = rows(reward=[1.0, None, 1.0, 1.0], response_ids=[[0] * 8, [0] * 8, [0] * 7, [0] * 6])
    given = penalise_overlong(context(), table, max_length=8, buffer=2, factor=0.5)
    assert given["reward"].to_pylist() == [0.5, None, 0.75, 1.0]


def _kinds(*rewards):
    return [None if parts is None else list(parts.items()) for parts in rewards]


def test_the_parts_of_a_reward_reach_an_advantage_that_asks_for_them():
    table = rows(
        group_id=[0, 0, 0],
        reward=[1.0, None, 0.0],
        reward_parts=_kinds({"a": 1.0, "b": 7.0, "c": 9.0}, None, {"a": 0.0, "b": 5.0}),
        response_ids=[[1], [2], [3]],
    )
    seen = []
    node = partial(
        estimate_advantage, advantage=lambda outcomes: seen.append(outcomes) or outcomes.parts["b"]
    )
    assert node(context(), table, parts=("a", "b"))["advantage"].to_pylist() == [7.0, None, 5.0]
    assert {name: rewards.tolist() for name, rewards in seen[0].parts.items()} == {
        "a": [1.0, 0.0],
        "b": [7.0, 5.0],
    }
    node = partial(estimate_advantage, advantage=gdpo, parts=("a", "b"))
    whole = node(context(), table)
    assert whole["advantage"].to_pylist() == pytest.approx([0.5**0.5, None, -(0.5**0.5)], abs=1e-5)
    with pytest.raises(
        DataError, match=r"the reward of row 2 has no part 'c' \(it has: \['a', 'b'\]\)"
    ):
        estimate_advantage(context(), table, advantage=gdpo, parts=("a", "c"))


def test_a_kl_in_the_reward_is_refused_beside_parts_that_do_not_hold_it():
    table = rows(
        group_id=[0],
        reward=[1.0],
        reward_parts=_kinds({"a": 1.0}),
        response_ids=[[1]],
        kl_penalty=[[-0.5]],
    )
    with pytest.raises(DataError, match="put it into the loss"):
        estimate_advantage(context(), table, advantage=gdpo, parts=("a",))


def test_parts_are_read_where_they_are_asked_for():
    assert (
        "reward_parts"
        in contract_of(partial(estimate_advantage, advantage=gdpo, parts=("a",))).reads
    )
    assert "reward_parts" not in contract_of(partial(estimate_advantage, advantage=grpo)).reads


def test_a_truncated_response_is_masked_by_its_reason_and_not_by_its_length():
    table = rows(
        response_ids=[[1, 2], [3, 4], [5], []], finish_reason=["length", "stop", "length", "length"]
    )
    ctx = context()
    masked = mask_truncated(ctx, table)
    assert masked["response_mask"].to_pylist() == [[False, False], [True, True], [False], []]
    assert ctx.metrics["response/masked"].value == 0.75
    turned = rows(response_ids=[[1], [2], [3]], finish_reason=["length", "turns", "stop"])
    given = mask_truncated(context(), turned, reasons=("length", "turns"))
    assert given["response_mask"].to_pylist() == [[False], [False], [True]]


def test_tokens_that_were_masked_before_stay_masked():
    table = rows(
        response_ids=[[1, 2], [3, 4]],
        response_mask=[[True, False], [False, True]],
        finish_reason=["stop", "length"],
    )
    given = mask_truncated(context(), table)
    assert given["response_mask"].to_pylist() == [[True, False], [False, False]]
    assert given.column_names == table.column_names


def test_a_masked_rows_reward_counts_in_its_group_and_none_of_its_tokens_in_whitening():
    table = rows(
        group_id=[0, 0],
        reward=[1.0, 3.0],
        response_ids=[[1, 2], [3, 4, 5]],
        finish_reason=["stop", "length"],
    )
    masked = mask_truncated(context(), table)
    assert estimate_advantage(context(), masked, advantage=dr_grpo)["advantage"].to_pylist() == [
        -1.0,
        1.0,
    ]
    given = estimate_token_advantages(context(), masked, advantage=reinforce_plus_plus)
    assert given["advantages"].to_pylist() == [[0.0, 0.0], [0.0, 0.0, 0.0]], (
        "one return of two tokens: no variance"
    )


def test_a_reason_that_no_response_has_is_refused():
    with pytest.raises(ValueError, match="'lenght' is none of"):
        mask_truncated.__contract__.trial(reasons=("lenght",))


def _covariance_table():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 30, 40).tolist()
    return rows(
        prompt_ids=[[1]] * 40,
        response_ids=[[1] * n for n in lengths],
        old_logprobs=[(-rng.random(n) * 5).tolist() for n in lengths],
        advantage=[None if i == 3 else float(x) for i, x in enumerate(rng.normal(size=40))],
        minibatch=[i % 2 for i in range(40)],
    )


@pytest.mark.parametrize("bounds", [{}, {"low": 0.0, "high": 5.0}], ids=["highest", "drawn"])
def test_any_number_of_workers_marks_the_same_covariant_tokens(bounds):
    table = _covariance_table()
    node = partial(choose_covariant, minibatches=2, fraction=0.05, **bounds)
    whole = node(context(), table)
    split, _ = on_workers(node, [table.slice(0, 7), table.slice(7, 0), table.slice(7)])
    assert split.equals(whole)
    assert whole["covariant"].to_pylist()[3] is None
    for minibatch in (0, 1):
        mine = [
            row
            for i, row in enumerate(whole["covariant"].to_pylist())
            if i % 2 == minibatch and row is not None
        ]
        tokens = [token for row in mine for token in row]
        assert sum(tokens) == int(0.05 * len(tokens))


def test_the_highest_covariances_match_a_plain_computation():
    table = _covariance_table().filter(pa.array([i != 3 for i in range(40)]))
    given = choose_covariant(context(), table, minibatches=2, fraction=0.05)
    for minibatch in (0, 1):
        part = [row for row in given.to_pylist() if row["minibatch"] == minibatch]
        tokens = [
            (logprob, row["advantage"], chosen)
            for row in part
            for logprob, chosen in zip(row["old_logprobs"], row["covariant"], strict=True)
        ]
        mean_lp, mean_a = (sum(t[i] for t in tokens) / len(tokens) for i in (0, 1))
        order = sorted(tokens, key=lambda t: -(t[0] - mean_lp) * (t[1] - mean_a))
        assert all(chosen for *_, chosen in order[: int(0.05 * len(tokens))])


@dataclass
class Recorder:
    """A trainer that records its batches."""

    batches: list = field(default_factory=list)

    def update(self, batches, loss, aggregate, on_nonfinite=None):
        self.batches += batches
        return {"loss": 1.0}


def _policy_table(**changes):
    given = {
        "prompt_ids": [[1], [1, 2], [3]],
        "response_ids": [[4, 5], [6], [7]],
        "rollout_logprobs": [[-1.0, -2.0], [-1.0], [-1.0]],
        "old_logprobs": [[-1.0, -2.0], [-1.5], [-1.0]],
        "advantage": [1.0, -1.0, None],
        "minibatch": [0, 1, 0],
    }
    return rows(**given | changes)


def _loss(inputs):
    return TokenLoss(loss=inputs.logprobs)


def test_rows_without_an_advantage_do_not_reach_the_trainer():
    ctx = context(Recorder())
    update_policy(ctx, _policy_table(), loss=_loss, minibatches=2)
    first, second = ctx.resource.batches
    assert (first.advantages.tolist(), second.advantages.tolist()) == ([1.0, 1.0], [-1.0])
    assert first.mask is None
    assert ctx.metrics["policy/loss"].value == 1.0


def test_columns_that_the_loss_names_reach_it_per_token():
    ctx = context(Recorder())
    mask = [[True, False], [True], [True]]
    table = _policy_table(
        mine=[0.5, 0.25, 0.0],
        each=[[1.0, 2.0], [3.0], [4.0]],
        response_mask=mask,
        minibatch=[0, 0, 0],
    )
    update_policy(ctx, table, loss=_loss, minibatches=1, columns=("mine", "each"))
    (batch,) = ctx.resource.batches
    assert batch.columns["mine"].tolist() == [0.5, 0.5, 0.25]
    assert batch.columns["each"].tolist() == [1.0, 2.0, 3.0]
    assert batch.mask.tolist() == [True, False, True]


def test_a_column_that_does_not_fit_the_tokens_is_refused():
    with pytest.raises(DataError, match="'each' has other lengths"):
        update_policy(
            context(Recorder()),
            _policy_table(each=[[1.0], [3.0], []]),
            loss=_loss,
            minibatches=1,
            columns=("each",),
        )


def test_the_mismatch_between_sampler_and_policy_is_logged():
    ctx = context(Recorder())
    update_policy(ctx, _policy_table(), loss=_loss, minibatches=2)
    kl = (
        0 + 0 + np.exp(-0.5) - 1 + 0.5
    ) / 3  # KL(sampler, policy): log sampler - log policy = 0.5 at one token
    assert ctx.metrics["mismatch/kl"].value == pytest.approx(kl, abs=1e-6)
    assert ctx.metrics["mismatch/max_ratio"].value == pytest.approx(np.exp(0.5))


def test_the_engines_log_probs_are_learned_from_as_they_are_and_no_mismatch_is_told_of_them():
    ctx, table = (
        context(Recorder()),
        _policy_table(minibatch=[0, 0, 0]).drop_columns(["old_logprobs"]),
    )
    update_policy(
        ctx,
        rollout_logprobs(context(), table),
        loss=_loss,
        minibatches=1,
        old_logprobs=ENGINES_LOGPROBS,
    )
    (batch,) = ctx.resource.batches
    assert batch.old_logprobs.tolist() == batch.rollout_logprobs.tolist() == [-1.0, -2.0, -1.0]
    assert not [name for name in ctx.metrics if name.startswith("mismatch/")], "nobody measured it"


def test_an_engine_that_is_the_policy_to_the_bit_is_told_to_have_no_mismatch():
    ctx, table = context(Recorder()), _policy_table()
    same = table.set_column(
        table.column_names.index("old_logprobs"), "old_logprobs", table["rollout_logprobs"]
    )
    update_policy(ctx, same, loss=_loss, minibatches=2)
    assert ctx.metrics["mismatch/kl"].value == 0


def test_an_engines_log_prob_that_is_not_finite_is_not_learned_from():
    table = _policy_table(rollout_logprobs=[[-1.0, float("nan")], [-1.0], [-1.0]]).drop_columns(
        ["old_logprobs"]
    )
    with pytest.raises(TrainingError, match="old_logprobs"):
        rollout_logprobs(context(), table)


def test_the_critic_learns_from_rows_that_have_returns():
    ctx = context(Recorder())
    table = _policy_table(values=[[0.1, 0.2], [0.3], [0.4]], returns=[[1.0, 2.0], None, [3.0]])
    update_critic(ctx, table, minibatches=2)
    first, second = ctx.resource.batches
    assert first.returns.tolist() == [1.0, 2.0, 3.0]
    assert first.old_values.tolist() == pytest.approx([0.1, 0.2, 0.4])
    assert len(second.rows) == 0


def wants_too_much(inputs, *, more):
    return TokenLoss(loss=inputs.logprobs)


def gives_a_mean(inputs):
    return TokenLoss(loss=inputs.logprobs.sum())


def averages(outcomes):
    return outcomes.rewards.mean()


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (partial(update_policy, minibatches=1, loss=wants_too_much), "more"),
        (partial(update_policy, minibatches=1, loss=gives_a_mean), "number a token"),
        (partial(update_policy, minibatches=1, loss=partial(ppo_clip, clip_low=2)), "clip_low"),
        (partial(estimate_advantage, advantage=averages), r"expected \[0\]"),
    ],
)
def test_an_option_that_cannot_work_fails_its_trial(fn, said):
    node = Node("mine", fn, role="policy")
    with pytest.raises(PlanError, match=f"node 'mine': its options fail.*{said}"):
        node.try_options()


def test_an_update_without_any_advantage_before_it_is_refused():
    source = _policy_table().drop_columns(["advantage"]).schema
    update = partial(update_policy, minibatches=1, loss=partial(policy_loss, surrogate=ppo_clip))
    dag = DAG((Role("policy", build_nothing),), (Node("mine", update, role="policy"),))
    with pytest.raises(PlanError, match=r"needs one of \['advantage', 'advantages'\]"):
        compile_chains(dag, ["w"], source)
