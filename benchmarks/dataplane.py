"""This project's data plane alone.

python benchmarks/dataplane.py --rows 256 --tokens 8192 --from 2 --to 4 --transport shm --json
"""

from __future__ import annotations

import argparse
import json

from candidates import our_candidate
from report import print_case
from rounds import measure
from work import add_arguments, parse_arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--transport", choices=("auto", "dask", "shm"), default="auto", help="how rows travel")
    work, arguments = parse_arguments(parser)
    candidate = our_candidate((arguments.transport,))
    (record,) = measure(work, [candidate], arguments.n, arguments.tag)
    record["scheduler_and_client_bytes"] = record.get("driver_bytes")
    if arguments.json:
        print(json.dumps(record))
    else:
        print_case([record])


if __name__ == "__main__":
    main()
