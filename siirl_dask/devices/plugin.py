"""Says why torch cannot be imported where a device's plug-in for it is broken, as torch-npu is
without CANN.

torch imports every package that announces itself as a plug-in (the entry point ``torch.backends``)
when it is imported itself, and fails with the first that fails. torch-npu fails on a machine
without CANN's libraries.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points

from siirl_dask.errors import ConfigError

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Environment variable of torch: ``0`` lets it import no plug-in."""
_GROUP = "torch.backends"
_FROM_CANN = ("libhccl", "libascend", "libge_", "libgraph", "libacl", "libop", "ASCEND", "CANN")


def check_plugins() -> None:
    """Import torch and its plug-ins, where one is installed that torch would import, and torch has
    not been imported.

    ConfigError, in one line, where a plug-in fails: a process in which torch itself has failed
    cannot import it again.
    """
    given = os.environ.get(AUTOLOAD, "1")
    plugins = entry_points(group=_GROUP) if given == "1" and "torch" not in sys.modules else ()
    if not plugins:
        return
    os.environ[AUTOLOAD] = "0"
    try:
        import torch  # noqa: F401
    finally:
        # a plug-in may look at it, and so do processes that are started from here
        os.environ[AUTOLOAD] = given
    for plugin in plugins:
        try:
            plugin.load()()
        except Exception as error:
            # a plug-in's own: a missing library, a version that does not fit
            raise ConfigError(_why(plugin.name, error)) from error


def _why(plugin: str, error: Exception) -> str:
    """Return one line: which plug-in fails, at what, and what to do."""
    first = str(error).strip().partition("\n")[0]
    what = (
        f"torch cannot be imported, since its plug-in {plugin} fails: {type(error).__name__}: "
        f"{first}"
    )
    return f"{what}; {remedy(plugin, error)}, or set {AUTOLOAD}=0 to compute without it"


def remedy(package: str, error: Exception) -> str:
    """Return what to do where ``package``, which needs CANN's libraries, cannot be imported."""
    if any(mark in str(error) for mark in _FROM_CANN):
        return "source CANN's set_env.sh"
    return f"mend {package}"
