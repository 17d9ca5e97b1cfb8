"""Notices what drifts over the steps of a run, and says each once, in a line.

Noise is no drift: nothing is said of numbers that stay within a fifth of their level. Each rule
compares the median of the newest steps with that of the run's first ones, but for memory, which
must not fall back for three blocks of steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from statistics import median

from siirl_dask.observe.metrics import Record, common_name

WARM_UP = 2
FIRST = 10
LAST = 5
"""Steps that are left out, steps of which the level is the median, and newest steps that are
compared with it."""
SLOWER = 1.5
"""Step time, by its level, from which it is said."""
BLOCK = 10
BLOCKS = 3
GROWTH = 1.05
"""Memory grows if all of a block of steps lie above all of the block before, over so many, and
by so much in all."""
COLLAPSE = 0.05
"""Entropy, by its level, below which it has collapsed."""
VANISHED = 0.01
"""Part of a reward, by the size of its level, below which it is gone."""
MISMATCH = 3.0
LEAST_MISMATCH = 1e-3
"""KL between sampler and trainer, by its level, from which it is said; below the least it is
rounding."""
DISAGREE = 0.1
"""KL between sampler and trainer, in nats a token, that is said from the first step on: no
rounding makes that."""
SECONDS = "seconds"
MEMORY = "bytes/process"
ENTROPY = "policy/entropy"
KL = "mismatch/kl"
SKIPPED = ("policy/skipped_steps", "critic/skipped_steps")
_NO_PARTS = (
    "reward/mean",
    "reward/std",
    "reward/failures",
    "reward/greedy",
    "reward/overlong_penalty",
)


class Drift:
    """Takes the record of each training step, and returns what there is to say, each thing once."""

    def __init__(self) -> None:
        self.said: list[str] = []
        """All that was said so far."""
        self._named: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Forget the levels: other workers, or steps that are done again, have levels of their
        own.
        """
        self._series: dict[str, _Series] = {}

    def note(self, record: Record) -> list[str]:
        """Return the sentences about what drifts as of this training step."""
        numbers: dict[str, float | None] = {SECONDS: record["seconds"], **record["metrics"]}
        for name, value in numbers.items():
            if value is not None and (common_name(name, _RULES) in _RULES or _is_part(name)):
                self._series.setdefault(name, _Series()).add(record["step"], value)
        found = dict(self._found(record["metrics"], record["step"]))
        new = [text for name, text in found.items() if name not in self._named]
        self._named |= found.keys()
        self.said += new
        return new

    def _found(self, metrics: Mapping[str, float | None], step: int) -> Iterator[tuple[str, str]]:
        for name in metrics:
            if common_name(name, SKIPPED) in SKIPPED and (count := metrics[name]):
                yield (
                    name,
                    (
                        f"step {step}: {count:.0f} of the optimizer steps left out, whose numbers "
                        "were not finite "
                        f"({name} counts them; the rows are in nonfinite-NODE/step={step:06d})"
                    ),
                )
        for name, series in self._series.items():
            if name in metrics or name == SECONDS:
                rule = common_name(name, _RULES)
                text = _RULES.get(rule, _part_is_gone)(series)
                if text and rule == name and rule in _RULES:
                    yield name, text
                elif text and rule in _RULES:
                    agent = name.removesuffix(f"/{rule}")
                    yield name, f"{agent}: {text}"
                elif text:
                    yield name, f"{name} {text}"


class _Series:
    """The first steps' level, and the newest values."""

    def __init__(self) -> None:
        self._count = 0
        self.latest = 0.0
        self._first: list[float] = []
        self.newest: deque[tuple[int, float]] = deque(maxlen=BLOCK * BLOCKS)

    def add(self, step: int, value: float) -> None:
        self._count += 1
        self.latest = value
        if self._count <= WARM_UP:
            return
        if len(self._first) < FIRST:
            self._first.append(value)
        self.newest.append((step, value))

    @property
    def level(self) -> float:
        return median(self._first)

    @property
    def last(self) -> list[tuple[int, float]]:
        """Steps and values that are compared with the level."""
        return list(self.newest)[-LAST:]

    @property
    def now(self) -> float:
        return median(value for _, value in self.last)

    @property
    def ready(self) -> bool:
        """Whether the newest steps are none of the first ones."""
        return self._count >= WARM_UP + FIRST + LAST


def _slower(series: _Series) -> str:
    if not series.ready or series.now < SLOWER * series.level:
        return ""
    first = series.last[0][0]
    last = series.last[-1][0]
    return (
        f"a step takes {series.now:.2f} s, {series.now / series.level:.1f} times as long as at "
        f"first: `siirl-dask trace RUN --steps {first}:{last}` says where the time goes"
    )


def _grows(series: _Series) -> str:
    values = [value for _, value in series.newest]
    if len(values) < BLOCK * BLOCKS:
        return ""
    blocks = []
    for number in range(BLOCKS):
        first = number * BLOCK
        blocks.append(values[first : first + BLOCK])
    rises = all(min(later) > max(before) for before, later in pairwise(blocks))
    if not rises or min(blocks[-1]) < GROWTH * max(blocks[0]):
        return ""
    growth = values[-1] - values[0]
    each = growth / (len(values) - 1) / 2**20
    return (
        f"the largest worker process grows with each step, by {each:.1f} MiB, to "
        f"{values[-1] / 2**30:.2f} GiB: what a "
        "node of yours keeps from step to step is freed by nobody else"
    )


def _collapses(series: _Series) -> str:
    if not series.ready or series.level <= 0 or series.now >= COLLAPSE * series.level:
        return ""
    return (
        f"entropy has fallen from {series.level:.3g} to {series.now:.2g}: the policy hardly "
        "explores any more; "
        "algorithm.entropy_coefficient, a KL term or a smaller trainer.lr keeps it up"
    )


def _part_is_gone(series: _Series) -> str:
    if not series.ready or not series.level:
        return ""
    if any(abs(value) > VANISHED * abs(series.level) for _, value in series.last):
        return ""
    return (
        f"has gone from {series.level:.3g} to {series.now:.2g}: this part of the reward teaches "
        "nothing any more"
    )


def _mismatched(series: _Series) -> str:
    if series.latest >= DISAGREE:
        return (
            f"sampler and trainer do not compute the same model: {KL} is {series.latest:.2g} a "
            "token, where rounding makes less than 0.01; unless rows are of weights that are "
            "steps old, take rollout.engine=transformers and report the model's family; "
            "`siirl-dask rollouts RUN --mismatch` shows where"
        )
    if not series.ready or series.now < max(MISMATCH * series.level, LEAST_MISMATCH):
        return ""
    return (
        f"sampler and trainer come apart: {KL} has grown from {series.level:.2g} to "
        f"{series.now:.2g}; "
        "`siirl-dask rollouts RUN --mismatch` shows it, algorithm.correction weighs it"
    )


def _is_part(name: str) -> bool:
    if not name.startswith("reward/"):
        return False
    return name not in _NO_PARTS


_RULES: dict[str, Callable[[_Series], str]] = {
    SECONDS: _slower,
    MEMORY: _grows,
    ENTROPY: _collapses,
    KL: _mismatched,
}
