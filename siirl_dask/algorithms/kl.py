"""Estimates of KL(p, q) from tokens drawn from p, and the coefficient of a KL in the reward.

With ``d = log p - log q`` (http://joschu.net/blog/kl-approx.html), every estimate depends on d
alone. Used as a loss on tokens of the current policy, k2 has the gradient of the KL, and the
gradient of k1 has mean 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from torch import Tensor

from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError, TrainingError
from siirl_dask.planner import RoleCost, builds

_FAR = 20.0
KLFn = Callable[[Tensor, Tensor], Tensor]
"""``(logprobs [K], reference [K]) -> estimates [K]``."""


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ``d``: unbiased, of either sign, of high variance. [K], [K] -> [K]."""
    return logprobs - reference


def abs_difference(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ``|d|``: never negative, and no estimate of the KL but a price on any difference.
    [K], [K] -> [K].
    """
    return (logprobs - reference).abs()


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ``d^2 / 2``: biased, of low variance; its gradient is that of the KL. [K], [K] ->
    [K].
    """
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ``exp(-d) - 1 + d``: unbiased, never negative, of low variance. [K], [K] -> [K]."""
    difference = logprobs - reference
    return (
        -difference
    ).expm1() + difference  # expm1: exp() - 1 would lose all digits of a small difference


def k3_clipped(logprobs: Tensor, reference: Tensor, *, limit: float = 10.0) -> Tensor:
    """Return k3, and ``limit`` where it is more: a token that the reference finds far likelier has
    no gradient then, where k3's grows as ``exp(-d)`` does. [K], [K] -> [K].

    verl's ``low_var_kl`` has 10.
    """
    # exp() of more is infinite, and its gradient not a number
    difference = (logprobs - reference).clamp(-_FAR, _FAR)
    return k3(difference, difference.new_zeros(())).clamp(max=limit)


def straight_through(logprobs: Tensor, reference: Tensor, *, value: KLFn = k3) -> Tensor:
    """Return the value of the estimate ``value`` with k2's gradient, which in expectation is that
    of the KL. [K], [K] -> [K].
    """
    gradient = k2(logprobs, reference)
    return value(logprobs, reference).detach() + (gradient - gradient.detach())


_MAX_ERROR = 0.2  # bound of kl / target - 1, as in the paper


class KLController:
    """A coefficient for a KL in the reward: fixed, or adapted until the KL meets a target (Ziegler
    et al., arXiv:1909.08593).

    All workers of a role call ``update`` with the same numbers, and so hold the same coefficient.
    """

    def __init__(
        self,
        coefficient: float,
        target: float | None = None,
        horizon: float = 10000.0,
    ) -> None:
        """``target`` is the KL to reach, in nats per token; None keeps the coefficient fixed.
        ``horizon`` is the number of samples over which an error is corrected. ConfigError for
        numbers that cannot work.
        """
        if not (isfinite(coefficient) and coefficient >= 0):
            raise ConfigError(f"KL coefficient={coefficient}: expected 0 or more, and finite")
        if target is not None and not (isfinite(target) and target > 0):
            raise ConfigError(
                f"KL target={target}: expected more than 0, or none for a fixed coefficient"
            )
        if not horizon > 0:
            raise ConfigError(f"KL horizon={horizon}: expected more than 0 samples")
        self.coefficient = coefficient
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """Multiply the coefficient by ``1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon``;
        leave a fixed one.

        ``kl`` is the mean over the tokens of ``samples`` rows, in nats. TrainingError when it is
        not finite. ConfigError when there are so many samples that the coefficient could change its
        sign.
        """
        if not isfinite(kl):
            raise TrainingError(f"the KL to the reference is {kl}, expected a finite number")
        if self._target is None:
            return
        share = samples / self._horizon
        if _MAX_ERROR * share >= 1:
            raise ConfigError(
                f"KL horizon={self._horizon} with {samples} samples at once: expected a horizon "
                f"above {_MAX_ERROR * samples:g}, so that the coefficient stays positive"
            )
        self.coefficient *= 1 + min(max(kl / self._target - 1, -_MAX_ERROR), _MAX_ERROR) * share

    def state(self) -> dict[str, float]:
        """Return the state that ``load_state`` resumes from."""
        return {"coefficient": self.coefficient}

    def load_state(self, state: dict[str, float]) -> None:
        """Resume from the result of ``state``."""
        self.coefficient = state["coefficient"]


def check_kl_controller(
    options: Mapping[str, Any], workers: Sequence[str], config: object
) -> RoleCost:
    """The preflight of ``build_kl_controller``: a controller is a number."""
    return RoleCost(memory=0)


@builds(preflight=check_kl_controller)
def build_kl_controller(
    device: Device,
    rank: Rank,
    *,
    coefficient: float,
    target: float | None = None,
    horizon: float = 10000.0,
) -> KLController:
    """Build a role's KLController. Every rank holds an equal one, and none uses its device."""
    return KLController(coefficient, target, horizon)
