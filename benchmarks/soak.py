"""A long run of small steps: do memory, file descriptors and threads of its processes stay where they are?

    python benchmarks/soak.py [--steps 1000] [--out docs/benchmarks/soak.md] [--json] [key=value ...]

The quickstart's task on two workers: one generates a step ahead, one learns; a validation every 10 steps, a checkpoint
every 50. All processes of the run are looked at twice a second. Linux.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil
from matplotlib.figure import Figure

_FIXED = (
    "run.name=soak",
    "cluster.workers=2",
    "cluster.placement={rollout: [0], reward: [0], policy: [1]}",
    "rollout.engine=transformers",
    "rollout.max_staleness=1",
    "rollout.n=4",
    "data.batch_size=4",
    "algorithm.minibatches=1",
    "validation.every=10",
    "checkpoint.every=50",
    "checkpoint.keep=2",
    "observe.progress=false",
)
_EVERY = 0.5  # seconds between looks
_MEASURES = {
    "rss": "resident memory, MB",
    "arena": "memory for rows (memfds), MB",
    "fds": "file descriptors",
    "threads": "threads",
}


@dataclass(frozen=True)
class Look:
    """One process at one time."""

    step: int
    rss: float
    arena: float
    fds: int
    threads: int


@dataclass
class Soak:
    """The processes of a run and the run's shared memory, as they were seen."""

    steps: int
    seconds: float = 0.0
    processes: dict[str, list[Look]] = field(default_factory=dict)
    """Looks at each process that lived for most of the run, by what it does."""
    shared_memory: list[tuple[int, float]] = field(default_factory=list)
    """Step, and MB of the run's files in /dev/shm."""
    left: list[str] = field(default_factory=list)
    """Names of these files that are there after the run."""

    def growth(self, process: str, measure: str) -> tuple[float, float]:
        """Return the median of a measure in the third tenth of the steps, and in the last but
        for the very end.
        """
        looks = self.processes[process]
        first, last = (
            [getattr(look, measure) for look in looks if low < look.step <= high]
            for low, high in _tenths(self.steps)
        )
        return median(first), median(last)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help="print what was seen as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        soak = measure(Path(folder), given.steps, given.overrides)
    text = report(soak)
    print(json.dumps(asdict(soak) | {"growth": growths(soak)}) if given.json else text)
    if given.out:
        given.out.write_text(text)
        draw(soak).savefig(given.out.with_suffix(".png"))


