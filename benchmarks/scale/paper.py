"""Draws the figures of DistFlow (arXiv:2507.13833) with the model: devices, context, and a central
driver beside.

Lengths of responses are log-normal with a median of a quarter of the longest, as long-tailed as
reasoning is (sigma 0.8); each figure is a range over seeds of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from .demand import Link, seconds
from .devices import H100, MODELS, OURS, Accelerator, Baseline, Devices
from .model import Layout, StepRows, predict

SEEDS = range(5)
GROUP, SIGMA, SHORT, PROMPT = 8, 0.8, 4096, 1024
MINIBATCHES = 4
NUMPY_RATE, DEFAULT_RATE = 0.5e9, 0.1e9
"""Bytes a second of verl's DataProto through one process, as docs/benchmarks/dataplane.md has
it: numpy, default."""
SCHEDULER = 0.7e-3
"""Core seconds of Dask's scheduler for a worker and step (docs/benchmarks/scale.md); a step is
no shorter than it."""
Exchange = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Range:
    """A figure over seeds."""

    low: float
    middle: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Range:
        found = np.array(list(values))
        return Range(float(found.min()), float(np.median(found)), float(found.max()))


@dataclass(frozen=True, slots=True)
class Case:
    """A step on a number of devices."""

    model: str
    devices: int
    rows: int
    """Rows of a step, over all devices."""
    context: int = SHORT + PROMPT
    baseline: Baseline = OURS
    device: Accelerator = H100


@cache
def tokens_a_second(case: Case, seed: int, exchange: Exchange) -> float:
    """Return the throughput of all devices."""
    parts, tokens = _parts(case, seed, exchange)
    return tokens / max(sum(parts.values()), SCHEDULER * case.devices)


def _parts(case: Case, seed: int, exchange: Exchange) -> tuple[dict[str, float], int]:
    shape = MODELS[case.model]
    engines = case.devices // shape.engine
    layout = Layout(case.model, engines, case.devices, together=True, minibatches=MINIBATCHES)
    rows = draw_rows(case, seed)
    machine = Devices(shape, case.context, PROMPT, case.baseline, case.device, exchange)
    step = predict(layout, rows, machine)
    return {name: seconds({name: part}, case.device.network) for name, part in step.items()}, int(
        rows.tokens.sum()
    )


def parts(case: Case, exchange: Exchange) -> Mapping[str, float]:
    """Return the seconds of each part, the mean over seeds."""
    found = [_parts(case, seed, exchange)[0] for seed in SEEDS]
    return {name: float(np.mean([each[name] for each in found])) for name in found[0]}


def draw_rows(case: Case, seed: int) -> StepRows:
    """Draw lengths; a system and the one beside it get the same."""
    top = case.context - PROMPT
    drawn = np.random.default_rng(seed).lognormal(np.log(top / 4), SIGMA, case.rows)
    responses = np.clip(drawn, 1, top).astype(np.int64)
    return StepRows(np.full(case.rows, PROMPT), responses, GROUP)


def efficiency(
    model: str,
    devices: Sequence[int],
    rows: Callable[[int], int],
    exchange: Exchange,
    device: Accelerator = H100,
) -> list[Range]:
    """Return throughput a device over that of the fewest devices."""
    found = []
    for count in devices:
        cases = [Case(model, each, rows(each), device=device) for each in (count, devices[0])]
        found.append(Range.of(_each_device(cases[0], cases[1], seed, exchange) for seed in SEEDS))
    return found


def _each_device(many: Case, few: Case, seed: int, exchange: Exchange) -> float:
    rates = [tokens_a_second(case, seed, exchange) / case.devices for case in (many, few)]
    return rates[0] / rates[1]


def ratio(case: Case, baseline: Baseline, exchange: Exchange) -> Range:
    """Return our throughput over that of a baseline."""
    other = replace(case, baseline=baseline)
    return Range.of(
        tokens_a_second(case, seed, exchange) / tokens_a_second(other, seed, exchange)
        for seed in SEEDS
    )


BASELINES: Mapping[str, Baseline] = {
    "driver, 0.5 GB/s": Baseline(driver_rate=NUMPY_RATE),
    "driver, 0.1 GB/s": Baseline(driver_rate=DEFAULT_RATE),
    "rows in order": Baseline(in_order=True),
    "padded": Baseline(padded=True),
    "rows in order; driver, 0.5 GB/s": Baseline(driver_rate=NUMPY_RATE, in_order=True),
    "padded; driver, 0.5 GB/s": Baseline(driver_rate=NUMPY_RATE, padded=True),
    "padded; driver, 0.1 GB/s": Baseline(driver_rate=DEFAULT_RATE, padded=True),
}
SLOW = Link(H100.network.rate / 4, H100.network.round_trip * 4)
OTHERWISE: Mapping[str, Accelerator] = {
    "as above": H100,
    "a quarter of the network": replace(H100, network=SLOW),
    "collectives not hidden": replace(H100, overlap=0.0),
    "both": replace(H100, overlap=0.0, network=SLOW),
    "half the pace in training": replace(H100, training=0.19),
    "half the pace in decoding": replace(H100, decoding=0.3),
    "pace that varies by 10 %": replace(H100, jitter=0.1),
}
"""Other constants, to see how much a figure depends on them."""
DEVICES: Mapping[str, tuple[int, ...]] = {
    "7B": (32, 64, 128, 256, 512, 1024),
    "32B": (64, 128, 256, 512),
}
CONTEXTS = (8192, 16_384, 32_768, 65_536)
_MANY, _FEW, _OF_CONTEXT = 64, 16, 64  # rows of a device; devices of the figure over context


def figures(exchange: Exchange) -> dict[str, Any]:
    """Return all figures as plain values; each range is its least, middle and most over seeds."""
    found: dict[str, Any] = {
        "efficiency": {},
        "devices": {},
        "context": {},
        "parts": {},
        "otherwise": {},
    }
    for model, devices in DEVICES.items():
        growths: dict[str, Callable[[int], int]] = {
            f"{each} rows a device": partial(operator.mul, each) for each in (_MANY, _FEW)
        }
        for each in (_MANY, _FEW):
            whole = each * devices[-1]
            growths[f"{whole:,} rows in all"] = partial(max, whole)
        for name, rows in growths.items():
            ranges = efficiency(model, devices, rows, exchange)
            found["efficiency"][f"{model}, {name}"] = [astuple(each) for each in ranges]
        for name, baseline in BASELINES.items():
            cases = [Case(model, count, _MANY * count) for count in devices]
            found["devices"][f"{model}, {name}"] = [
                astuple(ratio(case, baseline, exchange)) for case in cases
            ]
        found["parts"][model] = {
            count: parts(Case(model, count, _MANY * count), exchange)
            for count in (devices[0], devices[-1])
        }
    found["otherwise"] = otherwise(exchange)
    for per in (_MANY, _FEW):
        for name, baseline in BASELINES.items():
            cases = [Case("7B", _OF_CONTEXT, per * _OF_CONTEXT, context) for context in CONTEXTS]
            key = f"{per} rows a device, {name}"
            found["context"][key] = [astuple(ratio(case, baseline, exchange)) for case in cases]
    return found


def otherwise(exchange: Exchange) -> dict[str, Any]:
    """Return the efficiency of each model on the most devices, with other constants."""
    found = {}
    for name, device in OTHERWISE.items():
        ends = [(devices[0], devices[-1]) for devices in DEVICES.values()]
        pairs = zip(DEVICES, ends, strict=True)
        rows = partial(operator.mul, _MANY)
        found[name] = [
            astuple(efficiency(model, pair, rows, exchange, device)[1]) for model, pair in pairs
        ]
    return found
