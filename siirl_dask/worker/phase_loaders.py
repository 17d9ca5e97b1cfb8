"""The dataloaders of a run on one worker: one for each phase that reads a dataset."""

from __future__ import annotations

from collections.abc import Mapping

from siirl_dask.coordinator import Dataset
from siirl_dask.coordinator.dataloader import Dataloader
from siirl_dask.planner import Iteration


class PhaseLoaders:
    """Makes each phase's dataloader when it is first needed, and holds it until ``close``."""

    def __init__(self, positions: Mapping[str, int]) -> None:
        """``positions`` are those of a checkpoint's dataloaders, by phase; empty where a run
        begins.
        """
        self._first_positions = positions
        self._loaders: dict[str, Dataloader] = {}

    def get(self, iteration: Iteration, dataset: Dataset) -> Dataloader:
        """Return the dataloader of the iteration's phase, at the iteration's position where that
        has one.
        """
        phase = iteration.phase.counts_as
        if phase not in self._loaders:
            self._loaders[phase] = Dataloader(dataset, self._first_positions.get(phase))
        if iteration.position is not None:
            self._loaders[phase].seek(iteration.position)
        return self._loaders[phase]

    @property
    def positions(self) -> dict[str, int]:
        """Number of the next prompt by phase, for each dataloader whose number does not follow
        from the step.
        """
        positions = {str(phase): loader.position for phase, loader in self._loaders.items()}
        return {phase: position for phase, position in positions.items() if position is not None}

    def close(self) -> None:
        """Close all dataloaders; one that is needed later is made again."""
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()
