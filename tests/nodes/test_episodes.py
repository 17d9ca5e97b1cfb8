"""An episode counts as one, however many rows it has: in statistics, losses, mini-batches,
penalties and measures.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.algorithms import (
    KLController,
    TokenLoss,
    dr_grpo,
    gae,
    gmpo,
    grpo,
    gspo,
    opo,
    ppo_clip,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    sequence_mean_token_sum_norm,
    token_mean,
    value_clip,
)
from siirl_dask.config import TrainerConfig
from siirl_dask.coordinator.layout.balance import balance_groups
from siirl_dask.errors import PeerError
from siirl_dask.nodes import (
    draw_minibatches,
    estimate_advantage,
    estimate_token_advantages,
    mask_truncated,
    measure_answers,
    penalise_kl,
    penalise_overlong,
    take_greedy_baselines,
    update_critic,
    update_policy,
)
from siirl_dask.nodes.episodes.sequences import row_positions
from siirl_dask.tasks.tiny_model import tiny_model
from tests.nodes.episodes import N, episode, joined, table_of
from tests.nodes.test_learning_nodes import Recorder, context, on_workers
from tests.training.roles import critic, policy

TURNS = [(2, 3), (1, 2), (3, 0)]
AGGREGATIONS = {
    "token_mean": token_mean,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_mean_token_sum": sequence_mean_token_sum,
    "sequence_mean_token_sum_norm": partial(sequence_mean_token_sum_norm, length=16),
}


def of_group(*rewards, cuts):
    """One group whose first episode is cut, and whose others are one row each."""
    episodes = [episode(at, TURNS, reward=reward) for at, reward in enumerate(rewards)]
    return table_of(episodes, [cuts, *[()] * (len(rewards) - 1)])


def advantages_by_episode(table):
    found = {}
    for row in table.to_pylist():
        found.setdefault((row["episode_id"], row.get("agent")), set()).add(row["advantage"])
    return found


def test_a_long_episode_does_not_shift_the_statistics_of_its_group():
    """SkyRL #1278, Megatron-LM #2966: with rows counted, the episode of three rows would be
    three of six.
    """
    table = of_group(1.0, 0.0, 0.0, 0.0, cuts=(1, 2))
    found = advantages_by_episode(estimate_advantage(context(), table, advantage=grpo))
    assert {key[0]: value for key, (value,) in found.items()} == pytest.approx(
        {0: 1.5, 1: -0.5, 2: -0.5, 3: -0.5}, abs=1e-5
    )


def test_the_reward_of_an_episode_is_the_sum_of_its_rows():
    table = of_group(0.0, 0.0, cuts=(1, 2))
    table = table.set_column(
        table.column_names.index("reward"), "reward", pa.array([0.25, 0.5, 1.0, 0.5], pa.float32())
    )
    seen = []
    estimate_advantage(
        context(), table, advantage=lambda outcomes: seen.append(outcomes) or outcomes.rewards
    )
    assert seen[0].rewards.tolist() == [1.75, 0.5]
    assert seen[0].lengths.tolist() == [6, 6]


def test_every_segment_trains_on_its_episodes_advantage_at_its_own_tokens():
    """SkyRL #1492 and #1507: the last step's masked advantages, copied, were zeros where earlier
    steps had tokens.
    """
    table = table_of(
        [episode(0, [(1, 6), (5, 2), (2, 0)], reward=1.0), episode(1, TURNS)], [(1, 2), ()]
    )
    table = estimate_advantage(context(), table, advantage=grpo)
    ctx = context(Recorder())
    count = pa.array(table["response_ids"].combine_chunks().value_lengths())
    zeros = pa.array([[0.0] * n for n in count.to_pylist()], pa.large_list(pa.float32()))
    table = table.append_column("old_logprobs", zeros).append_column("rollout_logprobs", zeros)
    table = draw_minibatches(context(), table, minibatches=1, batch_size=1)
    update_policy(ctx, table, loss=policy_gradient_loss, minibatches=1)
    (batch,) = ctx.resource.batches
    learned = batch.advantages[batch.mask]
    assert learned.tolist() == pytest.approx([2**-0.5] * 8 + [-(2**-0.5)] * 6, abs=1e-5)


def policy_gradient_loss(inputs):
    return TokenLoss(loss=-inputs.advantages * inputs.logprobs)


def test_one_row_without_a_reward_leaves_its_whole_episode_out():
    table = of_group(3.0, 1.0, 0.0, cuts=(1, 2))
    rewards = pa.array([0.0, None, 3.0, 1.0, 0.0], pa.float32())
    table = table.set_column(table.column_names.index("reward"), "reward", rewards)
    found = estimate_advantage(context(), table, advantage=dr_grpo)["advantage"].to_pylist()
    assert found == [None, None, None, 0.5, -0.5]
    found = estimate_token_advantages(context(), table, advantage=reinforce_plus_plus, whiten=False)
    assert [row is None for row in found["advantages"].to_pylist()] == [True] * 3 + [False] * 2


def test_statistics_are_of_each_agent_by_itself():
    """Dr. MAS: rewards of agents differ in scale, and a common baseline would be nobody's."""
    episodes = [
        episode(at, TURNS, reward=reward * scale, agent=agent)
        for at, reward in enumerate([1.0, 0.0, 0.0, 0.0])
        for agent, scale in (("a", 1.0), ("b", 100.0))
    ]
    table = table_of(episodes, [(1,)] * len(episodes))
    found = advantages_by_episode(estimate_advantage(context(), table, advantage=dr_grpo))
    assert {key: value for key, (value,) in found.items() if key[0] < 2} == {
        (0, "a"): 0.75,
        (0, "b"): 75.0,
        (1, "a"): -0.25,
        (1, "b"): -25.0,
    }
    tokens = estimate_token_advantages(
        context(), table, advantage=reinforce_plus_plus_baseline, whiten=False
    )
    assert joined(tokens, "advantages")[1][-1] == 75.0


