"""The processes of a cluster: orders the workers by rank, and refuses environments that do not
fit together.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from distributed import Client, Status
from distributed.comm.addressing import get_address_host

from siirl_dask.errors import ConfigError, WorkerLost, clause
from siirl_dask.scheduler import has_resources
from siirl_dask.worker.process.report import ALIKE, SIMILAR, Report, report

logger = logging.getLogger("siirl_dask.driver")
_NAMED = 4  # processes that a message names; it counts the others
_MUST = ("python", "siirl_dask", *ALIKE)


@dataclass(frozen=True, slots=True)
class ClusterProcess:
    """A process of the cluster, and its report, or the error in place of one."""

    label: str
    """Its name in messages, such as ``worker 'a' on host 'node1'``."""
    start: str
    """The command that starts such a process."""
    report: Report | Exception


def members(
    client: Client,
    count: int,
    before: Iterable[str] = (),
    resources: Mapping[str, float] | None = None,
    taken: Collection[str] = (),
) -> dict[str, str]:
    """Return {name: address} of the first ``count`` workers in rank order, of those that have the
    Dask ``resources`` and whose address is not in ``taken``.

    ``before`` are the names of earlier members: those that are there have the ranks that they had.

    ConfigError for a process that cannot import this package, and for one with another version of
    it, of Python or of a package whose messages all must understand; WorkerLost for one that leaves
    meanwhile. Other differences are logged.
    """
    workers: dict[str, str] = {}
    for name, address in running_workers(client, resources).items():
        if address not in taken:
            workers[name] = address
    reports = client.run(report, on_error="return")
    ordered = rank_order(
        {name: (address, reports.get(address)) for name, address in workers.items()}
    )
    chosen = {name: workers[name] for name in keep_ranks(ordered, before)[:count]}
    if len(chosen) < count:
        raise WorkerLost(
            f"{len(chosen)} of {count} workers are there: another one left while the run was "
            "prepared"
        )
    with workers_needed(client, chosen):
        check_alike(client, chosen, reports)
    return chosen


def running_workers(client: Client, resources: Mapping[str, float] | None = None) -> dict[str, str]:
    """Return {name: address} of the workers that run and have the Dask ``resources``."""
    workers: dict[str, str] = {}
    for address, info in client.scheduler_info(n_workers=-1)["workers"].items():
        is_running = info["status"] == Status.running.name
        if is_running and (resources is None or has_resources(info["resources"], resources)):
            workers[str(info["name"])] = address
    return workers


@contextmanager
def workers_needed(client: Client, workers: Mapping[str, str]) -> Iterator[None]:
    """Raise WorkerLost if something fails inside and one of the ``workers``, {name: address},
    has left by then.
    """
    try:
        yield
    except WorkerLost:
        raise
    except Exception as error:  # a call to a worker that has just left may fail in any way
        lost = gone(client, workers)
        if lost is None:
            raise
        raise WorkerLost(f"{lost} while the run was prepared") from error


def gone(client: Client, workers: Mapping[str, str]) -> str | None:
    """Return a clause about the first of the ``workers``, {name: address}, that has left the
    cluster; None if all stay.

    Where the scheduler is gone, that is not known, and nobody has left.
    """
    present = client.scheduler_info(n_workers=-1)["workers"]
    for name, address in workers.items():
        if address not in present:
            return f"worker {name!r} at {address} left the cluster"
    return None


def check_alike(
    client: Client, workers: Mapping[str, str], reports: Mapping[str, Report | Exception]
) -> None:
    """Raise ConfigError unless the ``workers``, {name: address}, fit to each other, to the
    scheduler and this process.

    ``reports`` has the report of each address.
    """
    processes = [_worker(name, address, reports.get(address)) for name, address in workers.items()]
    _check(_scheduler(client), processes)


def keep_ranks(ordered: Sequence[str], before: Iterable[str]) -> list[str]:
    """Return the names in ``ordered``, those of ``before`` at the ranks that they had there;
    others fill the gaps.
    """
    earlier = list(before)
    others = [name for name in ordered if name not in earlier]
    names = []
    for name in earlier:
        if name in ordered:
            names.append(name)
        elif others:
            names.append(others.pop(0))
    return [*names, *others]


def hosts_of(members: Mapping[str, str]) -> dict[str, str]:
    """Return the host of each worker of ``members``: that of its address, which its peers reach
    it by.
    """
    return {name: get_address_host(address) for name, address in members.items()}


def rank_order(workers: Mapping[str, tuple[str, Report | Exception | None]]) -> list[str]:
    """Return the workers' names by host, then device, then name; ``workers`` has the address and
    report of each.

    A host goes by its own name, which launchers and container platforms keep where addresses
    change. A name that is the worker's address counts without its port, which is another one in
    each start. Numbers in names go by value.
    """

    def sort_key(name: str) -> tuple[object, ...]:
        address, answer = workers[name]
        address_host = get_address_host(address)
        host = address_host
        devices = ""
        if isinstance(answer, dict):
            host = answer["host"]
            devices = answer["devices"]
        stable_name = name
        if name == address:
            stable_name = ""
        return tuple(_natural(text) for text in (host, address_host, devices, stable_name, name))

    return sorted(workers, key=sort_key)


def _natural(text: str) -> list[tuple[bool, int, str]]:
    """Return a sort key by which ``node2`` comes before ``node10``, and numbers before other
    texts.
    """
    key = []
    for part in re.findall(r"\d+|\D+", text):
        is_number = part.isdecimal()
        key.append((not is_number, int(part) if is_number else 0, part))
    return key


def _scheduler(client: Client) -> ClusterProcess:
    try:
        answer: Report | Exception = client.run_on_scheduler(report)
    except Exception as error:  # whatever an import there may raise
        answer = error
    return ClusterProcess(
        f"the scheduler at {client.scheduler_info()['address']}", "dask scheduler", answer
    )


def _worker(name: str, address: str, answer: Report | Exception | None) -> ClusterProcess:
    if answer is None:
        answer = OSError("it did not answer")
    host = answer["host"] if isinstance(answer, dict) else get_address_host(address)
    return ClusterProcess(f"worker {name!r} on host {host!r}", "dask worker", answer)


def _check(scheduler: ClusterProcess, workers: Sequence[ClusterProcess]) -> None:
    """Raise ConfigError unless the processes fit to each other and to this one; log smaller
    differences.
    """
    here = report()
    reports: dict[str, Report] = {}
    for process in (scheduler, *workers):
        if isinstance(process.report, Exception):
            error = process.report
            raise ConfigError(
                f"{process.label} cannot load siirl_dask: {type(error).__name__}: {clause(error)}; "
                f"expected siirl_dask {here['versions']['siirl_dask']} and its dependencies in the "
                f"Python that runs `{process.start}` there"
            )
        reports[process.label] = process.report
    refused = [line for name in _MUST for line in _differences(name, here, reports)]
    if not refused:
        code = {label: each["code"] for label, each in reports.items()}
        refused = _describe_others("the code of siirl_dask", here["code"], code)
    if refused:
        raise ConfigError(
            "the processes of the cluster do not fit together: "
            + "; ".join(refused)
            + "; expected the same "
            "environment on every host"
        )
    of_workers = {process.label: reports[process.label] for process in workers}
    for name in SIMILAR:
        for line in _differences(name, here, of_workers):
            logger.warning("%s", line)
    _warn_of_variables(of_workers)


def _differences(package: str, here: Report, reports: Mapping[str, Report]) -> list[str]:
    found = {label: each["versions"].get(package) or "none" for label, each in reports.items()}
    return _describe_others(package, here["versions"].get(package) or "none", found)


def _describe_others(
    subject: str,
    here: str,
    found: Mapping[str, str],
    where: str = "here",
    at: str = "on",
) -> list[str]:
    """Return a sentence for each value other than ``here``, which names the processes that have
    it.
    """
    sentences = []
    for value in sorted({*found.values()} - {here}):
        labels = [label for label, each in found.items() if each == value]
        more = ""
        if len(labels) > _NAMED:
            more = f" and {len(labels) - _NAMED} more"
        named = ", ".join(labels[:_NAMED])
        sentences.append(f"{subject} is {here} {where} and {value} {at} {named}{more}")
    return sentences


def _warn_of_variables(workers: Mapping[str, Report]) -> None:
    """Log environment variables that workers have with different values."""
    first = next(iter(workers))
    names = {name for each in workers.values() for name in each["variables"]}
    for name in sorted(names):
        values = {label: _shown(each["variables"].get(name)) for label, each in workers.items()}
        for line in _describe_others(
            f"environment variable {name}", values[first], values, f"for {first}", "for"
        ):
            logger.warning("%s", line)


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    return repr(value)
