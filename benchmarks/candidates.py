"""All that there is to measure. A system's module is imported when it is started: its library
may not be there.
"""

from __future__ import annotations

from collections.abc import Sequence

from method import Candidate, System


def all_candidates() -> tuple[Candidate, ...]:
    return (our_candidate(), *peer_candidates())


def our_candidate(transports: Sequence[str] = ("auto", "dask")) -> Candidate:
    def build() -> System:
        from ours import Ours

        return Ours(transports)

    return Candidate(tuple(f"siirl_dask_{transport}" for transport in transports), build)


def peer_candidates() -> tuple[Candidate, ...]:
    return (
        Candidate(("ray_refs", "ray_refs_arrow", "ray_driver"), _ray_refs),
        Candidate(("verl", "verl_numpy"), _verl),
        Candidate(("tq_dense", "tq_jagged"), _transfer_queue),
        Candidate(("dask_graph", "dask_p2p"), _dask),
    )


def _ray_refs() -> System:
    from peers.ray_refs import RayRefs

    return RayRefs()


def _transfer_queue() -> System:
    from peers.transfer_queue import TransferQueue

    return TransferQueue()


def _verl() -> System:
    from peers.verl_dataproto import VerlDataProto

    return VerlDataProto()


def _dask() -> System:
    from peers.dask_peers import DaskPeers

    return DaskPeers()
