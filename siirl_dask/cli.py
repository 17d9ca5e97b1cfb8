"""``siirl-dask``: run, plan, quickstart, rollouts, eval, export. Errors are one message on stderr; exit codes are in
``--help``.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from siirl_dask.config import Config, Dtype
from siirl_dask.configfile import ConfigFile, load, shipped
from siirl_dask.errors import Interrupted, SiirlError, UserError
from siirl_dask.planner import DAG, dag_from_spec

_EXIT_CODES = "exit codes: 0 done, 1 the run failed, 2 something given cannot be used, 130 stopped by Ctrl-C or SIGTERM"

_EVAL_OPTIONS = {
    "n": ("validation.n", "N", "samples per prompt"),
    "k": ("validation.k", "1,4,8", "of pass@k; default: 1 and N"),
    "temperature": ("validation.temperature", "T", "default: 0, the most likely response, or 1 where N is more than 1"),
    "max-tokens": ("rollout.max_response_length", "N", "tokens of a response"),
    "reward": ("rewards.function", "module:function", "what scores; default: as the run did"),
    "workers": ("cluster.workers", "N", "processes"),
}
"""Options that stand for a key of the configuration."""
DagOf = Callable[[Config], DAG]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("siirl-dask", description=__doc__, epilog=_EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in {"run": "train as CONFIG says", "plan": "show what CONFIG would do; start nothing"}.items():
        command = commands.add_parser(name, help=text, epilog=_EXIT_CODES)
        command.add_argument("config", metavar="CONFIG", help="a YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="such as trainer.lr=2e-6")
        if name == "run":
            _add_beginning(command)
        if name == "plan":
            command.add_argument("--workers", type=int, metavar="N", help="for N workers, whatever CONFIG says")
            command.add_argument("--format", choices=("text", "json", "svg"), default="text", help="default: text")
    quick = commands.add_parser("quickstart", help="train a tiny model on this machine", epilog=_EXIT_CODES)
    quick.add_argument("overrides", nargs="*", metavar="key=value", help="such as run.seed=1")
    query = commands.add_parser("rollouts", help="query every sample of a run with SQL, as the table 'rollouts'")
    query.add_argument("run", metavar="RUN", help="the run's folder or URL")
    query.add_argument(
        "sql", metavar="SQL", nargs="?", default=None, help="default: count and mean reward of each step"
    )
    _add_eval(commands.add_parser("eval", help="sample from a run's model or a folder's and score", epilog=_EXIT_CODES))
    _add_export(commands.add_parser("export", help="write a checkpoint as a Hugging Face folder", epilog=_EXIT_CODES))
    chosen, more = parser.parse_known_args(arguments)  # key=value after an option, which argparse leaves over
    if more and (any(text.startswith("-") for text in more) or not hasattr(chosen, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        chosen.overrides += more
    _exit_with_message(lambda: _dispatch(chosen))


def _add_beginning(parser: argparse.ArgumentParser) -> None:
    """How to begin where there is a run already; left to itself, it is gone on with."""
    parser.add_argument("--fresh", action="store_true", help="begin anew: what the run left in its folder is removed")
    parser.add_argument("--force", action="store_true", help="go on with the run though CONFIG is not what it was")


def _add_eval(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="RUN_OR_MODEL", help="a run's folder or URL, or a Hugging Face folder")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="such as data.prompt=question")
    command.add_argument("--data", metavar="URL", required=True, help="dataset: Parquet, or a table of siirl_storage")
    command.add_argument("--step", type=int, metavar="S", help="checkpoint of a run; default: the newest")
    command.add_argument("--out", metavar="URL", help="where to write; default: RUN/evaluations/..., ./evaluations/...")
    for name, (key, metavar, text) in _EVAL_OPTIONS.items():
        command.add_argument(f"--{name}", dest=key, metavar=metavar, help=f"{text} ({key})")


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="the run's folder or URL")
    command.add_argument("to", metavar="DEST", help="a folder or URL where there is nothing yet")
    command.add_argument("--step", type=int, metavar="N", help="of the checkpoint; default: the newest")
    command.add_argument("--role", default="policy", metavar="ROLE", help="default: policy")
    command.add_argument("--ema", action="store_true", help="the moving average of the weights (trainer.ema_decay)")
    command.add_argument("--dtype", choices=[*Dtype], type=Dtype, help="default: as the run's model.dtype")
    command.add_argument("--adapter", action="store_true", help="the adapters alone, for peft (trainer.lora_rank)")


def run_pipeline(training: DagOf, validation: DagOf | None = None, arguments: Sequence[str] | None = None) -> None:
    """The command line of a pipeline script: ``CONFIG [key=value ...] [--fresh | --force]``; the script's DAG stands
    in for the config's.
    """
    parser = argparse.ArgumentParser(epilog=_EXIT_CODES)
    _add_beginning(parser)
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as trainer.lr=2e-6")
    chosen = parser.parse_intermixed_args(arguments)

    def start() -> None:
        config = load(chosen.config, chosen.overrides).config
        _train(config, training(config), validation(config) if validation else None, chosen)

    _exit_with_message(start)


def _dispatch(chosen: argparse.Namespace) -> None:
    match chosen.command:
        case "run":
            file = load(chosen.config, chosen.overrides)
            _train(file.config, *dags(file), chosen)
        case "plan":
            from siirl_dask.plan import describe_run

            scaled = [] if chosen.workers is None else [f"cluster.workers={chosen.workers}"]
            file = load(chosen.config, [*chosen.overrides, *scaled])
            print(describe_run(file.config, *dags(file), chosen.format))
        case "quickstart":
            from siirl_dask.quickstart import quickstart

            quickstart(shipped("quickstart.yaml"), chosen.overrides)
        case "rollouts":
            from siirl_dask.rollouts import query

            print(query(chosen.run, chosen.sql))
        case "eval":
            _evaluate(chosen)
        case "export":
            from siirl_dask.export import export

            how = {name: getattr(chosen, name) for name in ("step", "role", "ema", "dtype", "adapter")}
            step = export(chosen.run, chosen.to, **how)
            print(f"{chosen.role} of step {step} is in {chosen.to}")


def _evaluate(chosen: argparse.Namespace) -> None:
    from siirl_dask.evaluate import Evaluation, evaluate
    from siirl_dask.observe import show_standing

    given = {key: getattr(chosen, key) for key, _, _ in _EVAL_OPTIONS.values()}
    lists = ("validation.k",)
    options = [
        f"{key}=[{text}]" if key in lists else f"{key}={text}" for key, text in given.items() if text is not None
    ]
    asked = Evaluation(
        model=chosen.model,
        data=chosen.data,
        step=chosen.step,
        out=chosen.out,
        overrides=[*options, *chosen.overrides],
    )
    show_standing(*evaluate(asked))


def dags(file: ConfigFile) -> tuple[DAG, DAG | None]:
    """The training and the validation DAG that a config file spells."""
    dag = dag_from_spec(file.roles, file.nodes, role_places=file.role_places, node_places=file.node_places)
    if not file.validation_nodes:
        return dag, None
    places = file.validation_node_places
    return dag, dag_from_spec(file.roles, file.validation_nodes, role_places=file.role_places, node_places=places)


def _train(config: Config, dag: DAG, validation: DAG | None, chosen: argparse.Namespace) -> None:
    from siirl_dask.run import run  # dask and torch: seconds that `plan` and `--help` need not wait for

    run(config, dag, validation, fresh=chosen.fresh, force=chosen.force)


def _end_soon() -> None:
    """Python would go through all that torch made once more, for a second. nanobind, which triton is built with, calls
    leaked what is left out.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _exit_with_message(work: Callable[[], None]) -> None:
    """Run ``work``; what it raises on purpose becomes one message, what it does not (a bug) stays a traceback."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    atexit.register(_end_soon)
    sys.path.insert(0, str(Path.cwd()))  # functions named module:function in a config are looked for here too
    try:
        work()
    except KeyboardInterrupt:
        sys.exit(130)
    except SiirlError as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"error: {error}{notes}", file=sys.stderr)
        sys.exit(130 if isinstance(error, Interrupted) else 2 if isinstance(error, UserError) else 1)


def _as_interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
