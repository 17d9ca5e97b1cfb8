"""Linux's own calls, made through ctypes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

_PDEATHSIG = 1  # linux/prctl.h


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library, with each int as a long. OSError when it fails or does
    not exist.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(f"{sys.platform} has no {name}()")
    if (
        function(*(ctypes.c_long(item) if isinstance(item, int) else item for item in arguments))
        == -1
    ):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def prctl(option: int, value: int) -> None:
    """Call ``prctl`` with an option of one value: the kernel wants zeros for the others."""
    call("prctl", option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process with its parent. Other systems than Linux have no such
    call.
    """
    if sys.platform == "linux":
        call("prctl", _PDEATHSIG, signal.SIGKILL)
