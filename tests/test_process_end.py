"""Processes that freeze garbage collection end without reports of leaked objects."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "freeze",
    [
        "import tests.conftest, gc; gc.collect(); gc.freeze()",
        "import siirl_dask.worker.process._hide, siirl_dask.worker.process._freeze",
    ],
)
def test_frozen_processes_end_without_reports_of_leaks(freeze):
    script = f"import duckdb; duckdb.sql('SELECT 1'); {freeze}"
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True
    )
    assert "leaked" not in done.stdout + done.stderr
