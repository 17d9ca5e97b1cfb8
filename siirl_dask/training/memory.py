"""Arithmetic of a trained or scoring model's memory on an accelerator: what it holds, and what a
pass takes besides.

held        weights, gradients and AdamW's two moments in float32, 16 bytes a parameter, or 12 of a
matrix that Muon
            steps; with adapters those of the adapters, and 4 bytes for each frozen weight; with
            fsdp a shard of that, which may be in the host's memory
parked      what is held, with trainer.park: in the host's memory but for the gradients, and on the
device in its turn gathered    with fsdp: embeddings, norm and head, which stay gathered through a
pass, and two groups of layers activations what autograd keeps for each token of a micro-batch, and
a layer's temporary values; the same for each patch
            of its images
log-probs   three blocks of logits, the sum of the hidden states' gradient, and the head's gradient
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from siirl_dask.config import Dtype, TrainerConfig, parse_bytes
from siirl_dask.models.architecture import Architecture, Tower
from siirl_dask.models.shapes import ModelSize
from siirl_dask.planner import Footprint
from siirl_dask.training.model.logprobs import logits_rows
from siirl_dask.training.specs import Division, TrainerMemory, division_of, trainer_spec

FLOAT32 = 4
BFLOAT16 = 2
GRADIENTS = "gradients"
IN_FLOAT32 = " in float32"  # how parts end that weights are made of
FROZEN = f"frozen weights{IN_FLOAT32}"
_PIXELS = 3 * 2 * 16 * 16  # numbers of a patch: three colours, two frames
_BLOCKS = 2  # log-probs, which their gradient replaces, and its factor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnWorkers:
    """A model on the workers of its role."""

    size: ModelSize
    architecture: Architecture
    trainer: TrainerConfig
    dtype: Dtype
    ranks: int
    """Workers of the role."""
    tokens: int
    """Tokens of the largest micro-batch."""
    adapters: int = 0
    """Parameters of adapters; 0: all weights learn but the frozen ones, or none."""
    frozen: int = 0
    """Parameters of the parts that do not learn (``trainer.freeze``)."""
    matrices: int = 0
    """Parameters that Muon steps."""
    tower: Tower | None = None
    """The part that sees images; None where there are none."""
    image_share: float = 0.0
    """Largest share of a micro-batch's tokens that images have: that of the prompts."""
    learns: bool = True
    scores: bool = True
    """Whether it scores tokens through the vocabulary, as a critic does not."""
    float32_head: bool = False
    """Whether logits are products in float32 (``model.float32_head``)."""

    @property
    def division(self) -> Division:
        """How the model and its rows are divided among the workers of the role."""
        return division_of(self.trainer, self.ranks)

    @property
    def memory(self) -> TrainerMemory:
        """Arithmetic of the backend. ValueError for one that has none."""
        memory = trainer_spec(self.trainer.backend).memory
        if memory is None:
            raise ValueError(
                f"trainer.backend={self.trainer.backend}: expected a backend whose memory is "
                "estimated"
            )
        return memory

    @property
    def image_tokens(self) -> int:
        """Most tokens of images in a micro-batch."""
        if self.tower is not None:
            return int(self.tokens * self.image_share)
        return 0

    @property
    def narrow(self) -> int:
        """Bytes of a number in matrix products, and of hidden states."""
        if self.dtype is Dtype.bfloat16:
            return BFLOAT16
        return FLOAT32

    @property
    def root(self) -> int:
        """Parameters outside of the layers."""
        one = self.architecture
        embeddings = one.vocabulary * one.hidden * (1 if one.tied or not self.scores else 2)
        return min(embeddings + one.hidden, self.size.total)

    @property
    def head_learns(self) -> bool:
        """Whether the head has a gradient."""
        if not self.learns or not self.scores:
            return False
        return not self.adapters


def footprint(model: ModelOnWorkers) -> Footprint:
    """Return the memory of the model on one worker with an accelerator, without remedies."""
    held = held_bytes(model)
    working = working_bytes(model)
    loading = 0
    if model.memory.replicated:
        loading = FLOAT32 * model.size.total
    if model.trainer.fsdp.offload:
        return Footprint(working=working, host=held)
    weights = tuple(part for part in held if part.endswith(IN_FLOAT32))
    if "park" not in trainer_spec(model.trainer.backend).reads:
        return Footprint(held=held, working=working, moves=weights, loading=loading)
    parks = {part: 0 if part == GRADIENTS else size for part, size in held.items()}
    one = Footprint(held=held, working=working, moves=weights, parks=parks, loading=loading)
    if model.trainer.park:
        return one.parked()
    return one


