"""vLLM's own world of torch.distributed, apart from that of the process it lives in.

vLLM makes a process group of as many ranks as there are, and takes the default one where there is one. A worker's
default group spans all workers, so that an engine would wait there for workers that build none. An engine is one rank
and computes alone: its groups are made in a world of their own, and no other finds or destroys them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_c10d import _register_process_group, _resolve_process_group
from torch.distributed import distributed_c10d as c10d

_FIRST_NAME = 1_000_000  # groups are found by name in the whole process: these must not be those of the worker's


class EngineWorld(c10d._World):
    """torch's record of process groups, with tables of its own; torch keeps one a process, in one variable."""

    def __init__(self) -> None:
        super().__init__()
        self._count = _FIRST_NAME
        self._tables: dict[str, dict[Any, Any]] = {}

    def _table(self, name: str) -> dict[Any, Any]:
        return self._tables.setdefault(name, {})

    pg_map = property(lambda self: self._table("pg_map"))
    pg_names = property(lambda self: self._table("pg_names"))
    pg_group_ranks = property(lambda self: self._table("pg_group_ranks"))
    pg_backend_config = property(lambda self: self._table("pg_backend_config"))
    tags_to_pg = property(lambda self: self._table("tags_to_pg"))
    pg_to_tag = property(lambda self: self._table("pg_to_tag"))

    @property
    def group_count(self) -> int:
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._count = value

    @contextmanager
    def entered(self) -> Iterator[None]:
        """torch.distributed is this world's inside; outside it is what it was."""
        outside = c10d._world
        c10d._world = self
        try:
            yield
        finally:
            c10d._world = outside
            for group, name in outside.pg_names.items():
                _register_again(name, group)


def _register_again(name: Any, group: Any) -> None:
    """Destroying one world's groups takes the names of all off the process's list."""
    try:
        _resolve_process_group(name)
    except RuntimeError:
        _register_process_group(name, group)
