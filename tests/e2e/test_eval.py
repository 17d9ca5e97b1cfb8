"""``siirl-dask eval`` end to end: the same on any number of workers, and what the run's own validation said."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.cli import main
from siirl_dask.commands.evaluate import EvalRequest, evaluate

SAMPLING = ["validation.n=4", "validation.temperature=1", "validation.source_column=info.source"]
SAME = ["row_id", "prompt", "response", "reward"]
REWARD = "siirl_dask.tasks.sorting:digit_fraction"


@pytest.fixture
def data(tmp_path):
    """Prompts of three lengths and three sources, in uneven row groups."""
    prompts = [f"Digits {'9' * (at % 3 * 4)}{at}:" for at in range(11)]
    info = [{"source": ["a", "b", None][at % 3]} for at in range(11)]
    table = pa.table({"prompt": prompts, "answer": [""] * 11, "info": info})
    pq.write_table(table, tmp_path / "test.parquet", row_group_size=3)
    return str(tmp_path / "test.parquet")


def table_of(out, step):
    return pq.read_table(f"{out}/generations/step={step:06d}").sort_by("row_id")


def test_table_and_numbers_are_the_same_on_any_number_of_workers(digits_task, cluster_address, data, tmp_path, capsys):
    def run(workers):
        out = tmp_path / str(workers)
        options = ["--n=4", "--k=1,2,4", "--temperature=1", "--max-tokens=8", f"--reward={REWARD}"]
        options.append("rollout.engine=transformers")
        placed = [f"--workers={workers}", f"--out={out}", f"cluster.address={cluster_address}"]
        model = [str(digits_task.model), "--data", data]
        main(["eval", *model, *options, *placed, "validation.source_column=info.source", "observe.progress=false"])
        return table_of(out, 0), (out / "metrics.json").read_bytes()

    one, numbers = run(1)
    assert run(2) == (one, numbers)
    assert run(4) == (one, numbers)
    assert one["sample"].to_pylist() == [0, 1, 2, 3] * 11
    assert one["source"].to_pylist()[:12] == ["a"] * 4 + ["b"] * 4 + [None] * 4
    assert len(set(one["response"].to_pylist())) > 22
    found = json.loads(numbers)
    assert found["prompts"] == {"all": 11, "sources": {"a": 4, "b": 4}}
    assert found["metrics"]["mean@4"] == pytest.approx(sum(one["reward"].to_pylist()) / 44, abs=1e-12)
    kinds = ("mean@4", "pass@1", "pass@2", "pass@4", "best@2", "best@4", "maj@2", "maj@4")
    assert set(found["metrics"]) == {f"{kind}{end}" for kind in kinds for end in ("", "/a", "/b")}
    assert "0." in capsys.readouterr().out


def test_a_checkpoint_says_what_validation_said_and_its_export_the_same(train, cluster_address, data, tmp_path):
    settings = ["cluster.workers=2", "cluster.placement={}", "checkpoint.every=1", "run.steps=2", *SAMPLING]
    run = train("run", *settings, f"validation.url={data}")
    result, out = evaluate(EvalRequest(model=str(run.url), data=data, overrides=["cluster.workers=3"]))
    assert (result.step, out) == (2, f"{run.url}/evaluations/test-step000002")
    logged = run.records("validation")[-1]["metrics"]
    assert result.metrics == {name: value for name, value in logged.items() if "@" in name}
    assert table_of(out, 2).select(SAME).equals(run.table("validation", 2).select(SAME))
    main(["export", str(run.url), str(tmp_path / "model"), "--step", "1"])
    greedy = ["validation.n=1", "validation.temperature=0", f"cluster.address={cluster_address}"]
    greedy += ["rollout.engine=transformers", "rollout.max_response_length=8", f"rewards.function={REWARD}"]
    request = {"data": data, "overrides": greedy}
    evaluate(EvalRequest(model=str(run.url), step=1, out=f"{tmp_path}/of run", **request))
    evaluate(EvalRequest(model=str(tmp_path / "model"), out=f"{tmp_path}/of model", **request))
    first = table_of(f"{tmp_path}/of run", 1).select(SAME)
    assert table_of(f"{tmp_path}/of model", 0).select(SAME).equals(first)
