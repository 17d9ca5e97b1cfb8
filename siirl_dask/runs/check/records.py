"""Checks the small files of a run: configuration, DAG, starts, metrics, summary."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from siirl_storage import FileDigest, join, open_fs

from siirl_dask.errors import ConfigError, DataError, counted
from siirl_dask.observe import Status, damaged_lines, read_metrics, read_summary, summary_altered
from siirl_dask.planner import Phase
from siirl_dask.runs.attempt_folder import FOLDER as ATTEMPTS
from siirl_dask.runs.check.finding import PartState, RunFinding
from siirl_dask.runs.folder import CONFIG_FILE, DAG_FILE, recorded_config
from siirl_dask.runs.identity_file import FILE as IDENTITY
from siirl_dask.runs.identity_file import (
    RETENTION,
    IdentityFile,
    read_identity_file,
    read_retention,
)
from siirl_dask.runs.owner import Owner
from siirl_dask.runs.reader import Run

_ATTEMPT = re.compile(rf"{ATTEMPTS}/(\d{{4,}})\.json", re.ASCII)
_METRICS = "metrics.jsonl"
_SUMMARY = "summary.json"


def check_records(
    url: str, files: Mapping[str, int], validations: Collection[int]
) -> list[RunFinding]:
    """Return what is found of the run's small files, given the sizes of all files by path.

    ``validations`` are steps after which one was recorded.
    """
    findings, written = _identity(url, files)
    findings += [_config(url, written.get(CONFIG_FILE)), _dag(url, files, written.get(DAG_FILE))]
    findings += [*_attempts(url, files), *_metrics(url, files, validations), _summary(url, files)]
    return findings


def _identity(
    url: str, files: Mapping[str, int]
) -> tuple[list[RunFinding], Mapping[str, FileDigest]]:
    """Return what is found of what the run recorded at its start, and the digests in it; a
    damaged one has none.
    """
    found = []
    written: Mapping[str, FileDigest] = {}
    for name, reader in ((IDENTITY, read_identity_file), (RETENTION, read_retention)):
        if name not in files:
            continue
        try:
            content = reader(url)
        except ConfigError as error:
            found.append(
                RunFinding(
                    name,
                    PartState.DAMAGED,
                    str(error),
                    "nobody knows then which rows there ought to be",
                )
            )
            continue
        found.append(RunFinding(name, PartState.WHOLE, ""))
        if isinstance(content, IdentityFile):
            written = content.files
    return found, written


def _altered(data: bytes, written: FileDigest | None) -> str:
    """Return what is wrong with a file that was read; empty where it is what was written, or
    nobody knows.
    """
    found = FileDigest.of(data)
    if written is None or found == written:
        return ""
    return (
        f"it was altered: it has the SHA-256 {found.sha256[:16]}..., and {written.sha256[:16]}... "
        "was written"
    )


def _config(url: str, written: FileDigest | None) -> RunFinding:
    fs, path = open_fs(join(url, CONFIG_FILE))
    remedy = "samples and metrics can be read; a resume, evaluation or export cannot"
    try:
        data = fs.cat_file(path)
        recorded_config(data, url)
    except FileNotFoundError:
        return RunFinding(CONFIG_FILE, PartState.DAMAGED, "it is gone", remedy)
    except (ConfigError, UnicodeDecodeError) as error:
        return RunFinding(CONFIG_FILE, PartState.DAMAGED, str(error), remedy)
    altered = _altered(data, written)
    if altered:
        return RunFinding(
            CONFIG_FILE, PartState.DAMAGED, altered, "restore it: it does not say what was trained"
        )
    return RunFinding(CONFIG_FILE, PartState.WHOLE, "")


def _dag(url: str, files: Mapping[str, int], written: FileDigest | None) -> RunFinding:
    if DAG_FILE not in files:
        if files.get(_METRICS):
            return RunFinding(DAG_FILE, PartState.DAMAGED, "it is gone", "a resume writes it anew")
        return RunFinding(
            DAG_FILE, PartState.UNFINISHED, "the start was stopped before it wrote one"
        )
    try:
        nodes = len(Run(url).dag["nodes"])
        fs, path = open_fs(join(url, DAG_FILE))
        altered = _altered(fs.cat_file(path), written)
    except (ConfigError, UnicodeDecodeError) as error:
        return RunFinding(
            DAG_FILE, PartState.DAMAGED, str(error), "restore it, or start anew with --fresh"
        )
    if altered:
        return RunFinding(
            DAG_FILE, PartState.DAMAGED, altered, "restore it: it does not say what was trained"
        )
    return RunFinding(DAG_FILE, PartState.WHOLE, counted(nodes, "node"))


def _attempts(url: str, files: Mapping[str, int]) -> list[RunFinding]:
    findings = []
    numbers = []
    for name in sorted(files):
        matched = _ATTEMPT.fullmatch(name)
        if not matched:
            continue
        numbers.append(int(matched[1]))
        fs, path = open_fs(join(url, name))
        try:
            Owner.from_json(fs.cat_file(path))
        except FileNotFoundError:
            numbers.pop()  # a start that was refused has withdrawn
        except (TypeError, ValueError) as error:
            remedy = "a resume refuses: remove the file if nobody trains this run"
            findings.append(
                RunFinding(
                    name, PartState.DAMAGED, f"it does not say who trained the run: {error}", remedy
                )
            )
    if findings:
        return findings
    return [RunFinding(ATTEMPTS, PartState.WHOLE, counted(len(numbers), "start"))]


def _steps_of_summary(url: str, files: Mapping[str, int]) -> int:
    """Return the steps that the summary counts; 0 where there is none, or a damaged one."""
    if _SUMMARY not in files:
        return 0
    try:
        return read_summary(url).steps
    except (DataError, UnicodeDecodeError):
        return 0


def _metrics(url: str, files: Mapping[str, int], validations: Collection[int]) -> list[RunFinding]:
    steps = _steps_of_summary(url, files)
    if _METRICS not in files:
        if steps:
            text = f"it is gone: {_SUMMARY} counts {counted(steps, 'step')}"
            return [RunFinding(_METRICS, PartState.DAMAGED, text, "they are lost")]
        return [RunFinding(_METRICS, PartState.UNFINISHED, "there is none: no step was finished")]
    wrong, cut = damaged_lines(url)
    findings = []
    for text in wrong:
        what, _, remedy = text.rpartition("; ")
        findings.append(RunFinding(_METRICS, PartState.DAMAGED, what, remedy))
    if cut:
        findings.append(
            RunFinding(
                _METRICS, PartState.UNFINISHED, "its last line was cut short", "a resume drops it"
            )
        )
    if not wrong:
        records = read_metrics(url)
        trained = {record["step"] for record in records if record["phase"] == Phase.TRAIN}
        absent = sorted(set(range(1, max([steps, *trained]) + 1)) - trained)
        if absent:
            shown = ", ".join(map(str, absent[:10]))
            if len(absent) > 10:
                shown += ", ..."
            findings.append(
                RunFinding(
                    _METRICS,
                    PartState.DAMAGED,
                    f"it has no line of the steps {shown}",
                    "they are lost",
                )
            )
        validated = {record["step"] for record in records if record["phase"] == Phase.VALIDATION}
        unknown = sorted(set(validations) - validated)
        if unknown:
            text = (
                "it has no line of the validations after the steps "
                f"{', '.join(map(str, unknown[:10]))}"
            )
            findings.append(
                RunFinding(_METRICS, PartState.DAMAGED, text, "they are lost; their rows are there")
            )
        if not findings and not cut:
            findings.append(
                RunFinding(
                    _METRICS,
                    PartState.WHOLE,
                    f"{counted(len(records), 'record')}, {counted(len(trained), 'step')}",
                )
            )
    return findings


def _summary(url: str, files: Mapping[str, int]) -> RunFinding:
    if _SUMMARY not in files:
        return RunFinding(
            _SUMMARY, PartState.UNFINISHED, "there is none: the run is under way, or was killed"
        )
    try:
        summary = read_summary(url)
        altered = summary_altered(url)
    except (DataError, UnicodeDecodeError) as error:
        return RunFinding(
            _SUMMARY, PartState.DAMAGED, str(error), "the next end of the run writes it anew"
        )
    if altered:
        text = "it was altered: its digest is another one"
        return RunFinding(
            _SUMMARY, PartState.DAMAGED, text, "restore it: it does not say how the run ended"
        )
    said = f"{summary.status} after {counted(summary.steps, 'step')}"
    return RunFinding(
        _SUMMARY,
        PartState.WHOLE,
        said if summary.status is Status.COMPLETE else f"{said}; a resume goes on",
    )
