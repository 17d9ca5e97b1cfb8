"""Finds where a run begins: at step 1, or after the newest checkpoint of an earlier start."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from siirl_storage import absolute, join, open_fs

from siirl_dask.config import Config, Dtype
from siirl_dask.context import Metric
from siirl_dask.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpoint,
    DataError,
    PlanError,
    SiirlError,
    counted,
)
from siirl_dask.observe import METRICS_FILE, Record, Status, read_metrics, read_summary
from siirl_dask.planner import DAG, TRACE, Cut, Iteration, Node, Phase
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import BEGUN, Checkpoint, find_checkpoints, unfinished_steps
from siirl_dask.runs.checkpoints import FOLDER as CHECKPOINTS
from siirl_dask.runs.folder import RunIdentity, known_digests, read_identity
from siirl_dask.runs.identity_file import (
    DataVersion,
    ModelVersion,
    not_recorded,
    read_identity_file,
    relocation_of,
)
from siirl_dask.runs.reader import Run
from siirl_dask.runs.stages import Stage
from siirl_dask.runs.tables import stored_steps
from siirl_dask.schema import PARAMETER_DATA
from siirl_dask.tables import step_of
from siirl_dask.wording import redacted
from siirl_dask.worker.roles.role_state import ResumeFrom

logger = logging.getLogger("siirl_dask.driver")
_OTHERWISE = (
    "choose another run.name or run.url, or start anew with --fresh, which removes what is there"
)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Training resumes after step ``done``, from ``checkpoint``, whose metadata is ``state``."""

    done: int = 0
    checkpoint: Checkpoint | None = None
    """None for a run that begins at step 1."""
    state: CheckpointState | None = None
    exists: bool = False
    """True if the folder holds a run, which this start resumes or whose steps it repeats."""
    fresh: bool = False
    """True if the run in the folder is removed first."""
    note: str = ""
    """A sentence for the user about where the run begins."""
    skipped: tuple[str, ...] = ()
    """A sentence for each newer checkpoint that cannot be used."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """The DAG of a step that has a stage, by the stage's table."""
    stages: tuple[Stage, ...] = ()
    """Stored rows of the steps after ``done``, which are replayed; none is left out."""
    stored_state: Mapping[str, str] = field(default_factory=dict)
    """Folder of the rows that each node had stored for later steps, after the last step with a
    stage, by node."""
    unusable: tuple[tuple[int, str], ...] = ()
    """Steps with a stage, and tables of them that are damaged or not needed any more, and are
    removed."""
    recorded: Mapping[tuple[Phase, int], Record] = field(default_factory=dict)
    """Records of the steps up to the last one with a stage, by phase and step, which are not
    measured again."""

    @property
    def last(self) -> int:
        """The last step whose generated rows are all stored."""
        if self.stages:
            return self.stages[-1].step
        return self.done

    def metrics_before(self, iteration: Iteration) -> dict[str, Metric]:
        """Return what a replayed step had logged when its stage was stored; nothing for any
        other iteration.
        """
        if iteration.phase is not Phase.REPLAY:
            return {}
        return self.stages[iteration.step - self.done - 1].metrics

    @property
    def resume_from(self) -> ResumeFrom | None:
        """The checkpoint for the workers' RunSpec; None for a run that begins at step 1."""
        if self.checkpoint is None or self.state is None:
            return None
        return ResumeFrom(
            url=absolute(self.checkpoint.url),
            roles=tuple(self.state.roles),
            states=self.state.states,
            positions=self.state.positions,
        )


def find_resume_point(
    config: Config,
    dag: DAG,
    *,
    fresh: bool,
    force: bool,
    damaged: Mapping[str, str] | None = None,
) -> ResumePoint:
    """Return where the run at ``run.url`` begins; with ``fresh`` at step 1, whatever the folder
    holds.

    It resumes from the newest checkpoint that can be used. ``damaged`` holds the URLs of those that
    cannot, each with what is wrong with it. CheckpointError if there are checkpoints and none can
    be used; ConfigError if the folder holds a finished run, checkpoints without a run, or (unless
    ``force``) a run that differs in what decides its results. Where that run ended before its first
    step was done, there is nothing to protect, and it begins at step 1.
    """
    url = config.run.url
    if fresh:
        return ResumePoint(fresh=True)
    recorded, checkpoints = _read_folder(url)
    if recorded is None:
        if checkpoints or _logged_steps(url):
            what = "metrics"
            if checkpoints:
                what = "checkpoints"
            raise ConfigError(
                f"run.url={url!r} holds {what} of a run whose config.yaml is gone: {_OTHERWISE}"
            )
        return ResumePoint()
    _check_unfinished(config, checkpoints[-1].step if checkpoints else 0)
    moved = relocation_of(url)
    differences = []
    if not force:
        differences = recorded.changes(config, dag)
    if differences and is_untouched(url):
        return ResumePoint(
            fresh=True,
            note=f"no step of the run at {url} was finished, and none of its rows are stored: it "
            f"begins again with {'; '.join(differences)}",
        )
    if differences:
        was = ""
        if moved is not None:
            was = f" (when it was started last it was at {moved.before!r})"
        raise ConfigError(
            f"run.url={url!r} holds a run already{was}, which differs in what decides its results: "
            f"{'; '.join(differences)}. Give what it was started with, --force to go on all the "
            f"same, or {_OTHERWISE}"
        )
    if not checkpoints:
        return ResumePoint(exists=True, note=f"no checkpoint in {url}: its steps are done anew")
    checkpoint, state, skipped = _newest_usable(url, checkpoints, damaged or {})
    changed = ""
    if state.digest not in (*known_digests(config, dag), recorded.digest()):
        changed = ", of another configuration, DAG or version of siirl_dask"
    return ResumePoint(
        done=checkpoint.step,
        checkpoint=checkpoint,
        state=state,
        exists=True,
        note=f"going on after step {checkpoint.step} from {checkpoint.url}{changed}",
        skipped=skipped,
    )


