"""Config groups of the run itself: output, cluster, validation, checkpoints and display."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from siirl_dask.config.checks import above, absolute, at_least, parse_bytes
from siirl_dask.errors import ConfigError


class OnNan(StrEnum):
    """Consequence of a loss, a gradient, log-probs, values or advantages that are not finite."""

    stop = "stop"
    """The run ends, and names the rows."""
    skip = "skip"
    """The optimizer step of that mini-batch is left out on all workers."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """``run``: name, output, length and seed."""

    name: str = "run"
    url: str = "runs/${run.name}"
    """Folder of everything that the run writes: a local path or any fsspec URL."""
    steps: int = 100
    """Training steps."""
    seed: int = 0
    """Seed of data order and sampling."""
    lookahead: int = 2
    """Steps that the client submits ahead, so that no worker waits for it."""
    overlap: bool = True
    """Begin to score responses that are finished while others are still generated, where the reward function runs in
    processes of its own (``rewards.processes``) or is async. The rewards are the same, bit for bit.
    """
    keep_stages: int | None = None
    """Number of newest steps whose saved rows stay, beyond those that a resume may need. None: all."""
    lease: float = 30.0
    """Seconds without a sign of life of this start, after which another one may take the folder over."""
    max_restarts: int = 3
    """Times in a row, without a new step in between, that the run is tried again by itself when it has lost a worker.
    0: it ends then.
    """
    grace: float = 30.0
    """Seconds that a run which gets SIGTERM has for the steps under way and a last checkpoint. 0: it ends at once."""
    node_timeout: float | None = None
    """Seconds for which one node on one worker may get nothing done, while it does not wait for others; then the step
    fails, and the message says who waits for whom. None: one and a half times ``cluster.stall_timeout``. 0: any time.
    """
    on_nan: OnNan = OnNan.stop
    """Consequence of numbers that are not finite: ``stop`` ends the run; ``skip`` leaves the optimizer step of that
    mini-batch out, up to ``trainer.max_skipped_steps`` times in a row. No step is ever taken on them.
    """

    def __post_init__(self) -> None:
        at_least("run", 1, steps=self.steps, lookahead=self.lookahead)
        at_least("run", 0, seed=self.seed, max_restarts=self.max_restarts, grace=self.grace)
        if self.node_timeout is not None:
            at_least("run", 0, node_timeout=self.node_timeout)
        if self.keep_stages is not None:
            at_least("run", 1, keep_stages=self.keep_stages)
        if not 0 < self.lease <= 86400:
            raise ConfigError(f"run.lease={self.lease}: expected more than 0 seconds and at most a day")
        if not self.url:
            raise ConfigError("run.url='': expected a folder or an fsspec URL")
        self.url = self.url.replace("${run.name}", self.name)  # a Config made in Python has no OmegaConf to do it


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
    """Number of worker processes to start on this machine, or to take from a cluster given by its address."""
    address: str | None = None
    """Scheduler address of an existing cluster, such as ``tcp://10.0.0.1:8786``. With ``tls://``, Dask's configuration
    names the certificates.
    """
    scheduler_file: str | None = None
    """Scheduler file of an existing cluster."""
    spec: str | None = None
    """YAML file with a Dask cluster's class and arguments: the run starts that cluster, waits for it and ends it."""
    placement: dict[str, list[int]] = field(default_factory=dict)
    """Workers of each role, by index; a role that is absent is on every worker."""
    elastic: bool = False
    """Go on with fewer workers when some are lost and no others come, and take in more that join, between two steps."""
    max_workers: int | None = None
    """Most workers of an elastic run. None: all that join."""
    replacement_timeout: float | None = None
    """Seconds for which an elastic run that has lost a worker waits for another one before it goes on with fewer.
    None: 10.
    """
    threads: int = 1
    """Torch threads per worker."""
    memory_limit: str | None = None
    """Memory of one worker process, such as ``64GiB``; a run whose estimate is higher is refused. None: no limit."""
    device: DevicePreference = DevicePreference.auto
    """Devices of the workers: ``auto``, an accelerator where a worker sees one; ``cpu``, its CPU in any case."""
    device_memory: str | None = None
    """Memory of each worker's accelerator, such as ``80GB``; a run whose estimate is higher is refused. None: what the
    workers find.
    """
    affinity: Affinity = Affinity.auto
    """Places of workers with accelerators: ``auto`` binds each to CPUs of its accelerator's NUMA node, and gives
    neighbours in rank order accelerators with fast links; ``none`` does neither.
    """
    start_timeout: float = 120.0
    """Most seconds until every worker is up, and then of silence while its roles are built."""
    stall_timeout: float = 600.0
    """Seconds in which nothing gets done on any worker after which the run ends."""
    peer_timeout: float | None = None
    """Seconds without a sign of life after which a peer counts as dead if its process is not there either, and the
    scheduler after 15 at least. A link that is down for less costs nothing but the time. None: 5 where all workers are
    on one host, 15 where they are not.
    """
    scheduler_timeout: float = 60.0
    """Seconds for which a run that has lost the scheduler of an existing cluster waits until it is back, with workers.
    0: it ends at once.
    """

    @property
    def exists(self) -> bool:
        """Whether the cluster is there before the run, and stays after it."""
        return bool(self.address or self.scheduler_file)

    @property
    def scheduler_may_return(self) -> bool:
        """Whether a run that has lost the scheduler waits for another one."""
        return self.exists and self.scheduler_timeout > 0

    def __post_init__(self) -> None:
        at_least("cluster", 1, workers=self.workers, threads=self.threads)
        above("cluster", 0, start_timeout=self.start_timeout, stall_timeout=self.stall_timeout)
        at_least("cluster", 0, scheduler_timeout=self.scheduler_timeout)
        self._check_elastic()
        if self.peer_timeout is not None:
            above("cluster", 0, peer_timeout=self.peer_timeout)
        if self.memory_limit is not None:
            parse_bytes("cluster.memory_limit", self.memory_limit)
        memory = self.device_memory
        if memory is not None and parse_bytes("cluster.device_memory", memory) < 2**30:
            raise ConfigError(f"cluster.device_memory={memory!r}: expected at least 1GiB, such as 80GB")
        places = ("address", "scheduler_file", "spec")
        if len(given := [f"cluster.{name}" for name in places if getattr(self, name)]) > 1:
            raise ConfigError(f"{' and '.join(given)} are given: expected one of them")
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

    def _check_elastic(self) -> None:
        """Raise ConfigError for keys of an elastic run where this is none, and for values that it cannot have."""
        most, patience = self.max_workers, self.replacement_timeout
        for name, value in (("max_workers", most), ("replacement_timeout", patience)):
            if value is not None and not self.elastic:
                raise ConfigError(f"cluster.{name}={value} is for an elastic run: set cluster.elastic=true as well")
        if patience is not None:
            at_least("cluster", 0, replacement_timeout=patience)
        if most is not None and most < self.workers:
            raise ConfigError(
                f"cluster.max_workers={most} is less than cluster.workers={self.workers}, with which the run begins"
            )


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """``validation``: datasets, sampling and metrics of validation and test."""

    url: str | None = None
    """Dataset of the validation. None: no validation."""
    every: int = 10
    """Steps between validations; one is run before the first step and one after the last as well."""
    test_url: str | None = None
    """Dataset of the test, which is read once, after the last step."""
    n: int = 1
    """Samples per prompt."""
    temperature: float | None = None
    """Temperature of the samples; 0: the most likely response. None: 0 for one sample per prompt, 1 for several."""
    top_p: float = 1.0
    k: list[int] = field(default_factory=list)
    """Values of k for pass@k, maj@k and best@k, up to ``n``. Empty: 1 and ``n``."""
    source_column: str | None = None
    """Column with the source of a row, for metrics of each source; a dot leads into a struct."""
    answer_extractor: str | None = None
    """Function of a response, as ``module:function``, that returns the answer in it, for maj@k. None: the response."""

    def __post_init__(self) -> None:
        self.url, self.test_url = (url and absolute(url) for url in (self.url, self.test_url))
        at_least("validation", 1, every=self.every, n=self.n)
        at_least("validation", 0, temperature=self.temperature or 0)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"validation.top_p={self.top_p}: expected more than 0 and at most 1")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                f"validation.n={self.n} with validation.temperature=0: samples that are all the most likely response "
                "are all the same; expected a temperature above 0, or validation.n=1"
            )
        self.k = sorted({*self.k} or {1, self.n})
        if outside := [k for k in self.k if not 1 <= k <= self.n]:
            raise ConfigError(f"validation.k={self.k}: {outside[0]} of validation.n={self.n} samples; expected 1 to n")


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """``checkpoint``: when checkpoints are written, and which ones are kept."""

    every: int = 50
    """Steps between checkpoints; one is written after the last step as well. 0 writes none: a run that stops cannot
    resume, and the model is lost when the run ends.
    """
    keep: int = 2
    """Number of newest checkpoints to keep; older ones are removed."""
    keep_best: str | None = None
    """Metric, such as ``validation/reward/mean``, whose best checkpoint is kept as well: the highest value wins."""
    asynchronous: bool = True
    """Write while training goes on, from a copy of the state in the host's memory."""

    def __post_init__(self) -> None:
        at_least("checkpoint", 0, every=self.every)
        at_least("checkpoint", 1, keep=self.keep)
        phase, slash, metric = (self.keep_best or "train/x").partition("/")
        if phase not in ("train", "validation") or not slash or not metric:
            raise ConfigError(
                f"checkpoint.keep_best={self.keep_best!r}: expected train/ or validation/ and the name of a metric, "
                "such as validation/reward/mean"
            )


