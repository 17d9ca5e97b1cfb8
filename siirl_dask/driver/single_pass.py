"""A DAG gone through once over a dataset, by the workers of a run: no training, no checkpoints."""

from __future__ import annotations

from siirl_dask.cluster import connect, members
from siirl_dask.config import Config
from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.coordinator.messages import Turn
from siirl_dask.driver import Done, Driver
from siirl_dask.engines import refuse_wrong_engines
from siirl_dask.errors import Interrupted
from siirl_dask.lengths import refuse_wrong_lengths
from siirl_dask.memory import refuse_what_cannot_fit
from siirl_dask.observe import Progress, values
from siirl_dask.phases import Phases
from siirl_dask.planner import DAG, compile_chains
from siirl_dask.worker.parcel import pack
from siirl_dask.worker.runspec import RunSpec

_PHASE = "train"  # the one whose roles a worker builds


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
    refuse_wrong_lengths(config, planned)
    refuse_wrong_engines(config, planned[_PHASE][0])
    refuse_what_cannot_fit(config, planned)
    try:
        progress.note(f"starting {config.cluster.workers} workers")
        with connect(config) as client:
            found = members(client, config.cluster.workers)
            spec = RunSpec.of(config, found, phases(list(found)))
            progress.note(f"dashboard  {client.dashboard_link}")
            driver = Driver(client, spec, 1, config.cluster.stall_timeout, _no_checkpoint)
            with driver.at_work(config.cluster):
                (done,) = (done for done in driver.run(iter([Turn(_PHASE, step, 0)])) if isinstance(done, Done))
            return values(done.metrics)
    except KeyboardInterrupt:
        raise Interrupted("stopped by the user; what was written is whole") from None
    finally:
        progress.close()


def _no_checkpoint(step: int) -> str:
    raise AssertionError(f"a pass has no checkpoint, and was asked for that of step {step}")
