"""The driver tells once, for all workers, of prompts that were too long."""

import pytest

from siirl_dask.context import Context, Device, Rank, Reduce
from siirl_dask.driver.checks.prompts import check_prompts
from siirl_dask.driver.iterations import CompletedIteration
from siirl_dask.errors import DataError
from siirl_dask.planner import Iteration, Phase


def done(phase, step, kept, dropped, shortest=0):
    """Return an iteration's result as the workers' merged counts make it."""
    ctx = Context(step, 0, Rank(), Device("w"), None)
    ctx.log("data/prompts", kept, Reduce.SUM)
    ctx.log("data/dropped_prompts", dropped, Reduce.SUM)
    if dropped:
        ctx.log("data/shortest_dropped_prompt", shortest, Reduce.MIN)
    return CompletedIteration(Iteration(phase, step, 0), 1.0, ctx.metrics)


def test_dropped_prompts_are_one_warning_and_a_step_without_any_is_silent(caplog):
    check_prompts(done(Phase.TRAIN, 1, 8, 0), 20)
    check_prompts(CompletedIteration(Iteration(Phase.TRAIN, 1, 0), 1.0, {}), 20)
    assert not caplog.records
    check_prompts(done(Phase.TRAIN, 1, 5, 3, 21), 20)
    (record,) = caplog.records
    assert "train step 1: dropped 3 of 8 prompts" in record.message
    assert "longer than data.max_prompt_length=20 tokens" in record.message


@pytest.mark.parametrize(
    ("phase", "step"), [(Phase.TRAIN, 2), (Phase.VALIDATION, 10), (Phase.TEST, 10)]
)
def test_a_later_iteration_without_prompts_is_one_warning(phase, step, caplog):
    check_prompts(done(phase, step, 0, 4, 30), 20)
    (record,) = caplog.records
    assert f"{phase} step {step} has no prompts: all 4 are longer than" in record.message
    assert "the shortest has 30; it is skipped" in record.message


@pytest.mark.parametrize(
    ("phase", "step"),
    [(Phase.TRAIN, 1), (Phase.VALIDATION, 0), (Phase.EVALUATION, 0), (Phase.EVALUATION, 7)],
)
def test_a_first_iteration_without_prompts_is_a_data_error(phase, step):
    with pytest.raises(
        DataError, match=r"all 4 are .* the shortest has 30; raise data\.max_prompt_length"
    ):
        check_prompts(done(phase, step, 0, 4, 30), 20)
    with pytest.raises(DataError, match=rf"{phase} step {step} has no prompts; raise"):
        check_prompts(done(phase, step, 0, 0), 20)
