"""Estimates advantages of rows or of tokens, and draws mini-batches.

A row without a reward (its reward function failed, and ``rewards.max_failures`` allowed it) gets no
advantage and does not count in those of others. TrainingError for an advantage that is not finite,
unless ``run.on_nan=skip``.

Where episodes have several rows (``episodes.py``), an episode counts once, in a group of its
agent's. Its reward is the sum of its rows' rewards; a row without a reward leaves out the whole
episode.
"""

from __future__ import annotations

from collections.abc import Callable
from math import fsum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from siirl_dask.algorithms import (
    Outcomes,
    TokenAdvantages,
    TokenOutcomes,
    moments,
    row_sums,
    whitened,
)
from siirl_dask.context import Context
from siirl_dask.errors import DataError
from siirl_dask.nodes.episodes.sequences import (
    EPISODE_COLUMNS,
    comparison_groups,
    complete_sequences,
    sequences_of,
)
from siirl_dask.nodes.nonfinite import check_finite
from siirl_dask.nodes.packed_table import packed, ragged, response_mask, scatter_valid, values
from siirl_dask.planner import ContractChanges, columns
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

_STEP_SEED = -1  # used like a row id, for the seed of a draw for the step as a whole
_BaselineKey = tuple[int, str | None]
"""The group and, in a table of episodes, the agent that a baseline is for."""


def _check_row_advantage(
    *, advantage: Callable[[Outcomes], Tensor], parts: tuple[str, ...] = ()
) -> None:
    """Call the advantage with no rows, before the run begins. ValueError for a result of the
    wrong shape.
    """
    empty = torch.zeros(0)
    empty_ids = torch.zeros(0, dtype=torch.int64)
    outcomes = Outcomes(
        rewards=empty,
        group_ids=empty_ids,
        lengths=empty_ids,
        baselines=empty,
        parts=dict.fromkeys(parts, empty),
    )
    _check_empty(advantage(outcomes), "advantages")


def _check_token_advantages(
    *,
    advantage: Callable[[TokenOutcomes], TokenAdvantages],
    whiten: bool = True,
    probabilities: bool = False,
) -> None:
    """Call the advantage with no rows, before the run begins. ValueError for a result of the
    wrong shape.
    """
    empty = torch.zeros(0)
    outcomes = TokenOutcomes(
        rewards=empty,
        group_ids=empty.long(),
        offsets=torch.zeros(1).long(),
        mask=empty.bool(),
        values=empty,
        logprobs=empty if probabilities else None,
        collision=empty if probabilities else None,
    )
    estimated = advantage(outcomes)
    _check_empty(estimated.advantages, "advantages")
    _check_empty(estimated.returns, "returns")


def _check_empty(tensor: Tensor, name: str) -> None:
    if tensor.shape != (0,):
        raise ValueError(f"{name} have shape {list(tensor.shape)}: expected [0]")


def _learns_alone(*, advantage: Callable[[Outcomes], Tensor], parts: tuple[str, ...] = ()) -> bool:
    """Return whether a single sample of a prompt can get an advantage other than 0.

    False for an advantage that compares the samples of a prompt: a sample of reward 0 that is alone
    in its group gets 0, and in a group with another sample it does not.
    """
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
    *,
    advantage: Callable[[TokenOutcomes], TokenAdvantages],
    whiten: bool = True,
    probabilities: bool = False,
) -> bool:
    """Return whether a single sample of a prompt, of one token here, can get an advantage other
    than 0: see ``_learns_alone``.
    """
    if whiten:  # the batch's mean is a baseline then
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


def _reads_parts(*, parts: tuple[str, ...], **options: object) -> ContractChanges:
    return ContractChanges(reads=(REWARD_PARTS,) if parts else ())


def _reads_probabilities(*, probabilities: bool = False, **options: object) -> ContractChanges:
    return ContractChanges(reads=(OLD_LOGPROBS, COLLISION_PROBS) if probabilities else ())


