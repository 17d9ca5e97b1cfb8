"""``siirl-dask plan`` describes a run as text, JSON or a drawing; it starts nothing and writes
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from siirl_dask.commands.planning.hosts import describe_hosts, links_as_data, place_workers
from siirl_dask.commands.planning.step_time import TimingOptions
from siirl_dask.config import Config, DevicePreference
from siirl_dask.coordinator import exists
from siirl_dask.driver.checks.number_type import (
    NumberType,
    expected_dtype,
    is_open,
    with_dtype,
    with_dtype_in_dag,
)
from siirl_dask.driver.checks.preflight import Checked, check, check_observation
from siirl_dask.driver.checks.prompt_rows import first_prompt
from siirl_dask.driver.phases import (
    Phases,
    assumed_columns,
    plan_phases,
    validation_of,
    worker_names,
)
from siirl_dask.driver.starts import find_starts
from siirl_dask.errors import ConfigError, counted
from siirl_dask.estimates.device_memory import Cards, cards_of, device_memory
from siirl_dask.estimates.memory import WorkerMemory, sizes_of
from siirl_dask.estimates.worker_devices import (
    describe_worker_devices,
    find_worker_devices,
    worker_devices_as_data,
)
from siirl_dask.planner import DAG, Hosts, Phase, Plan, TableSizes
from siirl_dask.planner.explain.device_memory import card_as_data, describe_card, summary
from siirl_dask.runs.folder import check_writable
from siirl_dask.views.plan import as_data, describe, draw
from siirl_dask.wording import readable_bytes, redacted, table, worker_ranges


def describe_run(
    config: Config,
    dag: DAG,
    validation: DAG | None,
    form: str = "text",
    hosts: Sequence[int] | None = None,
    devices: int | None = None,
    timing: TimingOptions | None = None,
) -> str:
    """Describe a run's training and validation plans, and the memory of a worker and of its
    accelerator.

    A plan shows the DAG, the workers' chains, and edges with their columns and estimated bytes;
    with ``hosts``, the number of workers on each, the roles on them and the bytes between them as
    well. ``devices`` is the number of accelerators of each host; None: one for each worker.
    ``timing`` asks for seconds of a step. UserError for all mistakes that a run would refuse, such
    as more memory than ``cluster.memory_limit``; but of accelerators that are too small it says so,
    and what to change. Where a run would start its workers on accelerators of this machine, it
    shows their links, NUMA nodes and CPUs.
    """
    if devices is not None and devices < 1:
        raise ConfigError(f"--devices {devices}: expected at least 1 accelerator on each host")
    times = None
    named = None
    if timing is not None:
        times = timing.resolve(config)
        named = timing.device
    planned = plan_checked(config, dag, validation, hosts=hosts, device=named)
    config = planned.config
    phases = planned.phases
    checked = planned.checked
    workers = planned.workers
    placed = planned.placed
    backends = check_observation(config, phases[Phase.TRAIN][0], is_plan=True)
    check_writable(config.run.url, write=False)
    notes = redacted([*planned.notes, *backends])
    warnings: list[str] = []
    if named is None and hosts is None:  # else the plan is for another machine
        warnings = redacted(checked.warnings)
    shown = _shown(config, phases)
    accelerator = device_memory(config)
    cards = cards_of(phases[Phase.TRAIN][0], checked.footprints, devices)
    seconds = None
    if times is not None:
        seconds = times.estimate(config, phases[Phase.TRAIN][0])
    worker_devices = None
    if placed is None:
        worker_devices = find_worker_devices(config.cluster, workers)
    there = all(exists(url) for url in config.data.urls)
    prompt = None
    if there:
        prompt = first_prompt(config, *phases[Phase.TRAIN])
    match form:
        case "json":
            plans = {
                phase: redacted(as_data(plan, sizes) | links_as_data(plan, sizes))
                for phase, (plan, sizes) in shown.items()
            }
            memory = [_memory_as_data(one) for one in checked.memory]
            device = {}
            if accelerator is not None:
                device = {"devices": _cards_as_data(accelerator, cards)}
            time = {}
            if seconds is not None:
                time = {"time": seconds.as_data()}
            shows = {}
            if prompt is not None:
                shows = {"first_prompt": asdict(prompt)}
            train, _ = phases[Phase.TRAIN]
            where = {}
            if worker_devices is not None:
                where = {"topology": worker_devices_as_data(worker_devices, train)}
            said = {"notes": notes, "warnings": warnings}
            parts = {"version": 1, **said, "phases": plans, "memory": memory}
            return json.dumps({**parts, **device, **time, **where, **shows}, indent=1)
        case "svg":
            return draw(shown)
    texts = [f"warning: {text}" for text in warnings]
    texts += [f"note: {note}" for note in notes]
    for phase, (plan, sizes) in shown.items():
        texts.append(f"== {phase} ==\n\n{describe(plan, sizes)}")
        texts += (
            [] if placed is None else [f"== hosts in {phase} ==\n\n{describe_hosts(plan, sizes)}"]
        )
    texts.append(_memory(config, checked.memory, workers, on_cpu=accelerator is None))
    if config.cluster.device is not DevicePreference.cpu and cards:
        texts.append(_devices(accelerator, cards))
    if prompt is not None:
        heading = (
            f"{counted(prompt.tokens, 'token')}, as the model sees "
            f"{'it' if prompt.tokens == 1 else 'them'}"
        )
        texts.append(f"== first prompt ==\n\n{heading}\n{prompt.text}")
        if prompt.remark:
            texts.append(f"note: {prompt.remark}")
    if worker_devices is not None:
        texts.append(
            f"== topology ==\n\n{describe_worker_devices(worker_devices, phases[Phase.TRAIN][0])}"
        )
    return "\n\n".join(texts if seconds is None else [*texts, seconds.text()])


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """A run that was planned and checked, of which nothing was started."""

    config: Config
    phases: Phases
    workers: Sequence[str]
    placed: Hosts | None
    """The host of each worker, where hosts were asked for."""
    checked: Checked
    notes: Sequence[str]


def plan_checked(
    config: Config,
    dag: DAG,
    validation: DAG | None,
    *,
    hosts: Sequence[int] | None = None,
    device: str | None = None,
) -> CheckedPlan:
    """Plan a run and check it as its start would, but for accelerators that are too small.

    ``hosts`` are numbers of workers on each, ``device`` the one that ``--on`` names. UserError for
    a run that cannot work.
    """
    validation = validation_of(config, dag, validation)
    starts = find_starts(config, (dag, validation))
    config, dag, validation = starts.with_bases(*starts.with_folders(config, dag, validation))
    dags = [dag] if validation is None else [dag, validation]
    expected: NumberType | None = None
    if is_open(config, dags):
        expected = expected_dtype(config.cluster, device=device)
        config = with_dtype(config, expected.dtype)
        dag = with_dtype_in_dag(dag, expected.dtype)
        validation = None if validation is None else with_dtype_in_dag(validation, expected.dtype)
    workers = worker_names(config)
    placed = None
    if hosts is not None:
        placed = place_workers(workers, hosts)
    phases = plan_phases(config, dag, validation, workers, placed, assume_columns=True)
    checked = check(config, phases, is_plan=True)
    notes = [*starts.notes, *_assumed(config), *checked.notes]
    if expected is not None:
        notes.append(expected.note)
    return CheckedPlan(config, phases, workers, placed, checked=checked, notes=notes)


def _shown(config: Config, phases: Phases) -> dict[str, tuple[Plan, TableSizes]]:
    """Return the plans to show, with their sizes; the test phase is the validation's plan on
    other data.
    """
    chosen = {phase: pair for phase, pair in phases.items() if phase is not Phase.TEST}
    return {
        phase: (plan, sizes_of(config, plan, source)) for phase, (plan, source) in chosen.items()
    }


def _assumed(config: Config) -> list[str]:
    """Return a note on the datasets that are not there yet; none where all are."""
    urls = dict.fromkeys([*config.data.urls, config.validation.url, config.validation.test_url])
    absent = [url for url in urls if url is not None and not exists(url)]
    if not absent:
        return []
    columns = ", ".join(f"{column.name}: {column.type}" for column in assumed_columns(config))
    note = (
        f"no dataset is at {', '.join(absent)} yet; assumed the columns that the config names "
        f"({columns})"
    )
    if not set(absent) <= set(config.data.urls):
        note += f", and {counted(config.data.batch_size, 'row')} to validate on"
    if config.data.prepare is None or set(absent).isdisjoint(config.data.urls):
        return [f"{note}; a run needs that data"]
    return [f"{note}; a run calls data.prepare={config.data.prepare} first"]


def _devices(memory: int | None, cards: Cards) -> str:
    if memory is not None:
        texts = [describe_card(label, memory, workers) for label, workers in cards.items()]
        return "== device memory ==\n\n" + "\n\n".join(texts)
    groups = {}
    for label, workers in cards.items():
        roles = next(iter(workers.values()))
        groups[label.partition(" ")[2]] = (", ".join(roles), roles)
    title = (
        "What a worker needs of accelerators of several sizes: the run fits, with the number of "
        "rows that can be generated at once, or more is needed than there is. "
        "--device-memory 80GB shows the parts, and what to change"
    )
    return f"== device memory ==\n\n{title}\n{summary(groups)}"


def _cards_as_data(memory: int, cards: Cards) -> list[dict[str, Any]]:
    return [card_as_data(memory, workers) for workers in cards.values()]


def _memory(
    config: Config,
    groups: Sequence[WorkerMemory],
    workers: Sequence[str],
    *,
    on_cpu: bool,
) -> str:
    limit = "no cluster.memory_limit"
    if config.cluster.memory_limit is not None:
        limit = config.cluster.memory_limit
    rows = [
        (
            worker_ranges(one.workers, tuple(workers)),
            ", ".join(one.roles) or "-",
            readable_bytes(one.total),
            one.text(),
        )
        for one in groups
    ]
    where = "of the host for a worker with an accelerator"
    if on_cpu:
        where = "of a worker on a CPU"
    title = f"Memory {where}, at most, without texts and caches of transformers ({limit})"
    return f"== memory ==\n\n{title}\n{table(('workers', 'roles', 'in all', 'of which'), rows)}"


def _memory_as_data(memory: WorkerMemory) -> dict[str, Any]:
    return {
        "workers": list(memory.workers),
        "roles": dict(memory.roles),
        "process": memory.process,
        "computing": memory.computing,
        "loading": memory.loading,
        "checkpoint": memory.checkpoint,
        "tables": memory.tables,
        "largest": memory.largest,
        "moving": memory.moving,
        "unknown": list(memory.unknown),
        "total": memory.total,
    }
