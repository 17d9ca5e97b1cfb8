"""The parts of the day: the command and the seconds of each, and which of them are asked for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
GROUPS = {
    "probe": "what the machine is",
    "checks": "correctness, all at once on the device: its models are small",
    "bench": "figures, each alone on the device",
    "trl": "TRL's GRPOTrainer on the same model and rows",
    "speed": "three steps of half a billion parameters",
}
"""Groups in the order in which they run."""
TOGETHER = {"checks"}
"""Groups whose parts run at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """A process of the day."""

    name: str
    group: str
    seconds: float
    """Seconds after which it is ended."""
    arguments: tuple[str, ...]
    """Arguments of Python; ``OUT`` stands for the folder of results."""
    tests: bool = False
    """Whether it is pytest, whose report is counted."""


def _script(name: str, group: str, seconds: float, script: str, *arguments: str) -> Part:
    return Part(name, group, seconds, arguments=(str(HERE / script), "OUT", *arguments))


def _check(
    name: str, seconds: float, files: tuple[str, ...], pick: str, group: str = "checks"
) -> Part:
    options = (
        "-v",
        "-m",
        "gpu",
        "--confcutdir=tests/gpu",
        "-o",
        "timeout=300",
        "-p",
        "no:cacheprovider",
    )
    paths = tuple(f"tests/gpu/{file}" for file in files)
    chosen = ("-k", pick) if pick else ()
    arguments = ("-m", "pytest", *options, "--durations=5", *paths, *chosen)
    return Part(name, group, seconds, arguments=arguments, tests=True)


PARTS = (
    _script("probe", "probe", 60, "probe.py"),
    _check("kernels", 170, ("test_kernels.py",), "not soft_caps and not ligers"),
    _check("soft-caps", 170, ("test_kernels.py",), "soft_caps"),
    _check("liger", 170, ("test_kernels.py",), "ligers"),
    _check("trainers", 170, ("test_trainers.py",), "TestWholePolicy"),
    _check("shards", 170, ("test_trainers.py",), "TestShardedPolicy"),
    _check(
        "device",
        170,
        ("test_trainers.py", "test_places.py"),
        "not TestWholePolicy and not TestShardedPolicy",
    ),
    _check("engines", 170, ("test_engines.py",), "not vllm"),
    _check(
        "runs",
        170,
        ("test_runs.py",),
        "not quickstart and not vllm and not by_broadcast and not two_devices",
    ),
    _check("quickstart", 190, ("test_runs.py",), "quickstart and not vllm"),
    _script("ceilings", "bench", 30, "figures.py", "ceilings"),
    _script("decode", "bench", 75, "figures.py", "decode"),
    _script("train-torch", "bench", 45, "figures.py", "train-torch"),
    _script("train-fsdp", "bench", 45, "figures.py", "train-fsdp"),
    _script("sampler", "bench", 30, "figures.py", "sampler"),
    _script("plain", "bench", 45, "figures.py", "plain"),
    _script("train-variants", "bench", 60, "figures.py", "train-variants"),
    _script("trl", "trl", 75, "trl_steps.py"),
    _check("speed", 120, ("test_speed.py",), "not vllm", group="speed"),
)
"""One part of each file of tests leaves out by name what the file's other parts run, so that a new
test is in one of them; and what needs several devices or vLLM, which the machine does not have."""
NAMES = tuple(part.name for part in PARTS)


def choose(only: str) -> tuple[Part, ...]:
    """Return the parts that ``only`` names, by group or by part, separated by spaces; all for an
    empty text.

    ValueError names what is neither.
    """
    asked = only.split()
    unknown = [name for name in asked if name not in GROUPS and name not in NAMES]
    if unknown:
        raise ValueError(
            f"ONLY={only!r}: {', '.join(unknown)} is no group and no part; groups are "
            f"{', '.join(GROUPS)}; parts are {', '.join(NAMES)}"
        )
    if not asked:
        return PARTS
    return tuple(part for part in PARTS if part.name in asked or part.group in asked)


def command(part: Part, out: Path) -> list[str]:
    """The part's command line."""
    return [sys.executable, *(str(out) if each == "OUT" else each for each in part.arguments)]
