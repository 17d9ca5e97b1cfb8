"""Measure what `kill -9` costs in the middle of a turn: of a worker, a rank, an engine's process, a server.

    python benchmarks/kills.py [--cases worker process] [--steps 8] [--out docs/benchmarks/kills.md]

The guessing game of `configs/quickstart_turns.yaml` on two workers. Each case is two runs of one configuration: one is
left alone, in the other one process gets SIGKILL while an environment answers. Seconds are from the signal until the
step under way, or the one after it, is committed. Rows, tokens and rewards of all steps are compared with those of the
other run. Processes, files in /dev/shm and temporary files that the run leaves are counted, so nothing else may run on
the machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar
from urllib.request import urlopen

import psutil
import pyarrow as pa
from rich.console import Console
from siirl_storage import open_table

from siirl_dask.environments import Step
from siirl_dask.models.broken_imports import hide
from siirl_dask.observe import read_metrics
from siirl_dask.tasks.guessing import Guess, write_guessing_task
from siirl_dask.tasks.sorting import Task

_ANSWER = 0.05  # seconds of an answer of the environment, so that most of a step is in the middle of a turn
_KILLED_AFTER = 3  # steps
_SHARED = Path("/dev/shm")
_OF_DASK = (
    "global.lock",
    "purge.lock",
)  # of its scratch folder, which it leaves to the next cluster
_PATIENCE = 600.0  # seconds for a run, and for a server to start
_MARK = "SIIRL_KILLS_FOLDER"
"""In the environment of all processes of a run: the folder in which those that play leave their numbers."""
_CONFIG = Path(__file__).resolve().parents[1] / "configs" / "quickstart_turns.yaml"
_Found = TypeVar("_Found")
_EXACT = ("row_id", "prompt_ids", "response_ids", "reward", "weights_version")


class LateGuess(Guess):
    """The guessing game, whose answers take a while, and whose process can be found."""

    def step(self, text: str) -> Step | str:
        """Return the hint or the end, later."""
        Path(os.environ[_MARK], f"plays-{os.getpid()}").touch()
        time.sleep(_ANSWER)
        return super().step(text)


@dataclass(frozen=True)
class Case:
    """A process that is killed, and the keys of the runs in which that is done."""

    name: str
    what: str
    keys: tuple[str, ...]


_APART = "cluster.placement={rollout: [0], environments: [0], policy: [1]}"
_TOGETHER = "cluster.placement={}"
CASES = (
    Case("worker", "the worker that plays", (_APART,)),
    Case("learner", "the worker that learns", (_APART,)),
    Case(
        "rank",
        "one of two workers that are one engine of vLLM",
        (_TOGETHER, "rollout.engine=vllm", "rollout.tensor_parallel_size=2"),
    ),
    Case(
        "process",
        "the process of an engine of vLLM (`rollout.process`)",
        (_APART, "rollout.engine=vllm", "rollout.process=true"),
    ),
    Case("server", "a server of vLLM, started again at once", (_APART, "rollout.engine=server")),
)


@dataclass(frozen=True)
class Measured:
    """A run in which a process was killed, beside one that was left alone."""

    step: float
    """Seconds of a step, median, where nothing is killed."""
    until_next: float
    """Seconds from the signal until that step, or the one after it, is committed."""
    rows: int
    equal: int
    """Rows whose tokens, rewards and weights' versions are those of the other run."""
    processes: int
    files: tuple[str, ...]
    """In /dev/shm and in the folder of temporary files."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    hide()
    found: dict[str, Measured] = {}
    with TemporaryDirectory() as folder:
        task = write_guessing_task(Path(folder, "task"))
        for case in CASES:
            if case.name in given.cases:
                found[case.what] = measure(case, task, given.steps)
                print(f"{case.name}: {found[case.what]}", flush=True)
    text = page(found, given.steps)
    Console().print(text)
    if given.out:
        given.out.write_text(text)


def measure(case: Case, task: Task, steps: int) -> Measured:
    with TemporaryDirectory() as folder:
        straight = Path(folder, "straight")
        hurt = Path(folder, "hurt")
        straight.mkdir()
        hurt.mkdir()
        with server_of(case, task, straight) as keys:
            finish(start(straight, case, task, steps, keys), straight)
        shared = set(_SHARED.iterdir())
        with server_of(case, task, hurt) as keys:
            until_next = run_hurt(hurt, case, task, steps, keys)
        records = [
            record for record in read_metrics(f"{straight}/run") if record["phase"] == "train"
        ]
        seconds = sorted(record["seconds"] for record in records)
        equal = [
            row
            for step in range(1, steps + 1)
            for row in same_rows(rows_of(straight, step), rows_of(hurt, step))
        ]
        return Measured(
            step=seconds[len(seconds) // 2],
            until_next=until_next,
            rows=len(equal),
            equal=sum(equal),
            processes=len(processes_of(hurt)),
            files=tuple(str(path) for path in left_files(hurt, shared)),
        )


def run_hurt(folder: Path, case: Case, task: Task, steps: int, keys: Sequence[str]) -> float:
    """Run, kill a process in the middle of a turn, and return the seconds until the end of that
    step: what is committed by then may be one step behind.
    """
    run = start(folder, case, task, steps, keys)
    wait_until(lambda: steps_of(folder) >= _KILLED_AFTER, run)
    victim = wait_until(lambda: victim_of(folder, case.name), run)
    done = steps_of(folder)
    killed = time.monotonic()
    if case.name == "server":
        os.killpg(os.getpgid(victim.pid), signal.SIGKILL)  # all its processes
    else:
        victim.kill()
    wait_until(lambda: steps_of(folder) > done + 1, run)
    seconds = time.monotonic() - killed
    finish(run, folder)
    return seconds


def start(
    folder: Path, case: Case, task: Task, steps: int, keys: Sequence[str]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "siirl_dask.cli", "run", str(_CONFIG)]
    command += [
        "cluster.workers=2",
        f"environments.environment={Path(__file__).resolve()}:LateGuess",
        "environments.concurrency=64",
        "data.batch_size=8",
        "data.prepare=null",
        f"data.url={task.train}",
        f"model.path={task.model}",
        "validation.url=null",
        "validation.test_url=null",
        "checkpoint.every=2",
        "observe.progress=false",
        f"run.steps={steps}",
        f"run.url={folder}/run",
        *case.keys,
        *keys,
    ]
    temporary = folder / "temporary"
    temporary.mkdir()
    with Path(folder, "output").open("wb") as output:
        return subprocess.Popen(
            command, cwd=folder.parent, env=environment_of(folder), stdout=output, stderr=output
        )


def environment_of(folder: Path) -> Mapping[str, str]:
    return {**os.environ, _MARK: str(folder), "TMPDIR": str(folder / "temporary")}


def finish(run: subprocess.Popen[bytes], folder: Path) -> None:
    if run.wait(_PATIENCE) != 0:
        raise RuntimeError(f"a run failed:\n{Path(folder, 'output').read_text()[-3000:]}")


def victim_of(folder: Path, name: str) -> psutil.Process | None:
    """Return the process to kill if it is in the middle of a turn, else None."""
    newest = max(folder.glob("plays-*"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None or time.time() - newest.stat().st_mtime > _ANSWER / 2:
        return None
    playing = psutil.Process(int(newest.name.partition("-")[2]))
    if name in ("worker", "rank"):
        return playing
    marked = processes_of(folder)
    if name == "learner":
        server = playing.ppid()
        return next(each for each in marked if each.ppid() == server and each != playing)
    part = {"process": "process_engine", "server": "server_engine.serve"}[name]
    return next(each for each in marked if any(part in word for word in each.cmdline()))


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return all processes of a run, also those that left its group and its session."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == str(folder):
                found.append(process)
    return found


def left_files(folder: Path, before: Container[Path]) -> list[Path]:
    """Return what a run has left in shared memory and in its folder of temporary files."""
    found = [path for path in _SHARED.iterdir() if path not in before]
    found += [path for path in Path(folder, "temporary").rglob("*") if path.is_file()]
    return [path for path in found if path.name not in _OF_DASK]


def steps_of(folder: Path) -> int:
    """Return the newest step of a run's metrics, 0 before the first."""
    if not Path(folder, "run", "metrics.jsonl").exists():
        return 0
    records = read_metrics(f"{folder}/run")
    return max((record["step"] for record in records if record["phase"] == "train"), default=0)


