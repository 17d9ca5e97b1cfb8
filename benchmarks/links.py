"""Rows between hosts over links of a rate and a delay, in a lab on this machine, beside TCP streams and other systems.

    python benchmarks/links.py [--pairs 1 2] [--rates none 1e9 1e10] [--delays 0 0.001 0.01] [--n 5]
        [--out docs/benchmarks/links.md]

With one pair, rows go from one host to another; with two, from hosts 0 and 1 to hosts 2 and 3, each source to both
targets. The raw streams go from host to host of each pair at the same time, and carry as many bytes into each target.
All take turns in the same minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from links_page import SYSTEMS, write_page
from method import PATIENCE
from siirl_dask.testing.hosts import DaskCluster, Host, Lab, Links, why_no_lab
from usage import CpuClock, own_processes
from work import BYTES_PER_TOKEN, Work

_HERE = Path(__file__).resolve().parent
_RAY = Path("/tmp/ray")  # its sockets and logs: each host has its own
_RAY_PORT, _RAW_PORT = 6379, 7777
STREAMS = (1, 2, 4, 8)
_IDLE = 3.0  # seconds


@dataclass(frozen=True, slots=True)
class Turn:
    seconds: float
    cpu: float
    """Seconds of CPU of all processes of the party, beyond what they take when nobody asks them
    for anything."""


@dataclass(slots=True)
class Party:
    """Something that takes turns: programs that answer lines, one on host 0 or the senders of all
    pairs."""

    name: str
    programs: Sequence[subprocess.Popen[str]]
    pids: Sequence[int]
    """All processes that came with it."""
    idle: float = 0.0
    """Cores that they keep busy with nothing: heartbeats, profilers."""

    def watch_idle(self) -> None:
        clock = CpuClock(self.pids)
        time.sleep(_IDLE)
        self.idle = clock.seconds() / _IDLE

    def take_turn(self, share: int) -> Iterator[tuple[str, Turn]]:
        """Do the work once, the raw streams with each number of them. RuntimeError when a row is
        not right.
        """
        if self.name == "raw":
            for streams in STREAMS:
                yield f"raw {streams}", self._run(f"{streams} {share}")
            return
        self._ask("before")
        yield self.name, self._run("run")
        if not self._ask("check")["verified"]:
            raise RuntimeError(f"{self.name}: rows came that are not right")

    def _run(self, line: str) -> Turn:
        clock = CpuClock(self.pids)
        for program in self.programs:
            _write_line(program, line)
        seconds = max(_answer(self.name, program)["seconds"] for program in self.programs)
        return Turn(seconds, clock.seconds() - self.idle * seconds)

    def _ask(self, line: str) -> dict[str, Any]:
        (program,) = self.programs
        _write_line(program, line)
        return _answer(self.name, program)


def _write_line(program: subprocess.Popen[str], line: str) -> None:
    assert program.stdin is not None
    program.stdin.write(f"{line}\n")
    program.stdin.flush()


def start_parties(lab: Lab, work: Work, systems: Sequence[str], folder: Path) -> list[Party]:
    """Start the raw streams and the systems one after the other. Dask's graph runs on the
    workers of ours.
    """
    environment = {"PYTHONPATH": os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])}
    source = lab.hosts[0]
    parties: list[Party] = []
    known = set(own_processes())

    def start(name: str, host: Host, *command: object) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        program = host.start(sys.executable, *command, env=dict(os.environ, **environment), **pipes)
        _answer(name, program)
        return program

    def join(
        name: str, programs: Sequence[subprocess.Popen[str]], pids: Sequence[int] = ()
    ) -> None:
        new = [pid for pid in own_processes() if pid not in known]
        known.update(new)
        parties.append(Party(name, programs, [*pids, *new]))

    senders = []
    for number in range(work.sources):
        target = lab.hosts[work.sources + number]
        place = f"{target.address}:{_RAW_PORT}"
        start("a receiver", target, _HERE / "raw_streams.py", "serve", place)
        sender = start("a sender", lab.hosts[number], _HERE / "raw_streams.py", "send", place)
        senders.append(sender)
    join("raw", senders)
    sizes = (
        "--rows",
        work.rows,
        "--tokens",
        work.tokens,
        "--from",
        work.sources,
        "--to",
        work.destinations,
        "--apart",
    )
    cluster = DaskCluster(source, lab.hosts, folder, environment=environment)
    workers: Sequence[int] = ()
    for name in systems:
        if name == "ray":
            start_ray(lab.hosts, folder, environment)
        address = f"{source.address}:{_RAY_PORT}" if name == "ray" else cluster.address
        program = start(name, source, _HERE / "one_system.py", name, address, *sizes)
        join(name, [program], workers if name == "dask" else ())
        workers = parties[-1].pids if name == "ours" else workers
    return parties


def start_ray(hosts: Sequence[Host], folder: Path, environment: Mapping[str, str]) -> None:
    """Start a node of Ray on each host, the head on the first."""
    store = (
        "--object-store-memory",
        2 * 10**9,
        "--num-cpus",
        4,
        "--disable-usage-stats",
        "--block",
    )
    head = f"{hosts[0].address}:{_RAY_PORT}"
    variables = {
        **os.environ,
        **environment,
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    for number, host in enumerate(hosts):
        which = (
            (f"--address={head}",)
            if number
            else ("--head", f"--port={_RAY_PORT}", "--include-dashboard=false")
        )
        command = ("start", *which, f"--node-ip-address={host.address}", *store)
        with (folder / f"ray-{number}.log").open("w") as log:
            host.start(
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                *command,
                env=variables,
                stdout=log,
                stderr=log,
            )
        _wait_for_port(hosts[0], _RAY_PORT)


def _wait_for_port(host: Host, port: int) -> None:
    """Wait until somebody on the host listens at the port."""
    deadline = time.monotonic() + PATIENCE
    while f":{port} " not in host.run("ss", "-Hltn"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody listens at {host.address}:{port}")
        time.sleep(0.2)


def _answer(name: str, program: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next line of JSON that a program prints; what libraries print in between is
    passed over.
    """
    assert program.stdout is not None
    for line in program.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise RuntimeError(f"{name} ended with exit status {program.wait()}")


