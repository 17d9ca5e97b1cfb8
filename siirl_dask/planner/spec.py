"""A DAG as plain data, as YAML gives it, and back.

    roles:
      policy: {build: "siirl_dask.training:build_trainer", with: {model: "${model}", trainer: "${trainer}"}}
    nodes:
      - {name: reward, run: "siirl_dask.nodes:score", role: rollout, after: [rollout], with: {reward: "my:exact"}}

An option becomes what its parameter's annotation says: a name becomes the function where a callable is wanted, a
mapping becomes the dataclass, ``{run: ..., with: {...}}`` a partial; where None will do, it is None if ``run`` is null.
A node whose function declares no columns says them itself: ``reads: [response]``, ``writes: {score: float32}``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from siirl_dask.errors import PlanError, did_you_mean
from siirl_dask.planner.canonical import canonical
from siirl_dask.planner.dag import DAG, Node, Role, Rows
from siirl_dask.planner.functions import resolve
from siirl_dask.schema import TYPES, Schema, make_schema

_NODE_KEYS = ("name", "run", "role", "after", "with", "rows", "keep", "reads", "writes", "behind")
_ROLE_KEYS = ("build", "with")


def bind(fn: Callable[..., Any], options: Mapping[str, Any], what: str) -> Callable[..., Any]:
    """``fn`` with ``options`` bound. PlanError for one it has not, one that is missing, or one of the wrong type.

    What ``**extra`` takes is for whoever calls it: an option that it does not name is a mistake, not an extra.
    """
    if not isinstance(options, Mapping):
        raise PlanError(f"{what} has with={options!r}: expected a mapping of options")
    parameters = inspect.signature(fn).parameters.values()
    given_by_name = (p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty)
    known = [p.name for p in (*given_by_name, *(p for p in parameters if p.kind is p.KEYWORD_ONLY))]
    for name in options:
        if name not in known:
            raise PlanError(f"{what} has no option {name!r} (options: {known}){did_you_mean(str(name), known)}")
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in options:
            raise PlanError(f"{what} needs the option {p.name!r}: give it under 'with'")
    if not options:
        return fn
    hints = _hints(fn, options, what)
    return partial(fn, **{key: _convert(item, hints.get(key), f"{what}: {key}") for key, item in options.items()})


def _hints(fn: Callable[..., Any], names: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Types of the options ``names``. Of no others: those may be imported for type checkers only."""
    owner = inspect.unwrap(fn.__init__ if isinstance(fn, type) else fn)  # type: ignore[misc]
    written = {name: hint for name, hint in getattr(owner, "__annotations__", {}).items() if name in names}
    try:
        return get_type_hints(SimpleNamespace(__annotations__=written), getattr(owner, "__globals__", {}))
    except NameError as error:
        raise PlanError(f"{what}: the annotation of an option needs an import at run time: {error}") from error


def _convert(value: Any, hint: Any, what: str) -> Any:
    """``value`` as plain data, made what ``hint`` asks for."""
    if get_origin(hint) in (Union, UnionType):
        if value is None or (type(None) in get_args(hint) and _calls_nothing(value)):
            return None
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if _is_function(hint) and isinstance(value, str):
        return _resolved(value, what)
    if isinstance(value, Mapping) and (_is_function(hint) or value.keys() == {"run", "with"}):
        _known_keys(value, ("run", "with"), what)
        return _bound(value.get("run", ""), value.get("with"), what)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, Mapping):
        return _make(hint, value, what)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _member(hint, value, what)
    if hint in (int, float, bool, str):
        return _plain(value, hint, what)
    return _items(value, hint, what)


def _calls_nothing(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"run", "with"} and not value["run"] and not value["with"]


def _is_function(hint: Any) -> bool:
    is_protocol = getattr(hint, "_is_protocol", False) and "__call__" in vars(hint)
    return hint is Callable or get_origin(hint) is get_origin(Callable[..., Any]) or is_protocol


def _make(kind: type, value: Mapping[str, Any], what: str) -> Any:
    known = {f.name: f for f in fields(kind)}
    _known_keys(value, list(known), what)
    required = (f.name for f in known.values() if f.default is MISSING and f.default_factory is MISSING)
    if missing := [name for name in required if name not in value]:
        raise PlanError(f"{what} lacks {missing}: a {kind.__name__} needs them")
    hints = get_type_hints(kind)
    return kind(**{key: _convert(item, hints[key], f"{what}.{key}") for key, item in value.items()})


def _member(kind: type[Enum], value: Any, what: str) -> Enum:
    valid = [member.value for member in kind]
    if value not in valid:
        raise PlanError(f"{what}={value!r}: expected one of {valid}{did_you_mean(str(value), map(str, valid))}")
    return kind(value)


def _plain(value: Any, kind: type, what: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)  # YAML writes 1 where Python writes 1.0
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise PlanError(f"{what}={value!r}: expected {kind.__name__}")
    return value


