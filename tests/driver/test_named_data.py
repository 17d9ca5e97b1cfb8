"""`plan` names what does not fit between a configuration and its dataset."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.cli import main

MINE = """
base: siirl_dask:dags/grpo.yaml
data: {url: rows.parquet, batch_size: 1}
model: {path: model, dtype: float32}
rewards: {function: "siirl_dask.rewards:exact_match"}
rollout: {engine: transformers}
"""


@pytest.fixture(autouse=True)
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"prompt": ["1 + 1"] * 3, "answer": ["2"] * 3}), "rows.parquet")
    (tmp_path / "mine.yaml").write_text(MINE)


@pytest.mark.parametrize("key", ["data.prompt", "data.answer"])
def test_a_column_that_is_not_there_is_named_with_the_key_that_chooses_it(key, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "mine.yaml", f"{key}=messages"])
    err = capsys.readouterr().err
    assert "has no column 'messages' (there is: ['prompt', 'answer'])" in err
    assert err.endswith(f"; {key} names it\n")


def test_a_step_of_more_prompts_than_rows_is_remarked_on(capsys):
    main(["plan", "mine.yaml", "data.batch_size=4"])
    assert "data.batch_size=4 is more than the 3 rows of dataset" in capsys.readouterr().out
    main(["plan", "mine.yaml", "data.batch_size=3"])
    assert "is more than the" not in capsys.readouterr().out
