"""Chooses the number type that ``model.dtype=auto`` stands for in a run: one for all its roles and
workers.

Engine and trainer have to compute in one type, and a run's results depend on it. So it is decided
before anything is built, and the run records it: bfloat16 where the workers see accelerators that
all compute in it, float32 elsewhere. Before there are workers to ask, the type is expected from
this machine and the configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from siirl_dask.config import ClusterConfig, Config, DevicePreference, Dtype, ModelConfig
from siirl_dask.driver.checks.model_options import with_models, with_models_in_dag
from siirl_dask.planner import DAG
from siirl_dask.worker.hardware.accelerators import Accelerators, accelerators_here

if TYPE_CHECKING:
    from distributed import Client

_ANSWER_TIMEOUT = 60.0  # seconds for workers to load torch and look at their accelerators
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class NumberType:
    """A number type that ``model.dtype=auto`` stands for."""

    dtype: Dtype
    why: str
    certain: bool = True
    """False where only the workers know."""

    @property
    def note(self) -> str:
        """Return a sentence for the user."""
        verb = "is expected to take"
        if self.certain:
            verb = "takes"
        return f"model.dtype=auto {verb} {self.dtype}: {self.why}"


@dataclass(frozen=True, slots=True)
class OpenTypes:
    """A run with models of type ``auto``, and the type that its workers are expected to decide."""

    config: Config
    dags: tuple[DAG, ...]
    expected: NumberType

    def decide(self, dtype: Dtype) -> tuple[Config, list[DAG]]:
        """Return the configuration and the DAGs with ``dtype`` in place of ``auto``."""
        return with_dtype(self.config, dtype), [with_dtype_in_dag(dag, dtype) for dag in self.dags]

    def on_workers(self, client: Client) -> NumberType:
        """Return the type that the workers decide, where this machine could not."""
        if self.expected.certain:
            return self.expected
        return workers_dtype(client, self.expected)


def is_open(config: Config, dags: Iterable[DAG] = ()) -> bool:
    """Return whether a model of the configuration or of a DAG has the type ``auto``."""
    if with_dtype(config, Dtype.float32) is not config:
        return True
    return any(with_dtype_in_dag(dag, Dtype.float32) is not dag for dag in dags)


def expected_dtype(
    cluster: ClusterConfig, recorded: Dtype | None = None, device: str | None = None
) -> NumberType:
    """Return the type that ``auto`` stands for, as far as is known without workers.

    ``recorded`` is the type that the run in the folder computes in, which stays. ``device`` is a
    device of ``estimates/speeds.py`` for which a plan is made.
    """
    if recorded is not None and recorded is not Dtype.auto:
        return NumberType(recorded, "the run began with it")
    if device is not None:
        dtype = Dtype.float32 if device == "cpu" else Dtype.bfloat16
        return NumberType(dtype, f"the plan is for {device}")
    if cluster.device is DevicePreference.cpu:
        return NumberType(Dtype.float32, "cluster.device=cpu")
    if cluster.device_memory is not None:
        why = f"cluster.device_memory={cluster.device_memory} is an accelerator's"
        return NumberType(Dtype.bfloat16, why, certain=False)
    if not _is_here(cluster):
        return NumberType(
            Dtype.bfloat16, "the cluster's workers are elsewhere, with accelerators", certain=False
        )
    from siirl_dask.devices import DeviceKind, accelerator

    if accelerator.kind_here() is DeviceKind.CPU:
        # behind a port of this machine there may be another one
        return NumberType(
            Dtype.float32, "this machine has no accelerator", certain=not cluster.exists
        )
    return NumberType(Dtype.bfloat16, "this machine has accelerators", certain=False)


def workers_dtype(client: Client, expected: NumberType) -> NumberType:
    """Return the type that ``auto`` stands for on the workers of a cluster; ``expected`` if none
    answers in time.

    The run refuses later, with a reason, a worker that does not answer.
    """
    from siirl_dask.driver.clusters.calls import complete  # Dask, which `plan` need not wait for

    expected = dataclasses.replace(expected, certain=True)
    try:
        answers = complete(
            client,
            lambda: client.run(accelerators_here, on_error="return"),
            timeout=_ANSWER_TIMEOUT,
        )
    except TimeoutError:
        return expected
    reports = [answer for answer in answers.values() if isinstance(answer, Mapping)]
    if not reports:
        return expected
    found: Accelerators = {}
    for report in reports:
        for name, has_bfloat16 in report.items():
            if name not in found or not has_bfloat16:
                found[name] = has_bfloat16
    return _of_accelerators(found)


def _of_accelerators(found: Accelerators) -> NumberType:
    if not found:
        return NumberType(Dtype.float32, "the workers see no accelerator")
    unable = [name for name, has_bfloat16 in found.items() if not has_bfloat16]
    if unable:
        return NumberType(
            Dtype.float32, f"{', '.join(sorted(unable))} of the workers has no bfloat16"
        )
    return NumberType(Dtype.bfloat16, f"the workers have {', '.join(sorted(found))}")


def with_dtype(config: Config, dtype: Dtype) -> Config:
    """Return the configuration with ``dtype`` in place of ``auto`` for every model."""
    return with_models(config, partial(_with_type, dtype))


def with_dtype_in_dag(dag: DAG, dtype: Dtype) -> DAG:
    """Return the DAG with ``dtype`` in place of ``auto`` in the options of its roles and nodes;
    itself without any.
    """
    return with_models_in_dag(dag, partial(_with_type, dtype))


def _with_type(dtype: Dtype, value: Any) -> Any:
    if isinstance(value, ModelConfig) and value.dtype is Dtype.auto:
        return dataclasses.replace(value, dtype=dtype)
    return value


def _is_here(cluster: ClusterConfig) -> bool:
    """Return whether the workers are on this machine, as far as the configuration says."""
    if cluster.spec or cluster.scheduler_file:
        return False
    if cluster.address is None:
        return True
    _, _, place = cluster.address.rpartition("://")
    return urlsplit(f"//{place}").hostname in _LOOPBACK
