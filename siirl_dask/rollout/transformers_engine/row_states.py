"""States of rows under way in layers that have no keys and values, such as linear attention and
short convolutions.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import LongTensor, Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin


class RowStates(DynamicCache):
    """transformers' cache, for states alone: keys and values go through it as they are, to a
    KeyValueCache.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be named several times."""
        for layer in self.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                LinearAttentionCacheLayerMixin.reorder_cache(layer, cast(LongTensor, rows))


def row_states(model: PreTrainedModel) -> RowStates | None:
    """Return room for the states of rows that are about to be decoded; None for a model whose
    layers all attend.
    """
    states = RowStates(config=model.config)
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in states.layers):
        return states
    return None


def state_arguments(model: PreTrainedModel, states: RowStates | None) -> dict[str, Any]:
    """Return the arguments of a model's forward that have it read and write the rows' states."""
    if states is None:
        return {"use_cache": False}
    parameters = inspect.signature(model.forward).parameters
    name = "cache_params" if "cache_params" in parameters else "past_key_values"
    return {"use_cache": True, name: states}
