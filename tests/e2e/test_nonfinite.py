"""A loss that is not finite stops a run, with its rows by name and on the disk, or is left out
on every worker.
"""

import pyarrow.parquet as pq
import pytest

from siirl_dask.algorithms import TokenLoss, ppo_clip
from siirl_dask.errors import TrainingError

BOTH = ["cluster.workers=2", "cluster.placement={}", "run.steps=2"]
LONG = 5


def is_nan_in_long_rows(inputs, clip_low=0.2, clip_high=0.2):
    loss = ppo_clip(inputs, clip_low=clip_low, clip_high=clip_high)
    lengths = inputs.offsets.diff()
    return TokenLoss(
        loss=loss.loss.masked_fill((lengths > LONG).repeat_interleave(lengths), float("nan"))
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "fsdp"])
def test_a_loss_that_is_not_finite_is_named_by_row_or_left_out_on_all_workers(train, backend):
    loss = [
        "algorithm.loss=tests.e2e.test_nonfinite:is_nan_in_long_rows",
        f"trainer.backend={backend}",
    ]
    with pytest.raises(
        TrainingError, match=r"mini-batch 1 of 2: loss nan.* loss not finite on worker '[01]'"
    ) as raised:
        train("stops", *BOTH, *loss)
    origin = raised.value.origin
    assert (origin.node, origin.iteration) == ("update", "train step 1")
    run = train("skips", *BOTH, *loss, "run.on_nan=skip")
    for record in run.records():
        assert record["metrics"]["policy/skipped_steps"] == 2
        assert "policy/loss" not in record["metrics"]
    assert run.summary.warnings[0].startswith("step 1: 2 of the optimizer steps left out")
    table = pq.read_table(run.url / "nonfinite-update" / "step=000001")
    assert sorted(table["minibatch"].unique().to_pylist()) == [0]
    for row in table.to_pylist():
        assert row["nonfinite"] == (["loss"] if len(row["response_ids"]) > LONG else [])
    assert {*origin.rows} <= {*table["row_id"].to_pylist()}
    stored = run.table("rollouts", 1)
    assert table.num_rows < stored.num_rows