def _items(value: Any, hint: Any, what: str) -> Any:
    """Go into a list or a mapping; anything else is taken as it is."""
    hints = [arg for arg in get_args(hint) if arg is not Ellipsis] or [None]
    if isinstance(value, Mapping):
        return {key: _convert(item, hints[-1], f"{what}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        items = [_convert(v, hints[min(i, len(hints) - 1)], f"{what}[{i}]") for i, v in enumerate(value)]
        return tuple(items) if hint is tuple or get_origin(hint) is tuple else items
    return value


def _known_keys(given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in given:
        if key not in known:
            raise PlanError(f"{what} has an unknown key {key!r} (keys: {list(known)}){did_you_mean(str(key), known)}")


def dag_from_spec(
    roles: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    *,
    role_places: Mapping[str, str] | None = None,
    node_places: Sequence[str] = (),
) -> DAG:
    """The DAG that plain ``roles:`` and ``nodes:`` describe. PlanError names the role or node and what is wrong, and
    where it is written, as far as ``role_places``, by name, and ``node_places``, one a node, tell.
    """
    places = role_places or {}
    return DAG(
        tuple(_role(name, spec, places.get(name, "")) for name, spec in roles.items()),
        tuple(_node(position, spec, at) for position, (spec, at) in enumerate(zip_longest(nodes, node_places))),
    )


def _role(name: str, spec: Mapping[str, Any], at: str) -> Role:
    what = f"{at}: role {name!r}" if at else f"role {name!r}"
    if not isinstance(spec, Mapping) or "build" not in spec:
        raise PlanError(f"{what} is {spec!r}: expected {{build: 'module:function', with: {{...}}}}")
    _known_keys(spec, _ROLE_KEYS, what)
    return Role(name, _bound(spec["build"], spec.get("with"), what), at)


def _node(position: int, spec: Mapping[str, Any], at: str | None) -> Node:
    before = f"{at}: " if at else ""
    if not isinstance(spec, Mapping):
        raise PlanError(f"{before}node {position} is {spec!r}: expected a mapping with name, run and role")
    what = f"{before}node {spec.get('name', position)!r}"
    _known_keys(spec, _NODE_KEYS, what)
    for key in ("name", "run", "role"):
        if not isinstance(spec.get(key), str):
            raise PlanError(f"{what} has {key}={spec.get(key)!r}: expected name, run and role, each a text")
    rows = str(spec.get("rows") or Rows.ANYWHERE)
    valid = [str(policy) for policy in Rows]
    if rows not in valid:
        raise PlanError(f"{what} has rows={rows!r}: expected one of {valid}{did_you_mean(rows, valid)}")
    return Node(
        name=spec["name"],
        fn=_bound(spec["run"], spec.get("with"), what),
        role=spec["role"],
        after=_names(spec.get("after"), f"{what}: after") or (),
        rows=Rows(rows),
        keep=spec.get("keep"),
        reads=_names(spec.get("reads"), f"{what}: reads"),
        writes=_schema(spec.get("writes"), f"{what}: writes"),
        behind=spec.get("behind") or 0,
        at=at or "",
    )


def _bound(function: str, options: Any, what: str) -> Callable[..., Any]:
    return bind(_resolved(function, what), options or {}, what)


def _resolved(function: str, what: str) -> Callable[..., Any]:
    try:
        return resolve(function)
    except PlanError as error:
        raise PlanError(f"{what}: {error}") from error


def _names(value: Any, what: str) -> tuple[str, ...] | None:
    """None, one name, or a list of names."""
    if value is None:
        return None
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    if (value and not names) or not all(isinstance(name, str) for name in names):
        raise PlanError(f"{what}={value!r}: expected a name or a list of names")
    return names


def _schema(value: Any, what: str) -> Schema | None:
    """None, or a mapping of column to Arrow type as Arrow prints it; of lists, those of the built-in columns."""
    if value is None:
        return None
    lists = {str(kind): kind for kind in TYPES.values()}
    lists |= {text.replace("item: ", ""): kind for text, kind in lists.items()}
    try:
        return make_schema({name: lists.get(kind, kind) for name, kind in value.items()})
    except (AttributeError, TypeError, ValueError) as error:
        raise PlanError(f"{what}={value!r}: expected columns and Arrow types, as in {{score: float32}}") from error


def dag_to_spec(dag: DAG) -> dict[str, Any]:
    """``{"roles": ..., "nodes": ...}`` from which ``dag_from_spec`` makes an equal DAG."""
    roles = {role.name: {"build": _call(role.build)["run"], "with": _call(role.build)["with"]} for role in dag.roles}
    nodes = []
    for node in dag.nodes:
        call = _call(node.fn)
        spec = {"name": node.name, "run": call["run"], "role": node.role}
        spec |= {"after": list(node.after), "with": call["with"]}
        reads = {} if node.reads is None else {"reads": list(node.reads)}
        writes = {} if node.writes is None else {"writes": {field.name: str(field.type) for field in node.writes}}
        behind = {"behind": node.behind} if node.behind else {}
        kept = {"keep": node.keep} if node.keep else {}
        nodes.append(spec | {"rows": str(node.rows)} | kept | reads | writes | behind)
    return {"roles": roles, "nodes": nodes}


def _call(fn: Any) -> dict[str, Any]:
    call: dict[str, Any] = canonical(fn)
    return call
