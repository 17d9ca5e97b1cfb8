"""What every worker of a run is told before it starts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from siirl_storage.files import absolute

from siirl_dask.config import Config
from siirl_dask.worker.dataplane import DataSettings
from siirl_dask.worker.keeping import Restored, StateStore
from siirl_dask.worker.parcel import Phases, pack


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """All that a worker is told about a run: plans and settings, no data."""

    run: str
    """Unique to this start of the run; messages of any other are refused."""
    url: str
    seed: int
    members: Mapping[str, str]
    """{worker name: address}, in rank order, fixed for the run."""
    parcel: bytes
    """Plan and dataset of each phase, ``train``, ``validation``, ``test``: see parcel.py."""
    threads: int
    data: DataSettings
    store: StateStore | None = None
    """Where roles' states are saved to and restored from; None, neither is asked for."""
    restored: Restored | None = None
    """The checkpoint that the run goes on from."""

    @staticmethod
    def of(
        config: Config,
        members: Mapping[str, str],
        phases: Phases,
        store: StateStore | None = None,
        restored: Restored | None = None,
    ) -> RunSpec:
        """Of one more start of the run that ``config`` describes."""
        return RunSpec(
            run=uuid.uuid4().hex[:12],
            url=absolute(config.run.url),  # a worker of an existing cluster may run in another folder
            seed=config.run.seed,
            members=members,
            parcel=pack(phases),
            threads=config.cluster.threads,
            data=DataSettings.of(config),
            store=store,
            restored=restored,
        )

    @property
    def plugin(self) -> str:
        return f"siirl-{self.run}"

    @property
    def topic(self) -> str:
        """Dask event topic on which workers and the supervisor report."""
        return f"siirl-{self.run}"
