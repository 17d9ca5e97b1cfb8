"""An engine's inputs as plain data, for the process that builds it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from siirl_dask.coerce import Coercer
from siirl_dask.config import ImagesConfig, LoraConfig, ModelConfig, RolloutConfig
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.images import load_processor
from siirl_dask.rollout.specs import EngineInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedDevice:
    """The numbers of a ``Device``, which has fields of these names."""

    worker: str
    kind: DeviceKind
    index: int
    card: str
    shared_by: int
    memory: int
    cores: int
    room: int
    fill: int
    pci: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The place where the process of one rank of an engine meets those of the others."""

    rank: int
    """Rank in the engine."""
    size: int
    host: str
    """Address of the process's own host, where it listens."""
    store_host: str
    """Address of the store by which all meet, which the worker of the first rank hosts."""
    store_port: int
    start: int
    """Number of this meeting there."""
    timeout: float
    """Seconds that one of them may be late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedInputs:
    """``EngineInputs`` without what belongs to a process."""

    engine: str
    """Name of the engine's spec, as in ``rollout.engine``, and never ``auto``."""
    model: ModelConfig
    rollout: RolloutConfig
    device: DescribedDevice
    rank: int
    """Rank of the worker in its role."""
    ranks: int
    threads: int
    """Threads of torch on a CPU: sums depend on their number."""
    log_level: int
    """Level of ``logging`` from which on the engine's messages are shown."""
    lora: LoraConfig | None = None
    images: ImagesConfig | None = None
    agents: tuple[str, ...] = field(default=())
    meeting: Meeting | None = None
    """How the ranks of one engine find each other; None: it has one."""

    def inputs(self, rank: Rank, reports: Reports) -> EngineInputs:
        """Return the inputs for ``rank``, with a device that reports by these functions."""
        own = asdict(self.device)
        device = Device(
            **own,
            progress=reports.progress,
            stage=reports.stage,
            waiting=reports.waiting,
            engine_cache=reports.engine_cache,
        )
        return EngineInputs(
            model=self.model,
            rollout=self.rollout,
            device=device,
            rank=rank,
            lora=self.lora,
            images=self.images,
            processor=load_processor(self.model.path, self.images),
            agents=self.agents,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Functions by which an engine's device reports, as those of ``Device``."""

    progress: Callable[[], None]
    stage: Callable[[str], AbstractContextManager[object]]
    waiting: Callable[[], AbstractContextManager[object]]
    engine_cache: Callable[[float, int], None]


def describe(engine: str, inputs: EngineInputs, *, threads: int, log_level: int) -> dict[str, Any]:
    """Return the plain data of ``inputs`` for ``read_described``."""
    names = DescribedDevice.__dataclass_fields__
    device = {name: getattr(inputs.device, name) for name in names}
    return {
        "engine": engine,
        "model": asdict(inputs.model),
        "rollout": asdict(inputs.rollout),
        "device": device,
        "rank": inputs.rank.rank,
        "ranks": inputs.rank.size,
        "threads": threads,
        "log_level": log_level,
        "lora": None if inputs.lora is None else asdict(inputs.lora),
        "images": None if inputs.images is None else asdict(inputs.images),
        "agents": list(inputs.agents),
    }


def read_described(value: object) -> DescribedInputs:
    """Return the inputs in ``value``, checked like a configuration. ConfigError for anything else."""
    found: DescribedInputs = Coercer(ConfigError)(value, DescribedInputs, "inputs of an engine")
    return found
