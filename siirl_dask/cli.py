"""``siirl-dask``: run, plan, quickstart, rollouts. Errors are one message on stderr; exit codes are in ``--help``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from siirl_dask.config import Config
from siirl_dask.configfile import ConfigFile, load, shipped
from siirl_dask.errors import Interrupted, SiirlError, UserError
from siirl_dask.planner import DAG, dag_from_spec

_EXIT_CODES = "exit codes: 0 done, 1 the run failed, 2 something given cannot be used, 130 stopped by Ctrl-C or SIGTERM"

DagOf = Callable[[Config], DAG]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("siirl-dask", description=__doc__, epilog=_EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in {"run": "train as CONFIG says", "plan": "show what CONFIG would do; start nothing"}.items():
        command = commands.add_parser(name, help=text, epilog=_EXIT_CODES)
        command.add_argument("config", metavar="CONFIG", help="a YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="such as trainer.lr=2e-6")
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
    chosen, more = parser.parse_known_args(arguments)  # key=value after an option, which argparse leaves over
    if more and (any(text.startswith("-") for text in more) or not hasattr(chosen, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        chosen.overrides += more
    _exit_with_message(lambda: _dispatch(chosen))


def run_pipeline(training: DagOf, validation: DagOf | None = None, arguments: Sequence[str] | None = None) -> None:
    """The command line of a pipeline script: ``CONFIG [key=value ...]``; the script's DAG stands in for the
    config's.
    """
    parser = argparse.ArgumentParser(epilog=_EXIT_CODES)
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as trainer.lr=2e-6")
    chosen = parser.parse_args(arguments)

    def start() -> None:
        config = load(chosen.config, chosen.overrides).config
        _train(config, training(config), validation(config) if validation else None)

    _exit_with_message(start)


def _dispatch(chosen: argparse.Namespace) -> None:
    match chosen.command:
        case "run":
            file = load(chosen.config, chosen.overrides)
            _train(file.config, *dags(file))
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


def dags(file: ConfigFile) -> tuple[DAG, DAG | None]:
    """The training and the validation DAG that a config file spells."""
    dag = dag_from_spec(file.roles, file.nodes, role_places=file.role_places, node_places=file.node_places)
    if not file.validation_nodes:
        return dag, None
    places = file.validation_node_places
    return dag, dag_from_spec(file.roles, file.validation_nodes, role_places=file.role_places, node_places=places)


def _train(config: Config, dag: DAG, validation: DAG | None) -> None:
    from siirl_dask.run import run  # dask and torch: seconds that `plan` and `--help` need not wait for

    run(config, dag, validation)


def _exit_with_message(work: Callable[[], None]) -> None:
    """Run ``work``; what it raises on purpose becomes one message, what it does not (a bug) stays a traceback."""
    signal.signal(signal.SIGTERM, _as_interrupt)
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
