"""The exceptions that this package raises on purpose, as one tree.

``SiirlError`` is the root. ``UserError`` and its subclasses are mistakes in the input (config, DAG,
data, reward). They are raised before anything starts if possible, and their text names the value,
what was expected and what to do. ``RunError`` and its subclasses are failures of a run under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from traceback import walk_tb

_COLLECTIVES = ("torch.distributed.distributed_c10d", "siirl_dask.collectives")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a failure of a run comes from, as far as it is known."""

    worker: str | None = None
    host: str | None = None
    node: str | None = None
    iteration: str | None = None
    """Such as ``train step 3``."""
    rows: tuple[int, ...] = ()
    """Row ids within that step, some of them where there are many."""


class SiirlError(Exception):
    """Root of all exceptions that this package raises on purpose."""

    origin = Origin()
    report = ""
    """Lines about what was found when it happened, such as who waited for whom; shown also where
    the run goes on."""
    announced = False
    """The user has read it already: it was printed before what followed from it was tidied up."""


class UserError(SiirlError):
    """An input cannot be used."""


class ConfigError(UserError):
    """A config key, type or value cannot be used."""


class PlanError(UserError):
    """The DAG, its column contracts or its placement do not hold together."""


class DataError(UserError):
    """A dataset is missing, corrupt, or lacks a column."""


class ImageError(DataError):
    """An image is missing, damaged or too large, or a prompt has other images than its text
    says.
    """


class RewardError(UserError):
    """A reward function raised, or returned no number."""


class EpisodeError(UserError):
    """An environment or an agent gave no answer, or one that cannot be used."""


class RunInProgress(UserError):
    """Another process trains the run in the folder."""


class RunError(SiirlError):
    """A run under way cannot go on."""

    silence: float | None = None
    """Seconds from the last sign of life of the worker that was lost until that was noticed,
    where they are known."""


class NodeError(RunError):
    """A node function raised, or broke its column contract."""


class TrainingError(RunError):
    """The loss or the gradient is not a finite number."""


class WorkerLost(RunError):
    """A worker left the cluster while its chain was running."""


class WorkerLeft(WorkerLost):
    """A worker was retired or told to end, and left the cluster in order."""


class WorkersJoined(RunError):
    """An elastic run is interrupted between two steps, to go on with more workers: no failure."""

    since: float | None = None
    """Time, by ``time.monotonic``, at which the last step was done; a checkpoint of it was
    written since."""


class SchedulerLost(RunError):
    """The scheduler has ended, or this machine is cut off from it."""

    may_return = False
    """True where the cluster does not end with the run, and the run waits for another scheduler."""


class PeerError(RunError):
    """A peer is dead, stands still, or sent a message that is refused."""


class PeerGone(PeerError):
    """A peer's process has ended, or its connection was closed, before it answered."""


class SilentPeer(PeerError):
    """A peer gave no sign of life for as long as ``cluster.peer_timeout``."""


class CheckpointError(RunError):
    """A checkpoint cannot be written, or its content cannot be used."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is gone, or is not the one that was written."""


class Fenced(RunError):
    """Another start has taken over the run's folder."""


class FolderGone(Fenced):
    """The run's folder was moved or removed while this start trained there."""

    def __init__(self, message: str, now_at: str | None = None) -> None:
        super().__init__(message)
        self.now_at = now_at
        """Where the folder is now; None where that is not known."""

    def __reduce__(self) -> tuple[type[FolderGone], tuple[str, str | None]]:
        return FolderGone, (str(self), self.now_at)


class Aborted(RunError):
    """A worker was stopped because another one failed or the run was cancelled."""


class Interrupted(RunError):
    """The user stopped the run (Ctrl-C or SIGTERM)."""


def clause(error: object) -> str:
    """Return the words of an error for the middle of a sentence, without a full stop behind them;
    an ellipsis stays.
    """
    text = str(error).rstrip()
    return text if text.endswith("..") else text.removesuffix(".")


def said_by(error: BaseException) -> str:
    """Return what an error says; of a KeyError, which has the key alone, a sentence."""
    if isinstance(error, KeyError):
        return f"looked for {error}, and there is nothing of that name"
    return str(error)


def is_of_collective(error: BaseException) -> bool:
    """Return whether a collective of torch.distributed raised an error, which has no type of its
    own: a rank is gone, or stands still.
    """
    if not isinstance(error, RuntimeError):
        return False
    modules = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    innermost = modules[-1] if modules else None
    return innermost in _COLLECTIVES


def counted(number: int, what: str) -> str:
    """Return a number of things for a message: ``1 turn``, ``2 turns``, ``1,024 turns``."""
    if number == 1:
        return f"{number:,} {what}"
    return f"{number:,} {what}s"


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest valid spelling, or an empty string if
    none is near.
    """
    near = get_close_matches(name, list(valid), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return ""