lists_of_turns = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=4)
groups_of_episodes = st.lists(
    st.tuples(lists_of_turns, st.sampled_from([0.0, 0.5, 1.0, 2.0])), min_size=2, max_size=6
)


@settings(max_examples=25, deadline=None)
@given(drawn=groups_of_episodes, data=st.data())
def test_cutting_an_episode_changes_no_advantage(drawn, data):
    episodes = [
        episode(at, turns, reward=reward, group=at // 3) for at, (turns, reward) in enumerate(drawn)
    ]
    cuts = [data.draw(st.sets(st.integers(1, len(turns)))) for turns, _ in drawn]
    shuffled = data.draw(st.permutations(range(sum(1 + len([c for c in own if c < len(one["turns"])])
                                                   for own, one in zip(cuts, episodes, strict=True)))))  # fmt: skip
    whole = table_of(episodes, values=lambda at, place: 0.1 * (at + place))
    parts = table_of(episodes, cuts, values=lambda at, place: 0.1 * (at + place)).take(
        list(shuffled)
    )
    for advantage in (grpo, dr_grpo, rloo, opo, partial(grpo, scale="batch")):
        one, other = (
            estimate_advantage(context(), table, advantage=advantage) for table in (whole, parts)
        )
        expected = one["advantage"].to_pylist()
        assert {key[0]: value for key, (value,) in advantages_by_episode(other).items()} == dict(
            enumerate(expected)
        )
    for advantage in (
        partial(gae, discount=0.9, gae_lambda=0.8),
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
    ):
        one, other = (
            estimate_token_advantages(context(), table, advantage=advantage, whiten=False)
            for table in (whole, parts)
        )
        for name in ("advantages", "returns"):
            assert joined(other, name) == joined(one, name)


def test_what_follows_a_segment_is_the_next_one_not_the_end():
    """A critic's value after a segment's last token is the next segment's first: GAE over each
    alone would see 0.
    """
    table = table_of(
        [episode(0, [(1, 0), (1, 0)], reward=1.0)],
        [(1,)],
        values=lambda at, place: [0.4, 0.7][place],
    )
    found = estimate_token_advantages(
        context(), table, advantage=partial(gae, discount=1.0, gae_lambda=0.0), whiten=False
    )
    assert joined(found, "advantages")[0] == pytest.approx([0.7 - 0.4, 1.0 - 0.7])


def test_the_reward_of_a_segment_without_tokens_of_the_policy_falls_on_the_one_before():
    table = table_of(
        [episode(0, [(2, 0), (0, 2)], reward=1.0), episode(1, [(1, 0), (0, 0)], reward=1.0)],
        [(1,), (1,)],
    )
    found = estimate_token_advantages(context(), table, advantage=reinforce_plus_plus, whiten=False)
    assert [row[:2] for row in joined(found, "advantages")] == [[1.0, 1.0], [1.0]]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=8, max_size=8),
    split=st.booleans(),
    step=st.integers(0, 99),
)
def test_the_number_of_optimizer_steps_does_not_depend_on_how_long_episodes_are(
    lengths, split, step
):
    """SkyRL #1529: mini-batches of so many rows made more steps of longer episodes."""
    episodes = [episode(at, [(1, 0)] * length) for at, length in enumerate(lengths)]
    table = table_of(episodes, [range(1, length) for length in lengths])
    ctx = context()
    ctx.step = step
    drawn = draw_minibatches(
        ctx, table, minibatches=2, batch_size=2, n=N, split_groups=split
    ).to_pylist()
    by_minibatch = [
        {row["episode_id"] for row in drawn if row["minibatch"] == at} for at in range(2)
    ]
    assert [len(episodes) for episodes in by_minibatch] == [4, 4]
    assert not set.intersection(*by_minibatch), (
        "a segment is trained on in another step than its episode"
    )


