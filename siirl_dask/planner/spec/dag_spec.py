"""Converts a DAG to and from plain data, as YAML gives it.

    roles:
      policy: {build: "siirl_dask.training:build_trainer", with: {model: "${model}", trainer: "${trainer}"}}
    nodes:
      - {name: reward, run: "siirl_dask.nodes:score", role: rollout, after: [rollout], with: {reward: "my:exact"}}

An option is converted to its parameter's annotation: a name becomes a function where a callable is wanted, a mapping
becomes a dataclass, ``{run: ..., with: {...}}`` a partial, or None if ``run`` is null and the annotation allows it. A
node whose function declares no columns declares them itself: ``reads: [response]``, ``writes: {score: float32}``.
Nodes that several rounds have alike are written once: ``{repeat: {times: 3, nodes: [...]}}``, see ``rounds.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, get_type_hints

from siirl_dask.coerce import Coercer
from siirl_dask.errors import PlanError
from siirl_dask.planner.contract import check_options
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.node import Node, Role, Rows
from siirl_dask.planner.spec.names import canonical, resolve
from siirl_dask.planner.spec.rounds import written_out
from siirl_dask.schema import TYPES, Schema, make_schema

_NODE_KEYS = (
    *("name", "run", "role", "after", "with", "rows", "save_as", "stage", "save_blobs"),
    *("reads", "writes", "lag", "agent"),
)
_ROLE_KEYS = ("build", "with")
_RENAMED = {"keep": "save_as", "behind": "lag"}


def _bound(function: str, options: Any, label: str) -> Callable[..., Any]:
    return bind(_resolved(function, label), options or {}, label)


def _resolved(function: str, label: str) -> Callable[..., Any]:
    try:
        return resolve(function)
    except PlanError as error:
        raise PlanError(f"{label}: {error}") from error


_coerce = Coercer(PlanError, _bound)


def bind(fn: Callable[..., Any], options: Mapping[str, Any], label: str) -> Callable[..., Any]:
    """Return ``fn`` with ``options`` bound. PlanError for an unknown or missing option, or one
    of the wrong type.
    """
    if not isinstance(options, Mapping):
        raise PlanError(f"{label} has with={options!r}: expected a mapping of options")
    check_options(fn, options, label)
    if not options:
        return fn
    hints = _hints(fn, options, label)
    return partial(
        fn,
        **{
            key: _coerce(item, hints.get(key, Any), f"{label}: {key}")
            for key, item in options.items()
        },
    )


def _hints(fn: Callable[..., Any], names: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return the types of the options ``names`` only: other annotations may be imported for type
    checkers alone.
    """
    owner = inspect.unwrap(fn.__init__ if isinstance(fn, type) else fn)  # type: ignore[misc]
    written = {
        name: hint for name, hint in getattr(owner, "__annotations__", {}).items() if name in names
    }
    try:
        return get_type_hints(
            SimpleNamespace(__annotations__=written), getattr(owner, "__globals__", {})
        )
    except NameError as error:
        raise PlanError(
            f"{label}: the annotation of an option needs an import at run time: {error}"
        ) from error


def dag_from_spec(
    roles: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    *,
    role_places: Mapping[str, str] | None = None,
    node_places: Sequence[str] = (),
) -> DAG:
    """Return the DAG that plain ``roles:`` and ``nodes:`` describe.

    PlanError names the role or node and the mistake, and its file and line where ``role_places``
    (by name) and ``node_places`` (one per node) give them.
    """
    if role_places is None:
        role_places = {}
    specs, origins = written_out(nodes, node_places)
    return DAG(
        tuple(_role(name, spec, role_places.get(name, "")) for name, spec in roles.items()),
        tuple(
            _node(position, spec, at)
            for position, (spec, at) in enumerate(zip_longest(specs, origins))
        ),
    )


def _role(name: str, spec: Mapping[str, Any], at: str) -> Role:
    label = f"{at}: role {name!r}" if at else f"role {name!r}"
    if not isinstance(spec, Mapping) or "build" not in spec:
        raise PlanError(
            f"{label} is {spec!r}: expected {{build: 'module:function', with: {{...}}}}"
        )
    _coerce.known_keys(spec, _ROLE_KEYS, label)
    return Role(name, _bound(spec["build"], spec.get("with"), label), at)


