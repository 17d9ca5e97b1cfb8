"""Estimates advantages of rows or of tokens, and draws mini-batches.

A row without a reward (its reward function failed, and ``rewards.max_failures`` allowed it) gets no advantage and does
not count in those of others. TrainingError for an advantage that is not finite, unless ``run.on_nan=skip``.

Where episodes have several rows (``episodes.py``), an episode counts once, in a group of its agent's: its reward is the
sum of its rows', one without a reward leaves all of them out.
"""

from __future__ import annotations

from collections.abc import Callable
from math import fsum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from siirl_dask.algorithms import Outcomes, TokenAdvantages, TokenOutcomes, moments, row_sums, whitened
from siirl_dask.context import Context
from siirl_dask.errors import DataError
from siirl_dask.nodes.episodes import EPISODE, episodes_of, groups_of, whole_episodes
from siirl_dask.nodes.nonfinite import check_finite
from siirl_dask.nodes.packed_table import packed, ragged, response_mask, scatter_valid, values
from siirl_dask.planner import Changes, columns
from siirl_dask.schema import (
    ADVANTAGE,
    ADVANTAGES,
    AGENT,
    COLLISION_PROBS,
    EPISODE_ID,
    GREEDY,
    GREEDY_REWARD,
    GROUP_ID,
    KL_PENALTY,
    MINIBATCH,
    OLD_LOGPROBS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    RETURNS,
    REWARD,
    REWARD_PARTS,
    ROW_ID,
    TYPES,
    VALUES,
    fields,
)

_DRAW = -1  # stands for a row id in the seed of a draw that belongs to the step as a whole


def _try_rows(*, advantage: Callable[[Outcomes], Tensor], parts: tuple[str, ...] = ()) -> None:
    none, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    outcomes = Outcomes(rewards=none, group_ids=ids, lengths=ids, baselines=none, parts=dict.fromkeys(parts, none))
    _check_count(advantage(outcomes), "advantages")


def _try_tokens(
    *, advantage: Callable[[TokenOutcomes], TokenAdvantages], whiten: bool = True, probabilities: bool = False
) -> None:
    none = torch.zeros(0)
    outcomes = TokenOutcomes(
        rewards=none,
        group_ids=none.long(),
        offsets=torch.zeros(1).long(),
        mask=none.bool(),
        values=none,
        logprobs=none if probabilities else None,
        collision=none if probabilities else None,
    )
    estimated = advantage(outcomes)
    _check_count(estimated.advantages, "advantages")
    _check_count(estimated.returns, "returns")


def _learns_alone(*, advantage: Callable[[Outcomes], Tensor], parts: tuple[str, ...] = ()) -> bool:
    """Return False for an advantage that compares a prompt's samples: beside none, a sample of reward 0 has 0."""
    prompts = torch.arange(2)
    apart = advantage(_two_samples(prompts, parts))
    together = advantage(_two_samples(torch.zeros_like(prompts), parts))
    if torch.equal(apart, together):
        return True
    return bool(apart[0] != 0)


def _two_samples(group_ids: Tensor, parts: tuple[str, ...]) -> Outcomes:
    rewards = torch.tensor([0.0, 1.0])
    return Outcomes(
        rewards=rewards,
        parts=dict.fromkeys(parts, rewards),
        group_ids=group_ids,
        lengths=torch.ones(2, dtype=torch.int64),
        baselines=torch.full((2,), 0.5),
    )


def _tokens_learn_alone(
    *, advantage: Callable[[TokenOutcomes], TokenAdvantages], whiten: bool = True, probabilities: bool = False
) -> bool:
    """Return whether the same holds for samples of one token; with ``whiten`` the batch's mean is a baseline."""
    if whiten:
        return True
    prompts = torch.arange(2)
    apart = advantage(_two_tokens(prompts)).advantages
    together = advantage(_two_tokens(torch.zeros_like(prompts))).advantages
    if torch.equal(apart, together):
        return True
    return bool(apart[0] != 0)


def _two_tokens(group_ids: Tensor) -> TokenOutcomes:
    return TokenOutcomes(
        rewards=torch.tensor([0.0, 1.0]),
        group_ids=group_ids,
        offsets=torch.arange(3),
        mask=torch.ones(2, dtype=torch.bool),
        values=torch.full((2,), 0.5),
        logprobs=torch.full((2,), 0.5).log(),
        collision=torch.full((2,), 0.5),
    )


def _check_count(values: Tensor, name: str) -> None:
    if values.shape != (0,):
        raise ValueError(f"{name} have shape {list(values.shape)}: expected [0]")


def _reads_parts(*, parts: tuple[str, ...], **options: object) -> Changes:
    return Changes(reads=(REWARD_PARTS,) if parts else ())


