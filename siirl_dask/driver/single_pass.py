"""Runs a DAG without training and checkpoints: once over a dataset, or over rows that a run stored."""

from __future__ import annotations

from collections.abc import Sequence

from siirl_storage import set_retry_seconds

from siirl_dask.config import Config
from siirl_dask.coordinator.source import Dataset, Source, dataset_schema, opened, training_dataset
from siirl_dask.driver.cluster import connect
from siirl_dask.driver.driver import Driver
from siirl_dask.driver.phases import Phases
from siirl_dask.driver.preflight import check
from siirl_dask.driver.processes import hosts_of, members
from siirl_dask.driver.prompts import check_prompts
from siirl_dask.driver.reachable import check_reachable
from siirl_dask.driver.under_way import Done
from siirl_dask.errors import Interrupted, SiirlError
from siirl_dask.models.broken_imports import hide
from siirl_dask.observe import Progress, values
from siirl_dask.planner import DAG, NO_DATA, Hosts, Iteration, Phase, compile_chains
from siirl_dask.runs.folder import check_writable
from siirl_dask.schema import Schema
from siirl_dask.worker.run_spec import RunSpec


def one_pass(config: Config, dag: DAG, source: Source, step: int) -> dict[str, float | None]:
    """Run every worker through ``dag`` once, over all of ``source``, and return the logged metrics.

    Tables that the nodes save lie below ``run.url`` under ``step``, which is also part of the samples' seeds.
    UserError before anything starts; Interrupted on Ctrl-C.
    """
    dataset = opened(source)
    (done,) = _passes(config, dag, dataset, dataset_schema(dataset), [step])
    check_prompts(done, config.data.max_prompt_length)
    return values(done.metrics)


def stored_passes(config: Config, dag: DAG, steps: Sequence[int]) -> None:
    """Run every worker through ``dag`` on the rows that the run at ``run.url`` stored at each of ``steps``.

    ``dag`` begins with a node that stands for stored rows (``planner.run_again``). Errors as in ``one_pass``.
    """
    _passes(config, dag, training_dataset(config.data, config.run.seed), NO_DATA, steps)


def _passes(config: Config, dag: DAG, dataset: Dataset, schema: Schema, steps: Sequence[int]) -> list[Done]:
    hide()
    set_retry_seconds(config.storage.retry_seconds)
    progress = Progress(len(steps), enabled=config.observe.progress)

    def phases(workers: list[str], hosts: Hosts | None = None) -> Phases:
        return {Phase.EVALUATION: (compile_chains(dag, workers, schema, config.cluster.placement, hosts), dataset)}

    planned = phases([str(worker) for worker in range(config.cluster.workers)])
    checked = check(config, planned)
    check_writable(config.run.url)
    try:
        progress.note(f"starting {config.cluster.workers} workers")
        with connect(config, progress) as client:
            named = members(client, config.cluster.workers)
            actual = phases(list(named), hosts_of(named))
            check_reachable(client, named, actual, checked.reads, config.run.url)
            spec = RunSpec.of(config, named, actual, footprints=checked.footprints)
            progress.note(f"dashboard  {client.dashboard_link}")
            driver = Driver(client, spec, 1, config.cluster.stall_timeout, _no_checkpoint)
            with driver.at_work(config.cluster, SiirlError.announce):
                iterations = (Iteration(Phase.EVALUATION, step, number) for number, step in enumerate(steps))
                return [event for event in driver.run(iterations) if isinstance(event, Done)]
    except KeyboardInterrupt:
        raise Interrupted("stopped by the user; what was written is whole") from None
    finally:
        progress.close()


def _no_checkpoint(step: int) -> str:
    raise AssertionError(f"a pass has no checkpoint, and was asked for that of step {step}")
