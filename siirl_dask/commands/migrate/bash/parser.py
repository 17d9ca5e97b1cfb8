"""Parses bash with tree-sitter, which the extra ``migrate`` brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from siirl_dask.errors import ConfigError

if TYPE_CHECKING:
    from tree_sitter import Node


def parser() -> Callable[[bytes], Node]:
    """Return what parses a script. ConfigError where the packages are not installed."""
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError as error:
        raise ConfigError(
            "a shell script is read with tree-sitter, which is not installed here: pip install "
            "'siirl_dask[migrate]', or give the options themselves after --"
        ) from error
    made = Parser(Language(tree_sitter_bash.language()))
    return lambda text: made.parse(text).root_node