def _node(position: int, spec: Mapping[str, Any], at: str | None) -> Node:
    before = ""
    if at:
        before = f"{at}: "
    if not isinstance(spec, Mapping):
        raise PlanError(
            f"{before}node {position} is {spec!r}: expected a mapping with name, run and role"
        )
    label = f"{before}node {spec.get('name', position)!r}"
    old = next((key for key in spec if key in _RENAMED), None)
    if old:
        raise PlanError(f"{label} has the key {old!r}, which is called {_RENAMED[old]!r}")
    _coerce.known_keys(spec, _NODE_KEYS, label)
    for key in ("name", "run", "role"):
        if not isinstance(spec.get(key), str):
            raise PlanError(
                f"{label} has {key}={spec.get(key)!r}: expected name, run and role, each a text"
            )
    return Node(
        name=spec["name"],
        fn=_bound(spec["run"], spec.get("with"), label),
        role=spec["role"],
        after=_names(spec.get("after"), f"{label}: after") or (),
        rows=spec.get("rows") or Rows.ANYWHERE,
        save_as=spec.get("save_as"),
        stage=False if spec.get("stage") is None else spec["stage"],
        save_blobs=False if spec.get("save_blobs") is None else spec["save_blobs"],
        reads=_names(spec.get("reads"), f"{label}: reads"),
        writes=_schema(spec.get("writes"), f"{label}: writes"),
        lag=spec.get("lag") or 0,
        agent="" if spec.get("agent") is None else spec["agent"],
        at=at or "",
    )


def _names(value: Any, label: str) -> tuple[str, ...] | None:
    """Return a tuple of names for one name or a list of names; None for None."""
    if value is None:
        return None
    names: tuple[Any, ...] = ()
    if isinstance(value, str):
        names = (value,)
    elif isinstance(value, Sequence):
        names = tuple(value)
    if (value and not names) or not all(isinstance(name, str) for name in names):
        raise PlanError(f"{label}={value!r}: expected a name or a list of names")
    return names


def _schema(value: Any, label: str) -> Schema | None:
    """Return the schema of a mapping from columns to Arrow types as Arrow prints them; None for
    None.

    List types are limited to those of the built-in columns.
    """
    if value is None:
        return None
    lists = {str(kind): kind for kind in TYPES.values()}
    lists |= {text.replace("item: ", ""): kind for text, kind in lists.items()}
    lists |= {text.removeprefix("large_"): kind for text, kind in lists.items()}
    try:
        return make_schema({name: lists.get(kind, kind) for name, kind in value.items()})
    except (AttributeError, TypeError, ValueError) as error:
        raise PlanError(
            f"{label}={value!r}: expected columns and Arrow types, as in {{score: float32}}"
        ) from error


def dag_to_spec(dag: DAG) -> dict[str, Any]:
    """Return ``{"roles": ..., "nodes": ...}`` from which ``dag_from_spec`` makes an equal DAG."""
    roles = {
        role.name: {"build": _call(role.build)["run"], "with": _call(role.build)["with"]}
        for role in dag.roles
    }
    nodes = []
    for node in dag.nodes:
        call = _call(node.fn)
        spec: dict[str, Any] = {
            "name": node.name,
            "run": call["run"],
            "role": node.role,
            "after": list(node.after),
            "with": call["with"],
            "rows": str(node.rows),
        }
        if node.save_as:
            spec["save_as"] = node.save_as
        if node.stage:
            spec["stage"] = True
        if node.save_blobs:
            spec["save_blobs"] = True
        if node.reads is not None:
            spec["reads"] = list(node.reads)
        if node.writes is not None:
            spec["writes"] = {field.name: str(field.type) for field in node.writes}
        if node.lag:
            spec["lag"] = node.lag
        if node.agent:
            spec["agent"] = node.agent
        nodes.append(spec)
    return {"roles": roles, "nodes": nodes}


def _call(fn: Any) -> dict[str, Any]:
    call: dict[str, Any] = canonical(fn)
    return call
