"""Says, after the error that ended a run, how far it came, where the logs are, and how to resume it."""

from __future__ import annotations

from siirl_dask.config import ClusterConfig, Config
from siirl_dask.config.secrets import redacted
from siirl_dask.errors import Fenced, FolderGone, Interrupted, SiirlError
from siirl_dask.observe import Failure
from siirl_dask.runs.checkpoints import committed


def failure_of(error: BaseException, command: str | None) -> Failure:
    """Return the error by its parts, without secrets, for ``summary.json``; ``command`` resumes the run."""
    origin = error.origin if isinstance(error, SiirlError) else SiirlError.origin
    return Failure(
        kind=type(error).__name__,
        message=redacted(str(error)),
        worker=origin.worker,
        host=origin.host,
        node=origin.node,
        iteration=origin.iteration,
        rows=origin.rows,
        resume=redacted(command),
    )


def ending(config: Config, error: SiirlError, steps: int, command: str | None) -> list[str]:
    """Return lines for the user, to follow the error; none after one that was no failure of the run.

    ``steps`` are done; ``command`` starts the run again as the user did.
    """
    if isinstance(error, FolderGone):
        return [_weights_of(error, config.run.url, steps)]
    if isinstance(error, (Fenced, Interrupted)):
        return []
    url, newest = config.run.url, _newest(config.run.url)
    where = f"after step {newest}, of which there is a checkpoint" if newest else "at step 1: there is no checkpoint"
    shown = redacted(url)
    lines = [
        f"run      {shown}: {steps} of {config.run.steps} steps are done; it goes on {where}",
        f"logs     {_logs(config.cluster, error)}; `siirl-dask trace {shown}` says what the workers did",
    ]
    return lines if command is None else [*lines, f"resume   {redacted(command)}"]


def _weights_of(error: FolderGone, url: str, steps: int) -> str:
    """Return a line about where the newest weights are of a run whose folder was moved or removed."""
    place = url if error.now_at is None else error.now_at
    newest = _newest(place)
    if newest is None and error.now_at is None:
        return (
            f"weights  no checkpoint is at {url}: those of {_these(steps)} are where the folder was moved to, or "
            "gone with it; what was trained since the newest of them is gone"
        )
    if newest is None:
        return f"weights  {place} has no checkpoint: the weights of {_these(steps)} are gone"
    return (
        f"weights  the newest checkpoint that is left, after step {newest} of {steps}, is in {place}; "
        f"`siirl-dask export {place} FOLDER` writes its model, and run.url={place} goes on with it"
    )


def _these(steps: int) -> str:
    return "its only step" if steps == 1 else f"these {steps} steps"


def _newest(url: str) -> int | None:
    try:
        return max(committed(url), default=None)
    except Exception:  # each store has errors of its own, and it may be what the run failed of
        return None


def _logs(cluster: ClusterConfig, error: SiirlError) -> str:
    named = f"worker {error.origin.worker!r}" if error.origin.worker is not None else "the workers"
    host = f" on host {error.origin.host!r}" if error.origin.host is not None else ""
    if cluster.spec:
        return f"those of {named}{host} are where {cluster.spec} has the cluster write them"
    if cluster.exists:
        return f"those of {named}{host} are the output of its `dask worker`"
    return f"{named} wrote to this terminal"
