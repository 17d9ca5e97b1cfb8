"""Made-up hosts: a tree as sysfs has it, and what the makers' programs print there."""

from __future__ import annotations

from pathlib import Path

from siirl_dask.devices.cpus import show_cpus

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  NV#  = Connection traversing a bonded set of # NVLinks
  NA   = Unknown relationship.
"""


def make_nodes(root: Path, *nodes: range | list[int], threads: int = 1) -> Path:
    """Make NUMA nodes of these CPUs; of a node, CPU ``i`` and the one half a node further are
    threads of one core.
    """
    (root / "devices/system/node").mkdir(parents=True)
    for number, cpus in enumerate(nodes):
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(show_cpus(cpus) + "\n")
        cores = len(cpus) // threads
        for at, cpu in enumerate(cpus):
            place = root / f"devices/system/cpu/cpu{cpu}/topology"
            place.mkdir(parents=True)
            together = [cpus[thread * cores + at % cores] for thread in range(threads)]
            (place / "thread_siblings_list").write_text(show_cpus(together) + "\n")
    return root


def add_card(root: Path, way: str, node: int = -1) -> str:
    """Add a card below bridges, ``pci0000:00/0000:00:01.0/0000:01:00.0``; return its address."""
    folder = root / "devices" / way
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{node}\n")
    links = root / "bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / folder.name).symlink_to(folder)
    return folder.name


def nvidia(cells: list[list[str]]) -> str:
    """Print links as nvidia-smi does: tabs, an underlined first line, a network card, three more
    columns.
    """
    names = [f"GPU{index}" for index in range(len(cells))]
    lines = [
        "\x1b[4m\t"
        + "\t".join([*names, "NIC0", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
        + "\x1b[0m"
    ]
    lines += [
        f"{name}\t" + "\t".join([*row, "SYS", "0-31", "0", "N/A"])
        for name, row in zip(names, cells, strict=True)
    ]
    lines += ["NIC0\t" + "\t".join(["SYS"] * len(cells) + [" X "])]
    return "\n".join(lines) + LEGEND + "\nNIC Legend:\n\n  NIC0: mlx5_0\n"


def npu(cells: list[list[str]], near: list[str] | None, name: str = "NPU") -> str:
    """Print links as npu-smi does: columns of blanks, and the CPUs near each card where there is
    such a column.
    """
    names = [f"{name}{index}" for index in range(len(cells))]
    lines = ["           " + "  ".join(names) + ("  CPU Affinity" if near is not None else "")]
    for index, row in enumerate(cells):
        lines.append(
            "  ".join([f"{names[index]:<9}", *row, *([near[index]] if near is not None else [])])
        )
    return "\n".join(lines) + "\n" + LEGEND


def links(count: int, link) -> list[list[str]]:
    """Return a matrix of ``link(one, two)``."""
    return [["X" if one == two else link(one, two) for two in range(count)] for one in range(count)]


def quads(one: int, two: int) -> str:
    """Two quads of cards that are numbered in turn."""
    return "HCCS" if one % 2 == two % 2 else "SYS"


def install(folder: Path, program: str, text: str) -> None:
    """Put a program into ``folder`` that runs ``text`` in a shell."""
    folder.mkdir(exist_ok=True)
    (folder / program).write_text(f"#!/bin/sh\n{text}\n")
    (folder / program).chmod(0o755)
