"""Finds the metrics of single agents: a run with several logs ``a/policy/loss`` and
``b/policy/loss``.
"""

from __future__ import annotations

from collections.abc import Iterable

from siirl_dask.observe.metrics import Record


def agents_with(records: Iterable[Record], metric: str) -> list[str]:
    """Return the agents that logged a metric of their own by this name, in alphabetical order."""
    ending = f"/{metric}"
    return sorted(
        {
            name.removesuffix(ending)
            for record in records
            for name in record["metrics"]
            if _ends(name, ending)
        }
    )


def common_name(name: str, known: Iterable[str]) -> str:
    """Return the one of the ``known`` metrics that an agent's metric is, and any other name as
    it is.
    """
    return next((metric for metric in known if _ends(name, f"/{metric}")), name)


def _ends(name: str, ending: str) -> bool:
    if not name.endswith(ending):
        return False
    return "/" not in name.removesuffix(ending)
