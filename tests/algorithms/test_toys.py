"""Games of seconds that an algorithm learns, with bounds that a wrong sign or advantages of another
agent would miss.

Policies are tables of logits. A turn is one token, or two, and the update is the loss that the
algorithm is meant for.
"""

from functools import partial

import pytest
import torch

from siirl_dask.algorithms import (
    AgentOutcomes,
    LossInputs,
    RoleBaselines,
    TurnAdvantages,
    dr_mas,
    gigpo,
    grpo,
    happo_clip,
    hierarchical_grpo,
    magrpo,
    marft,
    marft_tokens,
    mt_grpo,
    ppo_clip,
    srpo_rewards,
    turn_clip,
    turn_gae,
    turn_returns,
)
from tests.algorithms.test_advantages import outcomes_of as responses_of
from tests.algorithms.turns import Row, outcomes_of, turn

EPISODES = 64


class Table:
    """A policy that is a table of logits, [states, actions], with its optimizer."""

    def __init__(self, states, actions, *, seed, lr=0.3):
        self.logits = torch.zeros(states, actions, requires_grad=True)
        self.generator = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.SGD([self.logits], lr)

    def sample(self, states):
        return torch.multinomial(
            self.logits.detach()[states].softmax(-1), 1, generator=self.generator
        ).squeeze(1)

    def logprobs(self, states, actions):
        return self.logits[states].log_softmax(-1)[torch.arange(len(states)), actions]

    def probability(self, state, action):
        return float(self.logits.detach()[state].softmax(-1)[action])

    def learn(self, states, actions, advantages, loss=ppo_clip, passes=4, **columns):
        """Take a step's passes over tokens, each a turn; gradients are means over episodes."""
        old = self.logprobs(states, actions).detach()
        columns = {"token_turns": torch.zeros(len(states), dtype=torch.int32)} | columns
        for _ in range(passes):
            inputs = LossInputs(
                logprobs=self.logprobs(states, actions),
                old_logprobs=old,
                advantages=advantages,
                rollout_logprobs=old,
                entropy=torch.zeros(len(states)),
                offsets=torch.arange(len(states) + 1),
                columns=columns,
            )
            self.optimizer.zero_grad()
            (loss(inputs).loss.sum() / EPISODES).backward()
            self.optimizer.step()


TURNS = 3
RIGHT = [2, 0, 1]