def _newest_usable(
    url: str, checkpoints: Sequence[Checkpoint], damaged: Mapping[str, str]
) -> tuple[Checkpoint, CheckpointState, tuple[str, ...]]:
    """Return the newest checkpoint that is not known to be damaged, its state, and why newer
    ones are skipped.
    """
    reasons: list[str] = []
    for checkpoint in reversed(checkpoints):
        try:
            if checkpoint.url in damaged:
                raise DamagedCheckpoint(damaged[checkpoint.url])
            state = checkpoint.state()
        except CheckpointError as error:
            reasons.append(f"the checkpoint of step {checkpoint.step} is damaged: {error}")
        else:
            return checkpoint, state, tuple(reasons)
    raise CheckpointError(
        f"run.url={url!r} holds no checkpoint that can be used: {'; '.join(reasons)}; {_OTHERWISE}"
    )


def check_nothing_lost(url: str, resume: ResumePoint, tables: Iterable[str]) -> None:
    """Raise CheckpointError if the run at ``url`` would repeat steps whose checkpoint ought to be
    there, and is not.

    Metrics, the summary and the rows in ``tables`` show how many steps were done. A checkpoint was
    due if these are ``checkpoint.every`` or more, and it ought to be there unless the first one was
    still being written. Where all steps, or all but the last, are replayed from their rows, nothing
    is lost, and the run goes on.
    """
    if not resume.exists or resume.fresh:
        return
    logged = _logged_steps(url)
    missing = set(range(1, resume.done + 1)) - logged
    if missing:
        lines = f"{len(missing)} of the {counted(resume.done, 'step')} before the checkpoint"
        logger.warning(
            "%s has no lines of %s: they were lost", redacted(join(url, METRICS_FILE)), lines
        )
    if resume.checkpoint is not None:
        return
    config = Run(url).config
    every = config.checkpoint.every
    # rows that are stored before their update
    ahead = config.run.lookahead + (config.rollout.steps_ahead or 0) + 1
    last_stored = 0
    for table in tables:
        last_stored = max([last_stored, *stored_steps(url, table)])
    done = max([0, *logged, _steps_of_summary(url), last_stored - ahead])
    if not every or done < every or resume.last >= max(done - 1, 1):
        return
    begun = unfinished_steps(url)
    if len(begun) == 1 and min(begun) <= every and done <= min(begun) + every:
        return  # it was the first one, for which the second would have waited
    raise CheckpointError(
        f"run.url={url!r} holds a run of {counted(done, 'step')} with checkpoint.every={every}, "
        f"and no checkpoint of it is there: {join(url, CHECKPOINTS)} is gone, or on another disk, "
        f"and the rows that are stored reach to step {resume.last}. Bring it back, or {_OTHERWISE}"
    )


def check_same_data(
    url: str,
    resume: ResumePoint,
    data: Mapping[str, DataVersion],
    models: Mapping[str, ModelVersion] = MappingProxyType({}),
    *,
    force: bool,
) -> tuple[str, ...]:
    """Raise ConfigError if a table of ``data``, or one of ``models``, is not what it was when the run
    at ``url`` was started last.

    With ``force`` a sentence about each is returned instead, and one about each model of which a run
    of an earlier version has not recorded all. Nothing is compared where all steps are repeated.
    """
    if not resume.last:
        return ()
    recorded = read_identity_file(url)
    if recorded is None:
        return ()
    changes = []
    for key, before in recorded.data.items():
        now = data.get(key, before)
        if not now.is_same(before):
            same = ""
            if str(now) == str(before):
                same = ", of other content"
            changes.append(
                f"the table of {key} was replaced or changed: it had {before}, and now has "
                f"{now}{same}"
            )
    unknown = []
    for key, model in models.items():
        began = recorded.models.get(key, ModelVersion())
        if model.has_other_weights(began):
            changes.append(
                f"the weights of {key} were replaced or changed, which adapters, a reference and "
                "frozen parts are of"
            )
        if names := model.other_files(began):
            changes.append(f"{', '.join(names)} of {key} were replaced or changed")
        if not began.files:
            unknown.append(f"{not_recorded(key)}: it is taken as it is now")
    if changes and not force:
        raise ConfigError(
            f"run.url={url!r} holds a run of other data or models: {'; '.join(changes)}. Bring back what it "
            f"was started with, give --force to go on with what is there now, or {_OTHERWISE}"
        )
    return (*changes, *unknown)


