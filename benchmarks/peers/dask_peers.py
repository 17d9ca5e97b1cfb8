"""The two ways that Dask offers by itself, on one cluster."""

from __future__ import annotations

from collections.abc import Sequence

from dask_cluster import DaskCluster
from method import Method
from peers.dask_graph import DaskGraph
from work import Work


class DaskPeers:
    """``address`` is that of a cluster that is there, whose workers must find these scripts. P2P is
    not on offer
    there: it chooses by itself on which workers the rows end.
    """

    def __init__(self, address: str = "") -> None:
        self._address = address
        self._cluster: DaskCluster | None = None

    def start(self, work: Work) -> Sequence[Method]:
        self._cluster = DaskCluster(work.workers, self._address)
        if self._address:
            return [DaskGraph(work, self._cluster)]
        from peers.dask_p2p import DaskP2P  # needs pandas, and the other does not

        return [DaskGraph(work, self._cluster), DaskP2P(work, self._cluster)]

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
