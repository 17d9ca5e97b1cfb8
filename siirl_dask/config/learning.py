"""Groups of what is learned and how: the algorithm, the optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from siirl_dask.config.checks import above, at_least
from siirl_dask.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """Functions by name, ``module:function``, and their options by theirs; see docs/algorithms.md for what there is."""

    advantage: str = "siirl_dask.algorithms:grpo"
    """Of Outcomes, or where the DAG estimates advantages of tokens, of TokenOutcomes."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    loss: str = "siirl_dask.algorithms:ppo_clip"
    """Of LossInputs: the policy's loss, token by token."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Such as ``{clip_low: 0.2, clip_high: 0.28}``."""
    aggregation: str = "siirl_dask.algorithms:token_mean"
    """How tokens' losses become a mini-batch's."""
    aggregation_options: dict[str, Any] = field(default_factory=dict)
    kl: str = "siirl_dask.algorithms:k3"
    """Estimate of KL(policy, reference) that ``kl_coefficient`` multiplies."""
    kl_coefficient: float = 0.0
    """In the loss; needs a node that writes ``reference_logprobs``."""
    entropy_coefficient: float = 0.0
    correction: str | None = None
    """Of LossInputs: weights of tokens that correct for a sampler that is not quite the policy; none, no correction
    where ``rollout.max_staleness`` is 0.
    """
    correction_options: dict[str, Any] = field(default_factory=dict)
    minibatches: int = 1
    """Optimiser steps per step; prompts are drawn into mini-batches globally, with all their samples."""

    def __post_init__(self) -> None:
        at_least("algorithm", 1, minibatches=self.minibatches)
        at_least("algorithm", 0, kl_coefficient=self.kl_coefficient, entropy_coefficient=self.entropy_coefficient)
        if self.correction_options and self.correction is None:
            raise ConfigError("algorithm.correction_options are given without algorithm.correction")


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    """Optimiser steps over which the learning rate rises linearly from 0."""
    max_grad_norm: float = 1.0
    max_tokens_per_micro_batch: int = 16384
    """Tokens, prompt and response, that go through the model at once."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"trainer.lr={self.lr!r}: expected more than 0, and finite")
        above("trainer", 0, max_grad_norm=self.max_grad_norm)
        at_least("trainer", 0, weight_decay=self.weight_decay, warmup_steps=self.warmup_steps)
        at_least("trainer", 1, max_tokens_per_micro_batch=self.max_tokens_per_micro_batch)
        self.betas = tuple(self.betas)  # type: ignore[assignment]  # a list is fine as well
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"trainer.betas={self.betas}: expected two numbers from 0 to below 1")