def measure(folder: Path, steps: int, overrides: Sequence[str] = ()) -> Soak:
    """Run the steps in ``folder`` and look at the run's processes meanwhile."""
    soak, own = Soak(steps), set[str]()
    seen: dict[psutil.Process, list[Look]] = {}
    command = [
        sys.executable,
        "-m",
        "siirl_dask.cli",
        "quickstart",
        *_FIXED,
        f"run.steps={steps}",
        *overrides,
    ]
    began = time.monotonic()
    run = psutil.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    while run.poll() is None:
        step = _step(folder)
        for process in (run, *_children(run)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                seen.setdefault(process, []).append(_look(process, step))
                own.update(
                    re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{process.pid}/maps").read_text())
                )
        now = _shared_files()
        soak.shared_memory.append(
            (step, sum(size for name, size in now.items() if name in own) / 1e6)
        )
        time.sleep(_EVERY)
    if run.returncode:
        raise SystemExit(f"the run ended with exit code {run.returncode}")
    soak.seconds = time.monotonic() - began
    soak.left = sorted(_shared_files().keys() & own)
    soak.processes = dict(_named(seen, steps))
    return soak


def _children(run: psutil.Popen) -> list[psutil.Process]:
    try:
        return run.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _step(folder: Path) -> int:
    """Return the newest training step whose metrics are written."""
    path = folder / "runs" / "soak" / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as lines:
        lines.seek(max(0, path.stat().st_size - 20_000))
        last = lines.read().splitlines()[1:]
    records = (json.loads(line) for line in last if line.endswith(b"}"))
    return max((record["step"] for record in records), default=0)


def _look(process: psutil.Process, step: int) -> Look:
    arena = 0
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            if link.readlink().name.startswith("memfd:siirl_dask"):
                arena += link.stat().st_blocks * 512
    with process.oneshot():
        rss = process.memory_info().rss / 1e6
        return Look(step, rss, arena / 1e6, process.num_fds(), process.num_threads())


def _shared_files() -> Mapping[str, int]:
    """Return the bytes of each file in /dev/shm."""
    files = {}
    for path in Path("/dev/shm").iterdir():
        with suppress(FileNotFoundError):
            files[path.name] = path.stat().st_blocks * 512
    return files


def _named(
    seen: Mapping[psutil.Process, list[Look]], steps: int
) -> Iterator[tuple[str, list[Look]]]:
    """Give the processes that lived from a fifth of the steps on to the end, with names; workers
    have most files.
    """
    lasting = [
        looks
        for looks in seen.values()
        if looks[0].step < steps / 5 and looks[-1].step > 0.95 * steps
    ]
    driver = next(iter(seen.values()))
    others = sorted(
        (looks for looks in lasting if looks is not driver),
        key=lambda looks: -looks[len(looks) // 2].fds,
    )
    yield "driver and scheduler", driver
    for number, looks in enumerate(others):
        yield (
            f"worker {number}" if number < 2 else f"process that starts others {number - 1}",
            looks,
        )


def growths(soak: Soak) -> dict[str, dict[str, tuple[float, float]]]:
    """Return each process's measures, early and late."""
    return {
        name: {measure: soak.growth(name, measure) for measure in _MEASURES}
        for name in soak.processes
    }


def report(soak: Soak) -> str:
    """Return a page with a table: each measure of each process in the third tenth of the run,
    and in the last.
    """
    rows = [
        f"| {name} | "
        + " | ".join(f"{early:.0f} -> {late:.0f}" for early, late in measures.values())
        + " |"
        for name, measures in growths(soak).items()
    ]
    shared = [
        [size for at, size in soak.shared_memory if low < at <= high]
        for low, high in _tenths(soak.steps)
    ]
    lines = [
        f"# {soak.steps:,} steps on end",
        "",
        f"`python benchmarks/soak.py --steps {soak.steps}`, {soak.seconds:.0f} s: the quickstart's "
        "task on two workers, `rollout.max_staleness=1`, a validation every 10 steps, a "
        "checkpoint every 50. Medians of the steps between a fifth and three tenths of the run, "
        "and of its last tenth.",
        "",
        "| process | " + " | ".join(_MEASURES.values()) + " |",
        "|---" * (len(_MEASURES) + 1) + "|",
        *rows,
        "",
        "The run's files in /dev/shm: "
        f"{' -> '.join(f'{median(sizes):.1f} MB' for sizes in shared)}; "
        f"{len(soak.left)} are left after the run.",
        "",
        "![Each measure over the steps](soak.png)",
        "",
    ]
    return "\n".join(lines)


def _tenths(steps: int) -> tuple[tuple[float, float], ...]:
    return ((0.2 * steps, 0.3 * steps), (0.9 * steps, steps - 1))


def draw(soak: Soak) -> Figure:
    """Draw each measure over the steps, a line a process."""
    figure = Figure(figsize=(11, 6), dpi=130, layout="constrained")
    for axes, (measure, title) in zip(
        figure.subplots(2, 2, sharex=True).flat, _MEASURES.items(), strict=True
    ):
        for name, looks in soak.processes.items():
            steps, values = (
                [look.step for look in looks],
                [getattr(look, measure) for look in looks],
            )
            axes.plot(steps, values, label=name, linewidth=1)
        axes.set_title(title, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    return figure


if __name__ == "__main__":
    main()