@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 99)), min_size=1),
    owners=st.integers(1, 4),
)
def test_segments_of_an_episode_never_part_where_groups_are_whole(rows, owners):
    groups, samples, tokens = (np.array(column) for column in zip(*rows, strict=True))
    homes = np.arange(len(rows)) % owners
    owner = balance_groups(tokens, groups, owners, homes, None)
    for number in np.unique(groups * N + samples):
        assert len({*owner[groups * N + samples == number].tolist()}) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("episodes") / "model", seed=1)


def learning_table(cuts, advantage=grpo):
    episodes = [
        episode(at, [(2, 1), (1 + at, 2), (3, 0)], reward=float(at == 1), seed=at)
        for at in range(4)
    ]
    table = table_of(
        episodes,
        cuts,
        old_logprobs=lambda at, place: -3.0 - 0.1 * ((at + place) % 5),
        rollout_logprobs=lambda at, place: -3.0,
        values=lambda at, place: 0.05 * place,
        returns=lambda at, place: 0.1 * at,
    )
    return draw_minibatches(context(), estimate_advantage(context(), table, advantage=advantage), minibatches=1,
                            batch_size=1)  # fmt: skip


CUTS = [(1, 2), (), (2,), (1,)]


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("budget", [30, 100_000])
def test_cutting_episodes_changes_neither_loss_nor_gradient(folder, name, budget):
    """SkyRL #1278: in a sequence mean a segment counted as much as a whole episode."""
    config = TrainerConfig(lr=1e-3, max_tokens_per_micro_batch=budget)
    seen = []
    for cuts in (None, CUTS):
        trainer = policy(folder, config)
        ctx = context(trainer)
        update_policy(
            ctx,
            learning_table(cuts),
            loss=ppo_clip_loss,
            minibatches=1,
            aggregate=AGGREGATIONS[name],
        )
        gradients = trainer._learner.optimizer.gradients.flat.clone()
        seen.append(
            (ctx.metrics["policy/loss"].value, ctx.metrics["policy/grad_norm"].value, gradients)
        )
        trainer.close()
    (loss, norm, gradients), (cut_loss, cut_norm, cut_gradients) = seen
    assert cut_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert cut_norm == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(cut_gradients, gradients, atol=1e-6, rtol=1e-4)


ppo_clip_loss = partial(ppo_clip, clip_low=0.2, clip_high=0.2)


def test_cutting_episodes_does_not_change_what_a_critic_learns(folder):
    seen = []
    for cuts in (None, CUTS):
        learner = critic(folder, TrainerConfig(lr=1e-3))
        ctx = context(learner)
        aggregate = sequence_mean_token_mean
        update_critic(
            ctx, learning_table(cuts), loss=value_clip, minibatches=1, aggregate=aggregate
        )
        seen.append([ctx.metrics[f"critic/{name}"].value for name in ("loss", "grad_norm")])
        learner.close()
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


