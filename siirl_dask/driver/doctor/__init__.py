"""Examines what a run needs: Python and packages, the machine, devices, vLLM, the store, the
cluster, servers that generate.

A check returns findings and changes nothing; that of the store removes its files. A configuration's
DAG, model and data are not examined here, but by ``preflight``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from siirl_dask.config import ClusterConfig, Config, Engine
from siirl_dask.context import DeviceKind
from siirl_dask.driver.doctor.devices import check_devices, check_plugin
from siirl_dask.driver.doctor.finding import DoctorFinding, DoctorState, fault, ok
from siirl_dask.driver.doctor.machine import check_machine
from siirl_dask.driver.doctor.packages import check_packages
from siirl_dask.driver.doctor.storage import check_storage
from siirl_dask.driver.doctor.vllm import judge_vllm, vllm_probe

__all__ = ["DoctorFinding", "DoctorState", "examine", "finding"]


def examine(config: Config | None) -> list[DoctorFinding]:
    """Return the findings, faults among them. Without ``config`` only this machine is examined."""
    examined = Config() if config is None else config
    cluster = examined.cluster
    workers_here = 0 if cluster.exists or cluster.spec else cluster.workers
    with vllm_probe() as probe:
        findings = [
            *_checked("devices", check_plugin),
            *_checked("packages", check_packages),
            *_checked(
                "machine",
                lambda: check_machine(workers_here, cluster.threads, examined.data.spill_directory),
            ),
            *_checked("devices", check_devices),
            *_checked("topology", lambda: _topology(cluster)),
        ]
        if config is not None:
            findings += _checked("storage", lambda: [check_storage(config.run.url)])
            findings += _checked("cluster", lambda: _cluster(config))
            findings += _checked("servers", lambda: check_servers(config))
        kind = _first_kind(findings)
        return [
            *findings,
            *_checked("vllm", lambda: [judge_vllm(probe, examined.rollout.engine, kind)]),
        ]


def _topology(cluster: ClusterConfig) -> Iterable[DoctorFinding]:
    # torch, which the first check tries to import
    from siirl_dask.driver.doctor.topology import check_topology

    return check_topology(cluster)


def _first_kind(findings: Sequence[DoctorFinding]) -> DeviceKind:
    """Return the first kind of device that there is a finding on; CPU if there is none."""
    for kind in DeviceKind:
        if any(finding.part.startswith(f"{kind}:") for finding in findings):
            return kind
    return DeviceKind.CPU


def _cluster(config: Config) -> Iterable[DoctorFinding]:
    # Dask, which other checks need not wait for
    from siirl_dask.driver.doctor.cluster import check_cluster

    return check_cluster(config.cluster)


def check_servers(config: Config) -> Iterable[DoctorFinding]:
    """Yield a finding on each server that the configuration generates with."""
    rollouts = [config.rollout, *(agent.rollout for agent in config.agents.values())]
    if not any(rollout.engine == Engine.server for rollout in rollouts):
        return
    # torch and transformers, as the engine that is asked for imports them
    from siirl_dask.rollout import examine_servers

    for server in examine_servers(config):
        part = f"server {server.url}"
        yield fault(part, server.said, server.cure) if server.cure else ok(part, server.said)


def _checked(part: str, check: Callable[[], Iterable[DoctorFinding]]) -> list[DoctorFinding]:
    """Return the findings of a check. A check that raises is a fault itself, and the others go
    on.
    """
    try:
        return list(check())
    except Exception as error:
        text = f"it could not be examined: {type(error).__name__}: {error}"
        return [
            fault(
                part,
                text,
                "see whether the packages are whole (pip check); a fault of this command otherwise",
            )
        ]
