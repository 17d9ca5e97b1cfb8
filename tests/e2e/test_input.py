"""Wrong input by the user or in the data meets a clear error before anything starts, or a
defined behaviour.
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.cli import main
from siirl_dask.errors import ConfigError, DataError, RewardError
from tests.conftest import digits_overrides


def command(capsys, *arguments):
    """Exit code and stderr of the command line."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code, capsys.readouterr().err


@pytest.fixture
def overrides(digits_task, tmp_path):
    return digits_overrides(digits_task, tmp_path / "run")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.learning_rate=1", "trainer.learning_rate"),
        ("rollout.temprature=1", "did you mean 'temperature'"),
        ("data.url=/nowhere/at/all", "/nowhere/at/all"),
        ("data.prompt=promt", "did you mean 'prompt'"),
        ("rewards.function=siirl_dask.rewards:exact_mach", "did you mean 'exact_match'"),
        ("cluster.placement={polcy: [0]}", "did you mean 'policy'"),
        ("algorithm.minibatches=99", "data.batch_size=8"),
        ("algorithm.kl_coefficient=0.1", "reference_logprobs"),
        ("rollout.n=0", "at least 1"),
    ],
)
def test_a_mistake_is_refused_by_name_before_anything_starts(
    capsys, tmp_path, overrides, override, said
):
    from siirl_dask.config.file import shipped

    code, err = command(capsys, "run", str(shipped("quickstart.yaml")), *overrides, override)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_there_is_refused_by_name(train):
    with pytest.raises(ConfigError, match=r"model\.path"):
        train("run", "model.path=/no/model")


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_stays(train):
    first = train("run", "cluster.workers=1", "cluster.placement={}", "run.steps=1")
    with pytest.raises(ConfigError, match="holds a run already"):
        train("run", "run.steps=1")
    assert first.table("rollouts", 1).num_rows == 32


def test_a_corrupt_part_stops_the_run_and_is_named(train, tmp_path):
    for part in range(4):
        rows = {"prompt": [f"{part}-{i}" for i in range(500)], "answer": ["x"] * 500}
        pq.write_table(pa.table(rows), tmp_path / f"part-{part}.parquet")
    damaged = bytearray((tmp_path / "part-2.parquet").read_bytes())
    damaged[10:1000] = bytes(990)
    (tmp_path / "part-2.parquet").write_bytes(damaged)
    with pytest.raises(DataError, match=r"part-2\.parquet"):
        train("run", f"data.url={tmp_path}", "run.steps=500")


def test_a_reward_that_raises_stops_the_run_with_the_row_that_broke_it(train):
    with pytest.raises(
        RewardError,
        match=r"fails_on_the_fifth raised ZeroDivisionError.*row \d+ of step 1.*'Digits",
    ):
        train("run", "rewards.function=tests.e2e.rewards:fails_on_the_fifth")


def test_a_reward_that_is_no_number_never_trains(train):
    with pytest.raises(RewardError, match="gave nan: expected a finite number"):
        train("run", "rewards.function=tests.e2e.rewards:gives_nan")


def test_too_long_prompts_are_dropped_alike_on_any_number_of_workers(train, tmp_path):
    prompts = [f"Digits {'9' * 40 if i % 3 == 0 else i}:" for i in range(64)]
    pq.write_table(
        pa.table({"prompt": prompts, "answer": [""] * 64}),
        tmp_path / "mixed.parquet",
        row_group_size=8,
    )
    settings = (f"data.url={tmp_path}/mixed.parquet", "data.max_prompt_length=20", "run.steps=2")
    one = train("one", *settings, "cluster.workers=1", "cluster.placement={}")
    four = train("four", *settings, "cluster.workers=4")
    for step in (1, 2):
        expected, got = one.table("rollouts", step), four.table("rollouts", step)
        assert 0 < expected.num_rows < 32
        assert got.select(["row_id", "prompt", "response", "advantage"]).equals(
            expected.select(["row_id", "prompt", "response", "advantage"])
        )
    dropped = [[r["metrics"]["data/dropped_prompts"] for r in run.records()] for run in (one, four)]
    assert dropped[0] == dropped[1]
    assert sum(dropped[0]) > 0


def test_fewer_prompts_than_workers_trains_with_empty_partitions(train):
    run = train(
        "run", "cluster.workers=4", "cluster.placement={}", "data.batch_size=2", "run.steps=2"
    )
    assert run.table("rollouts", 2).num_rows == 8
    assert run.summary.status == "complete"


def test_a_dataset_smaller_than_a_batch_gives_a_smaller_step(train, tmp_path):
    pq.write_table(
        pa.table({"prompt": ["Digits 1:", "Digits 2:"], "answer": ["", ""]}),
        tmp_path / "two.parquet",
    )
    run = train("run", "cluster.workers=4", f"data.url={tmp_path}/two.parquet", "run.steps=2")
    assert run.table("rollouts", 1)["group_id"].to_pylist() == [0] * 4 + [1] * 4
