"""This project's data plane alone: on processes of this machine, or on a Dask cluster of several
hosts.

python benchmarks/dataplane.py --rows 256 --tokens 8192 --from 2 --to 4 --transport shm --json
python benchmarks/dataplane.py --rows 256 --tokens 65536 --from 2 --to 2 --apart --cluster
tcp://198.51.100.1:8786
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from candidates import our_candidate
from report import print_case
from rounds import measure
from work import Oracle, Work, add_arguments, parse_arguments


def measure_on_cluster(work: Work, transport: str, address: str, n: int) -> dict[str, Any]:
    """Measure the transition on the workers of an existing cluster, after one round that warms
    up.
    """
    from ours import Ours, Usage

    oracle, system = Oracle(work), Ours((transport,), address)
    seconds, used, verified = [], Usage(), True
    try:
        (method,) = system.start(work)
        for number in range(n + 1):
            method.before()
            before = method.usage()
            start = time.perf_counter()
            method.run()
            took = time.perf_counter() - start
            if number:
                seconds.append(took)
                used += method.usage() - before
            verified &= oracle.judge(method.check()).complete
            method.after()
    finally:
        system.close()
    median, payload = statistics.median(seconds), work.payload_bytes
    return {
        "peer": method.name,
        "rows": work.rows,
        "tokens": work.tokens,
        "wfrom": work.sources,
        "wto": work.destinations,
        "payload_bytes": payload,
        "n": n,
        "median_s": round(median, 4),
        "min_s": round(min(seconds), 4),
        "max_s": round(max(seconds), 4),
        "MBps_into_each_target": round(payload / work.destinations / median / 1e6, 1),
        "cpu_s_per_GB": round(used.cpu / n / (payload / 1e9), 2),
        "received_bytes": used.received // n,
        "between_hosts_bytes": used.between_hosts // n,
        "verified": verified,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument(
        "--transport", choices=("auto", "dask", "shm"), default="auto", help="how rows travel"
    )
    parser.add_argument(
        "--cluster",
        default="",
        metavar="ADDRESS",
        help="of a scheduler; without it, processes here",
    )
    work, arguments = parse_arguments(parser)
    if arguments.cluster:
        record = measure_on_cluster(work, arguments.transport, arguments.cluster, arguments.n)
        print(
            json.dumps(record)
            if arguments.json
            else "\n".join(f"{key:22} {value}" for key, value in record.items())
        )
        return
    candidate = our_candidate((arguments.transport,))
    (record,) = measure(work, [candidate], arguments.n, arguments.tag)
    record["scheduler_and_client_bytes"] = record.get("driver_bytes")
    if arguments.json:
        print(json.dumps(record))
    else:
        print_case([record])


if __name__ == "__main__":
    main()