def _logged_steps(url: str) -> set[int]:
    """Return the training steps that ``metrics.jsonl`` has; none without such a file."""
    try:
        return {record["step"] for record in read_metrics(url) if record["phase"] is Phase.TRAIN}
    except DataError:
        return set()


def _steps_of_summary(url: str) -> int:
    try:
        return read_summary(url).steps
    except (DataError, FileNotFoundError):
        return 0


def is_untouched(url: str) -> bool:
    """Return whether the run at ``url`` has ended without anything that another start of it would
    lose: no step was done, no file of a checkpoint is there, and no rows of a step are committed.

    False where a file that would tell is damaged, and while nobody has said that the run ended.
    """
    fs, path = open_fs(url)
    try:
        summary = read_summary(url)
        records = read_metrics(url) if fs.exists(f"{path}/{METRICS_FILE}") else []
    except (DataError, FileNotFoundError):
        return False
    if summary.status is Status.COMPLETE or summary.steps:
        return False
    if any(record["phase"] is Phase.TRAIN for record in records):
        return False
    for file in fs.find(path):
        table, _, inside = str(file)[len(path) + 1 :].partition("/")
        folder, _, name = inside.rpartition("/")
        step = step_of(folder.rpartition("/")[2])
        if table == CHECKPOINTS and name != BEGUN:
            return False
        if step and table != TRACE and name.endswith(".json"):
            return False  # a record, which commits the rows
    return True


def recorded_dtype(url: str) -> Dtype | None:
    """Return the number type of the run at ``url``, whatever it was started with; None where
    there is no run, or none that has done anything.
    """
    recorded, _ = _read_folder(url)
    if recorded is None or is_untouched(url):
        return None
    return Dtype(recorded.values["model.dtype"])


def _read_folder(url: str) -> tuple[RunIdentity | None, list[Checkpoint]]:
    """Return the identity of the run at ``url``, if there is one, and its checkpoints,
    ascending.
    """
    try:
        return read_identity(url), find_checkpoints(url)
    except SiirlError:
        raise
    except Exception as error:  # each store has errors of its own: no credentials, no connection
        raise ConfigError(
            f"run.url={url!r} cannot be read: {type(error).__name__}: {error}"
        ) from error


def weights_dag(dag: DAG) -> DAG | None:
    """Return the nodes of a training DAG that bring the policy's weights to the engines; None if it
    has none.

    PlanError when a node that publishes or loads weights reads rows: there are none before a step.
    """
    nodes: dict[str, Node] = {}
    for node in dag.ordered():
        publishes = PARAMETER_DATA in node.contract.writes.names
        loads = not nodes.keys().isdisjoint(node.after)
        if not publishes and not loads:
            continue
        if publishes:
            needed = list(node.contract.reads)
            after: Sequence[str] = ()
        else:
            needed = [parent for parent in node.after if parent not in nodes]
            after = node.after
        if needed:
            raise PlanError(
                f"node {node.name!r} publishes or loads weights and needs {needed}: a run of this "
                "DAG cannot go "
                "on from a checkpoint; expected nodes that need the trainer and the engine alone"
            )
        nodes[node.name] = replace(node, after=after, save_as=None, lag=0)
    if nodes:
        return DAG(dag.roles, tuple(nodes.values()))
    return None


def _check_unfinished(config: Config, done: int) -> None:
    """Raise ConfigError if the run in the folder has trained all its steps, or ended without a
    checkpoint.
    """
    url = config.run.url
    steps = config.run.steps
    if done > steps:
        raise ConfigError(
            f"run.url={url!r} holds a run already, of {counted(done, 'step')}: raise "
            f"run.steps={steps} or {_OTHERWISE}"
        )
    fs, path = open_fs(join(url, "summary.json"))
    if not fs.exists(path):
        return
    try:
        summary = read_summary(url)
    except DataError:
        return  # a version that this one does not know wrote it
    if summary.status is Status.COMPLETE and summary.steps >= steps:
        raise ConfigError(
            f"run.url={url!r} holds a run already, finished after "
            f"{counted(summary.steps, 'step')}: raise "
            f"run.steps={steps} to go on with it, {_OTHERWISE}"
        )
    if summary.status is Status.COMPLETE and not done:
        raise ConfigError(
            f"run.url={url!r} holds a run already, finished after {counted(summary.steps, 'step')} "
            f"without a checkpoint to go on from (checkpoint.every): {_OTHERWISE}"
        )
