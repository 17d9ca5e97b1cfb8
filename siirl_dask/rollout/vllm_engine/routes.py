"""Records the experts that each token goes to inside vLLM.

vLLM's own record (``enable_return_routed_experts``) needs its second model runner, which takes no
logits processor of ours. Its routers tell their choices to anybody, though. Routes lie here as keys
and values lie in vLLM's cache, a place for each of its tokens: a token that is read from the cache
has its routes there as well, and one whose row was preempted is computed, and recorded, again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import LLM
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    bind_routed_experts_capturer,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from siirl_dask.errors import ConfigError, RunError
from siirl_dask.models.routing import NO_EXPERT, Routing


class VllmRoutes:
    """Routes of the tokens in the KV cache of one engine."""

    def __init__(self, llm: LLM, routing: Routing) -> None:
        """Begin to record. ConfigError for a cache of another kind than that of full attention, and
        for kernels that tell no choices.
        """
        self._routing = routing
        self._chosen: dict[int, Tensor] = {}
        self._runner: Any = None
        llm.collective_rpc(self._attach)
        llm.reset_prefix_cache()  # what it holds was computed before

    def take(self, request: str, tokens: int) -> bytes:
        """Return the routes of the first ``tokens`` tokens of a request that has just ended, as
        ``request`` names it. RunError where one of them was never recorded.
        """
        (own,) = (
            state
            for name, state in self._runner.requests.items()
            if name == request or name.startswith(f"{request}-")
        )
        blocks = np.asarray(own.block_ids[0])
        routes = self._stored[blocks[: -(-tokens // self._block)]].reshape(-1, self._routing.width)[
            :tokens
        ]
        if (routes == NO_EXPERT).any():
            raise RunError(
                "vLLM computed tokens without telling their experts; leave out "
                "rollout.router_replay"
            )
        taken: bytes = routes.tobytes()
        return taken

    def capture(self, layer: int, chosen: Tensor) -> None:
        """Note the experts of a pass's tokens in a layer, [tokens, k]: vLLM's routers call this."""
        self._chosen[layer] = chosen.to(torch.uint8)

    def _attach(self, worker: Any) -> None:
        runner = worker.model_runner
        groups = runner.kv_cache_config.kv_cache_groups
        transfer = runner.vllm_config.kv_transfer_config
        kinds = [type(group.kv_cache_spec) for group in groups]
        if kinds != [FullAttentionSpec] or transfer is not None:
            names = [kind.__name__ for kind in kinds]
            raise ConfigError(
                f"rollout.router_replay=true: the engine's cache has {names} "
                f"(kv_transfer_config={transfer}), and routes are kept beside one cache of full "
                "attention that is vLLM's own; leave it out"
            )
        self._block = groups[0].kv_cache_spec.block_size
        shape = runner.kv_cache_config.num_blocks, self._block, self._routing.width
        self._stored: NDArray[np.uint8] = np.full(shape, NO_EXPERT, np.uint8)
        try:
            bind_routed_experts_capturer(runner.model, self)
        except ValueError as error:  # of kernels that choose experts themselves, on newer GPUs
            raise ConfigError(
                f"rollout.router_replay=true: vLLM does not tell the experts of tokens: {error} "
                "Give rollout.vllm.engine_kwargs.moe_backend=triton, or leave it out"
            ) from error
        runner.execute_model = partial(self._execute, runner.execute_model)
        self._runner = runner

    def _execute(
        self, execute: Callable[..., Any], scheduled: Any, *args: Any, **kwargs: Any
    ) -> Any:
        output = execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._store(scheduled.num_scheduled_tokens)
        return output

    def _store(self, counts: dict[str, int]) -> None:
        """Put the routes of the pass that has just ended where its tokens lie in the cache."""
        chosen = [self._chosen[layer] for layer in self._routing.layers]
        routes = torch.cat(chosen, dim=1).cpu().numpy()
        places = []
        begun = self._runner.input_batch.num_computed_tokens_cpu
        for row, name in enumerate(self._runner.input_batch.req_ids):
            blocks = self._runner.requests[name].block_ids[0]
            first = int(begun[row])
            count = counts[name]
            at = first // self._block
            own = np.asarray(blocks[at : -(-(first + count) // self._block)])[:, None] * self._block
            of_blocks = (own + np.arange(self._block)).reshape(-1)
            places.append(of_blocks[first - at * self._block :][:count])
        where = np.concatenate(places)
        self._stored.reshape(-1, self._routing.width)[where] = routes[: len(where)]
        self._chosen.clear()
