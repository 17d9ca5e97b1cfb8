"""The notebook of docs/ runs from its first cell to its last, in a kernel of its own."""

import os
import re
import shutil
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "dask.ipynb"


def texts(cell):
    """Return all that a cell shows, as text."""
    shown = []
    for output in cell.get("outputs", ()):
        assert output.output_type != "error", output.evalue
        shown.append(output.get("text", output.get("data", {}).get("text/plain", "")))
    return "\n".join(shown)


@pytest.mark.timeout(600)
def test_the_notebook_of_the_page_runs(quickstarts_task, tmp_path, monkeypatch):
    shutil.copytree(quickstarts_task, tmp_path / "runs")
    paths = [str(ROOT), str(ROOT / "storage"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    for name in ("CONFIG", "DATA", "RUNTIME"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(texts(cell) for cell in notebook.cells), "it is kept without its outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = "\n".join(map(texts, notebook.cells))
    assert "<run " in shown
    assert "complete" in shown
    assert f"{6 * 16 * 8} samples" in shown
    assert "Sort:" in shown
    assert re.search(r"interrupted \[\d+", shown), "cancelled, with a checkpoint"
    assert (tmp_path / "runs" / "notebook" / "metrics.jsonl").is_file()
