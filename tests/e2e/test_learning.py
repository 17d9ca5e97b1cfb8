"""The main job learns, on workers of its own, and leaves behind what it promises."""

import json

import duckdb
import pytest

from siirl_dask.cli import main
from siirl_dask.commands.quickstart import quickstart
from siirl_dask.config.file import shipped
from tests.settings import digits_overrides

PROMISED = {
    "prompt_text", "response", "prompt_ids", "response_ids", "rollout_logprobs", "old_logprobs",
    "reward", "advantage", "weights_version", "worker", "finish_reason",
}  # fmt: skip
STEPS = 14


@pytest.fixture(scope="module")
def finished(digits_task, tmp_path_factory):
    from siirl_dask.config.file import load_config_file, shipped
    from siirl_dask.driver.phases import dags
    from siirl_dask.driver.run import run
    from tests.conftest import Finished, digits_overrides

    url = tmp_path_factory.mktemp("learning") / "run"
    file = load_config_file(
        shipped("quickstart.yaml"),
        [
            *digits_overrides(digits_task, url),
            f"run.steps={STEPS}",
            "trainer.warmup_steps=0",
            "trainer.lr=4e-3",
            "cluster.workers=2",
            "cluster.placement={rollout: [0], policy: [1]}",
            "rollout.n=16",
            f"validation.url={digits_task.validation}",
            f"validation.test_url={digits_task.test}",
            "validation.every=7",
            "observe.backends=[tensorboard, parquet]",
            "observe.plot=true",
        ],
    )
    return Finished(url, run(file.config, *dags(file)))


def test_reward_and_validation_rise(finished):
    rewards = [record["metrics"]["reward/mean"] for record in finished.records()]
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.5
    assert finished.summary.validation.last > finished.summary.validation.first + 0.3
    assert finished.summary.validation.test > 0.4


def test_a_quickstart_without_validation_ends_as_any_other(
    digits_task, cluster_address, tmp_path, capsys
):
    url = tmp_path / "run"
    overrides = [
        *digits_overrides(digits_task, url),
        f"cluster.address={cluster_address}",
        "run.steps=1",
    ]
    quickstart(shipped("quickstart.yaml"), overrides)
    words = capsys.readouterr().out.split()
    assert "complete" in words
    assert "Validation" not in words
    found = [
        name
        for name in ("rollouts", "validation")
        if any(word.endswith(f"run/{name}") for word in words)
    ]
    assert found == ["rollouts"]


def test_the_summary_file_has_what_is_documented(finished):
    summary = json.loads((finished.url / "summary.json").read_text())
    assert summary["status"] == "complete"
    assert (summary["steps"], summary["workers"]) == (STEPS, 2)
    assert summary["samples_per_second"] == pytest.approx(STEPS * 128 / summary["seconds"])
    assert summary["validation"]["first"] is not None
    assert summary["bytes_per_step"]["peers"] > 300_000  # the weights alone are 91k float32
    assert 0 < summary["bytes_per_step"]["scheduler_and_client"] < 200_000


def test_every_sample_is_kept_for_anyone_who_reads_parquet(finished):
    glob = f"{finished.url}/rollouts/step=*/*.parquet"
    steps = duckdb.sql(
        f"SELECT step::INT, count(*), min(weights_version), max(weights_version) FROM '{glob}' "
        "GROUP BY 1"
    )
    assert sorted(steps.fetchall()) == [
        (step, 128, step - 1, step - 1) for step in range(1, STEPS + 1)
    ]
    table = finished.table("rollouts", STEPS)
    assert set(table.column_names) >= PROMISED
    for row in table.to_pylist():
        assert len(row["response_ids"]) == len(row["rollout_logprobs"]) == len(row["old_logprobs"])
        assert row["old_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-4)


def test_metrics_are_logged_each_step_with_what_is_promised(finished):
    promised = {
        "reward/mean", "reward/std", "response/length", "policy/entropy", "policy/kl_to_sampler",
        "policy/clip_fraction",
        "policy/grad_norm", "seconds/rollout", "seconds/update", "tokens_per_second", "bytes/peers",
    }  # fmt: skip
    for record in finished.records():
        assert promised <= set(record["metrics"])
        assert record["metrics"]["samples"] == 128
    assert list((finished.url / "tensorboard").glob("events*"))
    rewards = (
        f"SELECT value FROM '{finished.url}/metrics.parquet' WHERE phase = 'train' AND name = "
        "'reward/mean'"
    )
    assert [value for (value,) in duckdb.sql(f"{rewards} ORDER BY step").fetchall()] == [
        record["metrics"]["reward/mean"] for record in finished.records()
    ]
    assert (finished.url / "plot.svg").read_text().startswith("<svg ")


def test_rollouts_answers_sql(finished, capsys):
    main(["rollouts", str(finished.url), "SELECT max(step) AS last, count(*) AS n FROM rollouts"])
    assert f"{STEPS * 128}" in capsys.readouterr().out


def test_rollouts_of_no_run_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["rollouts", str(tmp_path)])
    assert "holds no rollouts" in capsys.readouterr().err