def play_chain(advantage, *, seed, credit=lambda advantages: advantages, steps=40):
    """Learn to pull the right arm of three in each of three turns, each rewarded; return the
    share of right turns.
    """
    policy, values = Table(TURNS, 3, seed=seed, lr=1.0), torch.zeros(TURNS)
    states = torch.arange(TURNS).repeat(EPISODES)
    for _ in range(steps):
        actions = policy.sample(states)
        rewards = (actions == torch.tensor(RIGHT)[states]).float().view(EPISODES, TURNS)
        rows = [
            Row(at // 8, at, tuple(turn(float(r), 1 + s, [values[s]]) for s, r in enumerate(of)))
            for at, of in enumerate(rewards)
        ]
        given = advantage(outcomes_of(rows, values=True))
        values = 0.5 * values + 0.5 * given.returns.view(EPISODES, TURNS).mean(0)
        policy.learn(
            states, actions, credit(given.advantages.view(EPISODES, TURNS)).flatten(), turn_clip
        )
    return sum(policy.probability(state, right) for state, right in enumerate(RIGHT)) / TURNS


CREDIT = {
    "turn_returns": turn_returns,
    "turn_returns of the same turn": partial(turn_returns, same_turn=True),
    "gigpo": partial(gigpo, discount=0.5),
    "mt_grpo": mt_grpo,
    "turn_gae": partial(turn_gae, discount=0.5, gae_lambda=0.5),
}


def of_states(outcomes):
    """GiGPO without its comparison of episodes, which gives all turns of an episode the same."""
    given, episodes = gigpo(outcomes, discount=0.5), gigpo(outcomes, weight=0.0)
    return TurnAdvantages(advantages=given.advantages - episodes.advantages, returns=given.returns)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("advantage", CREDIT.values(), ids=CREDIT)
def test_credit_of_turns_finds_each_turns_arm(advantage, seed):
    assert play_chain(advantage, seed=seed) > 0.9


@pytest.mark.parametrize("advantage", CREDIT.values(), ids=CREDIT)
def test_credit_of_another_turn_or_sign_finds_none(advantage):
    own = of_states if advantage is CREDIT["gigpo"] else advantage
    assert play_chain(own, seed=0, credit=lambda advantages: advantages.roll(1, 1)) < 0.75
    assert play_chain(advantage, seed=0, credit=lambda advantages: -advantages) < 0.1


ANSWERS = [3, 1, 0, 2]  # what the second agent must say to each word of the first
WORTH = [0.2, 0.4, 1.0, 0.6]


def play_pair(advantage, *, seed, swap=False, tokens=1, steps=60):
    """Two agents: the second hears the first one's word, and their reward is the word's worth if
    the answer is right.

    Returns the reward that they can expect. With two tokens the first of each turn says nothing.
    """
    first, second = Table(1, 4, seed=seed, lr=1.0), Table(4, 4, seed=seed + 100, lr=1.0)
    before, after = torch.zeros(1), torch.zeros(4)
    zeros = torch.zeros(EPISODES, dtype=torch.int64)
    for _ in range(steps):
        words = first.sample(zeros)
        answers = second.sample(words)
        rewards = torch.where(
            answers == torch.tensor(ANSWERS)[words], torch.tensor(WORTH)[words], torch.zeros(())
        )
        rows = []
        for at in range(EPISODES):
            rows.append(Row(0, at, (turn(0.0, values=[float(before[0])] * tokens),), 0))
            rows.append(
                Row(
                    0, at, (turn(float(rewards[at]), values=[float(after[words[at]])] * tokens),), 1
                )
            )
        given = advantage(outcomes_of(rows, values=True))
        of_agents = [
            numbers.view(EPISODES, 2, -1)[:, :, -1] for numbers in (given.advantages, given.returns)
        ]
        advantages, returns = (of_agents[0].flip(1) if swap else of_agents[0]), of_agents[1]
        before = before + 0.3 * (returns[:, 0].mean() - before)
        for word in range(4):
            if (words == word).any():
                after[word] += 0.3 * (returns[words == word, 1].mean() - after[word])
        first.learn(zeros, words, advantages[:, 0], turn_clip)
        second.learn(words, answers, advantages[:, 1], turn_clip)
    return sum(
        first.probability(0, w) * second.probability(w, ANSWERS[w]) * WORTH[w] for w in range(4)
    )


MARFT = {
    "marft": (partial(marft, gae_lambda=0.0), 1),
    "marft_tokens": (partial(marft_tokens, gae_lambda=0.0), 2),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("advantage", "tokens"), MARFT.values(), ids=MARFT)
def test_a_team_with_one_critic_finds_the_best_word_and_its_answer(advantage, tokens, seed):
    normalised = partial(_whitened, advantage)
    # the second best word is worth .6
    assert play_pair(normalised, seed=seed, tokens=tokens) > 0.85


@pytest.mark.parametrize(("advantage", "tokens"), MARFT.values(), ids=MARFT)
def test_with_each_others_advantages_they_find_nothing(advantage, tokens):
    assert play_pair(partial(_whitened, advantage), seed=0, tokens=tokens, swap=True) < 0.5


def _whitened(advantage, outcomes):
    """The advantages of all agents normalised together, as MARFT does."""
    given = advantage(outcomes)
    scaled = (given.advantages - given.advantages.mean()) / (given.advantages.std() + 1e-8)
    return type(given)(advantages=scaled, returns=given.returns)


PAYOFF = torch.tensor([[0.2, 0.0, 0.0], [0.0, 0.3, 0.0], [0.0, 0.0, 1.0]])


def play_matrix(learn, *, seed, steps=60):
    """Two agents choose at the same time and are paid alike; return the payoff that they can
    expect.

    ``learn(agents, actions, rewards)`` updates both from a step's episodes.
    """
    agents = [Table(1, 3, seed=seed, lr=0.5), Table(1, 3, seed=seed + 100, lr=0.5)]
    zeros = torch.zeros(EPISODES, dtype=torch.int64)
    for _ in range(steps):
        actions = [agent.sample(zeros) for agent in agents]
        learn(agents, actions, PAYOFF[actions[0], actions[1]])
    chances = [agent.logits.detach()[0].softmax(-1) for agent in agents]
    return float(chances[0] @ PAYOFF @ chances[1])


def learn_magrpo(sign, agents, actions, rewards):
    rows = [
        Row(at // 16, at, (turn(float(reward) if agent else 0.0),), agent)
        for at, reward in enumerate(rewards)
        for agent in range(2)
    ]
    advantages = sign * magrpo(outcomes_of(rows)).advantages.view(EPISODES, 2)
    zeros = torch.zeros(EPISODES, dtype=torch.int64)
    for at, agent in enumerate(agents):
        agent.learn(zeros, actions[at], 4 * advantages[:, at])


def test_a_team_without_a_critic_agrees_on_the_best():
    assert min(play_matrix(partial(learn_magrpo, 1), seed=seed) for seed in range(2)) > 0.9
    assert play_matrix(partial(learn_magrpo, -1), seed=0) < 0.1


def learn_happo(agents, actions, rewards, *, changes=None):
    """Update one agent after the other, the second against what the first has become."""
    advantages = grpo(responses_of([rewards.tolist()]))
    zeros, change = torch.zeros(EPISODES, dtype=torch.int64), torch.zeros(EPISODES)
    for at, agent in enumerate(agents):
        old = agent.logprobs(zeros, actions[at]).detach()
        agent.learn(zeros, actions[at], advantages, happo_clip, policy_change=change)
        change = change + agent.logprobs(zeros, actions[at]).detach() - old
    if changes is not None:
        changes.append(float(change.abs().max()))


def test_agents_that_are_updated_one_by_one_agree_on_the_best():
    changes = []
    assert (
        min(play_matrix(partial(learn_happo, changes=changes), seed=seed) for seed in range(2))
        > 0.9
    )
    assert max(changes) > 0.1  # so that the ratios were not all 1


def test_the_ratio_of_earlier_agents_makes_the_second_ones_objective_that_of_the_new_team():
    """Over all joint actions, weighted by the old team's chances, the loss is the expectation
    under the new one.
    """
    old = [torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])]
    new = [torch.tensor([0.45, 0.3, 0.25]), torch.tensor([0.22, 0.18, 0.6])]
    first, second = (
        grid.flatten() for grid in torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")
    )
    inputs = LossInputs(
        logprobs=new[1][second].log(),
        old_logprobs=old[1][second].log(),
        advantages=PAYOFF[first, second],
        rollout_logprobs=old[1][second].log(),
        entropy=torch.zeros(9),
        offsets=torch.tensor([0, 9]),
        columns={"policy_change": new[0][first].log() - old[0][first].log()},
    )
    loss = happo_clip(inputs, clip_low=0.5, clip_high=0.5).loss
    torch.testing.assert_close(
        (old[0][first] * old[1][second] * -loss).sum(), new[0] @ PAYOFF @ new[1]
    )


