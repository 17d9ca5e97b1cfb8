"""``siirl-dask quickstart``: trains a tiny model on this machine, and explains the result to a
first-time user.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from siirl_storage import join, open_table

from siirl_dask.config import Config
from siirl_dask.config.file import load_config_file
from siirl_dask.coordinator.stored_rows import step_folder
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from siirl_dask.errors import counted
from siirl_dask.observe import EndOfRun, PipeConsole, Sample, render_end_of_run

_SHOWN_COLUMNS = ["prompt", "answer", "response", "reward"]


def quickstart(config_file: Path, overrides: Sequence[str]) -> None:
    """Train as the shipped config says and print a report. A run of an earlier quickstart is
    replaced.
    """
    file = load_config_file(config_file, overrides)
    config = file.config
    console = PipeConsole()
    console.print(
        "GRPO: a small model learns to sort digits. "
        f"{_doing(config, 'rollout', 'generate')}, {_doing(config, 'policy', 'learn')}."
    )
    again = shlex.join(["siirl-dask", "run", os.path.relpath(config_file.resolve()), *overrides])
    summary = run(config, *dags(file), fresh=True, command=again)
    url = config.run.url
    steps = config.run.steps
    files = {
        "every sample": join(url, "rollouts"),
        "metrics": join(url, "metrics.jsonl"),
        "summary": join(url, "summary.json"),
    }
    before: list[Sample] = []
    after: list[Sample] = []
    if config.validation.url is not None:
        files["validation"] = join(url, "validation")
        before = _validation_rows(url, 0)
        after = _validation_rows(url, steps)
    if config.observe.plot:
        files["plot"] = join(url, "plot.svg")
    # typed as it was here
    command = "siirl-dask" if shutil.which("siirl-dask") else os.path.relpath(sys.argv[0])
    next_lines = (
        f"{command} rollouts {url}",
        f"{command} plan {os.path.relpath(config_file.resolve())}",
        f"{command} quickstart run.name=mine trainer.lr=5e-5",
    )
    console.print(
        render_end_of_run(
            EndOfRun(
                summary=summary, files=files, before=before, after=after, next_lines=next_lines
            )
        )
    )


def _doing(config: Config, role: str, verb: str) -> str:
    workers = len(config.cluster.placement.get(role, range(config.cluster.workers)))
    return f"{counted(workers, 'worker')} {verb}{'s' if workers == 1 else ''}"


def _validation_rows(url: str, step: int) -> list[Sample]:
    table: pa.Table = open_table(step_folder(url, "validation", step)).to_table(_SHOWN_COLUMNS)
    rows: list[Sample] = table.to_pylist()
    return rows