def _reads_probabilities(*, probabilities: bool = False, **options: object) -> Changes:
    return Changes(reads=(OLD_LOGPROBS, COLLISION_PROBS) if probabilities else ())


def _parts(table: pa.Table, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the named parts of the rows' rewards, [R] each."""
    if not names:
        return {}
    if KL_PENALTY in table.column_names:
        raise DataError(
            f"parts={[*names]}: a KL in the reward ({KL_PENALTY}) is in none of them; put it into the loss "
            "(algorithm.kl_coefficient), or leave it out"
        )
    parts_of_rows = [dict(parts or ()) for parts in table[REWARD_PARTS].to_pylist()]
    for row_id, parts in zip(table[ROW_ID].to_pylist(), parts_of_rows, strict=True):
        if lacking := [name for name in names if parts.get(name) is None]:
            raise DataError(
                f"the reward of row {row_id} has no part {lacking[0]!r} (it has: {sorted(parts)}): expected a reward "
                f"function that returns a dict with {[*names]} for every row"
            )
    return {name: torch.tensor([parts[name] for parts in parts_of_rows], dtype=torch.float32) for name in names}


@columns(
    reads=[REWARD, GROUP_ID, RESPONSE_IDS],
    optional=[RESPONSE_MASK, KL_PENALTY, GREEDY_REWARD, *EPISODE],
    writes=fields(ADVANTAGE),
    depends_on_options=_reads_parts,
    trial=_try_rows,
    learns_alone=_learns_alone,
)
def estimate_advantage(
    ctx: Context, table: pa.Table, *, advantage: Callable[[Outcomes], Tensor], parts: tuple[str, ...] = ()
) -> pa.Table:
    """Add one advantage a row, from ``advantage(Outcomes) -> [R]``. The node asks for rows=GROUPED: groups are whole.

    The sum of a row's token rewards (``kl_penalty``) is added to its reward. All rows of an episode have its advantage.
    ``parts`` names parts of a reward that is a dict, which ``Outcomes.parts`` then has; an episode's are the sums of
    its rows'. DataError for a row whose reward lacks one, and beside ``kl_penalty``, which is in none of them.
    """
    comparable = whole_episodes(table, REWARD, GREEDY_REWARD)
    scored = table.filter(comparable)
    episodes = episodes_of(scored)
    mask, offsets = response_mask(scored)
    rewards = values(scored[REWARD])
    if KL_PENALTY in scored.column_names:
        rewards = rewards + row_sums(packed(scored[KL_PENALTY])[0] * mask, offsets)
    outcomes = Outcomes(
        rewards=episodes.sums(rewards),
        group_ids=episodes.last(groups_of(scored)),
        lengths=episodes.sums(row_sums(mask.long(), offsets)),
        baselines=episodes.last(values(scored[GREEDY_REWARD])) if GREEDY_REWARD in scored.column_names else None,
        parts={name: episodes.sums(rewards_of) for name, rewards_of in _parts(scored, parts).items()},
        all_sum=ctx.all_sum,
    )
    estimated = pa.array(episodes.spread(advantage(outcomes)).numpy(), TYPES[ADVANTAGE])
    table = table.append_column(ADVANTAGE, scatter_valid(comparable, estimated))
    check_finite(ctx, table, ADVANTAGE)
    return table


@columns(
    reads=[REWARD, GROUP_ID, RESPONSE_IDS],
    optional=[RESPONSE_MASK, KL_PENALTY, VALUES, *EPISODE],
    writes=fields(ADVANTAGES, RETURNS),
    depends_on_options=_reads_probabilities,
    trial=_try_tokens,
    learns_alone=_tokens_learn_alone,
)
def estimate_token_advantages(
    ctx: Context,
    table: pa.Table,
    *,
    advantage: Callable[[TokenOutcomes], TokenAdvantages],
    whiten: bool = True,
    probabilities: bool = False,
) -> pa.Table:
    """Add an advantage and a return for each response token. The row's reward falls on its last token in the mask.

    The rows of an episode are one row here: its segments lie end to end, and what follows a segment's last token is the
    next one's first. With ``whiten``, advantages get mean 0 and variance 1 over the tokens of all the role's workers.
    ``probabilities`` brings log-probs and collision probabilities, which ``policy_logprobs`` writes.
    """
    comparable = whole_episodes(table, REWARD)
    scored = table.filter(comparable)
    episodes = episodes_of(scored)
    scored = episodes.end_to_end(scored)
    mask, row_offsets = response_mask(scored)
    offsets = episodes.offsets(row_offsets)
    rewards = _on_last_token(values(scored[REWARD]), mask, row_offsets, episodes.begins(offsets))
    if KL_PENALTY in scored.column_names:
        rewards = rewards + packed(scored[KL_PENALTY])[0] * mask
    outcomes = TokenOutcomes(
        rewards=rewards,
        group_ids=groups_of(scored)[episodes.ends],
        offsets=offsets,
        mask=mask,
        values=packed(scored[VALUES])[0] if VALUES in scored.column_names else None,
        logprobs=packed(scored[OLD_LOGPROBS])[0] if probabilities else None,
        collision=packed(scored[COLLISION_PROBS])[0] if probabilities else None,
    )
    estimated = advantage(outcomes)
    advantages = estimated.advantages
    if whiten:
        advantages = whitened(advantages, mask, ctx.all_sum(moments(advantages, mask)))
    for name, flat in {ADVANTAGES: advantages, RETURNS: estimated.returns}.items():
        column = episodes.put_back(ragged(flat, row_offsets, TYPES[name]))
        table = table.append_column(name, scatter_valid(comparable, column))
    check_finite(ctx, table, ADVANTAGES, RETURNS)
    return table


@columns(
    reads=[GREEDY, REWARD, GROUP_ID],
    optional=EPISODE,
    writes=fields(GREEDY_REWARD),
    new_rows=True,
    groups="kept",
)
def take_greedy_baselines(ctx: Context, table: pa.Table) -> pa.Table:
    """Give each sample its prompt's greedy reward as a baseline, and drop the greedy rows (ReMax, arXiv:2310.10505).

    The node asks for rows=GROUPED; the responses come from ``generate_with_greedy``. The reward of a greedy episode is
    the sum of its rows'. ValueError for a group without a greedy response.
    """
    greedy = table.filter(table[GREEDY])
    rewards: dict[tuple[int, str | None], list[float | None]] = {}
    for key, reward in zip(_baseline_keys(greedy), greedy[REWARD].to_pylist(), strict=True):
        rewards.setdefault(key, []).append(reward)
    baseline = {key: None if None in parts else fsum(filter(None, parts)) for key, parts in rewards.items()}
    ctx.log("reward/greedy", [reward for reward in baseline.values() if reward is not None])
    sampled = table.filter(pc.invert(table[GREEDY]))
    keys = _baseline_keys(sampled)
    if missing := sorted({group for group, _ in {*keys} - baseline.keys()}):
        raise ValueError(f"groups {missing[:5]} have no greedy response: generate with generate_with_greedy")
    baselines = pa.array([baseline[key] for key in keys], TYPES[GREEDY_REWARD])
    return sampled.append_column(GREEDY_REWARD, baselines)


def _baseline_keys(table: pa.Table) -> list[tuple[int, str | None]]:
    """Return the group and, in a table of episodes, the agent that each row has a baseline for."""
    by_agent = EPISODE_ID in table.column_names and AGENT in table.column_names
    agents = table[AGENT].to_pylist() if by_agent else [None] * table.num_rows
    return list(zip(table[GROUP_ID].to_pylist(), agents, strict=True))


@columns(reads=[GROUP_ID], optional=[EPISODE_ID], writes=fields(MINIBATCH))
def draw_minibatches(
    ctx: Context, table: pa.Table, *, minibatches: int, batch_size: int, n: int = 1, split_groups: bool = False
) -> pa.Table:
    """Assign each row to a mini-batch: shuffle the step's prompts and cut them into equal parts.

    Samples go with their prompt; a group of an earlier step goes where the group at its place would. With
    ``split_groups`` each of a prompt's ``n`` samples is drawn by itself, an episode with all of its rows: the number of
    optimizer steps does not depend on how many rows episodes have. The draw depends on the step's seed alone, so all
    workers agree without a message.
    """
    sample = EPISODE_ID if EPISODE_ID in table.column_names else ROW_ID
    ids, count = (table[sample], batch_size * n) if split_groups else (table[GROUP_ID], batch_size)
    order = np.random.default_rng(ctx.seed(_DRAW)).permutation(count)
    drawn = order[ids.to_numpy() % count] * minibatches // count
    return table.append_column(MINIBATCH, pa.array(drawn, TYPES[MINIBATCH]))


def _on_last_token(rewards: Tensor, mask: Tensor, offsets: Tensor, begins: Tensor) -> Tensor:
    """Put each row's reward on its last token in the mask; ``begins`` is where its sequence begins. [R] -> [K].

    Of a row without one it falls on the last one before it in the sequence; where there is none either, nowhere.
    """
    rows = torch.arange(len(rewards)).repeat_interleave(offsets.diff())
    places = torch.where(mask, torch.arange(len(mask)), -1)
    last = torch.full((len(rewards),), -1).scatter_reduce(0, rows, places, "amax").cummax(0).values
    there = last >= begins
    return torch.zeros(len(mask), dtype=rewards.dtype).index_put_((last[there],), rewards[there], accumulate=True)