def play_apart(advantages_of, *, seed=0, steps=40):
    """Two agents, each with a bandit of its own, paid on different scales; return the chances of
    their best arms.
    """
    agents = [Table(1, 3, seed=seed), Table(1, 3, seed=seed + 100)]
    zeros = torch.zeros(EPISODES, dtype=torch.int64)
    for _ in range(steps):
        actions = [agent.sample(zeros) for agent in agents]
        rewards = torch.stack([(actions[0] == 2).float(), 100 + 50 * (actions[1] == 1).float()], 1)
        rows = [Row(0, at, (), agent) for at in range(EPISODES) for agent in range(2)]
        given = advantages_of(rows, rewards.flatten()).view(EPISODES, 2)
        for at, agent in enumerate(agents):
            agent.learn(zeros, actions[at], given[:, at])
    return agents[0].probability(0, 2), agents[1].probability(0, 1)


def by_agent(rows, rewards):
    return dr_mas(AgentOutcomes(rows=outcomes_of(rows).rows, rewards=rewards, names=("a", "b")))


def test_with_statistics_of_its_own_each_agent_learns():
    assert min(play_apart(by_agent)) > 0.9
    together = play_apart(lambda rows, rewards: grpo(responses_of([rewards.tolist()])))
    assert together[0] < 0.9  # whatever it does, it got less than the other one


