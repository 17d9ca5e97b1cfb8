"""The machine of the paper: many accelerators. Its constants are of data sheets and habit, none
of them is fitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, log

import numpy as np

from .demand import Demand, Link
from .model import Ints, Layout, StepRows, most

NETWORK = Link(rate=25e9, round_trip=20e-6)
HOST = 8  # devices
MICRO_BATCH = 16_384  # tokens
RELOAD = 0.5  # seconds to put weights into an engine, besides moving them
PASS, BACKWARD = 1.0, 2.0  # forward passes' worth of FLOPs
EDGES, BYTES_PER_TOKEN = 4, 40  # rows change hands four times in GRPO; ids, log-probs, advantages


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device and its network: an H100 SXM by its data sheet, and shares of it that are usual."""

    flops: float = 990e12
    """Dense bf16."""
    memory: float = 80e9
    memory_rate: float = 3.35e12
    training: float = 0.38
    """Share of ``flops`` in training."""
    prefill: float = 0.4
    decoding: float = 0.6
    """Share of ``memory_rate`` in decoding."""
    launch: float = 3e-3
    """Seconds of a decoding step whatever its rows are."""
    network: Link = NETWORK
    """Between hosts, for each device; a hop of a ring takes ``round_trip``."""
    overlap: float = 0.8
    """Share of FSDP's collectives that computing hides."""
    jitter: float = 0.02
    """Standard deviation of a device's pace: a collective waits for the slowest."""


H100 = Accelerator()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Size of a model: the costs of computing and moving it follow from it."""

    name: str
    parameters: float
    layers: int
    hidden: int
    cache_bytes: int
    """Keys and values of a token."""
    engine: int
    """Devices of one engine."""


MODELS = {
    "7B": ModelShape("7B", 7.6e9, 28, 3584, 2 * 28 * 4 * 128 * 2, 1),
    "32B": ModelShape("32B", 32.8e9, 64, 5120, 2 * 64 * 8 * 128 * 2, 4),
}


def no_exchange(workers: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """Differences of a system with a central driver, each to be switched on by itself."""

    driver_rate: float | None = None
    """Bytes a second of padded rows through the driver's process, in and out. None: rows do not
    pass it."""
    passes: int = 3
    """Times that all columns pass it: to log-probs, to the reference's log-probs, to the update."""
    padded: bool = False
    """Whether the trainer computes on padding."""
    in_order: bool = False
    """Whether learners take rows as they come, not balanced by length."""


OURS = Baseline()


@dataclass(frozen=True, slots=True)
class Devices:
    """``learners`` devices, which generate and learn in turn; FSDP over all of them."""

    shape: ModelShape
    longest: int
    """Tokens of prompt and response together, at most: the width of a padded row."""
    prompt: int
    baseline: Baseline = OURS
    device: Accelerator = H100
    exchange: Callable[[int], float] = field(default=no_exchange)
    """Seconds of an exchange of row statistics, by workers."""

    @property
    def shares_prompts(self) -> bool:
        """False: the systems of the paper's figures compute whole rows."""
        return False

    @property
    def quadratic_from(self) -> int:
        """Return the tokens at which a row's attention takes as much as its linear layers."""
        return round(self.shape.parameters / (self.shape.layers * self.shape.hidden))

    def generate(self, prompts: Ints, responses: Ints) -> Demand:
        pairs = zip(prompts.tolist(), responses.tolist(), strict=True)
        return Demand(compute=max(self._engine_seconds(*pair) for pair in pairs))

    def logprobs(self, rows: Ints, owners: Ints, learners: int) -> Demand:
        return self._pass(rows, owners, learners, PASS, gathers=1)

    def update(self, rows: Ints, owners: Ints, learners: int) -> Demand:
        # the backward pass computes the forward one again; parameters are gathered twice, gradients
        # scattered once
        return self._pass(rows, owners, learners, 2 * PASS + BACKWARD, gathers=3)

    def hand_over(self, layout: Layout) -> Demand:
        return Demand(compute=RELOAD, wire=2 * self.shape.parameters)

    def fixed(self, layout: Layout, rows: StepRows) -> Demand:
        rate, width = self.baseline.driver_rate, self.longest
        if rate is not None:
            response = width - self.prompt
            # int64: ids, mask and positions of the row, ids and mask of the response; float32: four
            # columns a token
            padded = len(rows) * (width * 3 * 8 + response * (2 * 8 + 4 * 4))
            return Demand(compute=padded * self.baseline.passes / rate)
        own = rows.tokens.sum() / layout.learners * BYTES_PER_TOKEN
        return Demand(compute=EDGES * self.exchange(layout.learners), wire=EDGES * float(own))

    def _pass(self, rows: Ints, owners: Ints, learners: int, passes: float, gathers: int) -> Demand:
        """Return a pass over rows by the slowest device, and what its collectives add."""
        if self.baseline.in_order:
            owners = np.arange(len(rows)) * learners // len(rows)
        if self.baseline.padded:
            rows = np.full_like(rows, self.longest)
        shape, device = self.shape, self.device
        linear, attention = (
            2 * shape.parameters * rows,
            2.0 * shape.layers * shape.hidden * rows.astype(float) ** 2,
        )
        flops = most(linear + attention, owners, learners)
        pace = 1 + device.jitter * (2 * log(learners)) ** 0.5
        micro_batches = max(1, ceil(most(rows, owners, learners) / MICRO_BATCH))
        exposed = (1 - device.overlap) * micro_batches * gathers
        hops = shape.layers * ceil(learners / HOST)
        return Demand(
            compute=flops * passes / (device.flops * device.training) * pace,
            wire=exposed * 2 * shape.parameters,
            trips=exposed * hops,
        )

    def _engine_seconds(self, prompts: list[int], responses: list[int]) -> float:
        """Return the seconds in which an engine ends its rows: as many at once as its cache has
        room for.
        """
        shape, device = self.shape, self.device
        devices, weights = shape.engine, 2 * shape.parameters
        room = (devices * device.memory * 0.9 - weights) / shape.cache_bytes
        expected = sum(prompts) / len(prompts) + sum(responses) / len(responses)
        slots = max(1, int(room / expected))
        waiting = list(zip(prompts, responses, strict=True))[::-1]
        running: list[tuple[int, int]] = []  # step at which a row ends, tokens of it at that step
        cached, step = 0, 0  # tokens in the cache at this step
        seconds = weights * sum(prompts) / (devices * device.flops * device.prefill)
        while waiting or running:
            while waiting and len(running) < slots:
                prompt, response = waiting.pop()
                heapq.heappush(running, (step + response, prompt + response))
                cached += prompt
            steps = running[0][0] - step
            mean_cache = cached + len(running) * steps / 2
            memory = (weights + mean_cache * shape.cache_bytes) / (
                devices * device.memory_rate * device.decoding
            )
            compute = weights * len(running) / (devices * device.flops * device.prefill)
            seconds += steps * (device.launch + max(memory, compute))
            step += steps
            cached += len(running) * steps
            while running and running[0][0] == step:
                cached -= heapq.heappop(running)[1]
        return seconds
