"""Config groups of learning: the algorithm, and the training of a policy or a critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from siirl_dask.config.checks import above, at_least, finite, located, parse_bytes
from siirl_dask.config.megatron import MegatronConfig, check_megatron_operators
from siirl_dask.devices.operators import check_operators
from siirl_dask.errors import ConfigError, did_you_mean

ENGINES_LOGPROBS = "siirl_dask.nodes:rollout_logprobs"
"""Value of ``algorithm.old_logprobs`` that takes those of the engine."""
LAYOUT_GROUPS = ("trainer.megatron",)
"""Groups whose options only divide a model among workers: what is learned does not depend on
them."""
# the one correction that no old log-probs enter
_OF_CURRENT_POLICY = "siirl_dask.algorithms:mask_off_policy"


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """``algorithm``: functions, as ``module:function``, with their options by name;
    docs/algorithms.md lists them.
    """

    advantage: str = "siirl_dask.algorithms:grpo"
    """Function of Outcomes, or of TokenOutcomes if the DAG estimates advantages of tokens."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Options of the advantage."""
    loss: str = "siirl_dask.algorithms:ppo_clip"
    """Function of LossInputs that returns the policy's loss of each token."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Options of the loss, such as ``{clip_low: 0.2, clip_high: 0.28}``."""
    aggregation: str = "siirl_dask.algorithms:token_mean"
    """Function that weighs the tokens' losses in a mini-batch's loss."""
    aggregation_options: dict[str, Any] = field(default_factory=dict)
    """Options of the aggregation."""
    kl: str = "siirl_dask.algorithms:k3"
    """Estimator of KL(policy, reference) that ``kl_coefficient`` multiplies."""
    kl_coefficient: float = 0.0
    """Weight of the KL term in the loss; above 0 it needs a node that writes
    ``reference_logprobs``."""
    kl_bias_correction: bool = False
    """Multiply the KL term by the ratio of current to old policy, which removes its bias; see
    ``policy_loss``."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus in the loss."""
    old_logprobs: str = "siirl_dask.nodes:policy_logprobs"
    """Node that writes the log-probs before the update: of a pass of the policy, or with
    ``siirl_dask.nodes:rollout_logprobs`` those of the engine that sampled."""
    correction: str | None = None
    """Function of LossInputs that weighs tokens by the ratio of policy to sampling engine. None: no
    correction if ``rollout.max_staleness`` is 0 or ``old_logprobs`` are the engine's, else
    truncated_is."""
    correction_options: dict[str, Any] = field(default_factory=dict)
    """Options of the correction."""
    minibatches: int = 1
    """Optimizer steps per step; prompts are drawn into mini-batches globally, with all their
    samples."""
    split_groups: bool = False
    """Draw samples into mini-batches one by one, apart from the other samples of their prompt."""
    epochs: int = 1
    """Passes over a step's mini-batches; old log-probs are those before the first pass."""
    critic_warmup_steps: int = 0
    """Number of first steps in which a critic learns and the policy does not."""

    def __post_init__(self) -> None:
        at_least("algorithm", 1, minibatches=self.minibatches, epochs=self.epochs)
        at_least("algorithm", 0, critic_warmup_steps=self.critic_warmup_steps)
        coefficients = {
            "kl_coefficient": self.kl_coefficient,
            "entropy_coefficient": self.entropy_coefficient,
        }
        at_least("algorithm", 0, **coefficients)
        finite("algorithm", **coefficients)
        if self.correction_options and self.correction is None:
            raise ConfigError("algorithm.correction_options are given without algorithm.correction")
        if (
            self.correction not in (None, _OF_CURRENT_POLICY)
            and self.old_logprobs == ENGINES_LOGPROBS
        ):
            raise ConfigError(
                f"algorithm.correction={self.correction} with "
                f"algorithm.old_logprobs={self.old_logprobs}: old "
                "log-probs are the engine's then, and its weights are all 1; leave one of them out"
            )


class Backend(StrEnum):
    """Shipped backend: distribution of a trained model over its workers; see docs/training.md."""

    torch = "torch"
    """The whole model on every worker of the role: the simplest, and the fastest if it fits."""
    fsdp = "fsdp"
    """Shards of the model over the workers of the role (FSDP2)."""
    megatron = "megatron"
    """Layers, and parts of each layer, on different workers of the role (megatron-core)."""


