"""Reads a cluster spec: a YAML file that names a class of Dask's deployment projects and its
arguments.

class: dask_jobqueue.SLURMCluster
kwargs: {queue: gpu, cores: 1, memory: 64GB, account: "${oc.env:ACCOUNT}"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from siirl_dask.config.file.layers import first_line, shipped_files
from siirl_dask.errors import ConfigError, did_you_mean

_KEYS = ("class", "kwargs")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A class by its full name, and the arguments to call it with."""

    path: str
    class_name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def read_cluster_spec(path: str) -> ClusterSpec:
    """Return the spec in a YAML file. ConfigError, naming ``cluster.spec``, for a file of
    another form.
    """
    where = f"cluster.spec={path!r}"
    try:
        loaded: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError as error:
        known = shipped_files("clusters").get(Path(path).name)
        raise ConfigError(
            f"{where}: no such file{f'; copy {known} and adapt it' if known else ''}"
        ) from error
    except (OSError, yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{where}: expected YAML with class and kwargs: {first_line(error)}"
        ) from error
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{where}: expected YAML with class and kwargs, and it holds a {type(loaded).__name__}"
        )
    unknown = [str(key) for key in loaded if key not in _KEYS]
    if unknown:
        hint = did_you_mean(unknown[0], _KEYS)
        raise ConfigError(f"{where}: unknown key {unknown[0]!r} (keys: {', '.join(_KEYS)}){hint}")
    name = loaded.get("class")
    kwargs = loaded.get("kwargs")
    if not kwargs:
        kwargs = {}
    if (
        not isinstance(name, str)
        or not all(part.isidentifier() for part in name.split("."))
        or "." not in name
    ):
        raise ConfigError(
            f"{where}: class={name!r}: expected a class by its module, as "
            "dask_jobqueue.SLURMCluster"
        )
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise ConfigError(
            f"{where}: kwargs={kwargs!r}: expected a mapping of the class's arguments"
        )
    return ClusterSpec(path, name, kwargs)
