"""The parts of a reward that is a dict, for advantages that weigh them apart."""

from __future__ import annotations

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.errors import DataError
from siirl_dask.planner import ContractChanges
from siirl_dask.schema import KL_PENALTY, REWARD_PARTS, ROW_ID


def reads_parts(*, parts: tuple[str, ...], **options: object) -> ContractChanges:
    """Declare, for ``depends_on_options``, that the parts are read where any are named."""
    return ContractChanges(reads=(REWARD_PARTS,) if parts else ())


def reward_parts(table: pa.Table, names: tuple[str, ...]) -> dict[str, Tensor]:
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
