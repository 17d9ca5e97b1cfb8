"""A DAG gone through once over a dataset, by the workers of a run: no training, no checkpoints."""

from __future__ import annotations

import uuid

from siirl_storage.files import absolute

from siirl_dask.cluster import connect, members
from siirl_dask.config import Config
from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.coordinator.messages import Turn
from siirl_dask.driver import Done, Driver
from siirl_dask.errors import Interrupted
from siirl_dask.memory import refuse_what_cannot_fit
from siirl_dask.observe import Progress, values
from siirl_dask.phases import Phases
from siirl_dask.planner import DAG, compile_chains
from siirl_dask.worker.dag_worker import RunSpec
from siirl_dask.worker.dataplane import DataSettings
from siirl_dask.worker.parcel import pack

_PHASE = "train"  # the one whose roles a worker builds
_CLOSE_TIMEOUT = 30.0  # seconds for every worker to let go of its model


def one_pass(config: Config, dag: DAG, source: Source, step: int) -> dict[str, float | None]:
    """What the DAG's nodes logged. Tables that they keep are below ``run.url``, as those of ``step``, which is part of
    the samples' seeds. UserError before anything starts; Interrupted on Ctrl-C.
    """
    progress = Progress(1, enabled=config.observe.progress)
    schema = source_schema(open_source(source).schema, source)

    def phases(workers: list[str]) -> Phases:
        return {_PHASE: (compile_chains(dag, workers, schema, config.cluster.placement), source)}

    planned = phases([str(worker) for worker in range(config.cluster.workers)])
    pack(planned)
    refuse_what_cannot_fit(config, planned)
    try:
        progress.note(f"starting {config.cluster.workers} workers")
        with connect(config) as client:
            found = members(client, config.cluster.workers)
            spec = RunSpec(
                run=uuid.uuid4().hex[:12],
                url=absolute(config.run.url),  # a worker of an existing cluster may run in another folder
                seed=config.run.seed,
                members=found,
                parcel=pack(phases(list(found))),
                threads=config.cluster.threads,
                data=DataSettings.of(config),
            )
            progress.note(f"dashboard  {client.dashboard_link}")
            driver = Driver(client, spec, 1, config.cluster.stall_timeout, _no_checkpoint)
            return _drive(driver, config, step)
    except KeyboardInterrupt:
        raise Interrupted("stopped by the user; what was written is whole") from None
    finally:
        progress.close()


def _drive(driver: Driver, config: Config, step: int) -> dict[str, float | None]:
    try:
        driver.start(config.cluster.start_timeout)
        (done,) = (done for done in driver.run(iter([Turn(_PHASE, step, 0)])) if isinstance(done, Done))
        driver.finish(_CLOSE_TIMEOUT)
    except BaseException as error:
        driver.abort(f"the evaluation was stopped: {type(error).__name__}")
        raise
    finally:
        if config.cluster.address or config.cluster.scheduler_file:
            driver.close()  # a cluster that was started for this ends with it
    return values(done.metrics)


def _no_checkpoint(step: int) -> str:
    raise AssertionError(f"a pass has no checkpoint, and was asked for that of step {step}")