class OptimizerName(StrEnum):
    """Optimizer of a trained model; see docs/training.md."""

    adamw = "adamw"
    """AdamW of all parameters."""
    muon = "muon"
    """Muon of the matrices of the layers, and AdamW of the other parameters."""


class Schedule(StrEnum):
    """Course of the learning rate after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class VisionPart(StrEnum):
    """Part of a model that sees images."""

    visual = "visual"
    """The whole tower: encoder and projector."""
    encoder = "encoder"
    """The tower without its projector."""
    projector = "projector"
    """The layers that map what the encoder sees into the language model."""
    language_model = "language_model"
    """Embeddings, decoder and head."""


@dataclass(kw_only=True, slots=True)
class FsdpConfig:
    """``trainer.fsdp``: options of the backend fsdp."""

    shard_size: int | None = None
    """Ranks over which the model is sharded; fewer than the role's ranks replicates the shards over
    groups of them (HSDP). None: all of the role's ranks."""
    offload: bool = False
    """Keep shards and the optimizer's state in the host's memory; the device holds only the
    layers in use."""
    gather_size: str = "64MiB"
    """Least size of float32 parameters that are gathered at once; smaller layers are gathered
    together. A lower value takes less memory and more messages."""
    sequence_parallel: int = 1
    """Ranks that share the tokens of each micro-batch, for rows too long for one rank; a divisor of
    the role's ranks and of the model's attention heads."""
    tensor_parallel: int = 1
    """Ranks that share the heads and the feed-forward width of each layer; a divisor of the role's
    ranks and of the model's key heads. Excludes adapters, ``compile``, ``liger`` and the options
    above but ``gather_size``."""

    def __post_init__(self) -> None:
        parse_bytes("trainer.fsdp.gather_size", self.gather_size)
        at_least(
            "trainer.fsdp",
            1,
            sequence_parallel=self.sequence_parallel,
            tensor_parallel=self.tensor_parallel,
        )
        if self.shard_size is not None:
            at_least("trainer.fsdp", 1, shard_size=self.shard_size)

    @property
    def needs_fsdp(self) -> list[str]:
        """Options in use that the backend torch does not have, as ``trainer.fsdp.offload=True``."""
        options = {
            "shard_size": self.shard_size,
            "offload": self.offload or None,
            "sequence_parallel": self.sequence_parallel if self.sequence_parallel > 1 else None,
            "tensor_parallel": self.tensor_parallel if self.tensor_parallel > 1 else None,
        }
        return [
            f"trainer.fsdp.{name}={value}" for name, value in options.items() if value is not None
        ]


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """``trainer.lora``: adapters that learn in place of the weights (LoRA, arXiv:2106.09685)."""

    rank: int = 0
    """Rank of the adapters; 0: no adapters, all weights learn."""
    alpha: float = 16.0
    """Scale of the adapters: their output is multiplied by ``alpha / rank``."""
    targets: list[str] = field(default_factory=list)
    """Names of the linear layers that get an adapter, such as ``[q_proj, v_proj]``. Empty: all of
    the decoder's. In a model that sees images also ``visual`` and ``language_model``, all of the
    tower's or the decoder's, and ``visual.NAME``."""
    path: str | None = None
    """Adapters to begin with: a folder in peft's format, or its URL, or the run, ``RUN`` or
    ``RUN@STEP``, that trained them on the same model. None: B is 0, so that the policy begins as
    the model."""

    def __post_init__(self) -> None:
        at_least("trainer.lora", 0, rank=self.rank)
        if self.path is not None:
            self.path = located("trainer.lora.path", self.path)
            if not self.rank:
                raise ConfigError(
                    f"trainer.lora.path={self.path!r}: there are no adapters with "
                    "trainer.lora.rank=0; give the rank that these have, or leave it out"
                )
        above("trainer.lora", 0, alpha=self.alpha)
        if self.targets and not self.rank:
            raise ConfigError(
                f"trainer.lora.targets={self.targets}: there are no adapters with "
                "trainer.lora.rank=0; give it a rank, or leave them out"
            )


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """``trainer`` and ``critic``: backend, optimizer and micro-batches of a trained model."""

    backend: str = Backend.torch
    """Backend: ``torch``; ``fsdp`` for a model that does not fit on one device; ``megatron``; or
    one of your own, as ``module:NAME`` or ``file.py:NAME`` of its TrainerSpec: see
    docs/training.md."""
    backend_options: dict[str, Any] = field(default_factory=dict)
    """Options of a backend of your own, which reads them itself."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    freeze: list[VisionPart] = field(default_factory=list)
    """Parts of a model that sees images which do not learn, such as ``[visual]``."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass instead of keeping their activations."""
    compile: bool = False
    """Compile the layers with torch.compile, which takes minutes before the first step."""
    liger: Literal["auto", True, False] = "auto"
    """Compute norms and feed-forward layers with the Triton kernels of liger-kernel, on GPUs.
    ``auto``: where the package is installed, its kernels run, and nothing else fuses these layers
    or divides them."""
    operators: dict[str, str] = field(default_factory=dict)
    """Libraries of fused operators, such as ``{rms_norm: torch}``; others are chosen by device:
    docs/devices.md."""
    optimizer: OptimizerName = OptimizerName.adamw
    """Optimizer: ``adamw``; or ``muon``, which steps the matrices of the layers by Muon, and the
    rest by AdamW."""
    lr: float = 1e-6
    """Learning rate after the warm-up."""
    visual_lr: float | None = None
    """The same for the tower of a model that sees images. None: ``lr``."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decays of AdamW's first and second moment."""
    eps: float = 1e-8
    """Number that AdamW adds to the root of the second moment."""
    weight_decay: float = 0.0
    """Weight decay of AdamW and Muon."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    schedule: Schedule = Schedule.constant
    total_steps: int | None = None
    """Optimizer steps, warm-up included, after which the rate has fallen. None: those of the
    run."""
    min_lr_ratio: float = 0.0
    """Share of ``lr`` that the rate falls to."""
    max_grad_norm: float = 1.0
    """Norm to which gradients are clipped."""
    max_skipped_steps: int | None = None
    """Most optimizer steps in a row that ``run.on_nan=skip`` leaves out; one more ends the run.
    None: 10."""
    ema_decay: float = 0.0
    """Decay of a moving average of the weights; 0: no average is kept, unless ``ema_every`` is
    above 1."""
    ema_every: int = 1
    """Optimizer steps from one update of the moving average to the next. Above 1 with ``ema_decay``
    of 0 the average is a copy of the weights, taken every so many steps."""
    park: bool = False
    """Keep weights and optimizer state in the host's memory while other roles of the worker compute
    on its accelerator, such as the engine; gradients take memory during updates alone."""
    max_tokens_per_micro_batch: int = 16384
    """Most tokens, prompts and responses, in a rank's micro-batch; ``fsdp.sequence_parallel`` ranks
    together take that many times more."""

    def __post_init__(self) -> None:
        self._check_backend()
        for name, rate in {
            "lr": self.lr,
            "visual_lr": self.lr if self.visual_lr is None else self.visual_lr,
        }.items():
            if not 0 < rate < float("inf"):
                raise ConfigError(f"trainer.{name}={rate!r}: expected more than 0, and finite")
        above("trainer", 0, max_grad_norm=self.max_grad_norm, eps=self.eps)
        finite("trainer", eps=self.eps, weight_decay=self.weight_decay)
        at_least("trainer", 0, weight_decay=self.weight_decay, warmup_steps=self.warmup_steps)
        if self.max_skipped_steps is not None:
            at_least("trainer", 0, max_skipped_steps=self.max_skipped_steps)
        at_least("trainer", 1, max_tokens_per_micro_batch=self.max_tokens_per_micro_batch)
        self.betas = tuple(self.betas)  # type: ignore[assignment]  # a list is fine as well
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"trainer.betas={self.betas}: expected two numbers from 0 to below 1")
        if self.backend != Backend.fsdp and (options := self.fsdp.needs_fsdp):
            raise ConfigError(
                f"{options[0]}: the backend {self.backend} does not have it; take "
                "trainer.backend=fsdp"
            )
        if self.backend != Backend.megatron and (options := self.megatron.needs_megatron):
            raise ConfigError(
                f"{options[0]}: the backend {self.backend} does not have it; take "
                "trainer.backend=megatron"
            )
        self._check_megatron()
        if self.park and self.fsdp.offload:
            raise ConfigError(
                "trainer.park=true and trainer.fsdp.offload=true: what is offloaded is in the "
                "host's memory already; leave one of them out"
            )
        self._check_tensor_parallel()
        if self.freeze and self.lora.rank:
            raise ConfigError(
                f"trainer.freeze={[*map(str, self.freeze)]} with "
                f"trainer.lora.rank={self.lora.rank}: no weights learn "
                "beside adapters; trainer.lora.targets says which layers have any"
            )
        if self.optimizer == OptimizerName.muon and self.lora.rank:
            raise ConfigError(
                f"trainer.optimizer=muon with trainer.lora.rank={self.lora.rank}: Muon steps whole "
                "matrices, and adapters are factors of one; take trainer.optimizer=adamw, or "
                "leave the adapters out"
            )
        self._check_visual_lr()
        if self.liger is True and self.compile:
            raise ConfigError(
                "trainer.liger=True with trainer.compile=True: both fuse the same operations; "
                "leave one of them out"
            )
        check_operators(self.operators, liger=self.liger is True)
        check_megatron_operators(self.operators, megatron=self.backend == Backend.megatron)
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"trainer.min_lr_ratio={self.min_lr_ratio}: expected 0 to 1")
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"trainer.ema_decay={self.ema_decay}: expected 0 to below 1")
        at_least("trainer", 1, ema_every=self.ema_every)
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"trainer.total_steps={self.total_steps}: expected more than "
                f"trainer.warmup_steps={self.warmup_steps}"
            )

    @property
    def keeps_average(self) -> bool:
        """Whether a moving average of the weights is kept."""
        if self.ema_decay > 0:
            return True
        return self.ema_every > 1

    def _check_backend(self) -> None:
        """Raise ConfigError for a name that is no backend's, and for options that a shipped
        backend does not read.
        """
        shipped = [*map(str, Backend)]
        if self.backend in shipped:
            if self.backend_options:
                raise ConfigError(
                    f"trainer.backend_options={self.backend_options}: the backend {self.backend} "
                    "reads none; they are for a backend of your own, trainer.backend=module:NAME"
                )
        elif ":" not in self.backend:
            raise ConfigError(
                f"trainer.backend={self.backend!r}: expected one of {shipped}, or module:NAME of a "
                f"TrainerSpec of your own{did_you_mean(self.backend, shipped)}"
            )

    def _check_visual_lr(self) -> None:
        """Raise ConfigError for a rate of the tower where nothing of it learns."""
        if self.visual_lr is None:
            return
        if VisionPart.visual in self.freeze or {VisionPart.encoder, VisionPart.projector} <= {
            *self.freeze
        }:
            raise ConfigError(
                f"trainer.visual_lr={self.visual_lr}: trainer.freeze has the tower; leave one out"
            )
        if self.lora.rank and not any(
            target.partition(".")[0] == VisionPart.visual for target in self.lora.targets
        ):
            raise ConfigError(
                f"trainer.visual_lr={self.visual_lr} with "
                f"trainer.lora.targets={self.lora.targets}: no adapters are in "
                "the tower; add 'visual' to the targets, or leave the rate out"
            )

    def _check_megatron(self) -> None:
        if self.backend != Backend.megatron:
            return
        others = {
            "compile": self.compile,
            "freeze": bool(self.freeze),
            "liger": self.liger is True,
            "lora.rank": self.lora.rank,
            "optimizer=muon": self.optimizer == OptimizerName.muon,
            "park": self.park,
            "visual_lr": self.visual_lr is not None,
        }
        conflicts = [f"trainer.{name}" for name, value in others.items() if value]
        if conflicts:
            raise ConfigError(
                f"trainer.backend=megatron: it does not go together with {', '.join(conflicts)}; "
                "leave one out"
            )

    def _check_tensor_parallel(self) -> None:
        if self.fsdp.tensor_parallel == 1:
            return
        others = {
            "fsdp.shard_size": self.fsdp.shard_size,
            "fsdp.offload": self.fsdp.offload,
            "fsdp.sequence_parallel": self.fsdp.sequence_parallel > 1,
            "compile": self.compile,
            "liger": self.liger is True,
            "lora.rank": self.lora.rank,
            "optimizer=muon": self.optimizer == OptimizerName.muon,
        }
        conflicts = [f"trainer.{name}" for name, value in others.items() if value]
        if conflicts:
            raise ConfigError(
                f"trainer.fsdp.tensor_parallel={self.fsdp.tensor_parallel}: it does not go "
                f"together with {', '.join(conflicts)}; leave one out"
            )