def test_segments_on_several_workers_are_still_one_episode():
    table = learning_table(CUTS)
    count = table.num_rows
    owners = np.arange(count) % 3
    order = np.concatenate([np.flatnonzero(owners == worker) for worker in range(3)])
    recorders = [Recorder() for _ in range(3)]
    parts = [table.filter(pa.array(owners == worker)) for worker in range(3)]
    on_workers(partial(update_policy, loss=policy_gradient_loss, minibatches=1), parts, recorders)
    alone = context(Recorder())
    update_policy(alone, table, loss=policy_gradient_loss, minibatches=1)
    (whole,) = alone.resource.batches
    for name in ("starts", "lengths"):
        found = torch.cat([getattr(recorder.batches[0].episodes, name) for recorder in recorders])
        assert found.tolist() == getattr(whole.episodes, name)[order].tolist()
    assert whole.episodes.lengths.tolist() == [6, 6, 6, 7, 8, 8, 9, 9]
    assert whole.episodes.starts.tolist() == [0, 2, 3, 0, 0, 5, 0, 2]


@pytest.mark.parametrize("surrogate", [gspo, gmpo], ids=["gspo", "gmpo"])
def test_the_ratio_of_a_sequence_is_a_segments_and_its_episode_counts_as_one(folder, surrogate):
    """SkyRL #1278, #1432: a ratio over a turn is not one over the episode. Here it is a row's,
    as docs say.
    """
    seen = {}

    def loss(inputs):
        shift = torch.cat(
            [torch.full((count,), size) for count, size in zip(lengths, shifts, strict=True)]
        )
        result = surrogate(
            replace(inputs, old_logprobs=inputs.logprobs.detach() - shift),
            clip_low=0.9,
            clip_high=0.9,
        )
        seen["ratio"] = result.metrics["ratio"]
        return result

    # log-ratios to the old policy: two segments, and an episode
    shifts, lengths = ([0.3, -0.2, 0.0], [2, 4, 3])
    table = table_of(
        [episode(0, [(2, 0), (4, 0)], reward=1.0), episode(1, [(3, 0)])],
        [(1,), ()],
        old_logprobs=lambda at, place: 0.0,
        rollout_logprobs=lambda at, place: 0.0,
    )
    table = draw_minibatches(context(), estimate_advantage(context(), table, advantage=dr_grpo), minibatches=1,
                             batch_size=1)  # fmt: skip
    ctx = context(policy(folder, TrainerConfig(lr=1e-3)))
    update_policy(ctx, table, loss=loss, minibatches=1, aggregate=sequence_mean_token_mean)
    assert seen["ratio"].tolist() == pytest.approx(
        [np.exp(0.3)] * 2 + [np.exp(-0.2)] * 4 + [1.0] * 3, rel=1e-5
    )
    first = -0.5 * (2 * np.exp(0.3) + 4 * np.exp(-0.2)) / 6
    assert ctx.metrics["policy/loss"].value == pytest.approx((first + 0.5) / 2, abs=1e-6)


def test_a_penalty_on_length_is_of_the_episode_and_falls_due_once():
    """With rows penalised, an episode of many short segments would be free, and one of long ones
    pay several times.
    """
    episodes = [episode(0, [(4, 0), (4, 0)], reward=1.0), episode(1, [(4, 0)], reward=1.0)]
    whole, parts = table_of(episodes), table_of(episodes, [(1,), ()])
    node = partial(penalise_overlong, max_length=10, buffer=4)
    assert node(context(), whole)["reward"].to_pylist() == [0.5, 1.0]
    assert node(context(), parts)["reward"].to_pylist() == [0.0, 0.5, 1.0]
    split, contexts = on_workers(node, [parts.slice(0, 1), parts.slice(1, 2)])
    assert split["reward"].to_pylist() == [0.0, 0.5, 1.0]
    assert (
        sum(ctx.metrics["reward/overlong_penalty"].weight for ctx in contexts if ctx.metrics) == 2
    )


def test_an_episode_that_was_cut_short_is_masked_with_all_its_rows_and_by_its_last_reason():
    table = table_of([episode(0, [(1, 0), (2, 0)]), episode(1, [(1, 0), (1, 1)])], [(1,), (1,)])
    table = table.append_column("finish_reason", pa.array(["stop", "length", "length", "stop"]))
    masked = mask_truncated(context(), table)
    assert masked["response_mask"].to_pylist() == [[False], [False, False], [True], [True, False]]


