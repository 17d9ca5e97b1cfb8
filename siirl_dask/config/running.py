"""Groups of a run: where it goes, on what it runs, when it is validated, what is shown of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from siirl_dask.config.checks import above, at_least, parse_bytes
from siirl_dask.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class RunConfig:
    name: str = "run"
    url: str = "runs/${run.name}"
    """Where everything the run makes is written: a local folder or any fsspec URL."""
    steps: int = 100
    seed: int = 0
    lookahead: int = 2
    """Steps submitted ahead, so that no worker waits for the client."""

    def __post_init__(self) -> None:
        at_least("run", 1, steps=self.steps, lookahead=self.lookahead)
        at_least("run", 0, seed=self.seed)
        if not self.url:
            raise ConfigError("run.url='': expected a folder or an fsspec URL")
        self.url = self.url.replace("${run.name}", self.name)  # a Config made in Python has no OmegaConf to do it


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    workers: int = 2
    """Processes started on this machine; of a cluster given by address, how many of its workers to take."""
    address: str | None = None
    """Scheduler address of an existing cluster, such as ``tcp://10.0.0.1:8786``."""
    scheduler_file: str | None = None
    """Scheduler file of an existing cluster."""
    placement: dict[str, list[int]] = field(default_factory=dict)
    """Workers of each role, by index; a role that is not named is on every worker."""
    threads: int = 1
    """Torch threads per worker."""
    memory_limit: str | None = None
    """Memory of one worker process, such as ``64GiB``: a run that is estimated to need more is refused. None is no
    limit.
    """
    start_timeout: float = 120.0
    """Seconds until every worker must be up and its roles built."""
    stall_timeout: float = 600.0
    """Seconds without progress after which a wait for a peer gives up and names it."""
    peer_timeout: float = 5.0
    """Seconds within which a peer that is dead or stands still is noticed by those that wait for it."""

    def __post_init__(self) -> None:
        at_least("cluster", 1, workers=self.workers, threads=self.threads)
        above("cluster", 0, start_timeout=self.start_timeout, stall_timeout=self.stall_timeout)
        above("cluster", 0, peer_timeout=self.peer_timeout)
        if self.memory_limit is not None:
            parse_bytes("cluster.memory_limit", self.memory_limit)
        if self.address and self.scheduler_file:
            raise ConfigError("cluster.address and cluster.scheduler_file are both given: expected one of them")
        for role, workers in self.placement.items():
            if not workers or len(set(workers)) != len(workers):
                raise ConfigError(
                    f"cluster.placement.{role}={workers}: expected worker indices, each once, at least one"
                )
            if outside := [w for w in workers if not 0 <= w < self.workers]:
                raise ConfigError(
                    f"cluster.placement.{role}={workers}: no worker {outside[0]}; "
                    f"cluster.workers={self.workers} gives 0 to {self.workers - 1}"
                )


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    url: str | None = None
    """Dataset of the validation nodes; none, no validation."""
    every: int = 10
    """Steps between validations; one is run before the first step and one after the last as well."""
    test_url: str | None = None
    """A dataset that is touched once, after the last step."""

    def __post_init__(self) -> None:
        at_least("validation", 1, every=self.every)


@dataclass(kw_only=True, slots=True)
class ObserveConfig:
    progress: bool = True
    """A progress bar on the terminal."""
    tensorboard: bool = False
    """Write TensorBoard event files under the run's URL; needs the extra ``tensorboard``."""
    dashboard_port: int = 0
    """Port of the Dask dashboard of a cluster started here, on 127.0.0.1; 0 takes a free one."""

    def __post_init__(self) -> None:
        if not 0 <= self.dashboard_port < 65536:
            raise ConfigError(f"observe.dashboard_port={self.dashboard_port}: expected 0 to 65535")
