"""The ledger of a run with ``rollout.window``: the table of its samples, step by step.

Which groups a step took is where their rows lie, and ``token_versions`` says how far each row was
when a step ended. With that a run of the same configuration repeats the other's choices, and
so its rows and weights, however long responses and environments take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from siirl_storage import StorageError, join, read_record

from siirl_dask.context import Context
from siirl_dask.errors import DataError
from siirl_dask.nodes.continued.row_progress import NOT_SAMPLED, RowProgress
from siirl_dask.schema import (
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    SAMPLING_SEED,
    TOKEN_VERSIONS,
    TYPES,
    make_schema,
)
from siirl_dask.tables import read_stored_rows, step_name

_COLUMNS = (SAMPLING_SEED, RESPONSE_IDS, TOKEN_VERSIONS, ROLLOUT_LOGPROBS)
_SCHEMA = make_schema({name: TYPES[name] for name in _COLUMNS})
_MOST_BYTES = 2 * 2**30  # of a row group, decoded: as many as of a dataset's (data.read_limit)
_TABLES = "ledger"  # in the node's state


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A row of the ledger."""

    seed: int
    response: list[int]
    versions: list[int]
    """Version of the weights of each token; ``NOT_SAMPLED`` for the environment's."""
    logprobs: list[float]

    def tokens_up_to(self, version: int) -> int:
        """Return how many tokens weights of at most ``version`` have sampled."""
        return sum(NOT_SAMPLED < token <= version for token in self.versions)

    def apply_to(self, row: RowProgress) -> None:
        """Give a row that has ended the log-probs of the ledger: those of a batch of other rows differ in
        their last bits. DataError for a row of other tokens.
        """
        if row.response != self.response or row.versions != self.versions:
            raise DataError(
                f"rollout.ledger: the row with sampling_seed={self.seed} has "
                f"{len(self.response)} tokens there, and other ones here: expected the same model, "
                "number of workers that train, sampling, and environments whose answers depend on "
                "their row, seed and turns alone; a run with rollout.in_flight cannot be repeated"
            )
        row.logprobs[:] = self.logprobs


@dataclass(frozen=True, slots=True)
class LedgerStep:
    """A step of the ledger, and those after it that may have tokens of this step."""

    taken: Mapping[int, LedgerRow]
    """Rows of the step that are in play on this worker, by their sampling seeds."""
    later: Mapping[int, LedgerRow]
    rows: int
    """Rows of the step, of all workers."""


def read_ledger_step(
    ctx: Context,
    url: str,
    seeds: Sequence[int],
    max_staleness: int,
) -> LedgerStep:
    """Return this step of the table at ``url``, and up to ``max_staleness`` steps after it: the
    rows with these sampling seeds.

    Each step is read once, and stays in the node's state until it is over. DataError where the step
    is not there, or its rows have other columns.
    """
    tables: dict[int, pa.Table | None] = ctx.state.setdefault(_TABLES, {})
    for step in [step for step in tables if step < ctx.step]:
        del tables[step]
    for step in range(ctx.step, ctx.step + max_staleness + 1):
        if step not in tables:
            tables[step] = _read(url, step)
    own = tables[ctx.step]
    if own is None:
        raise DataError(
            f"rollout.ledger={url!r} has no rows of step {ctx.step}: expected those of every step "
            "up to run.steps, of a run that has ended"
        )
    in_play = pa.array(seeds, TYPES[SAMPLING_SEED])
    later: dict[int, LedgerRow] = {}
    for step, table in tables.items():
        if step > ctx.step and table is not None:
            later |= _by_seed(table, in_play)
    return LedgerStep(_by_seed(own, in_play), later, own.num_rows)


def _read(url: str, step: int) -> pa.Table | None:
    """Return the rows of a step, those of all workers; None where none are committed."""
    folder = join(url, step_name(step))
    try:
        if read_record(folder) is None:
            return None
    except StorageError as error:
        raise DataError(f"rollout.ledger={url!r}: step {step} cannot be read: {error}") from error
    return read_stored_rows(folder, _SCHEMA, 0, 1, _MOST_BYTES)


def _by_seed(table: pa.Table, seeds: pa.Array) -> dict[int, LedgerRow]:
    table = table.filter(pc.is_in(table[SAMPLING_SEED], value_set=seeds))
    rows = [
        LedgerRow(row[SAMPLING_SEED], row[RESPONSE_IDS], row[TOKEN_VERSIONS], row[ROLLOUT_LOGPROBS])
        for row in table.to_pylist()
    ]
    return {row.seed: row for row in rows}
