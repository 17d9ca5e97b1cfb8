"""Groups of what is learned and how: the algorithm, the optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from siirl_dask.config.checks import above, at_least, parse_bytes
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
    split_groups: bool = False
    """Samples are drawn into mini-batches one by one, wherever the others of their prompt go."""
    epochs: int = 1
    """Passes over a step's mini-batches; old log-probs stay those before the first."""
    critic_warmup_steps: int = 0
    """Steps, the first of the run, in which a critic learns and the policy does not."""

    def __post_init__(self) -> None:
        at_least("algorithm", 1, minibatches=self.minibatches, epochs=self.epochs)
        at_least("algorithm", 0, critic_warmup_steps=self.critic_warmup_steps)
        at_least("algorithm", 0, kl_coefficient=self.kl_coefficient, entropy_coefficient=self.entropy_coefficient)
        if self.correction_options and self.correction is None:
            raise ConfigError("algorithm.correction_options are given without algorithm.correction")


class Backend(StrEnum):
    """What trains; see docs/training.md."""

    torch = "torch"
    """The whole model on every worker of the role: the simplest, and the fastest where it fits."""
    fsdp = "fsdp"
    """The model in shards over the workers of the role (FSDP2)."""


class Schedule(StrEnum):
    """How the learning rate goes on after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    backend: Backend = Backend.torch
    """``torch`` unless the model does not fit: on two workers and small models it is the faster one."""
    shard_size: int | None = None
    """This and ``offload`` are for fsdp. Ranks that a model is in shards over, of which a role may have several lots
    that hold the same; none, all of the role's.
    """
    offload: bool = False
    """Shards and the optimiser's state are in the memory of the host, and only what is computed with on the device."""
    gather_size: str = "64MiB"
    """For fsdp. Of float32 parameters that are gathered at once, at least: layers that are smaller go together. Less
    takes less memory, and more messages.
    """
    sequence_parallel: int = 1
    """For fsdp. Ranks that share the tokens of each micro-batch, for rows that are too long for one of them; it divides
    the role's ranks and the model's attention heads.
    """
    tensor_parallel: int = 1
    """For fsdp. Ranks that share the heads and the feed-forward width of each layer, and their rows; it divides the
    role's ranks and the model's heads of keys. Without adapters and the options above.
    """
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass instead of keeping what they computed."""
    compile: bool = False
    """torch.compile of the layers: minutes before the first step."""
    lora_rank: int = 0
    """Of adapters (LoRA, arXiv:2106.09685) that learn in place of the weights; 0, the weights do."""
    lora_alpha: float = 16.0
    """``lora_alpha / lora_rank`` multiplies what an adapter adds."""
    lora_targets: list[str] = field(default_factory=list)
    """Names of the linear layers that get one, such as ``[q_proj, v_proj]``; none, all of the decoder's."""
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    """What AdamW adds to the root of the second moment."""
    weight_decay: float = 0.0
    warmup_steps: int = 0
    """Optimiser steps over which the learning rate rises linearly from 0."""
    schedule: Schedule = Schedule.constant
    total_steps: int | None = None
    """Optimiser steps, warm-up included, at whose end the rate has fallen; none, those of the run."""
    min_lr_ratio: float = 0.0
    """Of ``lr``: what the rate falls to."""
    max_grad_norm: float = 1.0
    max_skipped_steps: int = 0
    """Optimiser steps in a row that may be left out because their loss or gradient is not finite."""
    ema_decay: float = 0.0
    """Of a moving average of the weights that is kept beside them; 0, none is."""
    max_tokens_per_micro_batch: int = 16384
    """Tokens, prompt and response, that go through the model at once; ``sequence_parallel`` ranks take that many times
    as many together.
    """

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"trainer.lr={self.lr!r}: expected more than 0, and finite")
        above("trainer", 0, max_grad_norm=self.max_grad_norm, eps=self.eps)
        at_least("trainer", 0, weight_decay=self.weight_decay, warmup_steps=self.warmup_steps)
        at_least("trainer", 0, max_skipped_steps=self.max_skipped_steps)
        at_least("trainer", 1, max_tokens_per_micro_batch=self.max_tokens_per_micro_batch)
        self.betas = tuple(self.betas)  # type: ignore[assignment]  # a list is fine as well
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"trainer.betas={self.betas}: expected two numbers from 0 to below 1")
        self._check_backend()
        self._check_lora()
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"trainer.min_lr_ratio={self.min_lr_ratio}: expected 0 to 1")
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"trainer.ema_decay={self.ema_decay}: expected 0 to below 1")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"trainer.total_steps={self.total_steps}: expected more than trainer.warmup_steps={self.warmup_steps}"
            )

    def _check_backend(self) -> None:
        parse_bytes("trainer.gather_size", self.gather_size)
        at_least("trainer", 1, sequence_parallel=self.sequence_parallel)
        if self.sequence_parallel > 1 and self.backend != Backend.fsdp:
            raise ConfigError(
                f"trainer.sequence_parallel={self.sequence_parallel}: the backend {self.backend} does not share tokens "
                "among workers; take trainer.backend=fsdp"
            )
        if self.shard_size is not None:
            at_least("trainer", 1, shard_size=self.shard_size)
        self._check_tensor_parallel()
        given = {"shard_size": self.shard_size, "offload": self.offload}
        for name, value in given.items():
            if value and self.backend != Backend.fsdp:
                raise ConfigError(f"trainer.{name}={value}: it is of trainer.backend=fsdp, and the backend is torch")

    def _check_tensor_parallel(self) -> None:
        at_least("trainer", 1, tensor_parallel=self.tensor_parallel)
        if self.tensor_parallel == 1:
            return
        what = f"trainer.tensor_parallel={self.tensor_parallel}"
        if self.backend != Backend.fsdp:
            raise ConfigError(f"{what}: the backend {self.backend} does not share layers; take trainer.backend=fsdp")
        given = {
            "shard_size": self.shard_size,
            "offload": self.offload,
            "sequence_parallel": self.sequence_parallel > 1,
            "compile": self.compile,
            "lora_rank": self.lora_rank,
        }
        if others := [f"trainer.{name}" for name, value in given.items() if value]:
            raise ConfigError(f"{what}: it does not go together with {', '.join(others)}; leave one out")

    def _check_lora(self) -> None:
        at_least("trainer", 0, lora_rank=self.lora_rank)
        above("trainer", 0, lora_alpha=self.lora_alpha)
        if self.lora_targets and not self.lora_rank:
            raise ConfigError(
                f"trainer.lora_targets={self.lora_targets}: there are no adapters with trainer.lora_rank=0; give it a "
                "rank, or leave them out"
            )
