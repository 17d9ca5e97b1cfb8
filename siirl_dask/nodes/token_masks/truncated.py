"""Masks responses that were cut short, so that the policy does not learn from them."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.context import Context
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS, sequences_of
from siirl_dask.nodes.packed_table import ragged, response_mask, values
from siirl_dask.planner import columns
from siirl_dask.rollout import FinishReason
from siirl_dask.schema import FINISH_REASON, RESPONSE_IDS, RESPONSE_MASK, TYPES, fields


def _check_reasons(*, reasons: tuple[str, ...] = (FinishReason.LENGTH,)) -> None:
    known = [str(reason) for reason in FinishReason]
    for reason in reasons:
        if reason not in known:
            raise ValueError(f"reasons={[*reasons]}: {reason!r} is none of {known}")


@columns(
    reads=[RESPONSE_IDS, FINISH_REASON],
    optional=[RESPONSE_MASK, *EPISODE_COLUMNS],
    writes=fields(RESPONSE_MASK),
    trial=_check_reasons,
)
def mask_truncated(
    ctx: Context, table: pa.Table, *, reasons: tuple[str, ...] = (FinishReason.LENGTH,)
) -> pa.Table:
    """Mask all tokens of responses that ended for one of ``reasons`` (overlong filtering, DAPO,
    arXiv:2503.14476).

    The reason is the engine's, so a response that ends by itself at the limit is not masked. The
    loss, a KL penalty, a critic, whitening and the loss's denominators ignore a masked row. Its
    reward still counts in the statistics of its group, as in TRL's ``mask_truncated_completions``;
    with ``reinforce_plus_plus_baseline`` it does not.

    An episode of several rows ended as its last row did, and all its rows are masked. Where there
    are such episodes the node needs complete groups: rows=GROUPED. ValueError for an unknown
    reason.
    """
    ended_so = pc.is_in(table[FINISH_REASON], pa.array(reasons, table[FINISH_REASON].type))
    sequences = sequences_of(table)
    masked = sequences.to_rows(sequences.of_last_rows(values(ended_so)))
    mask, offsets = response_mask(table)
    learned = mask & ~masked.repeat_interleave(offsets.diff())
    ctx.log("response/masked", masked.float().tolist())
    column = ragged(learned, offsets, TYPES[RESPONSE_MASK])
    if RESPONSE_MASK in table.column_names:
        return table.set_column(table.column_names.index(RESPONSE_MASK), RESPONSE_MASK, column)
    return table.append_column(RESPONSE_MASK, column)
