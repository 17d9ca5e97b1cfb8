"""Checks the accelerators that torch sees, those that it does not see, and the backends of
collectives.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # Dask needs it

from siirl_dask.context import DeviceKind
from siirl_dask.devices import Traits, check_plugins, hidden_by, traits_of
from siirl_dask.driver.doctor.finding import DoctorFinding, fault, note, ok
from siirl_dask.driver.doctor.packages import install_command
from siirl_dask.errors import ConfigError
from siirl_dask.wording import readable_bytes

_MAKERS = {traits_of(kind).maker: traits_of(kind) for kind in DeviceKind if traits_of(kind).maker}
_USED_BY_OTHERS = 0.1  # share of a device's memory in use from which it is reported
_USED_BY_TORCH = 2**30  # bytes that torch's own start uses
_LIBRARY = re.compile(r"\b(\d+\.\d[\w.]*)")


def check_plugin() -> list[DoctorFinding]:
    """Return a fault where a plug-in of torch's cannot be imported. It is the first to import
    torch.
    """
    try:
        check_plugins()
    except ConfigError as error:
        said, _, cure = str(error).rpartition("; ")
        return [fault("devices", said, cure)]
    return []


def check_devices() -> list[DoctorFinding]:
    """Return findings on the accelerators, and on the backends of torch.distributed and their
    interface.
    """
    try:
        import torch

        from siirl_dask.devices import accelerator
    except (ImportError, OSError) as error:
        return [fault("devices", f"torch cannot be imported: {error}", install_command("torch"))]
    kind = accelerator.visible_devices().kind
    counts = {maker: count_nodes(maker, Path("/dev")) for maker in _MAKERS}
    there = {maker: count for maker, count in counts.items() if count}
    if kind is DeviceKind.CPU:
        return [
            judge_unseen(there, torch.__version__, accelerator.built_for()),
            *check_backends(kind),
        ]
    drivers = ", ".join(filter(None, map(driver_of, there)))
    seen = [_device(kind, index, drivers) for index in range(accelerator.count(kind))]
    return [*seen, *check_backends(kind)]


def count_nodes(maker: str, folder: Path) -> int:
    """Return how many devices of a maker the operating system has, by their files in ``folder``."""
    return sum(bool(_MAKERS[maker].node.fullmatch(path.name)) for path in folder.iterdir())


def judge_unseen(there: dict[str, int], torch_version: str, built_for: str | None) -> DoctorFinding:
    """Return the finding where torch sees no accelerator; ``there`` are those that the operating
    system has, by maker.

    ``built_for`` is the version of CUDA that torch is built for; None for a build for CPUs.
    """
    hidden = hidden_by()
    if not there or hidden:
        why = ""
        if hidden:
            why = f" ({hidden} is empty)"
        return ok("devices", f"no accelerator{why}: a run computes on CPUs")
    maker, count = next(iter(there.items()))
    said = (
        f"{count} of {maker} {'is' if count == 1 else 'are'} there, and torch {torch_version} sees "
        "none"
    )
    if _MAKERS[maker].plugin is not None:
        return fault("devices", said, f"{_install(_MAKERS[maker])}, and source CANN's set_env.sh")
    if built_for is None:
        cure = (
            "pip install torch from PyPI, which is built for CUDA, in place of the build for CPUs "
            "(docs/engines.md)"
        )
        return fault("devices", f"{said}: it is built for CPUs", cure)
    cure = f"install a driver for CUDA {built_for} or newer, and look at what nvidia-smi says"
    driver = driver_of(maker)
    if not driver:
        driver = "unknown"
    return fault("devices", f"{said}: it is built for CUDA {built_for}, with driver {driver}", cure)


def driver_of(maker: str) -> str:
    """Return the version of the installed driver of ``maker``; empty where it cannot be told."""
    file = _MAKERS[maker].driver
    found = None
    if file.is_file():
        found = _LIBRARY.search(file.read_text())
    if found:
        return found[1]
    return ""


def _install(traits: Traits) -> str:
    return f"pip install 'siirl_dask[{traits.extra}]'"


def _device(kind: DeviceKind, index: int, driver: str) -> DoctorFinding:
    import torch

    from siirl_dask.devices import accelerator

    name = accelerator.name_of(kind, index)
    free, total = accelerator.free_and_total(kind, index)
    said = (
        f"{name} with {readable_bytes(total)}, {readable_bytes(free)} free, driver "
        f"{driver or 'unknown'}"
    )
    part = f"{kind}:{index}"
    if total - free > max(_USED_BY_TORCH, _USED_BY_OTHERS * total):
        cure = f"end what else runs on it, or give a run other devices ({traits_of(kind).visible})"
        return note(part, f"{said}: other programs have {readable_bytes(total - free)}", cure)
    capability = accelerator.compute_capability(torch.device(kind, index))
    if capability is not None and capability < accelerator.TENSOR_CORES:
        return note(
            part,
            f"{said}; it is older than Ampere",
            "it has no bfloat16: model.dtype=auto takes float32",
        )
    return ok(part, said)


def check_backends(kind: DeviceKind) -> list[DoctorFinding]:
    """Return findings on the backends of torch.distributed for devices of this kind, and on
    their interfaces.
    """
    from siirl_dask.collectives import BACKENDS, LOOPBACK, backends, interface_of

    wanted = dict.fromkeys(("gloo", BACKENDS[kind]))
    built = backends()
    missing = [name for name in wanted if name not in built]
    if missing:
        traits = traits_of(kind)
        cure = install_command("torch") if traits.plugin is None else _install(traits)
        return [
            fault(
                "collectives",
                f"torch is built without {', '.join(missing)}: it has {', '.join(built)}",
                cure,
            )
        ]
    here = interface_of(LOOPBACK)
    interfaces = list(psutil.net_if_addrs())
    others = [name for name in interfaces if name != here]
    text = (
        f"{' and '.join(wanted)} over {here} between workers of this machine; others: "
        f"{', '.join(others) or 'none'}"
    )
    findings = [ok("collectives", text)]
    for kind_traits in map(traits_of, DeviceKind):
        variable = kind_traits.interface
        value = None
        if variable:
            value = os.environ.get(variable)
        if variable and value:
            findings.append(judge_interface(variable, value, interfaces))
    return findings


def judge_interface(variable: str, value: str, interfaces: Iterable[str]) -> DoctorFinding:
    """Return a finding on an environment variable that names interfaces as NCCL and HCCL read it.

    It has beginnings of names with commas between them, whole names after ``=``, names to leave out
    after ``^``.
    """
    known = list(interfaces)
    names = [name.partition(":")[0] for name in value.lstrip("^=").split(",")]
    exact = "=" in value[:2]
    if exact:
        taken = [name for name in known if name in names]
    else:
        taken = [name for name in known if name.startswith(tuple(names))]
    if "^" in value[:2]:
        taken = [name for name in known if name not in taken]
    if taken:
        return ok("interface", f"{variable}={value} takes {', '.join(taken)}")
    cure = f"unset {variable}, or name one of {', '.join(known)}"
    return fault("interface", f"{variable}={value} fits no interface of this machine", cure)
