"""``siirl-dask clean``: deletes the files of a run that neither a resume nor a replay needs."""

from __future__ import annotations

from collections.abc import Sequence

from siirl_storage import absolute

from siirl_dask.errors import ConfigError, counted
from siirl_dask.runs.attempt import take
from siirl_dask.runs.reader import open_run
from siirl_dask.runs.retention import Leftover, Reason, find_leftovers, remove_leftovers

# seconds without a sign of life, after which another clean-up or a start may take the run over
_LEASE = 30.0


def clean(url: str, *, dry_run: bool, keep_stages: int | None, replays: bool) -> str:
    """Delete what is not needed, and return what that was as text; with ``dry_run`` delete nothing.

    RunInProgress while a start trains the run; ConfigError if there is no run, or for a number
    below 1.
    """
    open_run(url)
    if keep_stages is not None and keep_stages < 1:
        raise ConfigError(f"--keep-stages {keep_stages}: expected a number of steps of at least 1")
    if dry_run:
        return _told(
            find_leftovers(url, keep_stages=keep_stages, replays=replays, note=print),
            "would be deleted",
        )
    with take(absolute(url), _LEASE, print):  # nobody may write here meanwhile
        found = find_leftovers(url, keep_stages=keep_stages, replays=replays, note=print)
        remove_leftovers(url, found)
    return _told(found, "deleted")


def _told(leftovers: Sequence[Leftover], done: str) -> str:
    lines = []
    for reason in Reason:
        own = [leftover for leftover in leftovers if leftover.reason is reason]
        if own:
            lines.append(
                f"{counted(len(own), 'file')}, {sum(one.nbytes for one in own):,} bytes: {reason}"
            )
            lines += [f"  {leftover.path}" for leftover in own]
    total = (
        f"{counted(len(leftovers), 'file')}, {sum(one.nbytes for one in leftovers):,} bytes {done}"
    )
    return "\n".join([*lines, total if leftovers else "nothing to delete"])
