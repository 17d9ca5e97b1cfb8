"""Looks at the accelerators that torch sees, at those that it does not see, and at what torch can send between them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # Dask needs it

from siirl_dask.context import DeviceKind
from siirl_dask.driver.doctor.finding import Finding, fault, note, ok
from siirl_dask.planner.explain.tables import readable_bytes

_DRIVERS = {
    "nvidia": Path("/proc/driver/nvidia/version"),
    "ascend": Path("/usr/local/Ascend/driver/version.info"),
}
_NODES = {"nvidia": re.compile(r"nvidia\d+"), "ascend": re.compile(r"davinci\d+")}
_NAMES = {"NCCL_SOCKET_IFNAME": DeviceKind.CUDA, "HCCL_SOCKET_IFNAME": DeviceKind.NPU}
_TENSOR_CORES = (8, 0)  # Ampere: bfloat16 and FlashAttention
_TAKEN, _OWN = 0.1, 2**30  # share of a device's memory in use that is worth a word, beyond what torch's own start takes
_LIBRARY = re.compile(r"\b(\d+\.\d[\w.]*)")


def check_devices() -> list[Finding]:
    """Return findings on the accelerators, and on the backends of torch.distributed and their interface."""
    try:
        import torch

        from siirl_dask.worker.devices import visible_devices
    except (ImportError, OSError) as error:
        return [fault("devices", f"torch cannot be imported: {error}", "pip install 'torch>=2.13,<2.14'")]
    kind = visible_devices().kind
    there = {maker: count for maker in _NODES if (count := count_nodes(maker, Path("/dev")))}
    if kind is DeviceKind.CPU:
        return [judge_unseen(there, torch.__version__, torch.version.cuda), *check_backends(kind)]
    module = torch.get_device_module(str(kind))
    drivers = ", ".join(filter(None, map(driver_of, there)))
    seen = [_device(module, kind, index, drivers) for index in range(module.device_count())]
    return [*seen, *check_backends(kind)]


def count_nodes(maker: str, folder: Path) -> int:
    """Return how many devices of a maker the operating system has, by their files in ``folder``."""
    return sum(bool(_NODES[maker].fullmatch(path.name)) for path in folder.iterdir())


def judge_unseen(there: dict[str, int], torch_version: str, cuda: str | None) -> Finding:
    """Return the finding where torch sees no accelerator; ``there`` are those that the operating system has, by maker.

    ``cuda`` is the version that torch is built for; None for a build for CPUs.
    """
    hidden = [name for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES") if os.environ.get(name) == ""]
    if not there or hidden:
        why = f" ({hidden[0]} is empty)" if hidden else ""
        return ok("devices", f"no accelerator{why}: a run computes on CPUs")
    maker, count = next(iter(there.items()))
    said = f"{count} of {maker} {'is' if count == 1 else 'are'} there, and torch {torch_version} sees none"
    if maker == "ascend":
        return fault("devices", said, "pip install 'siirl_dask[npu]', and source CANN's set_env.sh")
    if cuda is None:
        cure = "pip install torch from PyPI, which is built for CUDA, in place of the build for CPUs (docs/engines.md)"
        return fault("devices", f"{said}: it is built for CPUs", cure)
    cure = f"install a driver for CUDA {cuda} or newer, and look at what nvidia-smi says"
    return fault("devices", f"{said}: it is built for CUDA {cuda}, with driver {driver_of(maker) or 'unknown'}", cure)


def driver_of(maker: str) -> str:
    """Return the version of the installed driver of ``maker``; empty where it cannot be told."""
    file = _DRIVERS[maker]
    found = _LIBRARY.search(file.read_text()) if file.is_file() else None
    return found[1] if found else ""


def _device(module: Any, kind: DeviceKind, index: int, driver: str) -> Finding:
    name, (free, total) = module.get_device_name(index), module.mem_get_info(index)
    said = f"{name} with {readable_bytes(total)}, {readable_bytes(free)} free, driver {driver or 'unknown'}"
    part = f"{kind}:{index}"
    if total - free > max(_OWN, _TAKEN * total):
        cure = "end what else runs on it, or give a run other devices (CUDA_VISIBLE_DEVICES)"
        return note(part, f"{said}: other programs have {readable_bytes(total - free)}", cure)
    if kind is DeviceKind.CUDA and module.get_device_capability(index) < _TENSOR_CORES:
        return note(part, f"{said}; it is older than Ampere", "model.dtype=float32: it has no bfloat16")
    return ok(part, said)


def check_backends(kind: DeviceKind) -> list[Finding]:
    """Return findings on what carries tensors between workers whose devices are of this kind, and where."""
    from siirl_dask.collectives import BACKENDS, LOOPBACK, backends, interface_of

    wanted, built = dict.fromkeys(("gloo", BACKENDS[kind])), backends()
    missing = [name for name in wanted if name not in built]
    if missing:
        cure = "pip install 'torch>=2.13,<2.14'" if kind is not DeviceKind.NPU else "pip install 'siirl_dask[npu]'"
        return [fault("collectives", f"torch is built without {', '.join(missing)}: it has {', '.join(built)}", cure)]
    here, interfaces = interface_of(LOOPBACK), list(psutil.net_if_addrs())
    others = [name for name in interfaces if name != here]
    text = f"{' and '.join(wanted)} over {here} between workers of this machine; others: {', '.join(others) or 'none'}"
    named = [judge_interface(name, os.environ[name], interfaces) for name in _NAMES if os.environ.get(name)]
    return [ok("collectives", text), *named]


def judge_interface(variable: str, value: str, interfaces: Iterable[str]) -> Finding:
    """Return a finding on an environment variable that names interfaces as NCCL and HCCL read it: beginnings of names
    with commas between them, whole names after ``=``, names to leave out after ``^``.
    """
    known = list(interfaces)
    names = [name.partition(":")[0] for name in value.lstrip("^=").split(",")]
    exact = "=" in value[:2]
    taken = [name for name in known if (name in names if exact else name.startswith(tuple(names)))]
    if "^" in value[:2]:
        taken = [name for name in known if name not in taken]
    if taken:
        return ok("interface", f"{variable}={value} takes {', '.join(taken)}")
    cure = f"unset {variable}, or name one of {', '.join(known)}"
    return fault("interface", f"{variable}={value} fits no interface of this machine", cure)