def _reward_parts(table: pa.Table, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the named parts of the rows' rewards, [R] each."""
    if not names:
        return {}
    if KL_PENALTY in table.column_names:
        raise DataError(
            f"parts={[*names]}: a KL in the reward ({KL_PENALTY}) is in none of them; put it into "
            "the loss (algorithm.kl_coefficient), or leave it out"
        )
    parts_of_rows = [dict(parts or ()) for parts in table[REWARD_PARTS].to_pylist()]
    for row_id, parts in zip(table[ROW_ID].to_pylist(), parts_of_rows, strict=True):
        for name in names:
            if parts.get(name) is None:
                raise DataError(
                    f"the reward of row {row_id} has no part {name!r} (it has: {sorted(parts)}): "
                    f"expected a reward function that returns a dict with {[*names]} for every row"
                )
    tensors = {}
    for name in names:
        values_of_part = [parts[name] for parts in parts_of_rows]
        tensors[name] = torch.tensor(values_of_part, dtype=torch.float32)
    return tensors


@columns(
    reads=[REWARD, GROUP_ID, RESPONSE_IDS],
    optional=[RESPONSE_MASK, KL_PENALTY, GREEDY_REWARD, *EPISODE_COLUMNS],
    writes=fields(ADVANTAGE),
    depends_on_options=_reads_parts,
    trial=_check_row_advantage,
    learns_alone=_learns_alone,
)
def estimate_advantage(
    ctx: Context,
    table: pa.Table,
    *,
    advantage: Callable[[Outcomes], Tensor],
    parts: tuple[str, ...] = (),
) -> pa.Table:
    """Add one advantage a row, from ``advantage(Outcomes) -> [R]``. The node needs complete groups:
    rows=GROUPED.

    The sum of a row's token rewards (``kl_penalty``) is added to its reward. All rows of an episode
    have its advantage. ``parts`` names parts of a reward that is a dict, which ``Outcomes.parts``
    then has; an episode's are the sums of its rows'. DataError for a row whose reward lacks one,
    and for ``parts`` together with ``kl_penalty``, which is in none of them.
    """
    comparable = complete_sequences(table, [REWARD, GREEDY_REWARD])
    scored = table.filter(comparable)
    sequences = sequences_of(scored)
    mask, offsets = response_mask(scored)
    rewards = values(scored[REWARD])
    if KL_PENALTY in scored.column_names:
        token_penalties, _ = packed(scored[KL_PENALTY])
        rewards = rewards + row_sums(token_penalties * mask, offsets)
    baselines = None
    if GREEDY_REWARD in scored.column_names:
        baselines = sequences.of_last_rows(values(scored[GREEDY_REWARD]))
    parts_of_rows = _reward_parts(scored, parts)
    lengths = row_sums(mask.long(), offsets)
    outcomes = Outcomes(
        rewards=sequences.sums(rewards),
        group_ids=sequences.of_last_rows(comparison_groups(scored)),
        lengths=sequences.sums(lengths),
        baselines=baselines,
        parts={name: sequences.sums(part) for name, part in parts_of_rows.items()},
        all_sum=ctx.all_sum,
    )
    advantages = sequences.to_rows(advantage(outcomes))
    estimated = pa.array(advantages.numpy(), TYPES[ADVANTAGE])
    table = table.append_column(ADVANTAGE, scatter_valid(comparable, estimated))
    check_finite(ctx, table, ADVANTAGE)
    return table


@columns(
    reads=[REWARD, GROUP_ID, RESPONSE_IDS],
    optional=[RESPONSE_MASK, KL_PENALTY, VALUES, *EPISODE_COLUMNS],
    writes=fields(ADVANTAGES, RETURNS),
    depends_on_options=_reads_probabilities,
    trial=_check_token_advantages,
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
    """Add an advantage and a return for each response token. The row's reward is that of its last
    token in the mask.

    The rows of an episode are one row here: a segment's last token is followed by the first one of
    the next segment. With ``whiten``, advantages get mean 0 and variance 1 over the tokens of all
    the role's workers. With ``probabilities`` the advantage also gets log-probs and collision
    probabilities, which ``policy_logprobs`` writes.
    """
    comparable = complete_sequences(table, [REWARD])
    scored = table.filter(comparable)
    sequences = sequences_of(scored)
    scored = sequences.sorted_table(scored)
    mask, row_offsets = response_mask(scored)
    offsets = sequences.token_offsets(row_offsets)
    sequence_starts = sequences.starts_of_rows(offsets)
    rewards = _rewards_on_last_tokens(values(scored[REWARD]), mask, row_offsets, sequence_starts)
    if KL_PENALTY in scored.column_names:
        token_penalties, _ = packed(scored[KL_PENALTY])
        rewards = rewards + token_penalties * mask
    token_values = None
    if VALUES in scored.column_names:
        token_values, _ = packed(scored[VALUES])
    logprobs = None
    collision = None
    if probabilities:
        logprobs, _ = packed(scored[OLD_LOGPROBS])
        collision, _ = packed(scored[COLLISION_PROBS])
    outcomes = TokenOutcomes(
        rewards=rewards,
        group_ids=comparison_groups(scored)[sequences.ends],
        offsets=offsets,
        mask=mask,
        values=token_values,
        logprobs=logprobs,
        collision=collision,
    )
    estimated = advantage(outcomes)
    advantages = estimated.advantages
    if whiten:
        moments_of_all = ctx.all_sum(moments(advantages, mask))
        advantages = whitened(advantages, mask, moments_of_all)
    for name, flat in {ADVANTAGES: advantages, RETURNS: estimated.returns}.items():
        column = sequences.unsorted_column(ragged(flat, row_offsets, TYPES[name]))
        table = table.append_column(name, scatter_valid(comparable, column))
    check_finite(ctx, table, ADVANTAGES, RETURNS)
    return table


@columns(
    reads=[GREEDY, REWARD, GROUP_ID],
    optional=EPISODE_COLUMNS,
    writes=fields(GREEDY_REWARD),
    new_rows=True,
    groups="kept",
)
def take_greedy_baselines(ctx: Context, table: pa.Table) -> pa.Table:
    """Give each sample its prompt's greedy reward as a baseline, and drop the greedy rows (ReMax,
    arXiv:2310.10505).

    The node needs complete groups, rows=GROUPED, and responses of ``generate_with_greedy``. The
    reward of a greedy episode is the sum of its rows'. ValueError for a group without a greedy
    response.
    """
    greedy = table.filter(table[GREEDY])
    rewards_of: dict[_BaselineKey, list[float | None]] = {}
    for key, reward in zip(_baseline_keys(greedy), greedy[REWARD].to_pylist(), strict=True):
        rewards_of.setdefault(key, []).append(reward)
    baselines: dict[_BaselineKey, float | None] = {}
    for key, rewards in rewards_of.items():
        valid = [reward for reward in rewards if reward is not None]
        baselines[key] = fsum(valid) if len(valid) == len(rewards) else None
    known_baselines = [reward for reward in baselines.values() if reward is not None]
    ctx.log("reward/greedy", known_baselines)
    sampled = table.filter(pc.invert(table[GREEDY]))
    keys = _baseline_keys(sampled)
    missing = sorted({group for group, agent in keys if (group, agent) not in baselines})
    if missing:
        raise ValueError(
            f"groups {missing[:5]} have no greedy response: generate with generate_with_greedy"
        )
    column = pa.array([baselines[key] for key in keys], TYPES[GREEDY_REWARD])
    return sampled.append_column(GREEDY_REWARD, column)


def _baseline_keys(table: pa.Table) -> list[_BaselineKey]:
    """Return the key of each row's baseline."""
    agents = [None] * table.num_rows
    if EPISODE_ID in table.column_names and AGENT in table.column_names:
        agents = table[AGENT].to_pylist()
    return list(zip(table[GROUP_ID].to_pylist(), agents, strict=True))


@columns(reads=[GROUP_ID], optional=[EPISODE_ID], writes=fields(MINIBATCH))
def draw_minibatches(
    ctx: Context,
    table: pa.Table,
    *,
    minibatches: int,
    batch_size: int,
    n: int = 1,
    split_groups: bool = False,
) -> pa.Table:
    """Assign each row to a mini-batch: shuffle the step's prompts and cut them into equal parts.

    All samples of a prompt are in one mini-batch; a group of an earlier step, whose number is
    larger than the step has prompts, is drawn as the group of that number modulo their count. With
    ``split_groups`` each of a prompt's ``n`` samples is drawn by itself, an episode with all of its
    rows: the number of optimizer steps does not depend on how many rows episodes have. The draw
    depends on the step's seed alone, so all workers agree without a message.
    """
    name = GROUP_ID
    count = batch_size
    if split_groups:
        name = EPISODE_ID if EPISODE_ID in table.column_names else ROW_ID
        count = batch_size * n
    ids = table[name]
    order = np.random.default_rng(ctx.seed(_STEP_SEED)).permutation(count)
    shuffled_index = order[ids.to_numpy() % count]
    minibatch = shuffled_index * minibatches // count
    return table.append_column(MINIBATCH, pa.array(minibatch, TYPES[MINIBATCH]))


def _rewards_on_last_tokens(
    rewards: Tensor,
    mask: Tensor,
    offsets: Tensor,
    sequence_starts: Tensor,
) -> Tensor:
    """Put each row's reward on its last token in the mask. [R] -> [K].

    ``sequence_starts``, [R], is the index of the first token of the row's sequence. The reward of a
    row without tokens in the mask is put on the last such token before it in the sequence; where
    there is none either, on no token.
    """
    row_of_token = torch.arange(len(rewards)).repeat_interleave(offsets.diff())
    index_in_mask = torch.where(mask, torch.arange(len(mask)), -1)
    no_token = torch.full((len(rewards),), -1)
    last_of_row = no_token.scatter_reduce(0, row_of_token, index_in_mask, "amax")
    last_so_far = last_of_row.cummax(0).values
    has_token = last_so_far >= sequence_starts
    on_tokens = torch.zeros(len(mask), dtype=rewards.dtype)
    return on_tokens.index_put_((last_so_far[has_token],), rewards[has_token], accumulate=True)
