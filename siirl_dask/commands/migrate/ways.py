"""Makes one draft of those of all the ways that a script may go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from siirl_dask.commands.migrate.draft import Draft, DraftEntry
from siirl_dask.commands.migrate.render import MISSING, scalar
from siirl_dask.errors import ConfigError

_LEFT_OUT = "left out"


def mark_followers(draft: Draft, probed: Draft, name: str) -> None:
    """Leave open what follows from an option that is not known: what another value of it changes,
    as in ``probed``.
    """
    reason = f"it follows from {name}, which is {draft.reason_open(name)}"
    for key, entry in draft.entries.items():
        other = probed.entries.get(key)
        if not entry.to_decide and (other is None or other.value != entry.value):
            draft.entries[key] = replace(entry, to_decide=reason)
            draft.open_questions.append(f"{key}: {reason}: write the value")
    for key, entry in probed.entries.items():
        if key not in draft.entries:
            draft.entries[key] = replace(entry, to_decide=f"{reason}, or it is left out")
            draft.open_questions.append(f"{key}: {reason}: write the value, or leave it out")
    if draft.bases != probed.bases:
        draft.ask(f"base: {reason}")


def merged(drafts: Sequence[Draft]) -> Draft:
    """Return the first draft, with open values where others differ from it. ConfigError where
    they have another DAG.
    """
    first = drafts[0]
    for other in drafts:
        if other.bases != first.bases:
            raise ConfigError(
                f"{first.given.origin}: the DAG is {', '.join(first.bases)} or "
                f"{', '.join(other.bases)}: {'; '.join(first.given.questions)}"
            )
    questions = list(first.given.questions)
    for key in dict.fromkeys(key for draft in drafts for key in draft.entries):
        values = _values(drafts, key)
        if len(values) > 1:
            choices = " or ".join(f"{value} ({where})" for value, where in values.items())
            entry = next(draft.entries[key] for draft in drafts if key in draft.entries)
            first.entries[key] = replace(entry, to_decide=choices)
            questions.append(f"{key}: {choices}")
    for part in ("nodes", "roles"):
        _merge_parts([getattr(draft, part) for draft in drafts], part, questions)
    for draft in drafts[1:]:
        questions += [one for one in draft.open_questions if one not in first.open_questions]
        for name, fate in draft.fates.items():
            first.fates.setdefault(name, fate)
    first.open_questions[:0] = [one for one in questions if one not in first.open_questions]
    return first


def _values(drafts: Sequence[Draft], key: str) -> dict[str, str]:
    """Return the values of a key in all drafts, each with the lines and assumptions it is from."""
    values: dict[str, list[Draft]] = {}
    for draft in drafts:
        entry = draft.entries.get(key)
        values.setdefault(_shown(entry), []).append(draft)
    return {value: _origin(found, key) for value, found in values.items()}


def _shown(entry: DraftEntry | None) -> str:
    if entry is None:
        return _LEFT_OUT
    if entry.to_decide:
        return entry.to_decide
    return scalar(entry.value)


def _origin(drafts: Sequence[Draft], key: str) -> str:
    """Return the lines and assumptions of the drafts in which a key has one value."""
    lines: set[int] = set()
    for draft in drafts:
        entry = draft.entries.get(key)
        if entry is not None:
            lines.update(draft.given.lines.get(name, 0) for name in entry.sources)
    lines.discard(0)
    assumed = " or ".join(dict.fromkeys(draft.given.assumed for draft in drafts[:4]))
    if not lines:
        return assumed
    word = "lines"
    if len(lines) == 1:
        word = "line"
    return f"{word} {', '.join(map(str, sorted(lines)))}: {assumed}"


def _merge_parts(parts: Sequence[dict[str, Any]], kind: str, questions: list[str]) -> None:
    """Leave open the nodes or roles in which drafts differ."""
    for name in dict.fromkeys(name for part in parts for name in part):
        shown = [scalar(part[name]) if name in part else _LEFT_OUT for part in parts]
        choices = list(dict.fromkeys(shown))
        if len(choices) > 1:
            parts[0][name] = MISSING
            questions.append(f"{kind}.{name}: {' or '.join(choices)}")
