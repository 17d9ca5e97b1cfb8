"""One run, from a configuration and a DAG to files under ``run.url`` and a summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise

from siirl_dask.adapters import refuse_wrong_adapters
from siirl_dask.checkpoints import Checkpoints, State
from siirl_dask.cluster import connect, members
from siirl_dask.config import Config, Engine
from siirl_dask.coordinator.messages import Turn
from siirl_dask.driver import CHECKPOINT, Driver, Written
from siirl_dask.engines import refuse_wrong_engines
from siirl_dask.errors import ConfigError, Interrupted
from siirl_dask.layouts import refuse_wrong_layouts
from siirl_dask.lengths import refuse_wrong_lengths
from siirl_dask.memory import refuse_what_cannot_fit
from siirl_dask.observe import Status, Summary
from siirl_dask.phases import PREPARED, Phases, plan_phases, prepare, worker_names
from siirl_dask.planner import DAG, compile_chains
from siirl_dask.resume import WEIGHTS, Beginning, find_beginning, weights_dag
from siirl_dask.rollout import choose_engine
from siirl_dask.runfolder import Description, describe, remove_run, remove_steps, remove_summary, tables_of
from siirl_dask.runlog import RunLog
from siirl_dask.schema import IDENTITY, TYPES, Schema, make_schema
from siirl_dask.training.checkpoint import DistributedCheckpoint
from siirl_dask.transfer import refuse_wrong_transfers
from siirl_dask.worker.parcel import pack
from siirl_dask.worker.runspec import RunSpec


def run(
    config: Config, dag: DAG, validation: DAG | None = None, *, fresh: bool = False, force: bool = False
) -> Summary:
    """Train ``dag`` as ``config`` says; ``validation`` runs over the validation data in between.

    A run that stopped is gone on with from its newest checkpoint. ``fresh``: begin anew, what it left is removed;
    ``force``: go on though the configuration or the DAG is another one.

    Everything is under ``run.url`` when this returns, ``summary.json`` also when it raises. UserError before anything
    starts; RunError when the run could not go on; Interrupted on Ctrl-C.
    """
    beginning = find_beginning(config, dag, fresh=fresh, force=force)
    assumed = PREPARED if config.data.prepare else None
    planned = _plan(config, dag, validation, worker_names(config), beginning, assumed)
    refuse_wrong_transfers(config, planned["train"][0])
    pack(planned)
    prepare(config)
    refuse_wrong_lengths(config, planned)  # of datasets that are there by now
    refuse_wrong_adapters(config, dag)  # of a model that is there by now, as the next two
    refuse_wrong_engines(config, planned["train"][0])
    refuse_wrong_layouts(config, planned["train"][0])
    refuse_what_cannot_fit(config, planned)
    log = RunLog(config, beginning)
    try:
        log.progress.note(f"starting {config.cluster.workers} workers")
        if beginning.note:
            log.progress.note(beginning.note)
        if config.rollout.engine is Engine.auto:
            log.progress.note(f"rollout.engine=auto takes {choose_engine(Engine.auto)}")
        with connect(config) as client:
            found = members(client, config.cluster.workers)
            phases = _plan(config, dag, validation, list(found), beginning)
            store = DistributedCheckpoint(config.checkpoint.asynchronous)
            spec = RunSpec.of(config, found, phases, store, beginning.restored)
            kept = Checkpoints(spec.url, spec.run, config.checkpoint.keep, config.checkpoint.keep_best)
            lookahead = config.run.lookahead + (config.rollout.ahead or 0)
            driver = Driver(client, spec, lookahead, config.cluster.stall_timeout, kept.claim)
            write = partial(_write_description, config, dag, validation, beginning)
            _drive(driver, log, client.dashboard_link, list(phases), write, partial(_commit, kept, log, dag))
    except KeyboardInterrupt:
        message = f"stopped by the user after {log.steps} of {config.run.steps} steps; what was written is whole"
        log.end(Status.INTERRUPTED, message)
        raise Interrupted(message) from None
    except BaseException as error:
        log.end(Status.FAILED, f"{type(error).__name__}: {error}")
        raise
    return log.end(Status.COMPLETE, None)


def _drive(
    driver: Driver,
    log: RunLog,
    dashboard: str,
    phases: Sequence[str],
    write_description: Callable[[], None],
    commit: Callable[[Written], None],
) -> None:
    config = log.config
    with driver.at_work(config.cluster):
        write_description()
        log.begin(dashboard)
        before = driver.traffic()
        for passed in driver.run(settling(turns(config, phases, log.beginning.done))):
            if isinstance(passed, Written):
                commit(passed)
            else:
                log.record(passed)
        after = driver.traffic()
        log.scheduler_bytes = None if before is None or after is None else after - before


def turns(config: Config, phases: Sequence[str], done: int = 0) -> Iterator[Turn]:
    """Every turn of a run in order: validation before the first step, every so often, and last; a checkpoint every so
    often, and last; the test at the end. After ``done`` steps: the weights to the engines, and what is left.
    """
    sequence = iter(range(2**62))
    if WEIGHTS in phases:
        yield Turn(WEIGHTS, done, next(sequence))
    if "validation" in phases and not done:
        yield Turn("validation", 0, next(sequence))
    steps, every = config.run.steps, config.checkpoint.every
    for step in range(done + 1, steps + 1):
        yield Turn("train", step, next(sequence))
        if "validation" in phases and (step % config.validation.every == 0 or step == steps):
            yield Turn("validation", step, next(sequence))
        if every and (step % every == 0 or step == steps):
            yield Turn(CHECKPOINT, step, next(sequence))
    if "test" in phases:
        yield Turn("test", steps, next(sequence))


def settling(turns: Iterator[Turn]) -> Iterator[Turn]:
    """Nodes that are behind catch up before anything but training comes, so that all of it is of its step."""
    for turn, following in pairwise(chain(turns, [None])):
        assert turn is not None
        settles = turn.phase == "train" and (following is None or following.phase != "train")
        yield replace(turn, settles=settles)


def _plan(
    config: Config,
    dag: DAG,
    validation: DAG | None,
    workers: Sequence[str],
    beginning: Beginning,
    assumed: Schema | None = None,
) -> Phases:
    """The phases of the run, and where it goes on, that of the weights."""
    phases = plan_phases(config, dag, validation, workers, assumed)
    if (best := config.checkpoint.keep_best) and best.partition("/")[0] not in phases:
        raise ConfigError(f"checkpoint.keep_best={best!r}: there is no validation; give validation.url")
    if beginning.done and (brings := weights_dag(dag)) is not None:
        identity = make_schema({name: TYPES[name] for name in IDENTITY})
        plan = compile_chains(brings, workers, identity, config.cluster.placement)
        phases[WEIGHTS] = (plan, phases["train"][1])
    return phases


def _write_description(config: Config, dag: DAG, validation: DAG | None, beginning: Beginning) -> None:
    """After what an earlier start left and does not count any more is gone."""
    url, tables = config.run.url, tables_of([dag, validation])
    if beginning.fresh:
        remove_run(url, tables)
    elif beginning.again:
        remove_steps(url, tables, beginning.done)
        remove_summary(url)
    describe(config, dag, again=beginning.again)


def _commit(kept: Checkpoints, log: RunLog, dag: DAG, written: Written) -> None:
    step, digest = written.turn.step, Description.of(log.config, dag).digest()
    kept.commit(written.url, State.of(step, written.saved, metrics=log.metrics_of(step), digest=digest))
