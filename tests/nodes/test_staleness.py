"""Rows are as old as the optimizer steps since the weights that sampled them; older ones than is
allowed are not learned from.
"""

from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import TrainingError
from siirl_dask.nodes import update_policy
from siirl_dask.schema import TYPES

STEP = 9
COLUMNS = {
    "row_id": 0,
    "group_id": 0,
    "tokens": 2,
    "prompt_ids": [1],
    "response_ids": [2],
    "rollout_logprobs": [-1.0],
    "old_logprobs": [-1.0],
    "advantage": 1.0,
    "minibatch": 0,
}


@dataclass
class Counting:
    """A trainer that counts the rows that it learns from."""

    rows: list = field(default_factory=list)

    def update(self, batches, loss, aggregate, on_nonfinite=None):
        self.rows += [len(batch.rows) for batch in batches]
        return {"loss": 1.0}


def no_loss(inputs):
    raise AssertionError("the trainer of this test computes nothing")


def rows_of_ages(ages):
    """Rows of step STEP; age 0 is sampled by the weights that the step before it has left."""
    columns = {
        name: pa.array([value] * len(ages), TYPES.get(name)) for name, value in COLUMNS.items()
    }
    columns["row_id"] = pa.array(range(len(ages)), pa.int64())
    versions = [STEP - 1 - age for age in ages]
    columns["weights_version"] = pa.array(versions, TYPES["weights_version"])
    return pa.table(columns)


@given(ages=st.lists(st.integers(0, STEP - 1), min_size=1, max_size=5), allowed=st.integers(0, 4))
def test_rows_are_learned_from_up_to_the_allowed_age_and_no_older(ages, allowed):
    trainer = Counting()
    ctx = Context(step=STEP, run_seed=0, rank=Rank(), device=Device("w"), resource=trainer)
    table = rows_of_ages(ages)
    options = {"loss": no_loss, "minibatches": 1, "max_staleness": allowed}
    if max(ages) > allowed:
        oldest = ages.index(max(ages))
        with pytest.raises(
            TrainingError,
            match=rf"^row {oldest} was sampled by weights {max(ages)} steps? behind: expected at "
            rf"most {allowed} ",
        ):
            update_policy(ctx, table, **options)
        assert trainer.rows == []
        return
    update_policy(ctx, table, **options)
    assert trainer.rows == [len(ages)]
    assert ctx.metrics["staleness/max"].value == max(ages)
    assert ctx.metrics["staleness/mean"].value == pytest.approx(sum(ages) / len(ages))
