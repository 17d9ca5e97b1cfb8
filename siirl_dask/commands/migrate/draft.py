"""A configuration in the making: our keys with the options that they come from, and the fate of
each option given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from siirl_dask.commands.migrate.given import Given

_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)\}")


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of an option that was given."""

    keys: tuple[str, ...] = ()
    """Our keys that it became; empty if it became none."""
    lost: str = ""
    """Reason why it has no counterpart; "" where nothing is lost."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """One value of the configuration, with the options that it comes from."""

    value: Any
    comment: str
    to_decide: str = ""
    """Why the file leaves the value open: the values that it may be, or what is not known. "" where
    the file has it. Rules that read the value go by ``value`` in both cases."""
    sources: tuple[str, ...] = ()
    """Options given that it comes from."""


@dataclass(slots=True)
class Draft:
    """Values and parts of the DAG, in the order in which rules set them."""

    given: Given
    bases: list[str] = field(default_factory=list)
    """Shipped files that the configuration stands on, such as ``dags/grpo.yaml``."""
    entries: dict[str, DraftEntry] = field(default_factory=dict)
    """Values by our key."""
    roles: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, Any] = field(default_factory=dict)
    fates: dict[str, Fate] = field(default_factory=dict)
    """Fate of each option that was given, by its name."""
    defaulted: dict[str, str] = field(default_factory=dict)
    """Our keys that no option given became, with the name of their default's option."""
    open_questions: list[str] = field(default_factory=list)
    """Values that a person must decide, such as the number of steps where there is no dataset to
    count."""
    no_numbers: set[str] = field(default_factory=set)
    """Options that should be numbers and are none."""
    probed: str = ""
    """An option whose number or flag is not known. In this draft it has another one than the
    default: what differs from the draft with the default follows from the option."""
    probed_number: float = 1
    """The number that the probed option has."""

    def has(self, *names: str) -> bool:
        """Whether any of these options was given."""
        return any(self.given.values.get(name) is not None for name in names)

    def is_null(self, name: str) -> bool:
        """Whether an option was given as null, which is not to leave it out."""
        return self.given.values.get(name, "") is None

    def value(self, name: str, default: Any = None) -> Any:
        """Return an option's value, or the other system's default."""
        value = self.given.values.get(name)
        if value is None:
            return default
        return value

    def text(self, name: str, default: str = "") -> str:
        """Return an option's value as text."""
        return str(self.value(name, default))

    def number(self, name: str, default: float, *, finite: bool = True) -> float:
        """Return an option's number. One that is none, as a variable that nobody set, is lost,
        and named; so is an infinite one unless ``finite`` is false.
        """
        value = self.value(name, default)
        if name == self.probed and self.reason_open(name):
            return self.probed_number
        try:
            number = float(value)
            if math.isnan(number) or (finite and math.isinf(number)):
                raise ValueError(f"{value!r} is not finite")
        except (TypeError, ValueError):
            if not self.reason_open(name):
                self.no_numbers.add(name)
            if name == self.probed:
                return self.probed_number
            self.lose(
                name,
                f"{value!r} is no number here: add the variable as NAME=value, or the option "
                "itself",
            )
            return default
        if number.is_integer():
            return int(number)
        return number

    def items(self, name: str, default: Sequence[Any] = ()) -> list[Any]:
        """Return an option's list: of a single value, and of a text with commas, its items."""
        value = self.value(name, list(default))
        if isinstance(value, str):
            value = [item.strip() for item in value.split(",")]
        if isinstance(value, (list, tuple)):
            return list(value)
        return [value]

    def flag(self, name: str, default: bool) -> bool:
        """Return an option's true or false; the default where it is not known."""
        if self.reason_open(name):
            return default != (name == self.probed)
        return str(self.value(name, default)).lower() in ("true", "1", "yes")

    def reason_open(self, name: str) -> str:
        """Return what is not known in the value of an option that was given; "" for nothing."""
        if name in self.given.unread:
            source = self.given.unread[name]
            if self.given.system == "TRL":
                return f"`{source}`, which the script alone does not tell"
            return f"what `{source}` prints"
        if name in self.no_numbers:
            return f"{self.text(name)!r}, which is no number"
        variables = _ENVIRONMENT.findall(str(self.given.values.get(name, "")))
        unknown = [f"${variable}" for variable in variables if variable != "HOME"]
        if not unknown:
            return ""
        return f"{' and '.join(unknown)}, which the environment has"

    def open_options(self) -> list[str]:
        """Return the options given whose values are not known."""
        return [name for name in self.given.values if self.has(name) and self.reason_open(name)]

    def whole(self, name: str, default: int) -> int:
        """Return an option's whole number of at least 1; another one is lost, and 1 stands in."""
        number = int(self.number(name, default))
        if number >= 1:
            return number
        self.lose(name, f"{self.text(name)}: expected at least 1")
        self.ask(f"{name}={self.text(name)}: expected at least 1; 1 stands in")
        return 1

    def set(self, key: str, value: Any, *sources: str, note: str = "") -> None:
        """Set our key, and say which options it comes from: of ``sources`` those given, or the
        default of the first.
        """
        self.set_from(key, value, sources, note)

    def set_from(self, key: str, value: Any, sources: Sequence[str], note: str = "") -> None:
        """Set our key as ``set`` does."""
        given = [name for name in sources if self.has(name)]
        for name in given:
            self.became(name, key)
        if given:
            origin = ", ".join(given)
        else:
            origin = f"{self.given.system}'s default"
            self.defaulted[key] = ""
            if sources:
                origin += f" of {sources[0]}"
                self.defaulted[key] = sources[0]
        if note:
            origin += f"; {note}"
        reasons = [
            f"{name} is {self.reason_open(name)}"
            for name in given
            # a text keeps its variables, which the configuration reads from the environment
            if name in self.given.unread
            or name in self.no_numbers
            or (self.reason_open(name) and not _ENVIRONMENT.search(str(value)))
        ]
        to_decide = "; ".join(reasons)
        if to_decide:
            self.open_questions.append(f"{key}: {to_decide}: write the value")
        self.entries[key] = DraftEntry(value, origin, to_decide, tuple(given))

    def leave_open(self, key: str, reason: str) -> None:
        """Leave our key without a value, for ``reason``, unless it has one that is open already."""
        entry = self.entries.get(key)
        if entry is not None and entry.to_decide:
            return
        self.defaulted.pop(key, None)
        value = None
        if entry is not None:
            value = entry.value
        self.entries[key] = DraftEntry(value, "", reason)
        self.open_questions.append(f"{key}: {reason}")

    def leave_out(self, name: str, reason: str, keys: Sequence[str]) -> None:
        """Say that an option that changes what is learned has no counterpart, where it was given, and
        ask for the first of ``keys`` that has a value: that value is to train without the option.
        """
        if not self.has(name):
            return
        self.lose(name, reason)
        key = next((one for one in keys if one in self.entries), keys[0])
        entry = self.entries.get(key)
        shown = f"{name}={self.value(name)!s:.60}"
        without = "a value"
        if entry is not None and isinstance(entry.value, (str, int, float)):
            without = str(entry.value)
        self.leave_open(
            key, f"{shown} has no counterpart: {reason}; write {without} to train without it"
        )

    def pass_to_reward(self, columns: Sequence[str]) -> None:
        """Have the node that scores pass columns on to the reward function; that of validation passes
        the same.
        """
        scores = "rollout" if "dags/dapo.yaml" in self.bases else "reward"
        node = self.nodes.get(scores, {})
        options = {**node.get("with", {}), "columns": [*columns]}
        self.nodes[scores] = {**node, "with": options}

    def became(self, name: str, *keys: str) -> None:
        """Say that an option became keys, or parts of the DAG, of ours."""
        if self.has(name) and not self.fate(name).lost:
            self.fates[name] = Fate(
                (*self.fate(name).keys, *(key for key in keys if key not in self.fate(name).keys))
            )

    def ask(self, question: str) -> None:
        """Ask for what a person must decide, once."""
        if question not in self.open_questions:
            self.open_questions.append(question)

    def lose(self, name: str, reason: str) -> None:
        """Say why an option that was given has no counterpart."""
        if self.has(name):
            self.fates[name] = Fate(lost=reason)

    def hold(self, name: str, note: str) -> None:
        """Say that what an option asks for is how it is, without a key."""
        if self.has(name) and not self.fate(name).lost:
            self.fates[name] = Fate(self.fate(name).keys, note=note)

    def hold_or_lose(self, name: str, text: str, *, holds: bool) -> None:
        """Say, with ``text``, that what an option asks for is how it is, or where that is not so
        that it has no counterpart.
        """
        if holds:
            self.hold(name, text)
        else:
            self.lose(name, text)

    def fate(self, name: str) -> Fate:
        """Return the fate of an option as far as it is known."""
        return self.fates.get(name, Fate())

    def copy(self, pairs: Mapping[str, str]) -> None:
        """Set our keys to the values of options, where these are given: ``{their name: our
        key}``.
        """
        for name, key in pairs.items():
            if self.has(name):
                self.set(key, self.value(name), name)

    def first(self, names: Iterable[str], default: str) -> str:
        """Return the first of the names that was given."""
        return next((name for name in names if self.has(name)), default)
