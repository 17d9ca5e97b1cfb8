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

import numpy as np
import pyarrow as pa
from torch import Tensor

from siirl_dask.algorithms import Outcomes, row_sums
from siirl_dask.context import Context
from siirl_dask.nodes.advantages.reward_parts import reads_parts, reward_parts
from siirl_dask.nodes.advantages.trials import check_row_advantage, learns_alone
from siirl_dask.nodes.episodes.sequences import (
    EPISODE_COLUMNS,
    comparison_groups,
    complete_sequences,
    sequences_of,
)
from siirl_dask.nodes.nonfinite import check_finite
from siirl_dask.nodes.packed_table import packed, response_mask, scatter_valid, values
from siirl_dask.planner import columns
from siirl_dask.schema import (
    ADVANTAGE,
    EPISODE_ID,
    GREEDY_REWARD,
    GROUP_ID,
    KL_PENALTY,
    MINIBATCH,
    RESPONSE_IDS,
    RESPONSE_MASK,
    REWARD,
    ROW_ID,
    TYPES,
    fields,
)

_STEP_SEED = -1  # used like a row id, for the seed of a draw for the step as a whole


@columns(
    reads=[REWARD, GROUP_ID, RESPONSE_IDS],
    optional=[RESPONSE_MASK, KL_PENALTY, GREEDY_REWARD, *EPISODE_COLUMNS],
    writes=fields(ADVANTAGE),
    depends_on_options=reads_parts,
    trial=check_row_advantage,
    learns_alone=learns_alone,
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
    parts_of_rows = reward_parts(scored, parts)
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