def test_the_kl_penalty_of_all_segments_counts_and_the_controller_sees_episodes():
    """SkyRL #1432 refuses a KL in the reward of step-wise rows: only the last step's was
    subtracted.
    """

    class Controller(KLController):
        def __init__(self, coefficient):
            super().__init__(coefficient)
            self.seen = []

        def update(self, divergence, samples):
            self.seen.append((divergence, samples))

    episodes = [episode(0, [(2, 1), (2, 0)], reward=1.0), episode(1, [(2, 0)], reward=0.0)]
    logprobs = {
        "old_logprobs": lambda at, place: -1.0,
        "reference_logprobs": lambda at, place: -1.5,
    }
    seen = []
    for cuts in (None, [(1,), ()]):
        controller, outcomes = Controller(0.1), []
        table = penalise_kl(context(controller), table_of(episodes, cuts, **logprobs))
        estimate_advantage(
            context(), table, advantage=lambda given, to=outcomes: to.append(given) or given.rewards
        )
        assert outcomes[0].rewards.tolist() == pytest.approx([1.0 - 4 * 0.05, -2 * 0.05])
        seen += controller.seen
    assert seen == [(0.5, 2), (0.5, 2)]


def test_a_greedy_episode_of_several_rows_is_one_baseline():
    table = table_of(
        [episode(0, TURNS, reward=1.0), episode(1, TURNS, reward=0.5, group=0)], [(), (1, 2)]
    )
    rewards = pa.array([1.0, 0.25, 0.25, 0.0], pa.float32())
    table = table.set_column(table.column_names.index("reward"), "reward", rewards)
    table = table.append_column("greedy", pa.array([False, True, True, True]))
    sampled = take_greedy_baselines(context(), table)
    assert estimate_advantage(context(), sampled, advantage=remax)["advantage"].to_pylist() == [0.5]


def test_pass_at_k_counts_episodes():
    """SkyRL's step-wise evaluation: rows counted, one long failure would be several samples."""
    table = of_group(0.0, 1.0, cuts=(1, 2))
    table = table.append_column("response", pa.array(["a", "b", "c", "d"]))
    ctx = context()
    measure_answers(ctx, table, n=2, k=(1, 2), alone=True)
    told = {name: metric.value for name, metric in ctx.metrics.items()}
    assert told == {"mean@2": 0.5, "pass@1": 0.5, "pass@2": 1.0, "maj@2": 0.0}


def test_places_from_a_peer_are_checked():
    table = of_group(1.0, 0.0, cuts=(1,))
    ctx = context()
    for message in (b"123", (np.ones(5, "<i8") * -1).tobytes()):
        ctx.peers = type(
            "Peers", (), {"all_gather": lambda self, own, message=message: [own, message]}
        )()
        with pytest.raises(PeerError, match="received"):
            row_positions(ctx, table, torch.ones(3, dtype=torch.int64))


def test_agents_of_one_episode_are_sequences_of_their_own():
    episodes = [episode(0, [(1, 0), (2, 0)], agent="a"), episode(0, [(4, 0), (3, 0)], agent="b")]
    table = table_of(episodes, [(1,), (1,)])
    found = row_positions(context(), table, torch.tensor([1, 2, 4, 3]))
    assert found.spans.lengths.tolist() == [3, 3, 7, 7]
    assert found.spans.starts.tolist() == [0, 1, 0, 4]
    assert found.is_last.tolist() == [False, True, False, True]


def test_a_worker_without_rows_takes_part():
    table = learning_table(CUTS).slice(0, 0).drop_columns(["advantage", "minibatch"])
    table = estimate_advantage(
        context(), penalise_overlong(context(), table, max_length=9), advantage=grpo
    )
    table = estimate_token_advantages(context(), table.drop_columns(["returns"]), advantage=gae)
    table = draw_minibatches(context(), table, minibatches=2, batch_size=1)
    ctx = context(Recorder())
    update_policy(ctx, table, loss=policy_gradient_loss, minibatches=2)
    assert [len(batch.rows) for batch in ctx.resource.batches] == [0, 0]
    assert [batch.episodes.starts.tolist() for batch in ctx.resource.batches] == [[], []]
    measure_answers(
        context(), table.append_column("response", pa.array([], pa.string())), n=2, k=(1,)
    )
