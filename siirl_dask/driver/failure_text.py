"""The text after the error that ended a run: how far it came, where the logs are, and how to
resume it.
"""

from __future__ import annotations

import shlex

from siirl_dask.config import ClusterConfig, Config
from siirl_dask.errors import Fenced, FolderGone, Interrupted, SiirlError, counted
from siirl_dask.observe import RunFailure
from siirl_dask.runs.checkpoints import committed
from siirl_dask.wording import redacted


def run_failure_of(error: BaseException, command: str | None) -> RunFailure:
    """Return the error by its parts, without secrets, for ``summary.json``.

    ``command`` is the shell command that resumes the run, where it is known.
    """
    origin = error.origin if isinstance(error, SiirlError) else SiirlError.origin
    return RunFailure(
        kind=type(error).__name__,
        message=redacted(str(error)),
        worker=origin.worker,
        host=origin.host,
        node=origin.node,
        iteration=origin.iteration,
        rows=origin.rows,
        resume=redacted(command),
    )


def failure_text(config: Config, error: SiirlError, steps: int, command: str | None) -> list[str]:
    """Return lines for the user, to print after the error; none after one that was no failure of
    the run.

    ``steps`` are done; ``command`` is the shell command that resumes the run, where it is known.
    """
    if isinstance(error, FolderGone):
        return [_where_weights_are(error, config.run.url, steps)]
    if isinstance(error, (Fenced, Interrupted)):
        return []
    url = redacted(config.run.url)
    logs = (
        f"logs     {_where_logs_are(config.cluster, error)}; `siirl-dask trace {url}` says what "
        "the workers did"
    )
    first, *others = going_on_text(config, steps, command)
    return [first, logs, *others]


def going_on_text(config: Config, steps: int, command: str | None) -> list[str]:
    """Return lines on a run that ended before its last step: how far it came, what shows it, and
    ``command``, which resumes it, where that is known.
    """
    newest = _newest_checkpoint(config.run.url)
    where = "at step 1: there is no checkpoint"
    if newest:
        where = f"after step {newest}, of which there is a checkpoint"
    url = redacted(config.run.url)
    verb = "is" if config.run.steps == 1 else "are"
    done = f"{steps} of {counted(config.run.steps, 'step')} {verb} done"
    lines = [
        f"run      {url}: {done}; it goes on {where}",
        f"look     siirl-dask serve {shlex.quote(url)}",
    ]
    if command is not None:
        lines.append(f"resume   {redacted(command)}")
    return lines


def _where_weights_are(error: FolderGone, url: str, steps: int) -> str:
    """Return a line about the newest weights of a run whose folder was moved or removed."""
    folder = url if error.now_at is None else error.now_at
    newest = _newest_checkpoint(folder)
    if newest is None and error.now_at is None:
        return (
            f"weights  no checkpoint is at {url}: those of {_all_of(steps)} are where the folder "
            "was moved to, or gone with it; what was trained since the newest of them is gone"
        )
    if newest is None:
        return f"weights  {folder} has no checkpoint: the weights of {_all_of(steps)} are gone"
    return (
        f"weights  the newest checkpoint that is left, after step {newest} of {steps}, is in "
        f"{folder}; `siirl-dask export {folder} FOLDER` writes its model, and run.url={folder} "
        "goes on with it"
    )


def _all_of(steps: int) -> str:
    if steps == 1:
        return "its only step"
    return f"these {steps} steps"


def _newest_checkpoint(url: str) -> int | None:
    try:
        return max(committed(url), default=None)
    except Exception:  # each store has errors of its own, and it may be what the run failed of
        return None


def _where_logs_are(cluster: ClusterConfig, error: SiirlError) -> str:
    worker = "the workers"
    if error.origin.worker is not None:
        worker = f"worker {error.origin.worker!r}"
    host = ""
    if error.origin.host is not None:
        host = f" on host {error.origin.host!r}"
    if cluster.spec:
        return f"those of {worker}{host} are where {cluster.spec} has the cluster write them"
    if cluster.exists:
        return f"those of {worker}{host} are the output of its `dask worker`"
    return f"{worker} wrote to this terminal"
