"""``siirl-dask migrate``: turns a configuration, command line or script of verl, siiRL or TRL into one of ours.

Every option that was given ends in one of three lists: it became keys of ours, it asks for what is so anyway, or it
has no counterpart, with the reason. None is dropped silently. Defaults of theirs that change results and differ from
ours are written out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from siirl_dask.commands.migrate.draft import Draft, Fate
from siirl_dask.commands.migrate.given import Given, read_given
from siirl_dask.commands.migrate.nulls import with_meant
from siirl_dask.commands.migrate.option import Option, Use
from siirl_dask.commands.migrate.render import as_yaml, report
from siirl_dask.commands.migrate.rules import apply_rules
from siirl_dask.commands.migrate.table import option_of, options_of
from siirl_dask.commands.migrate.trl.command import is_trl, read_trl
from siirl_dask.commands.migrate.trl.rules import apply_trl_rules
from siirl_dask.commands.migrate.ways import mark_followers, merged
from siirl_dask.errors import ConfigError, did_you_mean

__all__ = ["Migration", "add_migrate", "migrate", "show_migration"]

_PROBES = (1, 2, 4099)
"""Numbers that stand in for one that is not known, to see what follows from it: small ones and a
large one that divides nothing."""

_HAS_NONE = {
    "TRL": "TRL has no",
    "verl": "neither verl nor siiRL has",
    "siiRL": "neither verl nor siiRL has",
}


@dataclass(frozen=True, slots=True)
class Migration:
    """A configuration in YAML, and what became of the options."""

    text: str
    report: str
    fates: dict[str, Fate]
    """Fate of each option that was given."""
    defaulted: dict[str, str]
    """Keys that were not given and are written out, with the option whose default they are."""


def migrate(words: Sequence[str], rows: int | None = None) -> Migration:
    """Convert a file with its overrides, or a command line. ``rows`` is the number of rows to train on, if known.

    ConfigError for what is neither system's, or a script with no call or several.
    """
    if rows is not None and rows < 1:
        raise ConfigError(
            f"--rows {rows}: expected the number of rows of data.train_files, at least 1"
        )
    ways = [read_trl(words)] if is_trl(words) else read_given(words)
    draft = merged([_drafted(given, rows) for given in ways])
    return Migration(as_yaml(draft), report(draft), draft.fates, draft.defaulted)


def _drafted(given: Given, rows: int | None) -> Draft:
    """Return the draft of one way of what was given."""
    given = replace(given, values=with_meant(given.values, given.system))
    draft = _filled(Draft(given), rows)
    for name in draft.open_options():
        for number in _PROBES:
            probed = Draft(given, probed=name, probed_number=number)
            mark_followers(draft, _filled(probed, rows), name)
    return draft


def _filled(draft: Draft, rows: int | None) -> Draft:
    """Return a draft with what the rules make of its options, and the fate of each."""
    given = draft.given
    if given.system == "TRL":
        apply_trl_rules(draft, rows)
    else:
        apply_rules(draft, rows)
    for name, value in given.values.items():
        if name in draft.fates:
            continue
        option = option_of(name, given.system)
        fate = _fate(option, name, value, draft)
        if fate.lost and option is not None and option.decides:
            draft.leave_out(name, fate.lost, option.decides)
        else:
            draft.fates[name] = fate
    draft.fates = {name: draft.fates[name] for name in given.values if name in draft.fates}
    return draft


def _fate(option: Option | None, name: str, value: Any, draft: Draft) -> Fate:
    """Return the fate of an option that no rule has read, whose row of the table is ``option``."""
    system = draft.given.system
    if value is None or value is False or value in ("", [], {}, -1):
        return Fate(note="nothing is asked for")
    if option is None:
        known = [
            known for option in options_of(system) for known in option.names if "*" not in known
        ]
        return Fate(
            lost=f"{_HAS_NONE[system]} such an option, as far as is known{did_you_mean(name, known)}"
        )
    if option.use is Use.NONE:
        return Fate(lost=option.note)
    if option.use is Use.ALWAYS:
        return Fate(note=option.note)
    if system == "TRL":
        return Fate(note="not read with the options given")
    return Fate(
        note=f"not read with {draft.text('algorithm.adv_estimator', 'gae')} and the options given"
    )


def add_migrate(command: argparse.ArgumentParser) -> None:
    """Add the command line of ``migrate``."""
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="FILE | -- key=value ...",
        help="a YAML file or a shell script of verl or siiRL, or one of TRL's GRPOTrainer, then options "
        "that change it, or NAME=value for variables "
        "of the script; or a command line after --",
    )
    command.add_argument(
        "-o", "--out", metavar="FILE", help="where to write; default: standard output"
    )
    command.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="rows of data.train_files, for the steps of an epoch",
    )


def show_migration(chosen: argparse.Namespace) -> None:
    """Write the configuration to ``--out`` or standard output, and the report to standard error."""
    done = migrate(chosen.overrides, chosen.rows)
    if chosen.out is None:
        print(done.text, end="")
    else:
        path = Path(chosen.out)
        if not path.parent.is_dir():
            raise ConfigError(f"--out {path}: there is no folder {str(path.parent)!r}")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(done.text)
        except FileExistsError as error:
            raise ConfigError(
                f"--out {path}: it exists already; give another name, or remove it"
            ) from error
        except OSError as error:
            raise ConfigError(f"--out {path}: it cannot be written: {error.strerror}") from error
    print(done.report, file=sys.stderr)
