"""What a run's adapters (``trainer.lora_rank``) are, from the headers of the model's files: how many parameters, and
ConfigError for what cannot be, before anything starts.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

from siirl_dask.config import Config, TrainerConfig
from siirl_dask.errors import ConfigError
from siirl_dask.parameters import Parameters, weight_shapes
from siirl_dask.planner import DAG, Node
from siirl_dask.planner.canonical import function_name
from siirl_dask.planner.contract import bare
from siirl_dask.roles import model_of, trainer_of

PUBLISHES = "siirl_dask.nodes.weights:publish_adapters"
_NEED_ADAPTERS = (PUBLISHES, "siirl_dask.nodes.logprobs:base_logprobs")
_LOADS = "siirl_dask.nodes.weights:load_adapters"
_IN_A_LAYER = re.compile(r"(?:.+\.)?layers\.\d+\.(?:.+\.)?(\w+)\.weight")


def count_adapters(path: str, trainer: TrainerConfig) -> Parameters | None:
    """Parameters of the adapters beside the weights in ``path``; None when there are no weights there. ConfigError when
    one of ``trainer.lora_targets`` is no layer of theirs.
    """
    from siirl_dask.training.lora import chosen_targets  # imports torch, for those who have adapters

    shapes = weight_shapes(path)
    linear: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if len(shape) == 2 and (found := _IN_A_LAYER.fullmatch(name)):
            linear.setdefault(found[1], []).append(shape)
    if not shapes:
        return None
    chosen = [shape for target in chosen_targets(trainer, set(linear)) for shape in linear[target]]
    sizes = [trainer.lora_rank * side for shape in chosen for side in shape]
    return Parameters(sum(sizes), len(sizes), max(sizes, default=0))


def refuse_wrong_adapters(config: Config, dag: DAG) -> None:
    """ConfigError for adapters of layers that the model has not, for nodes that ask for adapters where there are none,
    and where peft is not installed.
    """
    for role in dag.roles:
        trainer = trainer_of(role, config)
        if trainer is None or not trainer.lora_rank:
            continue
        if find_spec("peft") is None:
            raise ConfigError(f"trainer.lora_rank={trainer.lora_rank} needs peft: pip install 'siirl_dask[lora]'")
        count_adapters(model_of(role, config).path, trainer)
    roles = {role.name: role for role in dag.roles}
    for node in dag.nodes:
        _refuse_without_adapters(node, trainer_of(roles[node.role], config))


def _refuse_without_adapters(node: Node, learns: TrainerConfig | None) -> None:
    name = function_name(bare(node.fn))
    trainer = learns if name in _NEED_ADAPTERS else node.options.get("trainer") if name == _LOADS else None
    if trainer is not None and not trainer.lora_rank:
        raise ConfigError(
            f"node {node.name!r} runs {name.rpartition(':')[2]}, which is for a policy with adapters: give its trainer "
            "a lora_rank, or leave the node out"
        )
