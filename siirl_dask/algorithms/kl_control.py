"""How much a divergence from the reference costs in the reward."""

from __future__ import annotations

from math import isfinite

from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError, TrainingError

_MAX_ERROR = 0.2  # of kl / target - 1, as in the paper


class KLController:
    """A coefficient that is fixed, or with a target follows the KL to it (Ziegler et al., arXiv:1909.08593).

    All workers of a role make the same updates, so that they hold the same coefficient.
    """

    def __init__(self, coefficient: float, target: float | None = None, horizon: float = 10000.0) -> None:
        """``target``: KL in nats per token; None, fixed. ``horizon``: samples over which an error is made good.

        ConfigError for numbers that cannot work.
        """
        if not (isfinite(coefficient) and coefficient >= 0):
            raise ConfigError(f"KL coefficient={coefficient}: expected 0 or more, and finite")
        if target is not None and not (isfinite(target) and target > 0):
            raise ConfigError(f"KL target={target}: expected more than 0, or none for a fixed coefficient")
        if not horizon > 0:
            raise ConfigError(f"KL horizon={horizon}: expected more than 0 samples")
        self.coefficient = coefficient
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """``coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon``; nothing when it is fixed.

        ``kl``: mean over the tokens of ``samples`` rows. TrainingError when it is not finite; ConfigError when there
        are so many samples that the coefficient could change its sign.
        """
        if not isfinite(kl):
            raise TrainingError(f"the KL to the reference is {kl}, expected a finite number")
        if self._target is None:
            return
        share = samples / self._horizon
        if _MAX_ERROR * share >= 1:
            raise ConfigError(
                f"KL horizon={self._horizon} with {samples} samples at once: expected a horizon above "
                f"{_MAX_ERROR * samples:g}, so that the coefficient stays positive"
            )
        self.coefficient *= 1 + min(max(kl / self._target - 1, -_MAX_ERROR), _MAX_ERROR) * share

    def state(self) -> dict[str, float]:
        """What ``load_state`` goes on from."""
        return {"coefficient": self.coefficient}

    def load_state(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]


def build_kl_controller(
    device: Device, rank: Rank, *, coefficient: float, target: float | None = None, horizon: float = 10000.0
) -> KLController:
    """A role's ``build``: the device is not used, every rank holds the same."""
    return KLController(coefficient, target, horizon)
