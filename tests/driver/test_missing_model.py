"""A model that is not there is named, with the nearest name, before any worker starts."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.cli import main
from siirl_dask.driver import run

MINE = """
base: siirl_dask:dags/grpo.yaml
data: {url: rows.parquet, batch_size: 1}
model: {path: models/smolm2, dtype: float32}
rewards: {function: "siirl_dask.rewards:math_answer"}
rollout: {engine: transformers}
cluster: {workers: 1}
run: {steps: 1, name: mine}
"""


def test_a_run_names_a_model_that_is_not_there_and_starts_no_worker(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "connect", lambda *given: pytest.fail("a cluster was started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "smollm2").mkdir(parents=True)
    pq.write_table(pa.table({"prompt": ["1 + 1"], "answer": ["2"]}), "rows.parquet")
    (tmp_path / "mine.yaml").write_text(MINE)
    with pytest.raises(SystemExit, match="2"):
        main(["run", "mine.yaml"])
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"is not at '{tmp_path}/models/smolm2'" in err
    assert err.endswith(f"did you mean '{tmp_path}/models/smollm2'?\n")
