"""``siirl-dask plan --analyze RUN``: the plan of a run beside what the run has measured; it
starts nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from textwrap import fill
from typing import Any

from siirl_dask.commands.planning.step_time import TimingOptions
from siirl_dask.config import Config
from siirl_dask.driver.checks.preflight import check
from siirl_dask.driver.phases import plan_phases, worker_names
from siirl_dask.errors import ConfigError, DataError, UserError, counted
from siirl_dask.estimates.analysis import Analysis, Compared, analyze, mean_lengths
from siirl_dask.estimates.memory import WorkerMemory, sizes_of
from siirl_dask.observe import read_metrics
from siirl_dask.observe.trace.step_averages import Measured, measure
from siirl_dask.planner import Phase, dag_from_spec
from siirl_dask.planner.spec.ecosystems import names_package
from siirl_dask.runs.reader import open_run
from siirl_dask.runs.trace import read_trace
from siirl_dask.views.charts.figures import duration
from siirl_dask.wording import readable_bytes, redacted, table, worker_ranges

_BYTES = 2**22  # of the trace
_PARTS = 128  # of the trace
_GAIN = 0.98  # of the measured step: a smaller gain is no news
_SHOWN = 3  # splits
_MARK = "!"
_LINE = 120
# any option that is a function may be spelled by its name alone
_FUNCTION = re.compile(r":\s*\w+\s*\Z")
_OWN = re.compile(r"siirl_dask(\.\w+)*:\w+", re.ASCII)
_MARKED = (
    "seconds and bytes that differ from their estimates by half as much again (bytes: above them "
    "alone, since rows that stay on their worker bring none), rows that differ by more than 1 %, "
    "and memory above its bound. '-': not measured, or not estimated."
)


def analyze_run(url: str, form: str, timing: TimingOptions, *, trust: bool = False) -> str:
    """Return the text, or the JSON, of a run's plan and measurements.

    To plan a DAG its functions are imported: those of other packages and files only with ``trust``.

    ConfigError without a run or for a DAG that cannot be planned here, DataError without a trace of
    a training step.
    """
    if form == "svg":
        raise ConfigError(
            "--format svg: expected text or json with --analyze; siirl-dask report draws a run's "
            "DAG"
        )
    run = open_run(url)
    config = run.config
    if not trust and (named := sorted(_foreign([run.dag, _engines_and_backends(config)]))):
        more = ""
        if len(named) > 1:
            more = f" and {len(named) - 1} more"
        raise ConfigError(
            f"run {url!r} names code that is not of siirl_dask: {named[0]!r}{more}. To plan it "
            "that code is imported and runs here, whoever wrote it: give --trust if you know it, "
            "or leave --analyze out; report and trace show what was measured without it"
        )
    measured = _measured(url)
    notes = [_of_steps(measured)]
    if len(measured.workers) != config.cluster.workers:
        config, note = _on_as_many(config, len(measured.workers))
        notes.append(note)
    phases = plan_phases(
        config, dag_from_spec(**run.dag), None, worker_names(config), assume_columns=True
    )
    plan, source = phases[Phase.TRAIN]
    memory: Sequence[WorkerMemory] = ()
    try:
        memory = check(config, phases, is_plan=True).memory
    except UserError as error:  # this machine may lack what the run's had
        notes.append(f"memory is not estimated: {error}")
    records = [
        one
        for one in read_metrics(url)
        if one["phase"] == Phase.TRAIN and one["step"] in measured.steps
    ]
    lengths = mean_lengths(records, config.rollout.max_response_length)
    resolved = timing.resolve(config)
    speed = None
    if resolved is not None:
        speed = resolved.speed
    if resolved is not None and (timing.tokens is not None or lengths is None):
        lengths = resolved.lengths
    found = analyze(
        config,
        plan,
        sizes=sizes_of(config, plan, source),
        memory=memory,
        measured=measured,
        records=records,
        speed=speed,
        lengths=lengths,
    )
    if form == "json":
        return json.dumps(
            {"version": 1, "run": redacted(url), "notes": redacted(notes), **_as_data(found)},
            indent=1,
        )
    return _text(config, found, redacted(notes), None if speed is None else speed.name)


def _engines_and_backends(config: Config) -> list[object]:
    """Return what a configuration names as engines and as backends of trainers, for roles whose
    options do not.
    """
    agents = config.agents.values()
    engines = [rollout.engine for rollout in (config.rollout, *(agent.rollout for agent in agents))]
    trainers = [config.trainer, config.critic, *(agent.trainer for agent in agents)]
    return [*engines, *(trainer.backend for trainer in trainers)]


def _foreign(spec: object) -> set[str]:
    """Return the texts in a recorded DAG that name functions, or may, which are not of
    siirl_dask.
    """
    match spec:
        case Mapping():
            return {name for value in spec.values() for name in _foreign(value)}
        case list():
            return {name for value in spec for name in _foreign(value)}
        case str() if _FUNCTION.search(spec) and not _OWN.fullmatch(spec):
            return {spec}
        # an environment's name may bring a package, or a file in its options
        case str() if names_package(spec):
            return {spec}
    return set()


def _measured(url: str) -> Measured:
    trace = read_trace(url, most_bytes=_BYTES, most_parts=_PARTS)
    # the first one compiles, and fills caches
    later = [span for span in trace.spans if span.step > 1]
    measured = measure(later)
    if measured is None:
        measured = measure(trace.spans)
    if measured is None:
        raise DataError(f"{url!r}: its trace has no training step (it has: {trace.steps})")
    return measured


def _of_steps(measured: Measured) -> str:
    first = measured.steps[0]
    last = measured.steps[-1]
    if first == last:
        return f"measured in step {first}"
    return f"measured in {len(measured.steps)} steps, {first} to {last}"


def _on_as_many(config: Config, workers: int) -> tuple[Config, str]:
    """Return the configuration for as many workers as the trace has, where no placement forbids
    it.
    """
    said = (
        f"the trace has {counted(workers, 'worker')}, and cluster.workers={config.cluster.workers}"
    )
    if config.cluster.placement:
        return (
            config,
            f"{said}: the plan is that of the configuration, and numbers may not belong together",
        )
    return replace(
        config, cluster=replace(config.cluster, workers=workers)
    ), f"{said}: the plan is for {workers}"


def _text(config: Config, found: Analysis, notes: Sequence[str], device: str | None) -> str:
    return "\n\n".join(
        [
            "\n".join(f"note: {note}" for note in notes),
            f"== edges ==\n\n{_edges(found)}",
            f"== nodes ==\n\n{_nodes(found, device)}",
            f"== memory ==\n\n{_memory(found)}",
            f"== another split of the workers ==\n\n{_splits(config, found, device)}",
            fill(f"{_MARK} marks {_MARKED}", _LINE),
        ]
    )


def _edges(found: Analysis) -> str:
    lengths = found.lengths
    mean = ""
    if lengths is not None:
        mean = f" of {lengths.prompt:.0f} + {lengths.response:.0f} tokens"
    title = (
        f"In an average step. Bytes: at most; for rows{mean}, as if each row moved; and what came "
        "from other workers"
    )
    rows = []
    for edge in found.edges:
        unknown = ""
        if edge.unknown and edge.moves:
            unknown = f" without {', '.join(edge.unknown)}"
        rows.append(
            (
                f"{edge.source} -> {edge.target}",
                _rows(edge.rows),
                _bytes(edge.most_bytes) if edge.moves else "local",
                f"{_bytes(edge.bytes.estimated)}{unknown}",
                _bytes(edge.bytes.measured),
                _ratio(edge.bytes),
                "-" if edge.waiting is None else duration(edge.waiting),
            )
        )
    heads = ("edge", "rows", "at most", "at these lengths", "measured", "ratio", "waited for")
    return f"{title}\n{table(heads, rows)}"


def _rows(rows: Compared) -> str:
    if rows.measured is None:
        if rows.estimated is None:
            return "-"
        return f"{rows.estimated:.0f} planned"
    of = "" if rows.estimated is None or not rows.deviates else f" of {rows.estimated:.0f} {_MARK}"
    return f"{rows.measured:.0f}{of}"


def _nodes(found: Analysis, device: str | None) -> str:
    on = "not estimated (--on cpu or another device)"
    if device is not None:
        on = f"estimated for {device}"
    title = (
        f"Seconds of the slowest worker, without its waits; {on}.\nMemory: most of a process at "
        "the node's end"
    )
    rows = [
        (
            node.name,
            f"{node.role} on {node.workers}",
            _seconds(node.seconds.estimated),
            _seconds(node.seconds.measured),
            _ratio(node.seconds),
            "-" if node.share is None else f"{node.share:.0%}",
            node.worker or "-",
            _bytes(node.memory),
        )
        for node in found.nodes
    ]
    step = found.seconds
    rows.append(
        ("step", "", _seconds(step.estimated), _seconds(step.measured), _ratio(step), "", "", "")
    )
    heads = ("node", "role", "estimated", "measured", "ratio", "share", "slowest on", "memory")
    return f"{title}\n{table(heads, rows)}"


def _memory(found: Analysis) -> str:
    if not found.memory:
        return "not estimated"
    workers = tuple(worker for group in found.memory for worker in group.workers)
    rows = [
        (
            worker_ranges(group.workers, workers),
            ", ".join(group.roles) or "-",
            _bytes(group.bytes.estimated),
            _bytes(group.bytes.measured),
            _ratio(group.bytes),
        )
        for group in found.memory
    ]
    recorded = any(group.bytes.measured is not None for group in found.memory)
    title = "Memory of a worker: at most, and the most that its process had at the end of a node"
    missing = "; this run did not record it"
    if recorded:
        missing = ""
    note = "What an accelerator holds, and peaks within a node, are not measured."
    return f"{title}{missing}\n{table(('workers', 'roles', 'at most', 'measured', 'ratio'), rows)}\n{note}"


def _splits(config: Config, found: Analysis, device: str | None) -> str:
    workers = len(found.measured.workers)
    if not found.splits:
        if workers == 1:
            return "There is no other split: one worker, or no node that generates."
        return "Not known."
    how = (
        "a role's work is divided evenly among its workers, as if each had a device of its own "
        "(--on takes the performance model instead)"
    )
    if device is not None:
        how = f"measured seconds change as the performance model says for {device}"
    now = found.measured.seconds
    faster = [one for one in found.splits if one.seconds < _GAIN * now][:_SHOWN]
    title = fill(f"Supposing that {how}; whether it fits was not looked at.", _LINE)
    if not faster:
        best = found.splits[0]
        said = f"{best.text(workers)}, {_seconds(best.seconds)} a step"
        return (
            f"{title}\nNo other split gains 2 %: the fastest would be {said}; measured now "
            f"{_seconds(now)}."
        )
    rows = [
        (one.text(workers), _seconds(one.seconds), f"{1 - one.seconds / now:.0%} less")
        for one in faster
    ]
    return f"{title}\n{table(('split', 'a step', f'than the measured {_seconds(now)}'), rows)}"


def _bytes(count: float | None) -> str:
    if count is None:
        return "-"
    return readable_bytes(round(count))


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return duration(value)


def _ratio(one: Compared) -> str:
    if one.ratio is None:
        if one.deviates:
            return _MARK
        return "-"
    return f"{one.ratio:.2f}{' ' + _MARK if one.deviates else ''}"


def _as_data(found: Analysis) -> dict[str, Any]:
    """Return it as plain data; numbers that are not known are null."""
    return {
        "steps": list(found.measured.steps),
        "lengths": None if found.lengths is None else asdict(found.lengths),
        "seconds": asdict(found.seconds),
        "edges": [asdict(edge) | {"deviates": edge.bytes.deviates} for edge in found.edges],
        "nodes": [asdict(node) | {"deviates": node.seconds.deviates} for node in found.nodes],
        "memory": [asdict(group) | {"deviates": group.bytes.deviates} for group in found.memory],
        "splits": [asdict(split) for split in found.splits],
    }