class MetricsBackend(StrEnum):
    """Places that a run's metrics may go to beside ``metrics.jsonl``."""

    parquet = "parquet"
    """``metrics.parquet`` in the run's folder."""
    tensorboard = "tensorboard"
    """Event files in the run's folder."""
    wandb = "wandb"
    mlflow = "mlflow"
    swanlab = "swanlab"
    trackio = "trackio"
    aim = "aim"


@dataclass(kw_only=True, slots=True)
class ObserveConfig:
    """``observe``: progress, the trace, backends of metrics and the dashboard."""

    progress: bool = True
    """Show a progress bar on the terminal."""
    trace: bool = True
    """Write what each worker did in each step, for ``siirl-dask trace``."""
    dashboard: bool = True
    """Show the run on a page of its own on the Dask dashboard, ``/siirl``, where the scheduler has a dashboard."""
    backends: list[MetricsBackend] = field(default_factory=list)
    """Backends that get the metrics as well, each of which needs the extra of its name but for ``parquet``."""
    project: str = "siirl_dask"
    """Project, or experiment, to which the backends that have such a thing add the run."""
    dashboard_port: int = 0
    """Port on 127.0.0.1 of the Dask dashboard, for a cluster started here; 0: any free port."""

    def __post_init__(self) -> None:
        if not 0 <= self.dashboard_port < 65536:
            raise ConfigError(f"observe.dashboard_port={self.dashboard_port}: expected 0 to 65535")
        if twice := [str(name) for name in self.backends if self.backends.count(name) > 1]:
            raise ConfigError(f"observe.backends has {twice[0]!r} more than once: expected each name once")
        if not self.project.strip():
            raise ConfigError(f"observe.project={self.project!r}: expected the name of a project")


class ProfileLevel(StrEnum):
    """Details of a profile."""

    time = "time"
    """Operators and kernels, with their times."""
    memory = "memory"
    """Shapes and memory as well."""
    stacks = "stacks"
    """The Python lines that called them as well."""


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """``profile``: operators and kernels of some steps, by torch's profiler."""

    steps: list[int] = field(default_factory=list)
    """Training steps that are profiled. Empty: none."""
    roles: list[str] = field(default_factory=list)
    """Roles whose nodes are profiled. Empty: all."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks, among the workers of each of these roles, that are profiled. Empty: all."""
    level: ProfileLevel = ProfileLevel.time
    """``time``, ``memory`` or ``stacks``, each with what the ones before have."""

    def __post_init__(self) -> None:
        for step in self.steps:
            at_least("profile", 1, steps=step)
        for rank in self.ranks:
            at_least("profile", 0, ranks=rank)
