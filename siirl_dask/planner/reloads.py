"""Roles whose weights are loaded again after a node, so that what they have need not be kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from siirl_dask.planner.chain import Chain, Lagged, RunNode, Stream
from siirl_dask.planner.node import Node


def reloaded_after(chain: Chain) -> Mapping[str, frozenset[str]]:
    """Return the roles, for each node of the chain, whose next node in it loads all weights.

    A node that lags does not count as one that loads: in some iterations it is left out.
    """
    found: dict[str, frozenset[str]] = {}
    loaded_next: frozenset[str] = frozenset()
    for node, surely in reversed(list(_nodes(chain))):
        found[node.name] = loaded_next
        others = loaded_next - {node.role}
        loaded_next = others
        if surely and node.weight_sink is not None:
            loaded_next = others | {node.role}
    return dict(reversed(found.items()))


def always_reloaded(chain: Chain, role: str, frees: frozenset[str]) -> bool:
    """Return whether weights for ``role`` come next after each node of the roles ``frees``,
    which put it to sleep.
    """
    after = reloaded_after(chain)
    others = frees - {role}
    asleep_after = [node for node, _ in _nodes(chain) if node.role in others]
    return all(role in after[node.name] for node in asleep_after)


def _nodes(chain: Chain) -> Iterator[tuple[Node, bool]]:
    """Yield the nodes that the worker runs, in order, and whether each runs in every iteration."""
    for link in chain.links:
        surely = not isinstance(link, Lagged)
        inner = link.links if isinstance(link, Lagged) else (link,)
        for each in inner:
            if isinstance(each, RunNode):
                yield each.node, surely
            elif isinstance(each, Stream):
                if each.gives:
                    yield each.source, surely
                if each.takes:
                    yield each.target, surely
