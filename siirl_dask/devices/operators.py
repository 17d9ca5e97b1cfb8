"""The table of fused operators: which libraries have each, on which devices, and which is chosen.

torch has all of them, and is the reference: what another library computes is held to it by tests,
and by the trial of each network that is built; where that computes in bfloat16 from weights in
float32, attention on GPUs by tests alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from siirl_dask.devices.kinds import DeviceKind
from siirl_dask.errors import ConfigError, did_you_mean

TORCH = "torch"
PLUGIN = "torch_npu"
LIGER = "liger"
FLASH = "flash"
FLEX = "flex"
MINDSPEED = "mindspeed"


@dataclass(frozen=True, slots=True)
class Library:
    """A library of fused operators."""

    packages: tuple[str, ...]
    """Packages of which it needs one."""
    kind: DeviceKind | None
    """Kind of device that it runs on; None: any."""
    cure: str
    """The command that installs it."""


LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {
        TORCH: Library(("torch",), None, ""),
        PLUGIN: Library(("torch_npu",), DeviceKind.NPU, "pip install 'siirl_dask[npu]'"),
        LIGER: Library(("liger_kernel",), DeviceKind.CUDA, "pip install 'siirl_dask[liger]'"),
        FLASH: Library(
            ("torch", "flash_attn_interface", "flash_attn"),
            DeviceKind.CUDA,
            "pip install flash-attn",
        ),
        FLEX: Library(("triton",), DeviceKind.CUDA, "pip install triton"),
        MINDSPEED: Library(
            ("mindspeed",),
            DeviceKind.NPU,
            "install its source, branch core_r0.16.0 (docs/devices.md#mindspeed)",
        ),
    }
)
OPERATORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rotary": (TORCH, PLUGIN, MINDSPEED),
        "rms_norm": (TORCH, PLUGIN, LIGER, MINDSPEED),
        "swiglu": (TORCH, PLUGIN, LIGER, MINDSPEED),
        "attention": (TORCH, PLUGIN, FLASH, FLEX, MINDSPEED),
        "adamw": (TORCH, PLUGIN),
    }
)
"""Libraries that have each operator."""
REFERENCE: Mapping[str, str] = MappingProxyType(dict.fromkeys(OPERATORS, TORCH))
"""Every operator by torch."""
AUTO = "auto"
"""The best that runs on a GPU: for attention see training/model/attention_kernels.py, for norms and
feed-forward layers training/model/liger.py."""


def check_operators(given: Mapping[str, str], *, liger: bool) -> None:
    """Check ``trainer.operators``. ConfigError for unknown names, and for what
    ``trainer.liger=true`` contradicts.
    """
    for operator, library in given.items():
        if operator not in OPERATORS:
            near = did_you_mean(operator, OPERATORS)
            raise ConfigError(
                f"trainer.operators.{operator}: expected one of {', '.join(OPERATORS)}{near}"
            )
        if library not in OPERATORS[operator]:
            near = did_you_mean(str(library), OPERATORS[operator])
            raise ConfigError(
                f"trainer.operators.{operator}={library}: expected one of "
                f"{', '.join(OPERATORS[operator])}{near}"
            )
        if liger and LIGER in OPERATORS[operator] and library != LIGER:
            raise ConfigError(
                f"trainer.operators.{operator}={library} with trainer.liger=true, which stands for "
                "liger: leave one out"
            )


def check_backend_operators(
    given: Mapping[str, str], libraries: Mapping[str, tuple[str, ...]], backend: str
) -> None:
    """Check that a backend has the libraries of ``trainer.operators`` that are ``given``;
    ``libraries`` are those that it has, by operator, and torch where it names none. ConfigError if
    not.
    """
    for operator, library in given.items():
        known = libraries.get(operator, (TORCH,))
        if library not in known:
            raise ConfigError(
                f"trainer.operators.{operator}={library} with trainer.backend={backend}: expected "
                f"one of {', '.join(known)}"
            )


def choose_operators(
    given: Mapping[str, str],
    kind: str,
    *,
    liger: str | bool,
    libraries: Mapping[str, tuple[str, ...]] = OPERATORS,
) -> dict[str, str]:
    """Return the library of each operator on a kind of device: those given, or the device's own
    where the backend has it, or torch. ``liger`` says whether liger has those that it can;
    ``auto``: on a GPU, where it runs. ``libraries`` are the backend's, by operator.
    """
    own = TORCH
    if kind == DeviceKind.NPU:
        own = PLUGIN
    chosen = dict.fromkeys(OPERATORS, TORCH)
    chosen |= {operator: own for operator, known in libraries.items() if own in known}
    if kind == DeviceKind.CUDA:
        chosen["attention"] = AUTO
    by_liger = [operator for operator, known in libraries.items() if LIGER in known]
    if liger is True:
        chosen |= dict.fromkeys(by_liger, LIGER)
    if liger == AUTO and kind == DeviceKind.CUDA:
        chosen |= dict.fromkeys(by_liger, AUTO)
    return {**chosen, **given}
