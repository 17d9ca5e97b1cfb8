"""A program: one system of several hosts, which does what lines of standard input say; ``links.py``
starts it.

Arguments: ``ours``, ``dask`` or ``ray``, the address of its cluster, and those of the work. It
prints one line of JSON when it is ready, and then one for each line: ``before``, ``run`` (the
seconds), ``check`` (is every byte right).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping

from method import Method, System
from work import Oracle, Work, add_arguments, parse_arguments


def _ours(address: str, work: Work) -> tuple[System, Method]:
    from ours import Ours

    system = Ours(("auto",), address)
    return system, system.start(work)[0]


def _dask(address: str, work: Work) -> tuple[System, Method]:
    from peers.dask_peers import DaskPeers

    system = DaskPeers(address)
    return system, system.start(work)[0]


def _ray(address: str, work: Work) -> tuple[System, Method]:
    from peers.ray_refs import RayRefs

    system = RayRefs(address)
    return system, system.start(work)[0]


SYSTEMS: Mapping[str, Callable[[str, Work], tuple[System, Method]]] = {
    "ours": _ours,
    "dask": _dask,
    "ray": _ray,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("address")
    add_arguments(parser)
    work, given = parse_arguments(parser)
    oracle = Oracle(work)
    system, method = SYSTEMS[given.system](given.address, work)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_obey(line.strip(), method, oracle)), flush=True)
    system.close()


def _obey(line: str, method: Method, oracle: Oracle) -> dict[str, float | bool]:
    if line == "before":
        method.before()
        return {}
    if line == "run":
        start = time.perf_counter()
        method.run()
        return {"seconds": time.perf_counter() - start}
    complete = oracle.judge(method.check()).complete
    method.after()
    return {"verified": complete}


if __name__ == "__main__":
    main()
