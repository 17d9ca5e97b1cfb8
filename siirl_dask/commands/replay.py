"""``siirl-dask replay``: runs nodes of a run's DAG again on the rows that it stored, with something changed.

    siirl-dask replay runs/mine --steps 10:20 --from reward --set rewards.function=rewards.py:stricter

The rows go into a table of their own beside the run's, and the difference is printed. Roles that none of these nodes
uses are not built: a changed reward loads no model. A model that is built has the weights of a checkpoint of the run,
by default those that it had at each step, as far as there are checkpoints.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from siirl_storage import absolute, join, open_fs, open_table

from siirl_dask.commands.options.steps import EVERY
from siirl_dask.config import Config
from siirl_dask.driver.single_pass import StoredPass, stored_passes
from siirl_dask.errors import ConfigError, counted, did_you_mean
from siirl_dask.observe import printable
from siirl_dask.planner import DAG, canonical, dag_from_spec, run_again, saved_after
from siirl_dask.runs.past_weights import StepsWithWeights, Weights, past_weights
from siirl_dask.runs.reader import open_run
from siirl_dask.runs.replays import ReplayChanges, compare
from siirl_dask.runs.samples.rollouts import in_words, saved_steps
from siirl_dask.runs.tables import REPLAY, listed
from siirl_dask.tables import step_folder

_FUNCTIONS = {
    "rewards.function": "reward",
    "algorithm.advantage": "advantage",
    "algorithm.advantage_options": "advantage",
}
"""Keys that name a function, or give its options, and the option of a role or node that holds
it."""
_WIDTH = 100  # letters of a prompt or a response that are printed
_PLACE: tuple[str, ...] = (
    *("cluster.address=null", "cluster.scheduler_file=null", "cluster.spec=null"),
    *("cluster.placement={}", "cluster.workers=1", "rollout.expected_length_column=null"),
    *("cluster.elastic=false", "cluster.max_workers=null", "cluster.replacement_timeout=null"),
    *("validation.url=null", "validation.test_url=null"),
)
"""A replay runs on one worker of this machine, unless it is told otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest:
    """A replay that a user asks for: the node to begin with, the steps, and the changes."""

    run: str
    """The run's folder or URL."""
    first: str
    """Node to begin with."""
    steps: range = EVERY
    """Steps whose stored rows are run again; those that are not stored are left out."""
    checkpoint: int | Weights = Weights.BEFORE
    """Checkpoint whose weights a model has that a node asks for: its step, or how it is chosen."""
    settings: Sequence[str] = ()
    """Changed keys of the configuration, ``key=value``."""
    nodes: Sequence[str] = ()
    """Changed functions of nodes, ``name=module:function`` or ``name=file.py:function``."""
    overrides: Sequence[str] = ()
    """Where to run: further overrides, such as ``cluster.workers=1``."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Tells the outcome of a replay."""

    changes: ReplayChanges
    weights: tuple[str, ...]
    """A sentence for each group of steps for which models were built, about their weights."""


def replay(request: ReplayRequest) -> Replayed:
    """Run the nodes again and return what changed, and with which weights. UserError before
    anything starts.
    """
    run = open_run(request.run)
    config = run.config_with([*_PLACE, *request.overrides, *request.settings])
    config.run.url = absolute(request.run)
    recorded = dag_from_spec(**run.dag)
    table = saved_after(recorded, recorded.node(request.first))
    steps = _chosen(request, table)
    stored = open_table(step_folder(request.run, table, steps[0])).schema
    name = _free_name(request.run)
    again = run_again(recorded, stored, request.first, name).dag
    dag = dag_from_spec(**changed_spec(run.dag, again, config, request))
    cut = run_again(dag, stored, request.first, name)
    groups = past_weights(request.run, steps, request.checkpoint)
    built = stored_passes(
        config, cut.dag, [StoredPass(group.steps, group.checkpoint) for group in groups]
    )
    weights = tuple(
        _weights(group, roles, config, request)
        for group, roles in zip(groups, built, strict=True)
        if roles
    )
    written = dict.fromkeys(
        name for node in cut.dag.nodes[1:] for name in node.contract.writes.names
    )
    return Replayed(compare(request.run, table, name, [*written]), weights)


def _weights(
    group: StepsWithWeights,
    roles: Sequence[str],
    config: Config,
    request: ReplayRequest,
) -> str:
    """Return which weights the objects of ``roles`` had at the steps of a group."""
    first = group.steps[0]
    last = group.steps[-1]
    found = group.checkpoint
    steps = f"steps {first} to {last}"
    if first == last:
        steps = f"step {first}"
    if found is not None:
        source = f"the checkpoint of step {found.step}"
    else:
        source = f"model.path={config.model.path}"
        if last > 1 and request.checkpoint is Weights.BEFORE:
            source += ", as no checkpoint is older"
    return f"{', '.join(roles)} at {steps}: the weights of {source}"


