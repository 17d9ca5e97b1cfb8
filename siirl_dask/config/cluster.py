"""Config group ``cluster``: workers, devices, placement and timeouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from siirl_dask.config.checks import above, at_least, parse_bytes
from siirl_dask.errors import ConfigError

MOST_WORKERS = 2**16
"""Workers of a run, at most: each has a chain of the plan."""


class DevicePreference(StrEnum):
    """Devices of a run's workers."""

    auto = "auto"
    """An accelerator where a worker sees one."""
    cpu = "cpu"
    """The CPU, whatever else there is."""


class Affinity(StrEnum):
    """Places of workers with accelerators on their host."""

    auto = "auto"
    """Near their accelerators, and neighbours on accelerators with fast links."""
    none = "none"
    """Wherever they were started, on accelerators as torch numbers them."""


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """``cluster``: the workers, the placement of roles on them, and timeouts."""

    workers: int = 2
    """Number of worker processes to start on this machine, or to take from a cluster given by
    its address."""
    address: str | None = None
    """Scheduler address of an existing cluster, such as ``tcp://10.0.0.1:8786``. With ``tls://``,
    Dask's configuration names the certificates.
    """
    scheduler_file: str | None = None
    """Scheduler file of an existing cluster."""
    spec: str | None = None
    """YAML file with a Dask cluster's class and arguments: the run starts that cluster, waits
    for it and ends it."""
    placement: dict[str, list[int]] = field(default_factory=dict)
    """Workers of each role, by index; a role that is absent is on every worker."""
    elastic: bool = False
    """Go on with fewer workers when some are lost and no others come, and take in more that
    join, between two steps."""
    max_workers: int | None = None
    """Most workers of an elastic run. None: all that join."""
    replacement_timeout: float | None = None
    """Seconds for which an elastic run that has lost a worker waits for another one before it goes
    on with fewer.
    None: 10.
    """
    resources: dict[str, float] = field(default_factory=dict)
    """Dask resources of an existing cluster's workers that the run asks for, such as ``{GPU: 1}``:
    it takes workers that have them, and each of its tasks claims them."""
    threads: int = 1
    """Torch threads per worker."""
    memory_limit: str | None = None
    """Memory of one worker process, such as ``64GiB``; a run whose estimate is higher is
    refused. None: no limit."""
    device: DevicePreference = DevicePreference.auto
    """Devices of the workers: ``auto``, an accelerator where a worker sees one; ``cpu``, its CPU
    in any case."""
    device_memory: str | None = None
    """Memory of each worker's accelerator, such as ``80GB``; a run whose estimate is higher is
    refused. None: what the workers find.
    """
    affinity: Affinity = Affinity.auto
    """Places of workers with accelerators: ``auto`` binds each to CPUs of its accelerator's NUMA
    node, and gives neighbours in rank order accelerators with fast links; ``none`` does neither.
    """
    start_timeout: float = 120.0
    """Most seconds until every worker is up, and then of silence while its roles are built."""
    stall_timeout: float = 600.0
    """Seconds in which nothing gets done on any worker after which the run ends."""
    peer_timeout: float | None = None
    """Seconds without a sign of life after which a peer counts as dead if its process is not there
    either, and the scheduler after 15 at least. A link that is down for less costs nothing but the
    time. None: 5 where all workers are on one host, 15 where they are not.
    """
    scheduler_timeout: float = 60.0
    """Seconds for which a run that has lost the scheduler of an existing cluster waits until it is
    back, with workers.
    0: it ends at once.
    """

    @property
    def exists(self) -> bool:
        """Whether the cluster is there before the run, and stays after it."""
        return bool(self.address or self.scheduler_file)

    @property
    def scheduler_may_return(self) -> bool:
        """Whether a run that has lost the scheduler waits for another one."""
        if not self.exists:
            return False
        return self.scheduler_timeout > 0

    def __post_init__(self) -> None:
        at_least("cluster", 1, workers=self.workers, threads=self.threads)
        if self.workers > MOST_WORKERS:
            raise ConfigError(f"cluster.workers={self.workers}: expected at most {MOST_WORKERS}")
        above("cluster", 0, start_timeout=self.start_timeout, stall_timeout=self.stall_timeout)
        at_least("cluster", 0, scheduler_timeout=self.scheduler_timeout)
        self._check_elastic()
        for name, amount in self.resources.items():
            if not amount > 0:
                raise ConfigError(
                    f"cluster.resources={self.resources}: expected more than 0 of {name}"
                )
        if self.peer_timeout is not None:
            above("cluster", 0, peer_timeout=self.peer_timeout)
        if self.memory_limit is not None:
            parse_bytes("cluster.memory_limit", self.memory_limit)
        memory = self.device_memory
        if memory is not None and parse_bytes("cluster.device_memory", memory) < 2**30:
            raise ConfigError(
                f"cluster.device_memory={memory!r}: expected at least 1GiB, such as 80GB"
            )
        places = ("address", "scheduler_file", "spec")
        if len(given := [f"cluster.{name}" for name in places if getattr(self, name)]) > 1:
            raise ConfigError(f"{' and '.join(given)} are given: expected one of them")
        for role, workers in self.placement.items():
            if not workers or len(set(workers)) != len(workers):
                raise ConfigError(
                    f"cluster.placement.{role}={workers}: expected worker indices, each once, at "
                    "least one"
                )
            outside = [w for w in workers if not 0 <= w < self.workers]
            if outside:
                raise ConfigError(
                    f"cluster.placement.{role}={workers}: no worker {outside[0]}; "
                    f"cluster.workers={self.workers} gives 0 to {self.workers - 1}"
                )

    def _check_elastic(self) -> None:
        """Raise ConfigError for keys of an elastic run where this is none, and for values that
        it cannot have.
        """
        most = self.max_workers
        patience = self.replacement_timeout
        for name, value in (("max_workers", most), ("replacement_timeout", patience)):
            if value is not None and not self.elastic:
                raise ConfigError(
                    f"cluster.{name}={value} is for an elastic run: set cluster.elastic=true as "
                    "well"
                )
        if patience is not None:
            at_least("cluster", 0, replacement_timeout=patience)
        if most is not None and most < self.workers:
            raise ConfigError(
                f"cluster.max_workers={most} is less than cluster.workers={self.workers}, with "
                "which the run begins"
            )
