"""Seconds in which a worker generates, scores and learns, from parameters, tokens and the device's
figures: the table at the top of ``node_seconds`` says what counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from siirl_dask.config import Config, RolloutConfig, TrainerConfig
from siirl_dask.estimates.optimizer_seconds import optimizer_step
from siirl_dask.estimates.speeds import Speed
from siirl_dask.models.architecture import Architecture
from siirl_dask.models.shapes import ModelSize
from siirl_dask.rollout import engine_spec
from siirl_dask.training import trainer_spec
from siirl_dask.training.specs import division_of

FLOAT32 = 4
_HIDDEN_BY_COMPUTING = 0.8  # share of a collective's time
ENGINE_SHARE = 0.85  # of an accelerator's memory, for weights and cache
_SAMPLER = 40  # bytes read and written for each logit that a token is drawn from
# times a bare operation's seconds that one takes within a model's Python; fitted on one machine
_MODULES = 6
_OPERATIONS = {  # counted on torch 2.13 and transformers 5: for each layer, and outside the layers
    "step": (70, 80),
    "forward": (96, 107),
    "backward": (192, 167),
}


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of the rows of a step."""

    prompt: float
    response: float
    longest: float
    """Longest of the responses that are generated together: an engine goes on as long."""


@dataclass(frozen=True, slots=True)
class ComputedModel:
    """A role's model on its workers."""

    size: ModelSize
    architecture: Architecture
    itemsize: int
    """Bytes of a number of the model's type."""
    workers: int
    experts: int
    """Experts of each layer of a mixture; 0 without."""
    wide_head: bool = False
    """Whether the head's products are in float32, and the others are not."""

    @property
    def layers(self) -> int:
        """Parameters of all layers, whose products take nearly all the time."""
        embeddings = self.head * (1 if self.architecture.tied else 2)
        return max(1, self.size.total - embeddings)

    def needed(self, tokens: float = 1) -> float:
        """Return the parameters of the layers that so many ``tokens`` use, which choose experts
        at random.
        """
        if not self.experts:
            return self.layers
        unused: float = (1 - self.architecture.chosen / self.experts) ** tokens
        return self.layers - self.size.experts * unused

    @property
    def head(self) -> int:
        """Parameters of the head."""
        return self.architecture.vocabulary * self.architecture.hidden

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.architecture.layers * self.architecture.keys * self.itemsize


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens that one worker runs through a model in a step."""

    whole: float
    """Tokens of whole rows, as attention sees them."""
    computed: float
    """The same, but with each prompt that several rows share only once."""
    responses: float
    length: float
    """Tokens of a whole row."""


def _flops(model: ComputedModel, speed: Speed) -> float:
    if model.itemsize == 2:  # bytes of bfloat16
        return speed.flops
    return speed.flops32


def _head_flops(model: ComputedModel, speed: Speed) -> float:
    """Return the arithmetic of the head for a token, in units of that in the model's type."""
    slower = 1.0
    if model.wide_head:
        slower = speed.flops / speed.flops32
    return 2 * slower * model.head


def _forward_flops(model: ComputedModel, tokens: _Tokens, speed: Speed) -> float:
    """Return the arithmetic of a forward pass: layers, causal attention within rows, and the
    head.
    """
    architecture = model.architecture
    # half of the pairs of tokens, two products of 2 FLOPs
    attention = 2 * architecture.layers * architecture.queries * tokens.length
    return (
        2 * model.needed() * tokens.computed
        + attention * tokens.whole
        + _head_flops(model, speed) * tokens.responses
    )


def _pass_bytes(model: ComputedModel, tokens: _Tokens) -> float:
    """Return the bytes of activations that a forward pass writes and reads again.

    Attention is over whole rows, to which prompts that they share are copied first.
    """
    architecture = model.architecture
    per_token = 24 * architecture.hidden + model.itemsize * 4 * architecture.intermediate
    in_attention = model.itemsize * 2 * (architecture.queries + architecture.keys)
    copies = 1
    if tokens.computed < tokens.whole:
        copies = 2
    return (
        2
        * architecture.layers
        * (tokens.computed * per_token + tokens.whole * in_attention * copies)
    )


def _operations(model: ComputedModel, speed: Speed, kind: str) -> float:
    """Return the seconds of the small operations of one pass of a ``kind`` in ``_OPERATIONS``."""
    per_layer, outside = _OPERATIONS[kind]
    return _MODULES * speed.operation * (per_layer * model.architecture.layers + outside)


def _tokens(
    model: ComputedModel,
    trainer: TrainerConfig,
    config: Config,
    lengths: StepTokens,
    *,
    epochs: int = 1,
    parts: int = 1,
) -> _Tokens:
    """Return the tokens of a worker.

    A prompt's samples are spread over the workers, and those of a worker over ``parts`` of its
    rows.
    """
    rows = epochs * config.data.batch_size * config.rollout.n / model.workers
    length = lengths.prompt + lengths.response
    sharing = max(1.0, config.rollout.n / model.workers / parts)  # rows that share a prompt
    if not division_of(trainer, model.workers).prompts_once:
        sharing = 1.0
    computed = rows * (lengths.prompt / sharing + lengths.response)
    return _Tokens(rows * length, computed, rows * lengths.response, length)


