"""Writes a draft as YAML with comments, and what became of the options as a report."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from siirl_dask.commands.migrate.draft import Draft
from siirl_dask.config.file.layers import GROUPS, SHIPPED
from siirl_dask.errors import counted

_PLAIN = re.compile(
    r"(?!(?:true|false|null|yes|no|on|off|none|y|n)$)[A-Za-z_/][\w./-]*", re.IGNORECASE
)

MISSING = "???"
"""A value that is still to be written: `plan` and `run` name it and stop."""


def as_yaml(draft: Draft) -> str:
    """Return the configuration, with the options that each value comes from, and those that have
    no counterpart.
    """
    given = draft.given
    lines = [
        f"# What {given.origin} ({given.system}) says, by `siirl-dask migrate`. Comments name the "
        "options that"
    ]
    lines += ["# values come from; docs/migrating.md has the whole table."]
    lines += [f"# TO DECIDE: {question}" for question in draft.open_questions]
    bases = [f"{SHIPPED}{base}" for base in draft.bases]
    base = scalar(bases)
    if len(bases) == 1:
        base = scalar(bases[0])
    lines += [f"base: {base}", ""]
    tree: dict[str, Any] = {}
    for key, entry in draft.entries.items():
        *groups, name = key.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = entry
    for group in [*GROUPS, *tree]:
        if group in tree:
            lines += [f"{group}:", *_lines(tree.pop(group), 1), ""]
    for part in ("roles", "nodes"):
        if content := getattr(draft, part):
            lines += [
                f"{part}:",
                *(f"  {name}: {scalar(value)}" for name, value in content.items()),
                "",
            ]
    lost = {name: fate.lost for name, fate in draft.fates.items() if fate.lost}
    if lost:
        lines.append("# Without a counterpart:")
    lines += [
        f"#   {name}={_shown(given.values.get(name))}: {reason}" for name, reason in lost.items()
    ]
    return "\n".join(lines).rstrip() + "\n"


def _lines(tree: Mapping[str, Any], depth: int) -> Iterator[str]:
    for name, entry in tree.items():
        if isinstance(entry, dict):
            yield f"{'  ' * depth}{name}:"
            yield from _lines(entry, depth + 1)
        elif entry.to_decide:
            yield f"{'  ' * depth}{name}: {MISSING}  # TO DECIDE: {entry.to_decide}"
        else:
            yield f"{'  ' * depth}{name}: {scalar(entry.value)}  # {entry.comment}"


def scalar(value: Any) -> str:
    """Return a value in one line of YAML; interpolations in quotes."""
    match value:
        case Mapping():
            return "{" + ", ".join(f"{key}: {scalar(one)}" for key, one in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(scalar, value)) + "]"
        case str() if _PLAIN.fullmatch(value):
            return value
        case float() if not math.isfinite(value):
            return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    return json.dumps(value)


def report(draft: Draft) -> str:
    """Return the lists of what became of each option that was given."""
    texts = [f"note: {note}" for note in draft.given.notes]
    mapped = {
        name: f"-> {', '.join(fate.keys)}"
        for name, fate in draft.fates.items()
        if fate.keys and not fate.lost
    }
    kept = {
        name: fate.note for name, fate in draft.fates.items() if not fate.keys and not fate.lost
    }
    lost = {
        f"{name}={_shown(draft.given.values.get(name))}": fate.lost
        for name, fate in draft.fates.items()
        if fate.lost
    }
    values = {key: scalar(draft.entries[key].value) for key in draft.defaulted}
    texts += _list(f"{len(mapped)} of {counted(len(draft.fates), 'option')} became keys", mapped)
    texts += _list(
        f"{len(kept)} {'asks' if len(kept) == 1 else 'ask'} for what is so anyway, or for nothing",
        kept,
    )
    texts += _list(
        f"{counted(len(values), 'key')} not given, written out with {draft.given.system}'s default",
        values,
    )
    texts += _list(f"{len(lost)} {'has' if len(lost) == 1 else 'have'} NO COUNTERPART", lost)
    return "\n".join([*texts, *(f"TO DECIDE: {question}" for question in draft.open_questions)])


def _list(title: str, rows: Mapping[str, str]) -> list[str]:
    if not rows:
        return []
    return [f"{title}:", *(f"  {name}  {text}" for name, text in rows.items())]


def _shown(value: Any) -> str:
    text = scalar(value)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."
