"""Config groups ``observe`` and ``profile``: what a run shows and measures of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from siirl_dask.config.checks import at_least
from siirl_dask.devices.profile_level import ProfileLevel
from siirl_dask.errors import ConfigError


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
    """Show the run on a page of its own on the Dask dashboard, ``/siirl``, where the scheduler
    has a dashboard."""
    plot: bool = True
    """Draw ``plot.svg`` at the end."""
    backends: list[MetricsBackend] = field(default_factory=list)
    """Backends that get the metrics as well, each of which needs the extra of its name but for
    ``parquet``."""
    project: str = "siirl_dask"
    """Project, or experiment, to which the backends that have such a thing add the run."""
    dashboard_port: int = 0
    """Port on 127.0.0.1 of the Dask dashboard, for a cluster started here; 0: any free port."""

    def __post_init__(self) -> None:
        if not 0 <= self.dashboard_port < 65536:
            raise ConfigError(f"observe.dashboard_port={self.dashboard_port}: expected 0 to 65535")
        twice = [str(name) for name in self.backends if self.backends.count(name) > 1]
        if twice:
            raise ConfigError(
                f"observe.backends has {twice[0]!r} more than once: expected each name once"
            )
        if not self.project.strip():
            raise ConfigError(f"observe.project={self.project!r}: expected the name of a project")


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