def scoring_seconds(
    model: ComputedModel,
    trainer: TrainerConfig,
    config: Config,
    speed: Speed,
    lengths: StepTokens,
) -> float:
    tokens = _tokens(model, trainer, config, lengths)
    compute = _forward_flops(model, tokens, speed)
    passes = max(1.0, tokens.whole / trainer.max_tokens_per_micro_batch)
    seconds = compute / (_flops(model, speed) * speed.training) + passes * _operations(
        model, speed, "forward"
    )
    if speed.cores:
        seconds += _pass_bytes(model, tokens) / speed.memory_rate
    gathered = 0
    if trainer_spec(trainer.backend).gathers:
        gathered = model.itemsize * model.size.total
    return _with_collectives(seconds, passes * gathered, model, speed)


def update_seconds(
    model: ComputedModel,
    trainer: TrainerConfig,
    config: Config,
    speed: Speed,
    lengths: StepTokens,
    *,
    matrices: Sequence[Sequence[int]],
) -> float:
    """Return the seconds of an update; ``matrices`` are the shapes of what Muon steps."""
    steps = config.algorithm.minibatches * config.algorithm.epochs
    parts = 1
    if config.algorithm.split_groups:
        parts = config.algorithm.minibatches
    tokens = _tokens(model, trainer, config, lengths, epochs=config.algorithm.epochs, parts=parts)
    times = (2 if trainer.lora.rank else 3) + trainer.gradient_checkpointing
    compute = times * _forward_flops(model, tokens, speed)
    # logits are computed again in the backward pass
    compute += _head_flops(model, speed) * tokens.responses
    passes = max(float(steps), tokens.whole / trainer.max_tokens_per_micro_batch)
    operations = sum(_operations(model, speed, kind) for kind in ("forward", "backward"))
    seconds = compute / (_flops(model, speed) * speed.training) + passes * operations
    if speed.cores:
        seconds += times * _pass_bytes(model, tokens) / speed.memory_rate
    learned = 0
    if not trainer.lora.rank:
        learned = model.size.total
    shards = division_of(trainer, model.workers).shards
    gathers = trainer_spec(trainer.backend).gathers
    step = optimizer_step(
        learned,
        matrices,
        speed,
        shards=shards,
        workers=model.workers,
        gathers=gathers,
    )
    seconds += steps * step.seconds
    if gathers:
        # gathers, and the scatter
        moved = passes * ((times - 1) * model.itemsize * model.size.total + 4 * learned)
    else:
        # the sums over replicas; those within one are not counted
        moved = steps * 2 * 4 * learned / shards
    seconds = _with_collectives(seconds, moved, model, speed, hidden=gathers)
    # of Muon's, which nothing hides
    return _with_collectives(seconds, steps * step.sent, model, speed, hidden=False)


def _with_collectives(
    compute: float,
    nbytes: float,
    model: ComputedModel,
    speed: Speed,
    *,
    hidden: bool = True,
) -> float:
    """Return the seconds of computing and of collectives; computing hides most of these if they
    are ``hidden``.
    """
    ring = (model.workers - 1) / model.workers  # share of a tensor that each worker of a ring sends
    moved = nbytes * ring / speed.link
    if not hidden:
        return compute + moved
    return compute + max(moved - _HIDDEN_BY_COMPUTING * compute, (1 - _HIDDEN_BY_COMPUTING) * moved)


def generation_seconds(
    model: ComputedModel,
    rollout: RolloutConfig,
    config: Config,
    speed: Speed,
    lengths: StepTokens,
) -> float:
    """Return the seconds of the slowest engine, in which a waiting row replaces each row that
    has ended.
    """
    facts = engine_spec(rollout.engine).facts
    if not facts.widens_head:
        model = replace(model, wide_head=False)
    ranks = rollout.tensor_parallel_size
    rows = config.data.batch_size * config.rollout.n / (model.workers / ranks)
    slots = min(
        rows, _slots(model, rollout, float(facts.rows(rollout)), speed=speed, lengths=lengths)
    )
    prompts = rows
    if facts.reads_prompts_once(rollout):
        prompts = rows / rollout.n
    flops = ranks * _flops(model, speed)
    rate = ranks * speed.memory_rate * speed.decoding
    read = prompts * lengths.prompt
    prompt_tokens = _Tokens(read, read, rows, lengths.prompt)
    prefill = _forward_flops(model, prompt_tokens, speed) / (flops * speed.prefill)
    steps = max(lengths.longest, rows * lengths.response / slots)
    running = rows * lengths.response / steps
    weights = model.itemsize * (model.needed(running) + model.head)
    if model.wide_head:
        weights += 2 * FLOAT32 * model.head
    cache = running * (lengths.prompt + lengths.response / 2) * model.token_bytes
    reading = (weights + cache) / rate
    token_flops = 2 * model.needed() + _head_flops(model, speed)
    arithmetic = running * token_flops / (flops * speed.prefill)
    token = max(reading, arithmetic)
    if speed.cores:
        token = reading + arithmetic
    token += running * model.architecture.vocabulary * _SAMPLER / speed.memory_rate + speed.step
    return prefill + steps * (token + _operations(model, speed, "step"))


def _slots(
    model: ComputedModel,
    rollout: RolloutConfig,
    most: float,
    *,
    speed: Speed,
    lengths: StepTokens,
) -> float:
    """Return the rows that an engine generates at once: at most ``most``, and as many as have
    room.
    """
    ranks = rollout.tensor_parallel_size
    if speed.cores:
        return most
    room = ranks * ENGINE_SHARE * speed.memory - model.itemsize * model.size.total
    return max(1.0, min(most, room / ((lengths.prompt + lengths.response) * model.token_bytes)))