def rows_of(folder: Path, step: int) -> pa.Table:
    return open_table(f"{folder}/run/rollouts/step={step:06d}").to_table().sort_by("row_id")


def same_rows(one: pa.Table, other: pa.Table) -> list[bool]:
    """Return for each row of ``one`` whether ``other`` has the same."""
    names = [name for name in _EXACT if name in one.column_names]
    pairs = zip(one.select(names).to_pylist(), other.select(names).to_pylist(), strict=True)
    return [ours == theirs for ours, theirs in pairs]


def wait_until(
    condition: Callable[[], _Found | None], run: subprocess.Popen[bytes] | None
) -> _Found:
    """Return what ``condition`` returns once that is true; RuntimeError when the run has ended."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        if run is not None and run.poll() is not None:
            raise RuntimeError(f"a run has ended too early, with {run.returncode}")
        time.sleep(_ANSWER / 10)
    raise RuntimeError(f"nothing came within {_PATIENCE:g} s")


class Server:
    """A server of vLLM that is started again when it is killed, until ``stop``."""

    def __init__(self, model: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        self._model = model
        self._folder = folder
        self._is_over = False
        self._process = self._start()
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    def answers(self) -> bool:
        """Return whether it answers requests by now. RuntimeError where it did not start."""
        if self._is_over:
            raise RuntimeError(f"the server has ended:\n{self._output().read_text()[-3000:]}")
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == HTTPStatus.OK)
        except OSError:
            return False

    def stop(self) -> None:
        self._is_over = True
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._keeper.join()

    def _output(self) -> Path:
        return self._folder / "server"

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "siirl_dask.rollout.server_engine.serve", self._model]
        command += ["--port", str(self.port), "--max-model-len", "64", "--max-num-seqs", "64"]
        command += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "67108864"]
        with self._output().open("ab") as output:
            return subprocess.Popen(
                command,
                env=environment_of(self._folder),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _keep(self) -> None:
        while not self._is_over:
            status = self._process.wait()
            if status != -signal.SIGKILL:
                self._is_over = True
            elif not self._is_over:
                self._process = self._start()


@contextmanager
def server_of(case: Case, task: Task, folder: Path) -> Iterator[tuple[str, ...]]:
    """Run a server where the case needs one, and yield the keys that name it."""
    if case.name != "server":
        yield ()
        return
    server = Server(str(task.model), folder)
    try:
        wait_until(server.answers, None)
        yield (
            f"rollout.server.urls=[http://127.0.0.1:{server.port}]",
            f"rollout.server.weights_folder={folder}/weights",
        )
    finally:
        server.stop()


def page(found: Mapping[str, Measured], steps: int) -> str:
    lines = [
        "# What `kill -9` costs in the middle of a turn",
        "",
        f"`python benchmarks/kills.py` on {platform.machine()}: the guessing game of "
        f"`configs/quickstart_turns.yaml`, 8 prompts of 8 episodes a step, {steps} steps, a checkpoint "
        f"every second one, on two workers and two cores. An answer of the environment takes {_ANSWER} s. One process "
        f"gets SIGKILL while an environment answers, after step {_KILLED_AFTER}. Of the rows, tokens, rewards and the "
        "weights' versions are compared with those of a run that was left alone.",
        "",
        "| killed | s a step | s until a step is committed | rows equal | processes left | files left |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {what} | {one.step:.1f} | {one.until_next:.1f} | {one.equal} of {one.rows} "
        f"| {one.processes} | {len(one.files)} |"
        for what, one in found.items()
    ]
    lines += [
        "",
        "A server's time is mostly that of its next start. What a killed server leaves is vLLM's own: shared memory "
        "between its processes, and files of its compiler.",
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
