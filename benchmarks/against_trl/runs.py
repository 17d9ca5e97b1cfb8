"""Both sides in processes of their own, one at a time, on as many cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from .setting import Curves, Setting

OURS, TRL = "ours", "trl"
SIDES = (OURS, TRL)
WHOLE = "ours, prompts whole"
"""Ours with mini-batches of prompts with all their samples."""
TOLD = "ours, engine's log-probs"
"""Ours with old log-probs of the engine."""
_BENCHMARKS = Path(__file__).resolve().parents[1]
_WARM_UP = 2  # steps of a round that are not timed


def losses(setting: Setting) -> dict[str, Any]:
    """Loss and gradient of one update in every case."""
    found: dict[str, Any] = _child("equality", [str(setting.task.model)], setting.threads)
    return found


def curves(setting: Setting, seeds: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """Run each side once a seed, ours once more with the engine's log-probs, and once with the
    mini-batches that it draws by default.
    """
    kinds = {
        OURS: (OURS, setting),
        TRL: (TRL, setting),
        TOLD: (OURS, replace(setting, told=True)),
        WHOLE: (OURS, replace(setting, mixed=False)),
    }
    return {
        kind: [asdict(run_side(side, replace(given, seed=seed))) for seed in seeds]
        for kind, (side, given) in kinds.items()
    }


def speed(
    setting: Setting, rounds: int, steps: int, modules: str = "run", kinds: Sequence[str] = SIDES
) -> dict[str, Any]:
    """Samples per second of each kind of run in ``rounds`` runs of ``steps`` timed steps, which
    alternate; on the setting's cores, everything that a side starts included. A side is the module
    ``MODULES_SIDE``; the ratio is that of the first kind to TRL.
    """
    short = replace(setting, steps=steps + _WARM_UP, validate=False)
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    loads = []
    for at in range(rounds):
        loads.append(os.getloadavg()[0])
        for kind in kinds if at % 2 == 0 else reversed(kinds):
            given = replace(short, seed=at, told=kind == TOLD)
            run = run_side(TRL if kind == TRL else OURS, given, modules, pinned=True)
            found[kind].append(run.samples_per_second(setting.rows, _WARM_UP))
    medians = {kind: median(values) for kind, values in found.items()}
    ratio = medians[kinds[0]] / medians[TRL]
    return {
        "samples_per_second": found,
        "medians": medians,
        "ratio": ratio,
        "steps": steps,
        "loads": loads,
    }


def run_side(side: str, setting: Setting, modules: str = "run", *, pinned: bool = False) -> Curves:
    """Run a side in a process of its own, on the setting's cores alone where it is pinned."""
    threads = setting.threads if side == OURS else setting.cores
    given = [json.dumps(asdict(setting))]
    return Curves(
        **_child(f"{modules}_{side}", given, threads, cores=setting.cores if pinned else 0)
    )


def _child(module: str, arguments: Sequence[str], threads: int, *, cores: int = 0) -> Any:
    """Run a module of this package, on so many cores, 0 for all, and return the JSON that it
    writes. RuntimeError with the end of its output.
    """
    command = [
        *(_pin(cores) if cores else []),
        sys.executable,
        "-m",
        f"{__package__}.{module}",
        *arguments,
    ]
    with TemporaryDirectory() as folder:
        log, out = Path(folder, "log"), Path(folder, "out.json")
        with log.open("w") as said:
            environment = {**os.environ, **_environment(threads)}
            done = subprocess.run(
                [*command, str(out)], cwd=_BENCHMARKS, env=environment, stdout=said, stderr=said
            )
        if done.returncode:
            raise RuntimeError(f"{module} ended with {done.returncode}:\n{log.read_text()[-3000:]}")
        return json.loads(out.read_text())


def _environment(threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",  # bars for reading weights
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(_BENCHMARKS), os.environ.get("PYTHONPATH")))
        ),
    }


def _pin(cores: int) -> list[str]:
    """A command's beginning that keeps it, and all that it starts, on so many cores; nothing
    where none can.
    """
    if not shutil.which("taskset"):
        return []
    mine = sorted(os.sched_getaffinity(0))[:cores]
    return ["taskset", "-c", ",".join(map(str, mine))]
