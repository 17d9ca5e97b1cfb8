"""The part of ``siirl-dask plan --hosts`` about hosts: their workers and roles, and the bytes
between them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from siirl_dask.errors import ConfigError, counted
from siirl_dask.estimates.links import EdgeLinks, Links, links_of, total_of
from siirl_dask.planner import Hosts, Plan, TableSizes, by_host
from siirl_dask.wording import readable_bytes, table, worker_ranges

_MOST_WORKERS = 2**16
_LISTED = 12  # links that are listed one by one


def read_hosts(text: str, workers: int | None = None) -> list[int]:
    """Return the number of workers on each host that ``4x8`` or ``8,8,4`` names.

    ConfigError for another text, and where ``workers``, from ``--workers``, is another number.
    """
    times = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", text)
    if times is None and not re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*", text):
        raise ConfigError(
            f"--hosts {text}: expected hosts x workers on each, such as 4x8, or the workers of "
            "each host, such as 8,8,4"
        )
    total = int(times[1]) * int(times[2]) if times else sum(map(int, text.split(",")))
    if total > _MOST_WORKERS:
        raise ConfigError(f"--hosts {text} is {total} workers: expected at most {_MOST_WORKERS}")
    counts = [int(times[2])] * int(times[1]) if times else [int(count) for count in text.split(",")]
    if workers is not None and workers != sum(counts):
        raise ConfigError(
            f"--hosts {text} has {counted(sum(counts), 'worker')}, and --workers is {workers}: "
            "leave out one of them"
        )
    return counts


def place_workers(workers: Sequence[str], counts: Sequence[int]) -> Hosts:
    """Return the host of each worker: the first host has the first workers."""
    hosts = (f"host{host}" for host, count in enumerate(counts) for _ in range(count))
    return dict(zip(workers, hosts, strict=True))


def describe_hosts(plan: Plan, sizes: TableSizes) -> str:
    """Describe the hosts' roles, and what each edge moves between hosts in a step, rows at their
    longest.
    """
    links = links_of(plan, sizes)
    total = total_of(links)
    texts = [
        _roles(plan),
        f"Bytes between hosts in a step, rows at their longest\n{_edges(plan, links)}",
    ]
    if 0 < len(total) <= _LISTED:
        texts.append(f"Bytes of each link in a step\n{_links(total, links)}")
    return "\n\n".join([*texts, _sum(total, links)])


def links_as_data(plan: Plan, sizes: TableSizes) -> dict[str, Any]:
    """Return the hosts' workers and the bytes of each edge on each link; nothing where all
    workers are on one host.
    """
    if not plan.hosts:
        return {}
    links = [
        {"edge": one.edge.name, "from": source, "to": target, "bytes": nbytes}
        for one in links_of(plan, sizes)
        for (source, target), nbytes in sorted(one.bytes.items())
    ]
    return {"hosts": by_host(plan.chains, plan.hosts), "links": links}


def _roles(plan: Plan) -> str:
    """Return the table of hosts; those with as many workers of each role share a line."""
    workers = tuple(plan.chains)
    hosts = by_host(plan.chains, plan.hosts)
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for host, own in hosts.items():
        counts = ((role, len({*own} & {*placed})) for role, placed in plan.placement.items())
        alike.setdefault((("", len(own)), *(pair for pair in counts if pair[1])), []).append(host)
    rows = []
    for ((_, count), *roles), those in alike.items():
        own = [worker for host in those for worker in hosts[host]]
        texts = (role if on == count else f"{role} on {on} of {count}" for role, on in roles)
        rows.append(
            (
                worker_ranges(those, tuple(hosts)),
                worker_ranges(own, workers),
                ", ".join(texts) or "-",
            )
        )
    return table(("hosts", "workers", "roles"), rows)


def _edges(plan: Plan, links: Sequence[EdgeLinks]) -> str:
    rows = []
    for one in links:
        marked = ""
        if one.unknown:
            marked = f", and {', '.join(one.unknown)}?"
        in_all = "?"
        most = "?"
        if one.counted:
            in_all = f"{readable_bytes(sum(one.bytes.values()))}{marked}"
            most = readable_bytes(max(one.bytes.values(), default=0))
        rows.append((f"{one.edge.source} -> {one.edge.target}", str(len(one.bytes)), most, in_all))
    return table(("edge", "links", "most on one", "in all"), rows)


def _links(total: Links, links: Sequence[EdgeLinks]) -> str:
    rows = []
    for ends, nbytes in total.items():
        parts = {f"{one.edge.source} -> {one.edge.target}": one.bytes.get(ends, 0) for one in links}
        texts = (f"{name} {readable_bytes(part)}" for name, part in parts.items() if part)
        rows.append((f"{ends[0]} -> {ends[1]}", readable_bytes(nbytes), ", ".join(texts)))
    return table(("link", "bytes", "of which"), rows)


def _sum(total: Links, links: Sequence[EdgeLinks]) -> str:
    text = f"Between hosts: {readable_bytes(sum(total.values()))} a step"
    if any(one.unknown or not one.counted for one in links):
        text += ", and what is marked '?', whose size is not known"
    return text + "."
