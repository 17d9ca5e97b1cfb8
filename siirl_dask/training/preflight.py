"""Preflight of policies, references, critics and reward models: layouts, adapters, and each
worker's memory.

A model that learns takes 16 bytes per parameter (weights, gradients and AdamW's two moments in
float32), 4 less of a matrix that Muon steps, and 4 more with a moving average of the weights. A
reference takes 4. With adapters the model takes 4 and the adapters learn. With
``trainer.backend=fsdp`` a worker holds its shard of that, plus the layers that are gathered at one
time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from siirl_dask.config import (
    Config,
    ImagesConfig,
    ModelConfig,
    RolloutConfig,
    TrainerConfig,
    check_adapters,
)
from siirl_dask.errors import ConfigError
from siirl_dask.images.families import FAMILIES
from siirl_dask.models.adapter_folder import check_adapter_folder
from siirl_dask.models.architecture import (
    ModelUse,
    read_architecture,
    read_config,
    read_tower,
)
from siirl_dask.models.longest_row import check_frequencies_are_pinned, check_longest_row
from siirl_dask.models.packed_weights import check_not_packed
from siirl_dask.models.planned_models import check_has_layout, check_model, rows_note
from siirl_dask.models.remote import is_remote
from siirl_dask.models.routing import read_routing
from siirl_dask.models.shapes import ModelSize, count_parameters, parameter_shapes
from siirl_dask.planner import Footprint, RoleCost
from siirl_dask.training.layouts import check_layout, check_libraries, check_liger, check_replay
from siirl_dask.training.memory import FROZEN, ModelOnWorkers, passing_bytes
from siirl_dask.training.parts import (
    check_no_split_images,
    check_parts,
    count_frozen,
    count_matrices,
    family_seen,
    in_tower,
)
from siirl_dask.training.remedies import with_remedies
from siirl_dask.training.specs import TrainerSpec, division_of, needed, trainer_spec

ENCODED_TOKENS = 512
"""Tokens that an encoder reads of a text, unless its role says another number."""
# Bytes per parameter.
_LEARNS = 16
_SCORES = 4
_AVERAGE = 4
_WEIGHT = 4  # part of _LEARNS
_GRADIENT = 4  # part of _LEARNS; no checkpoint has the gradient
_MOMENT = 4  # bytes per parameter: Muon has one moment, AdamW two
_EXPERTS = ".experts."
# beside the experts; neither these nor it are linear layers of transformers
_ROUTER = ".gate.weight"
_ADAPTER_A = ".lora_A.weight"  # of models/adapters.py, which imports torch
_ADAPTER_B = ".lora_B.weight"
_IN_A_LAYER = re.compile(r"(?:.+\.)?layers\.\d+\.(?:.+\.)?(\w+)\.weight")


def check_trainer(options: Mapping[str, Any], workers: Sequence[str], config: Config) -> RoleCost:
    """Check and size a role of ``build_trainer``. ConfigError for an impossible layout or
    impossible adapters.

    Of agents over one base the first one's role counts it.
    """
    trainer: TrainerConfig = options.get("trainer", config.trainer)
    _check_replay(options, config, trainer)
    cost = _check_learner(options, workers, config, trainer, "trainer")
    agent = options.get("agent", "")
    base = tuple(options.get("base", ()))
    estimate = trainer_spec(trainer.backend).memory
    if not base:
        return cost
    check_adapters(agent, base, trainer.lora)
    together = f"the weights of {base[0]!r} under adapters of {', '.join(base)}"
    cost = replace(cost, together=together, device=cost.device and cost.device.staying())
    if agent == base[0] or cost.memory is None or estimate is None:
        return cost
    model: ModelConfig = options.get("model", config.model)
    size = count_parameters(model.path)
    assert size is not None
    frozen = _share(_SCORES * estimate.parameters(size, trainer), trainer, len(workers))
    notes = (f"its frozen weights are those of agent {base[0]!r}, which are held once",)
    memory = cost.memory - frozen - estimate.gathered(size, trainer, True)
    return replace(
        cost,
        memory=memory,
        device=cost.device and cost.device.without(FROZEN),
        notes=notes,
    )


def _check_replay(options: Mapping[str, Any], config: Config, trainer: TrainerConfig) -> None:
    rollout: RolloutConfig = options.get("rollout", config.rollout)
    check_replay(trainer, rollout)
    if rollout.router_replay:
        model: ModelConfig = options.get("model", config.model)
        read_routing(model.path)


def check_critic(options: Mapping[str, Any], workers: Sequence[str], config: Config) -> RoleCost:
    """Check and size a role of ``build_critic``. ConfigError for an impossible layout or impossible
    adapters, and for a backend without critics.
    """
    trainer: TrainerConfig = options.get("trainer", config.critic)
    needed(trainer_spec(trainer.backend).build_critic, trainer, "critic")
    return _check_learner(options, workers, config, trainer, "critic")


def check_reference(options: Mapping[str, Any], workers: Sequence[str], config: Config) -> RoleCost:
    """Check and size a role of ``build_reference``. ConfigError for an impossible layout, and for a
    backend without references.
    """
    model: ModelConfig = options.get("model", config.model)
    trainer: TrainerConfig = options.get("trainer", config.trainer)
    images: ImagesConfig | None = options.get("images")
    spec = trainer_spec(trainer.backend)
    needed(spec.build_reference, trainer, "reference")
    check_not_packed(model.path)
    check_has_layout(model.path)
    check_libraries(trainer, config)
    check_layout(trainer, model, len(workers))
    check_longest_row(model, _longest(config))
    check_frequencies_are_pinned(model)
    check_liger(trainer, config)
    check_no_split_images(trainer, images)
    family_seen(model.path, images)
    cost = RoleCost(reads=(model.path,), process=spec.process(trainer))
    size = count_parameters(model.path)
    if size is None or spec.memory is None:
        return cost
    held = _share(_SCORES * spec.memory.parameters(size, trainer), trainer, len(workers))
    computing, device = _passes(
        size,
        model,
        trainer=trainer,
        workers=len(workers),
        config=config,
        key="trainer",
        images=images,
        learns=False,
    )
    memory = held + spec.memory.gathered(size, trainer, False)
    return replace(
        cost,
        memory=memory,
        computing=computing,
        device=device,
        notes=_notes(spec, model),
    )


def trainer_groups(options: Mapping[str, Any], workers: int) -> dict[str, int]:
    """Return the sizes of the groups in which the ranks of a trained model speak with each
    other, by config key.
    """
    return dict(division_of(options["trainer"], workers).groups)


def check_reward_model(
    options: Mapping[str, Any], workers: Sequence[str], config: Config
) -> RoleCost:
    """Check and size a role of ``build_reward_model``, whose batches have rows of the run.
    ConfigError for files that are not of a classifier with one label, and a token to pad with, for
    packed weights, and for too few positions.
    """
    model: ModelConfig = options.get("model", config.model)
    from siirl_dask.training.reward_model import check_row_length, check_settings  # imports torch

    check_settings(model)
    check_model(model.path, ModelUse.SCORES)
    check_longest_row(model, _longest(config))
    check_row_length(model, _longest(config))
    check_frequencies_are_pinned(model)
    return _scoring_cost(model)


def check_encoder(options: Mapping[str, Any], workers: Sequence[str], config: Config) -> RoleCost:
    """Check and size a role of ``build_encoder``, which encodes each text by itself. ConfigError
    for files that are not of such a model, and for one that reads fewer tokens.
    """
    model: ModelConfig = options.get("model", config.model)
    from siirl_dask.training.encoder import check_settings  # imports torch

    check_settings(model, options.get("max_tokens", ENCODED_TOKENS))
    check_model(model.path, ModelUse.ENCODES)
    return _scoring_cost(model)


def _scoring_cost(model: ModelConfig) -> RoleCost:
    """Return the memory of a model that each worker holds whole, and that does not learn."""
    size = count_parameters(model.path)
    if size is None:
        return RoleCost(reads=(model.path,))
    weights = model.dtype.itemsize * size.total
    return RoleCost(
        memory=weights,
        device=Footprint(held={"weights": weights}, loading=weights),
        reads=(model.path,),
    )


def _check_learner(
    options: Mapping[str, Any],
    workers: Sequence[str],
    config: Config,
    trainer: TrainerConfig,
    key: str,
) -> RoleCost:
    model: ModelConfig = options.get("model", config.model)
    images: ImagesConfig | None = options.get("images")
    spec = trainer_spec(trainer.backend)
    check_not_packed(model.path)
    check_has_layout(model.path)
    check_libraries(trainer, config)
    check_layout(trainer, model, len(workers))
    check_longest_row(model, _longest(config))
    check_frequencies_are_pinned(model)
    check_no_split_images(trainer, images)
    family, sees = family_seen(model.path, images)
    check_parts(trainer, family, model.path, sees_images=sees)
    if trainer.lora.rank and find_spec("peft") is None:
        raise ConfigError(
            f"trainer.lora.rank={trainer.lora.rank} needs peft: pip install 'siirl_dask[lora]'"
        )
    check_liger(trainer, config)
    adapters = count_adapters(model.path, trainer) if trainer.lora.rank else None
    if trainer.lora.path is not None:
        _check_first_adapters(model.path, trainer)
    reads: tuple[str, ...] = (model.path,)
    # at a URL each worker reads them itself
    if trainer.lora.path is not None and not is_remote(trainer.lora.path):
        reads = (model.path, trainer.lora.path)
    cost = RoleCost(provides=_abilities(spec, trainer), reads=reads, process=spec.process(trainer))
    size = count_parameters(model.path)
    if size is None or spec.memory is None:
        return cost
    each = _LEARNS + (_AVERAGE if trainer.keeps_average else 0)
    whole = spec.memory.parameters(size, trainer)
    learned = (
        whole - count_frozen(model.path, trainer, images) if adapters is None else adapters.total
    )
    fewer = _MOMENT * count_matrices(model.path, trainer, images)
    held = each * learned - fewer + _SCORES * (whole - learned if adapters is None else whole)
    elsewhere = (each - _WEIGHT - _GRADIENT) * spec.memory.stepped_elsewhere(
        size, trainer, len(workers)
    )
    copied = 0
    if config.checkpoint.every and config.checkpoint.asynchronous:
        copied = _share((each - _GRADIENT) * learned - fewer, trainer, len(workers)) - elsewhere
    memory = (
        _share(held, trainer, len(workers)) - elsewhere + spec.memory.gathered(size, trainer, True)
    )
    computing, device = _passes(
        size,
        model,
        trainer=trainer,
        workers=len(workers),
        config=config,
        key=key,
        images=images,
    )
    cost = replace(
        cost,
        memory=memory,
        computing=computing,
        device=device,
        notes=_notes(spec, model),
    )
    return replace(cost, checkpoint_copy=copied)


def _notes(spec: TrainerSpec, model: ModelConfig) -> tuple[str, ...]:
    """Return a sentence on rows that are not packed, where there are such."""
    note = rows_note(model.path) if spec.pads_families else None
    return () if note is None else (note,)


def _abilities(spec: TrainerSpec, trainer: TrainerConfig) -> frozenset[str]:
    """Return what nodes may require of a policy with this trainer."""
    found = set()
    if trainer.lora.rank:
        found.add("adapters")
    if trainer.keeps_average and spec.scores_averages:
        found.add("averages")
    return frozenset(found)


def _longest(config: Config) -> int:
    """Return the tokens of the longest row that a run may have."""
    return config.data.max_prompt_length + config.rollout.max_response_length


def _passes(
    size: ModelSize,
    model: ModelConfig,
    trainer: TrainerConfig,
    workers: int,
    config: Config,
    key: str,
    images: ImagesConfig | None,
    *,
    learns: bool = True,
) -> tuple[int, Footprint | None]:
    """Return the bytes of a pass on a CPU, without gathered layers and their gradients, and the
    memory on a device.

    0 and None for an architecture that is not known.
    """
    architecture = read_architecture(model.path)
    if architecture is None:
        return 0, None
    longest = _longest(config)
    rows = config.data.batch_size * config.rollout.rows_per_prompt
    if learns:
        rows = -(-rows // config.algorithm.minibatches)
    most = -(-rows // workers) * longest

    def tokens(trainer: TrainerConfig) -> int:
        division = division_of(trainer, workers)
        row = -(-longest // division.row)  # ranks share a row's tokens
        rows = max(most * division.rows, row)  # all compute the rows of each
        return min(max(trainer.max_tokens_per_micro_batch, row), rows)

    def adapters(trainer: TrainerConfig) -> int:
        found = count_adapters(model.path, trainer)
        return 0 if found is None else found.total

    on_workers = ModelOnWorkers(
        size=size,
        architecture=architecture,
        trainer=trainer,
        dtype=model.dtype,
        ranks=workers,
        tokens=tokens(trainer),
        adapters=adapters(trainer) if learns and trainer.lora.rank else 0,
        frozen=count_frozen(model.path, trainer, images) if learns else 0,
        matrices=count_matrices(model.path, trainer, images) if learns else 0,
        tower=read_tower(model.path),
        image_share=config.data.max_prompt_length / longest
        if family_seen(model.path, images)[1]
        else 0.0,
        learns=learns,
        scores=key != "critic",
        float32_head=model.float32_head,
    )
    return passing_bytes(on_workers), with_remedies(on_workers, key, tokens, adapters)


def count_adapters(path: str, trainer: TrainerConfig) -> ModelSize | None:
    """Return the size of the adapters for the weights in ``path``; None when there are no weights
    there. ConfigError when one of ``trainer.lora.targets`` names no layer.
    """
    layers = _adapted_layers(path, trainer)
    if layers is None:
        return None
    sizes = [trainer.lora.rank * side for shape in layers.values() for side in shape]
    return ModelSize(sum(sizes), len(sizes), max(sizes, default=0))


def _adapted_layers(path: str, trainer: TrainerConfig) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of the weights that get adapters, by name; None and ConfigError as of
    ``count_adapters``.
    """
    # imports torch, which only adapters need here
    from siirl_dask.training.model.lora import chosen_targets

    shapes = parameter_shapes(path)
    if not shapes:
        return None
    family = FAMILIES.get((read_config(path) or {}).get("model_type", ""))
    decoder: dict[str, list[str]] = {}
    tower: dict[str, list[str]] = {}
    mixtures = {name.partition(_EXPERTS)[0] for name in shapes if _EXPERTS in name}
    for name, shape in shapes.items():
        if len(shape) != 2 or _EXPERTS in name or name.removesuffix(_ROUTER) in mixtures:
            continue
        if (inside := in_tower(name, family)) is not None:
            tower.setdefault(inside, []).append(name)
        elif layer := _IN_A_LAYER.fullmatch(name):
            decoder.setdefault(layer[1], []).append(name)
    of_decoder, of_tower = chosen_targets(trainer, set(decoder), set(tower))
    chosen = [name for target in of_decoder for name in decoder[target]]
    chosen += [name for target in of_tower for name in tower[target]]
    return {name: shapes[name] for name in chosen}


def _check_first_adapters(path: str, trainer: TrainerConfig) -> None:
    """Raise ConfigError for adapters to begin with that are not those of the model in ``path``.

    Names in the files of a model that sees images are others than in the model: the workers compare
    these.
    """
    layers = _adapted_layers(path, trainer)
    expected: dict[str, tuple[int, ...]] | None = None
    if layers is not None and (read_config(path) or {}).get("model_type") not in FAMILIES:
        expected = {}
        for name, (out, width) in layers.items():
            layer = name.removesuffix(".weight")
            expected[f"{layer}{_ADAPTER_A}"] = (trainer.lora.rank, width)
            expected[f"{layer}{_ADAPTER_B}"] = (out, trainer.lora.rank)
    check_adapter_folder(trainer.lora, path, expected)


def _share(total: int, trainer: TrainerConfig, workers: int) -> int:
    """Return one worker's part of ``total`` bytes: all of them, or its shard."""
    return -(-total // division_of(trainer, workers).shards)
