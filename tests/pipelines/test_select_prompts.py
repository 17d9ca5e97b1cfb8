"""Prompts are chosen on Dask's workers as a loop over all of them would choose, and a run trains on
them.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dask.delayed import delayed
from distributed import Client
from siirl_storage import open_table
from transformers import AutoModelForCausalLM, AutoTokenizer

import siirl_dask
from siirl_dask.config.file import shipped
from tests.forked_programs import run_forked
from tests.settings import digits_overrides

SCRIPT = Path(__file__).parents[2] / "pipelines" / "select_prompts.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("select_prompts", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rows():
    """Rows of which some come again in another spelling, and one is too long."""
    rows = [
        {"prompt": f"Digits {number}:", "answer": f"{number * 7 % 100}"} for number in range(60)
    ]
    again = [{**row, "prompt": f"  {row['prompt'].upper()} "} for row in rows[:20]]
    long = [{"prompt": "1 " * 150, "answer": "1"}]
    return rows + again + long + rows[30:40]


def difficulty_of(row, model, tokenizer):
    prompt = tokenizer.encode(row["prompt"])
    answer = tokenizer.encode(row["answer"], add_special_tokens=False)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, :-1]
    logprobs = logits.log_softmax(-1)[torch.arange(len(prompt + answer) - 1), (prompt + answer)[1:]]
    return float(-logprobs[len(prompt) - 1 :].mean())


def expected(rows, path, choice):
    """Choose as the script does, one row after the other."""
    seen = set()
    kept = []
    for row in rows:
        plain = " ".join(row["prompt"].lower().split())
        if len(row["prompt"]) <= choice.longest and plain not in seen:
            seen.add(plain)
            kept.append(row)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    values = np.array([difficulty_of(row, model, tokenizer) for row in kept], dtype=np.float32)
    low, high = np.quantile(values, [choice.easiest, 1 - choice.hardest])
    return [row for row, value in zip(kept, values, strict=True) if low <= value <= high], values


def test_prompts_are_chosen_as_a_loop_would(script, rows, digits_task, cluster_address, capsys):
    choice = script.Choice(longest=100)
    wanted, values = expected(rows, str(digits_task.model), choice)
    assert 20 < len(wanted) < 60
    parts = [pa.Table.from_pylist(rows[start : start + 17]) for start in range(0, len(rows), 17)]
    with Client(cluster_address, set_as_default=False) as client:
        found = script.selected(
            client, [delayed(part) for part in parts], str(digits_task.model), choice
        )
        chosen = pa.concat_tables(client.gather(found))
    assert chosen.select(["prompt", "answer"]).to_pylist() == wanted
    inside = [value for value in values if any(np.isclose(value, chosen["difficulty"], atol=1e-4))]
    assert len(inside) >= len(wanted)
    assert f"without duplicates: {len(values)} prompts" in capsys.readouterr().out


def test_the_script_chooses_and_trains(rows, digits_task, tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in range(3):
        pq.write_table(pa.Table.from_pylist(rows[number::3]), parts / f"{number}.parquet")
    settings = digits_overrides(digits_task, tmp_path / "run")
    settings = [setting for setting in settings if not setting.startswith("data.url=")]
    done = run_forked(
        SCRIPT,
        shipped("quickstart.yaml"),
        parts,
        *settings,
        "cluster.workers=1",
        "cluster.placement={}",
        "run.steps=1",
        folder=tmp_path,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "scored: 60 prompts" in done.stdout
    run = siirl_dask.open_run(str(tmp_path / "run"))
    assert run.steps == [1]
    table = open_table(str(tmp_path / "run" / "data")).to_table()
    assert table.num_rows < 60
    assert "difficulty" in table.column_names
