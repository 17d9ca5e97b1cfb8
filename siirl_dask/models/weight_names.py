"""Names of weights in a folder's files, which some models keep under other names than their parameters have.

A Qwen2.5-VL has ``model.layers.0.*`` and ``visual.*`` in its files, and ``model.language_model.layers.0.*`` and
``model.visual.*`` in its modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform, rename_source_key


def parameter_names(model: PreTrainedModel, in_files: Iterable[str]) -> dict[str, str]:
    """Return the parameter's name for each name in a folder's files, as ``from_pretrained`` finds it.

    A tensor that is joined with others, or split, to make a parameter is left out. The model may be without memory.
    """
    return renaming(model)(in_files)


def renaming(model: PreTrainedModel) -> Callable[[Iterable[str]], dict[str, str]]:
    """Return ``parameter_names`` of a model, as a function that does not keep it alive."""
    there = dict.fromkeys(model.state_dict(), True)
    return partial(_renamed, get_model_conversion_mapping(model), model.base_model_prefix, there)


def _renamed(
    changes: list[WeightTransform], prefix: str, there: dict[str, bool], in_files: Iterable[str]
) -> dict[str, str]:
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    found = {}
    for name in in_files:
        renamed, converter = rename_source_key(name, renamings, converters, prefix, there)
        if converter is None:
            found[name] = renamed
    return found