def held_bytes(model: ModelOnWorkers) -> dict[str, int]:
    """Return the bytes that a worker holds of the model, by part."""
    return model.memory.held(model)


def held_in_float32(model: ModelOnWorkers) -> dict[str, int]:
    """Return the bytes that a worker holds of a model in float32 that AdamW or Muon steps, by part:
    the sum over the shards is the whole, rounded up.
    """
    whole = model.memory.parameters(model.size, model.trainer)
    shards = model.division.shards

    def share(parameters: int, each: int) -> int:
        return -(-each * parameters // shards)

    if not model.learns:
        return {f"weights{IN_FLOAT32}": share(whole, FLOAT32)}
    learned = model.adapters if model.adapters else whole - model.frozen
    parts: dict[str, int] = {}
    frozen = whole if model.adapters else model.frozen
    if frozen:
        parts[FROZEN] = share(frozen, FLOAT32)
    named = "weights"
    if model.adapters:
        named = "adapters"
    parts |= {
        f"{named}{IN_FLOAT32}": share(learned, FLOAT32),
        GRADIENTS: share(learned, FLOAT32),
        "optimizer state": share(2 * learned - model.matrices, FLOAT32),
    }
    if model.trainer.keeps_average:
        parts["moving average"] = share(learned, FLOAT32)
    return parts


def working_bytes(model: ModelOnWorkers) -> dict[str, int]:
    """Return the bytes of the peak of a pass, by part."""
    return max(model.memory.moments(model), key=lambda parts: sum(parts.values()))


def passing_bytes(model: ModelOnWorkers) -> int:
    """Return the bytes of the peak of a pass without gathered weights and their gradients."""
    gathered = ("gathered", "gradients of")
    moments = model.memory.moments(model)
    totals = []
    for parts in moments:
        others = [size for part, size in parts.items() if not part.startswith(gathered)]
        totals.append(sum(others))
    return max(totals)


def replica_moments(model: ModelOnWorkers) -> list[dict[str, int]]:
    """Return the bytes of a pass of a model that is whole on each worker, at its peak: at the
    head.
    """
    return [{**_copied(model), **_activations(model), **head_bytes(model)}]


def shard_moments(model: ModelOnWorkers) -> list[dict[str, int]]:
    """Return the bytes of the moments that may be the peak of a pass which gathers layers: at the
    head, at the last layer, after the first one.
    """
    activations = _activations(model)
    unit = _unit(model)
    root = model.root
    narrow = model.narrow
    gathered = {
        "gathered embeddings and head": narrow * root,
        "gathered layers, two groups": 2 * narrow * unit,
    }
    at_head = {**gathered, **activations, **head_bytes(model)}
    if not model.learns or model.adapters:
        return [at_head]
    last_layer = {"gradients of two groups of layers": 2 * (narrow + FLOAT32) * unit}
    pending = {
        "head's gradient": narrow
        * model.architecture.vocabulary
        * model.architecture.hidden
        * model.scores
    }
    at_end = {**gathered, "gradients of embeddings and head": (narrow + FLOAT32) * root}
    return [at_head, {**gathered, **activations, **pending, **last_layer}, at_end]


def _activations(model: ModelOnWorkers) -> dict[str, int]:
    activations = {
        f"activations of {model.tokens:,} tokens": activation_bytes(model) * model.tokens
    }
    if model.tower is not None and model.image_tokens:
        activations[f"activations of {model.image_tokens:,} tokens of images"] = tower_bytes(
            model, model.tower
        )
    return activations


def _copied(model: ModelOnWorkers) -> dict[str, int]:
    """Return what a pass holds of whole weights besides these: copies in the narrower type."""
    if model.narrow == FLOAT32:
        return {}
    layers = model.size.total - model.root
    copied = layers
    if model.trainer.gradient_checkpointing and model.adapters:
        copied = model.size.layer
    return {"weights in bfloat16": model.narrow * (copied if model.learns else model.size.layer)}


def _unit(model: ModelOnWorkers) -> int:
    """Return the parameters of a group of layers that fsdp gathers at once, of one
    tensor-parallel rank.
    """
    size = parse_bytes("trainer.fsdp.gather_size", model.trainer.fsdp.gather_size)
    layer = max(1, model.size.layer // model.trainer.fsdp.tensor_parallel)
    layers = min(max(1, -(-size // (FLOAT32 * layer))), model.architecture.layers)
    return layers * layer


def activation_bytes(model: ModelOnWorkers) -> int:
    """Return the bytes for each token of a micro-batch at the peak of a pass, without log-probs.

    Without ``gradient_checkpointing`` autograd keeps of every layer what ``layer_bytes`` says; with
    it the input of each layer, and the values of one. A pass without gradient has the values of one
    layer only.
    """
    one = model.architecture
    narrow = model.narrow
    inner = one.inner // model.division.layer
    if not model.learns:
        return (3 * narrow + FLOAT32) * one.hidden + 3 * narrow * inner
    layer = layer_bytes(model)
    temporary = 3 * narrow * inner + 2 * (narrow + FLOAT32) * one.hidden
    last = (FLOAT32 + 4 * narrow) * one.hidden  # the final norm, and the states that predict
    if model.trainer.gradient_checkpointing:
        return narrow * one.hidden * one.layers // model.division.norms + layer + temporary + last
    return layer * one.layers + temporary + last


def tower_bytes(model: ModelOnWorkers, tower: Tower) -> int:
    """Return the bytes of the tower's activations, with the pixels of each patch. A frozen one
    keeps none.
    """
    patches = model.image_tokens * tower.patches
    inside = replace(model, architecture=tower.layers, learns=model.learns and not model.frozen)
    return patches * (activation_bytes(inside) + FLOAT32 * _PIXELS)


def layer_bytes(model: ModelOnWorkers) -> int:
    """Return the bytes that autograd keeps of one layer for each token, by a Llama-like decoder's
    operations.

    Each of the two norms keeps its input in float32, its normalised value, and its output, which a
    product reads. Attention keeps queries, keys, values and its result after their rotation; the
    MLP gate, its SiLU, up and their product. Experts also keep the token that each of them gets,
    and what it gives before that is weighed.
    """
    one = model.architecture
    narrow = model.narrow
    division = model.division
    norms = 2 * (FLOAT32 + 2 * narrow) * one.hidden // division.norms
    attention = narrow * 2 * (one.queries + one.keys) + FLOAT32 * one.heads
    heads = 0
    if one.normed_heads:
        heads = (FLOAT32 + narrow) * (one.queries + one.keys)
    feed_forward = narrow * (4 * one.inner + 2 * one.chosen * one.hidden)
    return norms + (attention + heads + feed_forward) // division.layer


def head_bytes(model: ModelOnWorkers) -> dict[str, int]:
    """Return what log-probs take: blocks of logits, the sum of the hidden states' gradient over
    them, and the head's gradient, in the type of its parameter. In the narrower type each block has
    its logits, and their gradient, too; with a head in float32 instead the block's part of the head
    in float32, and all hidden states.
    """
    if not model.scores:
        return {}
    one = model.architecture
    narrow = model.narrow % FLOAT32
    widened = False
    if narrow:
        widened = model.float32_head
    tokens = model.tokens
    rows = logits_rows(tokens, one.hidden, one.vocabulary, on_cpu=False)
    replica = model.memory.replicated
    block = _BLOCKS * FLOAT32 * rows * tokens
    if widened:  # the head's rows in float32, while the next ones are rounded and widened
        block += (2 * FLOAT32 + (narrow if replica else 0)) * rows * one.hidden
    else:
        block += 2 * narrow * rows * tokens
        if replica:  # the head's rows in the narrower type, and their gradient
            block += 2 * narrow * rows * one.hidden
    parts = {"log-probs of a block": block}
    if widened:
        parts["hidden states in float32"] = FLOAT32 * tokens * one.hidden
    if model.learns:
        each = FLOAT32 if widened else FLOAT32 + narrow
        parts["gradient of hidden states"] = each * tokens * one.hidden
    if model.head_learns:
        parts["head's gradient"] = (
            (FLOAT32 if replica else model.narrow) * one.vocabulary * one.hidden
        )
    return parts
