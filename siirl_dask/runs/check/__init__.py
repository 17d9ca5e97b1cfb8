"""Verifies a run: reads every file that counts, compares it with what was written, and says what a
resume makes of it.

What ought to be there and is not is damage as well.
Nothing is changed. A file that a run under way removes or has not committed yet is no damage.
"""

from __future__ import annotations

from collections.abc import Callable

from siirl_storage import StorageError, list_files, open_fs

from siirl_dask.errors import ConfigError
from siirl_dask.runs.absent import hint_if_absent
from siirl_dask.runs.check.checkpoints import check_checkpoints, newest_whole
from siirl_dask.runs.check.due import find_due
from siirl_dask.runs.check.finding import PartState, RunFinding
from siirl_dask.runs.check.records import check_records
from siirl_dask.runs.check.tables import check_tables
from siirl_dask.runs.folder import CONFIG_FILE

__all__ = ["PartState", "RunFinding", "check_run"]

_OF_A_RUN = ("checkpoints/", "rollouts/", "stages/", "attempts/", "metrics.jsonl")


def check_run(
    url: str, begin: Callable[[int], None], read: Callable[[int], None]
) -> list[RunFinding]:
    """Return what is found in the folder of the run at ``url``, part by part.

    ``begin`` is called once with the bytes of all files, and ``read``, from several threads, with
    those of each file that has been read. ConfigError if there is no run.
    """
    try:
        fs, root = open_fs(url)
        files = list_files(fs, root)
    except StorageError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # each store has errors of its own: no credentials, no connection
        raise ConfigError(f"{url!r} cannot be read: {type(error).__name__}: {error}") from error
    if CONFIG_FILE not in files and not any(path.startswith(_OF_A_RUN) for path in files):
        raise ConfigError(
            f"{url!r} holds no run: expected a folder with a {CONFIG_FILE}{hint_if_absent(url)}"
        )
    begin(sum(files.values()))
    due = find_due(url, files)
    findings = check_records(url, files, due.validations)
    checkpoints = check_checkpoints(url, files, read)
    resumed = newest_whole(url, checkpoints)
    findings += check_tables(fs, root, files=files, resumed=resumed, due=due.folders, read=read)
    return findings + checkpoints