def changed_spec(
    spec: Mapping[str, Any],
    again: DAG,
    config: Config,
    request: ReplayRequest,
) -> dict[str, Any]:
    """Return a DAG as plain data with the request's changes: functions of nodes, and options of
    nodes and roles that hold a key of the configuration. ConfigError for a change that reaches none
    of those in ``again``.
    """
    roles = deepcopy(dict(spec["roles"]))
    nodes = deepcopy(list(spec["nodes"]))
    known = [
        node["name"] for node in nodes if node["name"] in {other.name for other in again.nodes}
    ]
    for text in request.nodes:
        name, _, function = text.partition("=")
        if name not in known or not function:
            raise ConfigError(
                f"--node {text!r}: expected NAME=module:function or NAME=file.py:function, with "
                f"the name of a node that is run again (nodes: {known}){did_you_mean(name, known)}"
            )
        next(node for node in nodes if node["name"] == name)["run"] = function
    named = [role.name for role in again.roles]
    owners = [*(roles[name] for name in named), *(node for node in nodes if node["name"] in known)]
    for text in request.settings:
        key = text.partition("=")[0]
        if not _set(key, config, owners):
            raise ConfigError(
                f"--set {text}: it changes nothing: nodes {known} of roles {named} do not have "
                f"{key}"
            )
    return {"roles": roles, "nodes": nodes}


def _set(key: str, config: Config, owners: Sequence[dict[str, Any]]) -> bool:
    """Set a key of the configuration wherever an option holds it; return whether one does."""
    group, _, name = key.partition(".")
    found = False
    for owner in owners:
        options = owner.get("with")
        if not options:
            continue
        if key in _FUNCTIONS and (option := _FUNCTIONS[key]) in options:
            options[option] = _function(config, key)
            found = True
        elif isinstance(held := options.get(group), dict) and name in held:
            held[name] = canonical(getattr(getattr(config, group), name))
            found = True
    return found


def _function(config: Config, key: str) -> Any:
    """Return a function of the configuration as an option, with the options that the
    configuration gives it.
    """
    group, _, name = key.removesuffix("_options").partition(".")
    options = getattr(getattr(config, group), f"{name}_options", {})
    function = getattr(getattr(config, group), name)
    if options:
        return {"run": function, "with": dict(options)}
    return function


def _chosen(request: ReplayRequest, table: str) -> list[int]:
    """Return the stored steps that the request names. ConfigError if none of them is stored."""
    there = list(saved_steps(*open_fs(join(request.run, table))).whole)
    wanted = [step for step in there if step in request.steps]
    if not wanted:
        held = "none"
        if there:
            held = f"steps {there[0]} to {there[-1]}"
        raise ConfigError(
            f"--steps: run {request.run!r} has saved no {in_words(request.steps)} (it has {held})"
        )
    return wanted


def _free_name(run_url: str) -> str:
    """Return ``replay-N`` with the first number that no table of the run has."""
    fs, path = open_fs(run_url)
    names = (name.rpartition("/")[2] for name in listed(fs, path))
    taken = [int(found[1]) for name in names if (found := REPLAY.fullmatch(name))]
    return f"replay-{max(taken, default=0) + 1}"


def render(replayed: Replayed) -> str:
    """Return which rows were run again with which weights, and what that changed."""
    changes = replayed.changes
    first, last = changes.steps
    steps = f"steps {first} to {last}"
    if first == last:
        steps = f"step {first}"
    lines = [
        f"{counted(changes.rows, 'row')} of {steps}, in table {changes.table!r}",
        *replayed.weights,
        "",
    ]
    lines.append(
        f"{'column':<20} {'values':>9} {'changed':>9} {'flipped':>9} {'before':>10} {'after':>10} "
        f"{'corr.':>7}"
    )
    for column in changes.columns:
        correlation = "-"
        if column.correlation is not None:
            correlation = f"{column.correlation:.3f}"
        lines.append(
            f"{column.name:<20} {column.values:>9} {column.changed:>9} {column.flipped:>9} "
            f"{column.before:>10.4g} {column.after:>10.4g} {correlation:>7}"
        )
    for sample in changes.samples:
        lines += [
            "",
            f"step {sample.step}, row {sample.row}: reward {_reward(sample.before)} -> "
            f"{_reward(sample.after)}",
        ]
        lines += [
            f"  prompt    {_one_line(sample.prompt)}",
            f"  response  {_one_line(sample.response)}",
        ]
    return "\n".join(lines)


def _reward(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:g}"


def _one_line(text: str) -> str:
    """Return a text on one line, cut to what a terminal shows."""
    line = textwrap.shorten(printable(text), _WIDTH, placeholder=" ...")
    if not line:
        return "(nothing)"
    return line