def test_proposers_and_solvers_learn_each_from_its_own_comparison():
    """A proposal's quality is the proposer's affair; solvers answer it right or wrong."""
    proposer, solver = Table(1, 3, seed=0), Table(3, 3, seed=100)
    quality, answers = torch.tensor([0.0, 5.0, 2.0]), torch.tensor([1, 2, 0])
    for _ in range(60):
        proposals = proposer.sample(torch.zeros(16, dtype=torch.int64))
        asked = proposals.repeat_interleave(4)
        given = solver.sample(asked)
        right = (given == answers[asked]).float()
        rows = [
            row
            for at in range(16)
            for row in [
                Row(at // 8, at, ()),
                *(Row(at // 8, at, (), agent=1, part=k) for k in range(4)),
            ]
        ]
        rewards = torch.cat([quality[proposals][:, None], right.view(16, 4)], 1)
        outcomes = AgentOutcomes(
            rows=outcomes_of(rows).rows,
            rewards=rewards.flatten(),
            names=("proposer", "solver"),
            proposals=torch.arange(16).repeat_interleave(5),
        )
        advantages = hierarchical_grpo(outcomes, proposer="proposer", mean_of_answers=True).view(
            16, 5
        )
        proposer.learn(torch.zeros(16, dtype=torch.int64), proposals, 4 * advantages[:, 0])
        solver.learn(asked, given, advantages[:, 1:].flatten())
    assert proposer.probability(0, 1) > 0.9
    assert solver.probability(1, 2) > 0.9


# the saddle: row 0, column 1, value .5
GAME = torch.tensor([[0.9, 0.5, 0.8], [0.3, -0.9, 0.9], [0.1, -0.2, -0.5]])


def play_zero_sum(role_of, *, seed=0, sign=1, steps=100):
    """Self-play of a game that favours one side: chances of the saddle, the baselines, and the
    advantages' spread.
    """
    players, held = [Table(1, 3, seed=seed), Table(1, 3, seed=seed + 100)], RoleBaselines()
    zeros, spread = torch.zeros(EPISODES, dtype=torch.int64), 0.0
    for _ in range(steps):
        actions = [player.sample(zeros) for player in players]
        payoff = GAME[actions[0], actions[1]]
        roles, rewards = (
            [role_of(p) for _ in range(EPISODES) for p in range(2)],
            torch.stack([payoff, -payoff], 1),
        )
        advantages = torch.tensor(held.advantages(rewards.flatten().tolist(), roles)).view(
            EPISODES, 2
        )
        held.update(zip(roles, rewards.flatten().tolist(), strict=True))
        spread = float(advantages.square().mean())
        for at, player in enumerate(players):
            player.learn(zeros, actions[at], sign * advantages[:, at])
    return players[0].probability(0, 0) * players[1].probability(0, 1), held.baselines, spread


def test_self_play_with_a_baseline_for_each_role_finds_the_saddle():
    chance, baselines, spread = play_zero_sum(["first", "second"].__getitem__)
    assert chance > 0.9
    assert baselines["first"] == pytest.approx(0.5, abs=0.1)
    assert baselines["second"] == pytest.approx(-0.5, abs=0.1)
    _, _, shared = play_zero_sum(lambda player: "both")
    assert spread < shared / 4  # one baseline for both sides is that of none
    assert play_zero_sum(["first", "second"].__getitem__, sign=-1)[0] < 0.1


def climb(rewards_of, *, steps=60):
    """Learn to stand at place 12 of 13, from around place 2; only there is success. Return its
    chance.
    """
    policy = Table(1, 13, seed=0, lr=0.5)
    with torch.no_grad():
        policy.logits[0] = -0.3 * (torch.arange(13) - 2.0).abs()
    zeros = torch.zeros(EPISODES, dtype=torch.int64)
    for _ in range(steps):
        places = policy.sample(zeros)
        policy.learn(zeros, places, grpo(responses_of([rewards_of(places).tolist()])))
    return policy.probability(0, 12)


def test_failures_that_look_like_successes_lead_to_them():
    def by_likeness(places):
        rewards = (places == 12).float()
        failed = places != 12
        if not failed.all():
            rewards[failed] = srpo_rewards((12 - places[failed]).double())
        return rewards

    assert climb(by_likeness) > 0.9
    assert climb(lambda places: -by_likeness(places)) < 0.01
