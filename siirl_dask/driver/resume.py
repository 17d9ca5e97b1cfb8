"""Where a run begins: in an empty folder, or where an earlier start of it stopped."""

from __future__ import annotations

from dataclasses import dataclass, replace

from siirl_storage import join, open_fs
from siirl_storage.files import absolute

from siirl_dask.checkpoints import State, checkpoint_url, committed, read_state
from siirl_dask.config import Config
from siirl_dask.errors import ConfigError, DataError, PlanError
from siirl_dask.observe import Status, read_summary
from siirl_dask.planner import DAG, Node
from siirl_dask.runfolder import Description, described
from siirl_dask.schema import PARAMETER_DATA
from siirl_dask.worker.keeping import Restored

WEIGHTS = "weights"
"""Phase of a turn that brings the restored weights to the engines."""
_OTHERWISE = "choose another run.name or run.url, or start anew with --fresh, which removes what is there"


@dataclass(frozen=True, slots=True)
class Beginning:
    """``done`` steps are trained already, those of the checkpoint ``url``, of which ``state`` is."""

    done: int = 0
    url: str | None = None
    state: State | None = None
    again: bool = False
    """There is a run in the folder: this one goes on with it, or does its steps anew."""
    fresh: bool = False
    """What is there is removed first."""
    note: str = ""
    """What to tell the user of it."""

    @property
    def restored(self) -> Restored | None:
        """What the workers are told of the checkpoint."""
        if self.url is None or self.state is None:
            return None
        state = self.state
        return Restored(
            url=absolute(self.url), roles=tuple(state.roles), states=state.states, positions=state.positions
        )


def find_beginning(config: Config, dag: DAG, *, fresh: bool, force: bool) -> Beginning:
    """ConfigError for a folder that holds a run that is finished, or that differs in what decides its results
    (``force``: go on all the same), or that holds checkpoints and no run. ``fresh``: whatever is there, start anew.
    """
    url = config.run.url
    if fresh:
        return Beginning(fresh=True)
    before = described(url)
    whole = committed(url)
    if before is None:
        if whole:
            raise ConfigError(f"run.url={url!r} holds checkpoints of a run whose config.yaml is gone: {_OTHERWISE}")
        return Beginning()
    done = whole[-1] if whole else 0
    _refuse_what_is_finished(config, done)
    mine = Description.of(config, dag)
    if not force and (differences := before.differences(mine)):
        raise ConfigError(
            f"run.url={url!r} holds a run already, which differs in what decides its results: "
            f"{'; '.join(differences)}. Give what it was started with, --force to go on all the same, or {_OTHERWISE}"
        )
    if not done:
        return Beginning(again=True, note=f"no checkpoint in {url}: its steps are done anew")
    state, place = read_state(url, done), checkpoint_url(url, done)
    changed = "" if state.digest == mine.digest() else ", of another configuration, DAG or version of siirl_dask"
    return Beginning(done, place, state, again=True, note=f"going on after step {done} from {place}{changed}")


def weights_dag(dag: DAG) -> DAG | None:
    """The part of a training DAG that brings the policy's weights to the engines; None if there is none.

    PlanError when what publishes weights reads rows, or when what loads them does: there are none before a step.
    """
    chosen: dict[str, Node] = {}
    for node in dag.ordered():
        publishes = PARAMETER_DATA in node.contract.writes.names
        if not publishes and chosen.keys().isdisjoint(node.after):
            continue
        needed = node.contract.reads if publishes else [parent for parent in node.after if parent not in chosen]
        if needed:
            raise PlanError(
                f"node {node.name!r} publishes or loads weights and needs {list(needed)}: a run of this DAG cannot go "
                "on from a checkpoint; expected nodes that need the trainer and the engine alone"
            )
        chosen[node.name] = replace(node, after=() if publishes else node.after, keep=None, behind=0)
    return DAG(dag.roles, tuple(chosen.values())) if chosen else None


def _refuse_what_is_finished(config: Config, done: int) -> None:
    url, steps = config.run.url, config.run.steps
    if done > steps:
        raise ConfigError(
            f"run.url={url!r} holds a run already, of {done} steps: raise run.steps={steps} or {_OTHERWISE}"
        )
    fs, path = open_fs(join(url, "summary.json"))
    if not fs.exists(path):
        return
    try:
        summary = read_summary(url)
    except DataError:
        return  # it was not finished by any version that this one knows
    if summary.status is Status.COMPLETE and summary.steps >= steps:
        raise ConfigError(
            f"run.url={url!r} holds a run already, finished after {summary.steps} steps: raise run.steps={steps} to go "
            f"on with it, {_OTHERWISE}"
        )
    if summary.status is Status.COMPLETE and not done:
        raise ConfigError(
            f"run.url={url!r} holds a run already, finished after {summary.steps} steps without a checkpoint to go on "
            f"from (checkpoint.every): {_OTHERWISE}"
        )
