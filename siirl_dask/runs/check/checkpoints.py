"""Checks the checkpoints of a run: every file against the digest in its commit record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from siirl_storage import join, open_fs

from siirl_dask.errors import CheckpointError, ConfigError, DataError, counted
from siirl_dask.observe import SUMMARY_FILE as SUMMARY
from siirl_dask.observe import Status, read_summary
from siirl_dask.runs.check.finding import PartState, RunFinding
from siirl_dask.runs.checkpoints import FOLDER, Checkpoint, damage_of, find_checkpoints
from siirl_dask.runs.commit_record import NAME
from siirl_dask.runs.folder import CONFIG_FILE
from siirl_dask.runs.reader import Run

_READERS = 4


def check_checkpoints(
    url: str, files: Mapping[str, int], read: Callable[[int], None]
) -> list[RunFinding]:
    """Return what is found of each checkpoint folder of the run, given the sizes of all files by
    path.

    ``read`` is told the bytes of each file that was read.
    """
    found = find_checkpoints(url)
    damages = {one.url: _damages(one, read) for one in found}
    whole = [one.step for one in found if not damages[one.url]]
    findings = []
    for one in found:
        part = f"{FOLDER}/{one.url.rpartition('/')[2]}"
        before = [step for step in whole if step < one.step]
        if not damages[one.url]:
            findings.append(RunFinding(part, PartState.WHOLE, _told(one)))
        elif _is_there(one):  # a run under way removes those that it does not keep
            remedy = _remedy(one.step, before, max(whole, default=0))
            findings += [
                RunFinding(part, PartState.DAMAGED, text, remedy) for text in damages[one.url]
            ]
    findings += _absent(url, files, {one.step for one in found})
    return findings + list(_others({one.url.rpartition("/")[2] for one in found}, files))


def _absent(url: str, files: Mapping[str, int], steps: Collection[int]) -> list[RunFinding]:
    """Return that the checkpoint with which a complete run ends is not among those of ``steps``, if
    it is not.

    Of another run, that none is there, nor one that was begun, though steps after the first one
    that was due were done.
    """
    if not {SUMMARY, CONFIG_FILE} <= files.keys():
        return []
    try:
        summary = read_summary(url)
        every = Run(url).config.checkpoint.every
    except (ConfigError, DataError, UnicodeDecodeError):
        return []  # that is a finding of its own
    if summary.status is not Status.COMPLETE and 0 < every < summary.steps:
        if steps or any(path.startswith(f"{FOLDER}/") for path in files):
            return []
        text = f"there is none, after {counted(summary.steps, 'step')} (checkpoint.every={every})"
        return [
            RunFinding(
                FOLDER,
                PartState.DAMAGED,
                text,
                "bring it back: a resume refuses, or does all steps anew",
            )
        ]
    if (
        summary.status is not Status.COMPLETE
        or not summary.steps
        or not every
        or summary.steps in steps
    ):
        return []
    text = (
        f"there is none of step {summary.steps}, with which the run ended "
        f"(checkpoint.every={every})"
    )
    return [
        RunFinding(FOLDER, PartState.DAMAGED, text, "bring it back; its weights are lost otherwise")
    ]


def newest_whole(url: str, findings: Sequence[RunFinding]) -> int:
    """Return the step of the newest checkpoint of which nothing is damaged; 0 if there is none."""
    whole = {one.part for one in findings if one.state is PartState.WHOLE}
    steps = [
        one.step
        for one in find_checkpoints(url)
        if f"{FOLDER}/{one.url.rpartition('/')[2]}" in whole
    ]
    return max(steps, default=0)


def _damages(found: Checkpoint, read: Callable[[int], None]) -> list[str]:
    if found.record is None:
        return [found.damage]

    def damage(name: str) -> str:
        text = damage_of(found.url, {name: found.files()[name]})
        read(found.files()[name].nbytes)
        return text

    with ThreadPoolExecutor(_READERS) as pool:
        damages = [text for text in pool.map(damage, found.files()) if text]
    if not damages:
        try:
            found.state()
        except CheckpointError as error:
            damages.append(str(error))
    return damages


def _told(found: Checkpoint) -> str:
    count = len(found.files())
    nbytes = sum(one.nbytes for one in found.files().values())
    if not count:
        return "an earlier version wrote it, without digests: its files were not read"
    return f"{counted(count, 'file')}, {nbytes:,} bytes, by their SHA-256"


def _remedy(step: int, before: Sequence[int], newest: int) -> str:
    if newest > step:
        return f"a resume does not need it: it goes on after step {newest}"
    if before:
        return f"a resume passes over it, and goes on after step {before[-1]}"
    return "no other is whole: a resume refuses, and --fresh starts anew"


def _is_there(found: Checkpoint) -> bool:
    fs, path = open_fs(join(found.url, NAME))
    return bool(fs.exists(path))


def _others(found: set[str], files: Mapping[str, int]) -> Iterator[RunFinding]:
    """Yield the folders that do not count: without a record, voided, or written again by a later
    start.
    """
    names = {
        path.split("/")[1]
        for path in files
        if path.startswith(f"{FOLDER}/") and path.count("/") > 1
    }
    for name in sorted(names - found):
        recorded = f"{FOLDER}/{name}/{NAME}" in files
        text = "it was never committed"
        if recorded:
            text = "void, or written again by a later start"
        yield RunFinding(
            f"{FOLDER}/{name}",
            PartState.UNFINISHED,
            text,
            "nothing reads it; a later commit removes it",
        )
