"""A model that is not there, or is none, is named before any worker starts."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.cli import main
from siirl_dask.driver import launch_loop

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
    monkeypatch.setattr(launch_loop, "connect", lambda *given: pytest.fail("a cluster was started"))
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


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Return a function that has `plan` refuse the configuration with a change, in one line."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"prompt": ["1 + 1"], "answer": ["2"]}), "rows.parquet")
    (tmp_path / "mine.yaml").write_text(MINE)

    def plan(*overrides):
        with pytest.raises(SystemExit, match="2"):
            main(["plan", "mine.yaml", *overrides])
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    return plan


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("models/smolm2", "is a file: expected a Hugging Face folder"),
        ("models/smolm2/tokenizer.json", "has no config.json: expected a Hugging Face folder"),
        ("models/smolm2/adapter_config.json", "holds adapters alone: .*trainer.lora.path for them"),
    ],
)
def test_what_lies_in_the_place_of_a_model_and_is_none_is_named_by_plan(
    file, said, refused, tmp_path
):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    assert re.search(rf"the model of role '\w+': '{tmp_path}/models/smolm2' {said}", refused())
