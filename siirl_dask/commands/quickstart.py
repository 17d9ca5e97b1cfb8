"""``siirl-dask quickstart``: trains a tiny model on this machine, and explains the result to a
first-time user.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from siirl_dask.commands.run_end import print_run_end, program
from siirl_dask.config import Config
from siirl_dask.config.file import load_config_file
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from siirl_dask.errors import counted
from siirl_dask.observe import PipeConsole


def quickstart(config_file: Path, overrides: Sequence[str]) -> None:
    """Train as the shipped config says and print a report. A run of an earlier quickstart is
    replaced.
    """
    file = load_config_file(config_file, overrides)
    config = file.config
    PipeConsole().print(
        "GRPO: a small model learns to sort digits. "
        f"{_doing(config, 'rollout', 'generate')}, {_doing(config, 'policy', 'learn')}."
    )
    shown = os.path.relpath(config_file.resolve())
    again = shlex.join(["siirl-dask", "run", shown, *overrides])
    summary = run(config, *dags(file), fresh=True, command=again)
    more = {
        "what it planned": shlex.join([program(), "plan", shown]),
        "another run": f"{program()} quickstart run.name=mine trainer.lr=5e-5",
    }
    print_run_end(config, summary, more)


def _doing(config: Config, role: str, verb: str) -> str:
    workers = len(config.cluster.placement.get(role, range(config.cluster.workers)))
    return f"{counted(workers, 'worker')} {verb}{'s' if workers == 1 else ''}"
