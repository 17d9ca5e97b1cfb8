"""Imports SGLang, has it start its processes from a Dask worker, and ends them: what is written
here for SGLang 0.5.23.

SGLang computes in processes of its own. It starts them as if it was a process's only purpose, and
ends all children that the process has; a worker has others, such as those of rewards.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any

from siirl_dask.errors import ConfigError, clause

WRITTEN_FOR = "0.5.23"
"""Release of SGLang whose source the engine is written against."""
_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs after the temperature, as they are trained
    "SGLANG_SANITIZE_NAN_LOGITS": "0",  # logits that are not finite must end the run
    "SGLANG_MAX_NEW_TOKENS_LIMIT": "0",  # responses are as long as they were asked for
}
"""Read by SGLang's processes; anything else would change samples without a word."""
_NEEDED = (
    "async_generate",
    "begin_weight_update",
    "end_weight_update",
    "flush_cache",
    "get_all_child_pids",
    "get_server_info",
    "release_memory_occupation",
    "resume_memory_occupation",
    "shutdown",
    "update_weights_from_tensor",
)
# multiprocessing runs finalizers with a priority before it waits for children
_BEFORE_JOINING = 100


def load_sglang() -> tuple[Any, Any]:
    """Import SGLang and return its modules ``entrypoints.engine`` and ``server_args``.

    ConfigError where it cannot be imported, or is of a release without what the engine calls.
    """
    os.environ.update(_ENVIRONMENT)
    policy = asyncio.get_event_loop_policy()
    try:
        engine = importlib.import_module("sglang.srt.entrypoints.engine")
        arguments = importlib.import_module("sglang.srt.server_args")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"rollout.engine=sglang: SGLang cannot be imported: {clause(error)}; install it as "
            "docs/engines.md#sglang says, or take another rollout.engine"
        ) from error
    finally:
        asyncio.set_event_loop_policy(policy)  # SGLang takes uvloop's, for all loops of the process
    if lacking := [name for name in _NEEDED if not hasattr(engine.Engine, name)]:
        raise ConfigError(
            f"rollout.engine=sglang: SGLang {release()} has no Engine.{lacking[0]}; expected "
            f"{WRITTEN_FOR}, or a later release that has it"
        )
    return engine, arguments


def release() -> str:
    """Return the release of the SGLang that is imported."""
    return str(importlib.import_module("sglang.version").__version__)


@contextmanager
def as_parent() -> Iterator[None]:
    """Let the process have children, and keep its way to start them: SGLang sets another for all.

    A Dask worker under a nanny is a daemon, which multiprocessing allows none.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = dict(config)
    method = multiprocessing.get_start_method(allow_none=True)
    config["daemon"] = False
    try:
        yield
    finally:
        del config["daemon"]
        config.update(before)
        multiprocessing.set_start_method(method, force=True)


class Ending:
    """Ends an engine's processes once: when it is called, or before multiprocessing waits for
    them at the end.
    """

    def __init__(self, engine: Any, module: Any) -> None:
        """``module`` is that of the engine's class."""
        atexit.unregister(engine.shutdown)  # it would end processes that are not SGLang's
        self._finalize = Finalize(
            None, _shut_down, args=(engine, module), exitpriority=_BEFORE_JOINING
        )

    def __call__(self) -> None:
        """End the processes, unless they were ended before."""
        self._finalize()


def _shut_down(engine: Any, module: Any) -> None:
    """Shut an engine down, which kills the children of this process: those that are the
    engine's.
    """
    own = list(engine.get_all_child_pids())
    kill = module.kill_process_tree

    def kill_own(_: int | None, **options: Any) -> None:
        for pid in own:
            kill(pid, **{**options, "include_parent": True})

    module.kill_process_tree = kill_own
    try:
        engine.shutdown()
    finally:
        module.kill_process_tree = kill
