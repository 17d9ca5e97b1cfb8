"""The examples and tables of docs/dags.md hold."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path

from siirl_dask import grpo
from siirl_dask.cli import main
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.planner import Node, Rows, resolve
from tests.recipes.keys import same_dag
from tests.settings import digits_overrides

DOCS = (Path(__file__).parents[2] / "docs" / "dags.md").read_text()
BREVITY = """
import pyarrow as pa
from siirl_dask.planner import columns

@columns(reads=["response_ids"], writes={"brevity": pa.float32()})
def brevity(ctx, table): ...
"""


def test_the_example_changes_the_base_as_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = re.search(r"(    base: quickstart.yaml\n(?:    .*\n)+)", DOCS)[1]
    (tmp_path / "mine.py").write_text(BREVITY)
    text = textwrap.dedent(example).replace("quickstart.yaml", str(shipped("quickstart.yaml")))
    (tmp_path / "mine.yaml").write_text(text)
    overrides = [
        "nodes.update.with.loss.with.kl_coefficient=0.1",
        "nodes.old_logprobs.rows=anywhere",
    ]
    try:
        dag, _ = dags(load_config_file("mine.yaml", overrides))
        main(["plan", "mine.yaml"])
    finally:
        del sys.modules["mine.py"]
    base, _ = dags(load_config_file(shipped("quickstart.yaml")))
    assert [n.name for n in dag.nodes] == [
        n.name for n in base.nodes if n.name != "load_weights"
    ] + ["brevity"]
    update, advantage = dag.node("update"), dag.node("advantage")
    assert (update.rows, update.options["minibatches"]) == (Rows.ANYWHERE, 2)
    assert update.options["loss"].keywords["kl_coefficient"] == 0.1
    assert (advantage.after, advantage.save_as) == (("reward", "old_logprobs", "brevity"), None)
    assert "mine.py:brevity" in capsys.readouterr().out


def test_the_same_changes_in_python_make_the_same_dag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(BREVITY)
    example = re.search(r"(    base: quickstart.yaml\n(?:    .*\n)+)", DOCS)[1]
    text = textwrap.dedent(example).replace("quickstart.yaml", str(shipped("quickstart.yaml")))
    (tmp_path / "mine.yaml").write_text(text)
    try:
        file = load_config_file("mine.yaml")
        names = {
            "grpo": grpo,
            "Node": Node,
            "config": file.config,
            "brevity": resolve("mine.py:brevity"),
        }
        exec(re.search(r"```python\n(dag = grpo.*?)```", DOCS, re.DOTALL)[1], names)
        assert same_dag(lambda config: names["dag"])(file)
    finally:
        del sys.modules["mine.py"]


def keys(data):
    """Yield the keys of an object and of the objects in its lists, but for keys that are the
    user's names.
    """
    for key, value in data.items():
        yield key
        if key in ("memory", "chains", "edges", "links"):
            for item in value:
                yield from keys(item)
        if key == "phases":
            for phase in value.values():
                yield from keys(phase)
        if key == "contracts":
            for contract in value.values():
                yield from contract


def test_every_key_of_the_json_is_documented(digits_task, tmp_path, capsys):
    overrides = digits_overrides(digits_task, tmp_path / "run")
    main(["plan", "--format", "json", "--on", "h100", str(shipped("grpo_kl.yaml")), *overrides])
    given = json.loads(capsys.readouterr().out)
    assert {"first_prompt", "time"} <= set(given)
    table = DOCS[DOCS.index("**`--format json`**") : DOCS.index("**`--format svg`**")]
    assert set(keys(given)) <= set(re.findall(r"`(\w+)`", table))
    assert given["version"] == 1
