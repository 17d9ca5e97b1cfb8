"""Figures of devices from which a plan estimates seconds: data sheets of accelerators, this
machine's CPU measured.

Shares of these figures that programs reach are usual values, not measured here: 40 % of the
arithmetic in training, 50 % while prompts are read, 60 % of the memory's rate while tokens are
generated one after the other, and 60 % of the rate between a device and its host. The host is one
of a system that is sold with eight such cards: DGX H100 and H200 with sixteen channels of
DDR5-4800, DGX A100 with sixteen of DDR4-3200, Atlas 800 with 32 of DDR4-3200; a workstation with
eight of DDR5-4800 for the RTX 4090.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from siirl_dask.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Figures of a device; rates are per second."""

    name: str
    source: str
    """Where the figures are from."""
    flops: float
    """Floating-point operations in bfloat16, without sparsity."""
    flops32: float
    """The same in float32."""
    memory: float
    """Bytes."""
    memory_rate: float
    """Bytes read or written."""
    link: float
    """Bytes to other devices of the host, in one direction."""
    host_link: float
    """Bytes between the device and its host, in one direction."""
    host_memory: float
    """Bytes that the memory of a host reads or writes for all its devices together."""
    copying: float = 0.6
    """Share of ``host_link`` and ``host_memory`` in copies from and to pinned memory."""
    training: float = 0.4
    """Share of ``flops`` in training and log-probs."""
    prefill: float = 0.5
    """Share of ``flops`` while prompts are read."""
    decoding: float = 0.6
    """Share of ``memory_rate`` while tokens are generated."""
    step: float = 2e-3
    """Seconds of a step of generation whatever its rows are: launching it, and choosing tokens."""
    operation: float = 0.0
    """Seconds of a small operation, 0 on an accelerator, which overlaps them."""
    cores: int = 0
    """Cores that all workers of a host share; 0 on an accelerator."""
    overhead: float = 0.02
    """Seconds of a step of the run without any work, and again of each edge that moves rows."""


TABLE = {
    "h100": Speed(
        name="H100 SXM 80GB",
        source="NVIDIA H100 data sheet",
        flops=989e12,
        flops32=67e12,
        memory=80e9,
        memory_rate=3.35e12,
        link=450e9,
        host_link=64e9,
        host_memory=614e9,
    ),
    "h200": Speed(
        name="H200 SXM 141GB",
        source="NVIDIA H200 data sheet",
        flops=989e12,
        flops32=67e12,
        memory=141e9,
        memory_rate=4.8e12,
        link=450e9,
        host_link=64e9,
        host_memory=614e9,
    ),
    "a100": Speed(
        name="A100 SXM 80GB",
        source="NVIDIA A100 data sheet",
        flops=312e12,
        flops32=19.5e12,
        memory=80e9,
        memory_rate=2.039e12,
        link=300e9,
        host_link=32e9,
        host_memory=410e9,
    ),
    "4090": Speed(
        name="RTX 4090 24GB",
        source="NVIDIA Ada white paper; PCIe 4.0 x16",
        flops=165e12,
        flops32=82.6e12,
        memory=24e9,
        memory_rate=1.008e12,
        link=25e9,
        host_link=32e9,
        host_memory=307e9,
    ),
    "910b": Speed(
        name="Ascend 910B 64GB",
        source="press reports of the 910B3, of which Huawei publishes no data sheet",
        flops=313e12,
        flops32=78e12,
        memory=64e9,
        memory_rate=1.6e12,
        link=196e9,
        host_link=32e9,
        host_memory=819e9,
    ),
}
"""Accelerators by their short names."""
_ROUNDS = 50  # measurements of a CPU, of which the fastest counts
_MAY_BE_ZERO = ("operation", "step", "overhead")


def note_on_float32(accelerator: str) -> str:
    """Return a sentence for a user whose run computes in float32 on an accelerator of that name."""
    shown = f"model.dtype=float32 on {accelerator}"
    speed = next((speed for name, speed in TABLE.items() if name in accelerator.casefold()), None)
    if speed is None:
        return f"{shown}: it multiplies several times as fast in bfloat16 (model.dtype=bfloat16)"
    return (
        f"{shown}: it multiplies {speed.flops / speed.flops32:.0f} times as fast in bfloat16, "
        f"{speed.flops / 1e12:.0f} "
        f"TFLOP/s for {speed.flops32 / 1e12:.0f} by {speed.source} (model.dtype=bfloat16)"
    )


def speed_of(name: str, figures: Sequence[str] = (), threads: int = 1) -> Speed:
    """Return the figures of a device of the table, or of this machine's CPU for ``cpu``, which
    takes half a second.

    ``figures`` replace values, as ``flops=4e14``. ConfigError for an unknown name or a figure that
    is no number.
    """
    if name != "cpu" and name not in TABLE:
        known = ["cpu", *TABLE]
        raise ConfigError(
            f"--on {name}: expected one of {', '.join(known)}{did_you_mean(name, known)}"
        )
    speed = measure_cpu(threads) if name == "cpu" else TABLE[name]
    known = [field.name for field in fields(Speed) if field.name not in ("name", "source")]
    replaced: dict[str, Any] = {}
    for figure in figures:
        key, _, text = figure.partition("=")
        if key not in known:
            raise ConfigError(
                f"--figure {figure}: expected one of {', '.join(known)}{did_you_mean(key, known)}"
            )
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not 0 <= value < float("inf") or (value == 0 and key not in _MAY_BE_ZERO):
            raise ConfigError(f"--figure {figure}: expected a number above 0, such as {key}=4e14")
        replaced[key] = int(value) if key == "cores" else value
    source = f"{speed.source}; {', '.join(figures)} by --figure" if figures else speed.source
    return replace(speed, source=source, **replaced)


_OF_BEST = 0.7
"""Share of a CPU's best rounds that whole runs reach, by twelve of 0.3 and 32 million parameters
(estimates.md)."""


def measure_cpu(threads: int = 1) -> Speed:
    """Measure this machine's CPU with all cores busy, and return the figures of ``threads`` of
    them.

    It measures a product of matrices, a copy, and small operations.
    """
    import torch

    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)  # together they are slower than each is alone
    try:
        side = 512
        left, right, result = (torch.rand(side, side) for _ in range(3))
        product = _seconds(lambda: torch.mm(left, right, out=result))
        block = torch.rand(2**22)
        copy = torch.empty(2**22)
        moved = _seconds(lambda: copy.copy_(block))
        small = torch.rand(32, 64)

        # norms: as much Python and as many operations as a layer's, on small tensors
        def chain() -> object:
            value = small
            for _ in range(20):
                value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6)
            return value

        with torch.inference_mode():
            each = _seconds(chain) / 100
    finally:
        torch.set_num_threads(before)
    rate = 2 * side**3 / product * threads / cores
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Speed(
        name=f"this machine's CPU, {threads} thread{'s' if threads > 1 else ''} a worker",
        source="measured now",
        flops=rate,
        flops32=rate,
        memory=float(memory),
        memory_rate=2 * block.nbytes / moved * threads / cores,
        link=1e9,
        host_link=1e9,  # for no use: nothing moves there
        host_memory=1e9,
        training=_OF_BEST,
        prefill=_OF_BEST,
        decoding=_OF_BEST,
        step=0.0,
        operation=each,
        cores=cores,
    )


def _seconds(work: Callable[[], object]) -> float:
    """Return the least seconds of ``work``, which other programs on the machine disturb least."""
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)
