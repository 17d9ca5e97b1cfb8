"""Connects to the cluster that a configuration names, and compares its processes with this one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed import Client, Status

from siirl_dask.collectives import interface_of
from siirl_dask.config import ClusterConfig
from siirl_dask.driver.checks.preflight import check_resources
from siirl_dask.driver.clusters.deployment import check_spec
from siirl_dask.driver.clusters.processes import hosts_of, members
from siirl_dask.driver.clusters.scheduler_file import read_address
from siirl_dask.driver.doctor.finding import DoctorFinding, DoctorState, fault, note, ok
from siirl_dask.driver.doctor.logs import warnings_of
from siirl_dask.driver.doctor.machine import check_limits
from siirl_dask.errors import ConfigError, counted
from siirl_dask.observe import Progress
from siirl_dask.scheduler import has_resources

_PART = "cluster"
_RESOURCES = "resources"
_PATIENCE = 10.0  # seconds for the scheduler's answer; a run waits for cluster.start_timeout
_CLOSE_TIMEOUT = 0.5  # seconds
_ALIKE = "install the same environment on every host, or start the workers from an image"


def check_cluster(cluster: ClusterConfig) -> list[DoctorFinding]:
    """Return findings on the cluster that the configuration names, whatever it is. Nothing is
    started.
    """
    if cluster.spec:
        return [_described(cluster.spec)]
    if not cluster.exists:
        return _started_here(cluster)
    try:
        return _existing(cluster)
    except ConfigError as error:
        return [
            fault(
                _PART,
                str(error),
                "start the scheduler, or correct cluster.address or cluster.scheduler_file",
            )
        ]


def _started_here(cluster: ClusterConfig) -> list[DoctorFinding]:
    findings = [ok(_PART, f"a run starts {counted(cluster.workers, 'worker')} on this machine")]
    if cluster.resources:
        try:
            check_resources(cluster)
        except ConfigError as error:
            said, _, cure = str(error).rpartition("; ")
            findings.append(fault(_RESOURCES, said, cure))
    return findings


def _described(path: str) -> DoctorFinding:
    try:
        check_spec(path)
    except ConfigError as error:
        return fault(_PART, str(error), "see docs/clusters.md for files that work")
    return note(
        _PART, f"{path} can be used; it is not started here, so its hosts are not looked at"
    )


def _existing(cluster: ClusterConfig) -> list[DoctorFinding]:
    address = cluster.address
    if cluster.scheduler_file:
        wait = 0.0
        if Path(cluster.scheduler_file).exists():
            wait = _PATIENCE
        address = read_address(cluster.scheduler_file, wait, Progress(0, enabled=False))
    assert address is not None
    try:
        client = Client(address, timeout=_PATIENCE)
    except (
        OSError,
        ValueError,
        TypeError,
    ) as error:  # no scheduler; a malformed address; tls without certificates
        raise ConfigError(f"no Dask scheduler answers at {address!r}: {error}") from error
    try:
        return _workers(client, cluster)
    finally:
        with suppress(TimeoutError):
            client.close(timeout=_CLOSE_TIMEOUT)


def _workers(client: Client, cluster: ClusterConfig) -> list[DoctorFinding]:
    wanted = cluster.workers
    scheduler = client.scheduler_info(n_workers=-1)
    address = scheduler["address"]
    infos = scheduler["workers"].values()
    where = f"the scheduler at {address}"
    if not infos:
        cure = f"dask worker {address} --nthreads 1 --memory-limit 0"
        return [fault(_PART, f"{where} has no workers, and a run wants {wanted}", cure)]
    text = f"{where} has {counted(len(infos), 'worker')}"
    findings = [ok(_PART, text)]
    if len(infos) < wanted:
        findings = [
            fault(
                _PART, f"{text}, and a run wants {wanted}", "start more, or lower cluster.workers"
            )
        ]
    if cluster.resources:
        findings.append(_judge_resources(address, infos, cluster))
    running = sum(worker["status"] == Status.running.name for worker in infos)
    with warnings_of("siirl_dask.driver") as warnings:
        try:
            addresses = members(client, running)
        except ConfigError as error:
            return [*findings, fault("versions", str(error), _ALIKE)]
    findings += [note("versions", warning) for warning in warnings]
    if not warnings:
        findings.append(ok("versions", "the same in all processes"))
    return [*findings, *_hosts(client, addresses, wanted)]


def _judge_resources(
    address: str, workers: Collection[Mapping[str, Any]], cluster: ClusterConfig
) -> DoctorFinding:
    """Return the finding on the Dask resources that a run asks each of its workers for."""
    needed = cluster.resources
    each = " ".join(f"{name}={amount:g}" for name, amount in needed.items())
    there = [worker["resources"] for worker in workers]
    fitting = sum(has_resources(one, needed) for one in there)
    if fitting >= cluster.workers:
        return ok(_RESOURCES, f"{counted(fitting, 'worker')} with {each}")
    short = []
    for name, wanted in needed.items():
        most = max(one.get(name, 0.0) for one in there)
        if most >= wanted:
            continue
        if most:
            short.append(f"none has more than {most:g} of {name}")
        else:
            short.append(f"none has any {name}")
    why = ""
    if short:
        why = f": {', '.join(short)}"
    return fault(
        _RESOURCES,
        f"{fitting} of {counted(len(there), 'worker')} have cluster.resources={needed}, and a run "
        f"wants {cluster.workers}{why}",
        f'dask worker {address} --nthreads 1 --memory-limit 0 --resources "{each}", or change '
        "cluster.resources",
    )


def _hosts(client: Client, addresses: dict[str, str], wanted: int) -> list[DoctorFinding]:
    """Return findings of a worker on each host, on its limits and on the interface over which it
    reaches its peers.

    ``addresses`` is {name: address}.
    """
    hosts = hosts_of(addresses)
    first = {host: addresses[worker] for worker, host in reversed(hosts.items())}
    limits = client.run(check_limits, wanted, workers=list(first.values()))
    findings = []
    for host, address in first.items():
        faults = [each for each in limits[address] if each.state is DoctorState.FAULT]
        interface = client.run(interface_of, host, workers=[address], on_error="return")[address]
        if isinstance(interface, Exception):
            findings.append(
                fault(
                    f"host {host}", str(interface), "dask worker --host ADDRESS or --interface NAME"
                )
            )
        findings += [
            DoctorFinding(f"host {host}", each.state, f"{each.part}: {each.text}", each.cure)
            for each in faults
        ]
        if not faults and not isinstance(interface, Exception):
            count = list(hosts.values()).count(host)
            workers = "1 worker, which reaches its"
            if count != 1:
                workers = f"{count} workers, which reach their"
            findings.append(ok(f"host {host}", f"{workers} peers over {interface}"))
    return findings