def measure(parties: Sequence[Party], work: Work, n: int) -> dict[str, list[Turn]]:
    """Let everyone take turns ``n`` times, after one round that warms up."""
    share = work.payload_bytes // work.destinations
    found: dict[str, list[Turn]] = {}
    for party in parties:
        party.watch_idle()
    for number in range(n + 1):
        for party in parties:
            for name, turn in party.take_turn(share):
                if number:
                    found.setdefault(name, []).append(turn)
    return found


def describe(
    rate: float | None, delay: float, found: Mapping[str, Sequence[Turn]], work: Work
) -> dict[str, Any]:
    """Return a line of the table: MB/s into each target, and CPU seconds for each GB that
    crossed a link.
    """
    share = work.payload_bytes // work.destinations
    record: dict[str, Any] = {
        "pairs": work.sources,
        "rate": rate,
        "delay": delay,
        "load": os.getloadavg()[0],
    }
    for name, turns in found.items():
        seconds = [turn.seconds for turn in turns]
        record[name] = {
            "MBps": share / statistics.median(seconds) / 1e6,
            "slowest": share / max(seconds) / 1e6,
            "fastest": share / min(seconds) / 1e6,
            "cpu_s_per_GB": statistics.mean(turn.cpu for turn in turns)
            / (work.payload_bytes / 1e9),
        }
    return record


def measure_links(
    rates: Sequence[float | None],
    delays: Sequence[float],
    work: Work,
    systems: Sequence[str],
    n: int,
) -> Iterator[dict[str, Any]]:
    """Measure every rate with every delay, in a lab for each delay."""
    _RAY.mkdir(exist_ok=True)
    for delay in delays:
        with (
            tempfile.TemporaryDirectory() as folder,
            Lab(2 * work.sources, links=Links(delay=delay), private=[_RAY]) as lab,
        ):
            parties = start_parties(lab, work, systems, Path(folder))
            for rate in rates:
                lab.set_rate(rate)
                yield describe(rate, delay, measure(parties, work, n), work)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates", nargs="+", default=["none", "1e9", "1e10"], help="bits per second, or none"
    )
    parser.add_argument(
        "--delays", nargs="+", type=float, default=[0.0, 0.001, 0.01], help="seconds, one way"
    )
    parser.add_argument(
        "--systems", nargs="*", default=[*SYSTEMS], choices=SYSTEMS, help="besides raw streams"
    )
    parser.add_argument("--pairs", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", type=int, default=128, help="into each target")
    parser.add_argument("--tokens", type=int, default=65_536, help="per row, of 16 bytes each")
    parser.add_argument("--n", type=int, default=5, help="timed rounds, after one that warms up")
    parser.add_argument(
        "--out",
        type=Path,
        help="page for the tables; a line of JSON for each link is printed anyway",
    )
    given = parser.parse_args()
    if (reason := why_no_lab()) is not None:
        parser.error(reason)
    rates = [None if rate == "none" else float(rate) for rate in given.rates]
    records = []
    for pairs in given.pairs:
        work = Work(given.rows * pairs, given.tokens, pairs, pairs, apart=True)
        for record in measure_links(rates, given.delays, work, given.systems, given.n):
            print(json.dumps(record), flush=True)
            records.append(record)
    if given.out is not None:
        words = ["python benchmarks/links.py --n", str(given.n)]
        if given.systems != [*SYSTEMS]:
            words += ["--systems", *given.systems]
        command = " ".join([*words, "--out docs/benchmarks/links.md"])
        share = given.rows * given.tokens * BYTES_PER_TOKEN
        write_page(given.out, records, share, given.n, command)


if __name__ == "__main__":
    main()
