"""Runs a DAG once over a dataset, without training and checkpoints."""

from __future__ import annotations

from siirl_storage import set_retry_seconds

from siirl_dask.config import Config
from siirl_dask.coordinator.source import Source, dataset_schema, opened
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
from siirl_dask.planner import DAG, Hosts, Iteration, Phase, compile_chains
from siirl_dask.runs.folder import check_writable
from siirl_dask.worker.run_spec import RunSpec


def one_pass(config: Config, dag: DAG, source: Source, step: int) -> dict[str, float | None]:
    """Run every worker through ``dag`` once, over all of ``source``, and return the logged metrics.

    Tables that the nodes save lie below ``run.url`` under ``step``, which is also part of the samples' seeds.
    UserError before anything starts; Interrupted on Ctrl-C.
    """
    hide()
    set_retry_seconds(config.storage.retry_seconds)
    progress = Progress(1, enabled=config.observe.progress)
    dataset = opened(source)
    schema = dataset_schema(dataset)

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
            spec = RunSpec.of(config, named, actual)
            progress.note(f"dashboard  {client.dashboard_link}")
            driver = Driver(client, spec, 1, config.cluster.stall_timeout, _no_checkpoint)
            with driver.at_work(config.cluster, SiirlError.announce):
                once = iter([Iteration(Phase.EVALUATION, step, 0)])
                (done,) = (event for event in driver.run(once) if isinstance(event, Done))
            check_prompts(done, config.data.max_prompt_length)
            return values(done.metrics)
    except KeyboardInterrupt:
        raise Interrupted("stopped by the user; what was written is whole") from None
    finally:
        progress.close()


def _no_checkpoint(step: int) -> str:
    raise AssertionError(f"a pass has no checkpoint, and was asked for that of step {step}")
