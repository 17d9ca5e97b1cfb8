"""A device that computes nothing, on which whatever would make the host wait for a device is an
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")


class Waits(TorchDispatchMode):
    """Refuses copies between devices that wait: those to the host, and those from memory that is
    not pinned.
    """

    def __init__(self, pinned: set[int]) -> None:
        super().__init__()
        self._pinned = pinned

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        match function:
            case torch.ops.aten._to_copy.default:
                self._check(
                    arguments[0], options.get("device"), bool(options.get("non_blocking", False))
                )
            case torch.ops.aten.copy_.default:
                waits_not = len(arguments) > 2 and bool(arguments[2])
                self._check(
                    arguments[1],
                    arguments[0].device,
                    waits_not or bool(options.get("non_blocking", False)),
                )
            case torch.ops.aten._local_scalar_dense.default | torch.ops.aten.nonzero.default:
                raise AssertionError(f"{function}: the host waits for the device")
        return function(*arguments, **options)

    def _check(self, source: torch.Tensor, target: torch.device | None, non_blocking: bool) -> None:
        if target is None or target.type == source.device.type:
            return
        assert target.type != "cpu", "a copy to the host waits for the device"
        assert non_blocking, "a copy that is not non_blocking waits for the device"
        assert id(source) in self._pinned, (
            "a copy from memory that is not pinned waits for the device"
        )


@contextmanager
def device_without_waits() -> Iterator[torch.device]:
    """Give a stand-in for a GPU: tensors have shapes there and no numbers, and AssertionError
    says what would wait.
    """
    kept = []  # ids are of tensors that are still there

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.clone())
        pinned.add(id(kept[-1]))
        return kept[-1]

    pinned: set[int] = set()
    with pytest.MonkeyPatch.context() as patch, Waits(pinned):
        patch.setattr(torch.Tensor, "pin_memory", pin_memory)
        yield DEVICE
