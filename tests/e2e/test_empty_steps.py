"""Runs in which a worker, or a whole step, has only prompts that are too long."""

import pytest
from siirl_storage import open_table

from siirl_dask.cli import main
from siirl_dask.config.file import shipped
from siirl_dask.errors import DataError
from tests.conftest import digits_overrides
from tests.long_prompts import LIMIT, write_long_prompts


@pytest.fixture
def overrides(tmp_path):
    """Overrides for a dataset whose prompts are too long in the given (step, worker, workers)."""

    def write(*parts, workers):
        write_long_prompts(tmp_path / "data.parquet", *parts)
        placement = (f"cluster.workers={workers}", "cluster.placement={}")
        return [f"data.url={tmp_path}/data.parquet", f"data.max_prompt_length={LIMIT}", *placement]

    return write


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_without_rows_is_counted_and_trains_nothing(train, overrides, tmp_path, workers):
    settings = ("checkpoint.every=1", "checkpoint.keep=3", "checkpoint.keep_best=train/policy/loss")
    run = train("run", *overrides((2, 0, 1), workers=workers), *settings)
    first, second, third = (record["metrics"] for record in run.records())
    assert (first["samples"], second["samples"], third["samples"]) == (32, 0, 32)
    assert second["data/dropped_prompts"] == 8
    assert second["policy/empty_minibatches"] == 2
    # the schedule counts steps that were taken
    assert third["policy/lr"] == pytest.approx(2 * first["policy/lr"])
    assert run.summary.status == "complete"
    assert run.summary.steps == 3
    assert open_table(f"{tmp_path}/run/rollouts/step=000002").num_rows == 0


@pytest.mark.parametrize("backend", ["torch", "fsdp"])
def test_a_worker_without_rows_learns_with_the_other(train, overrides, backend):
    run = train("run", *overrides((2, 0, 2), (3, 1, 2), workers=2), f"trainer.backend={backend}")
    assert [record["metrics"]["samples"] for record in run.records()] == [32, 16, 16]
    assert [record["metrics"]["policy/empty_minibatches"] for record in run.records()] == [0, 0, 0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_first_step_without_rows_ends_the_run_with_what_to_do(train, overrides, workers):
    with pytest.raises(
        DataError,
        match=(
            rf"all 8 are longer than data.max_prompt_length={LIMIT} tokens.*; raise "
            r"data\.max_prompt_length"
        ),
    ):
        train("run", *overrides((1, 0, 1), workers=workers))


def test_the_command_line_shows_the_error_without_a_traceback(
    digits_task, overrides, tmp_path, capsys
):
    given = [*digits_overrides(digits_task, tmp_path / "run"), *overrides((1, 0, 1), workers=1)]
    with pytest.raises(SystemExit) as ended:
        main(["run", str(shipped("quickstart.yaml")), *given])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert "step 1 has no prompts" in error
    assert "Traceback" not in error
