"""Reports versions and settings of a process, for comparison before a run starts. Imports the
standard library alone.

The driver calls ``report`` on the scheduler and on every worker: one that lacks a package must be
able to say so.
"""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

from siirl_dask import __version__
from siirl_dask.devices import (
    ALLOCATOR_VARIABLES,
    BACKEND_PREFIXES,
    ENGINE_PACKAGES,
    ENGINE_VARIABLES,
    VISIBLE,
)

ALIKE = ("dask", "distributed", "cloudpickle", "pyarrow", "torch")
"""Packages whose messages or numbers go from process to process: all must have the same version
of them."""
SIMILAR = (
    "transformers",
    *ENGINE_PACKAGES,
    "numpy",
    "msgpack",
    "fsspec",
    "safetensors",
    "tokenizers",
)
"""Packages of which another version is worth a warning."""
_VARIABLES = (
    "OMP_NUM_THREADS",  # also the order in which sums are taken
    "PYTHONHASHSEED",
    "HF_HUB_OFFLINE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    *ALLOCATOR_VARIABLES,
    *ENGINE_VARIABLES,
)
_PREFIXES = BACKEND_PREFIXES  # with other settings than its peers a worker may never answer
# of names whose values may differ from host to host
_HOST_SUFFIXES = ("_IFNAME", "_FAMILY", "_HCA", "_FILE", "_DIR")


class Report(TypedDict):
    """A process's answer, in plain values, which another version of this package can read too."""

    host: str
    """The host's own name."""
    versions: dict[str, str | None]
    """Versions by package, ``python`` among them; None for one that is not installed."""
    code: str
    """Digest of this package's files."""
    variables: dict[str, str]
    """Environment variables that change results or how processes reach each other."""
    devices: str
    """The accelerators that a launcher left visible, as it named them; empty where it named
    none."""


def report() -> Report:
    """Return this process's versions and settings."""
    return Report(
        host=socket.gethostname(),
        versions={
            "python": ".".join(map(str, sys.version_info[:2])),
            "siirl_dask": __version__,
            **{name: _version(name) for name in (*ALIKE, *SIMILAR)},
        },
        code=code_digest(),
        variables={name: value for name, value in os.environ.items() if _is_compared(name)},
        devices=next((os.environ[name] for name in VISIBLE if name in os.environ), ""),
    )


@cache
def code_digest() -> str:
    """Return a digest of the files of siirl_dask and siirl_storage, by their places in the
    package.
    """
    digest = sha256()
    for package in ("siirl_dask", "siirl_storage"):
        spec = find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            continue
        for folder in spec.submodule_search_locations:
            files = {
                file.relative_to(folder).as_posix(): file for file in Path(folder).rglob("*.py")
            }
            for name in sorted(files):
                digest.update(
                    f"{package}/{name}".encode() + b"\0" + files[name].read_bytes() + b"\0"
                )
    return digest.hexdigest()[:12]


@cache
def _version(name: str) -> str | None:
    try:
        # 2.13.0+cpu beside 2.13.0+cu126: a login node and its GPUs
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def _is_compared(name: str) -> bool:
    if name in _VARIABLES:
        return True
    if name.endswith(_HOST_SUFFIXES):
        return False
    return name.startswith(_PREFIXES)
