"""Post-training of language models with no centre. Errors are one message on stderr."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from siirl_dask.commands.check import CHECK_EXIT_CODES, check
from siirl_dask.commands.data import add_data, data
from siirl_dask.commands.migrate import add_migrate, show_migration
from siirl_dask.commands.report import add_report, write_report
from siirl_dask.commands.rollouts import add_questions, show_rollouts
from siirl_dask.commands.script import (
    EXIT_CODES,
    add_cluster_option,
    add_resume_options,
    exit_with_message,
    overrides_of,
    train,
)
from siirl_dask.commands.serve import add_serve, serve
from siirl_dask.commands.steps import steps_between
from siirl_dask.commands.trace import add_trace, show_trace
from siirl_dask.commands.watch import WATCH_EXIT_CODES, add_watch, watch
from siirl_dask.config import Dtype
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.devices import check_plugins
from siirl_dask.errors import ConfigError, did_you_mean

_EXPORTED = [dtype for dtype in Dtype if dtype is not Dtype.auto]
_NEED_TORCH = ("run", "plan", "quickstart", "replay", "eval", "export", "unpack")
_EVAL_OPTIONS = {
    "n": ("validation.n", "N", "samples per prompt"),
    "k": ("validation.k", "1,4,8", "values of k for pass@k; default: 1 and N"),
    "temperature": (
        "validation.temperature",
        "T",
        "default: 0, the most likely response, or 1 where N is more than 1",
    ),
    "max-tokens": ("rollout.max_response_length", "N", "longest response, in tokens"),
    "reward": ("rewards.function", "module:function", "reward function; default: the run's own"),
    "workers": ("cluster.workers", "N", "worker processes"),
}
"""Options of ``eval`` that are short for a key: {option: (key, placeholder, help)}."""

_DOCTOR_CODES = "exit codes: 0 no fault, 1 a fault, 2 CONFIG cannot be used"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a failure ends the process with a message and an exit code."""
    exit_with_message(lambda: _dispatch(_parse(arguments)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("siirl-dask", description=__doc__, epilog=EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in {
        "run": "train as CONFIG says",
        "plan": "show what CONFIG would do; start nothing",
    }.items():
        command = commands.add_parser(name, help=text, epilog=EXIT_CODES)
        count = {"nargs": "?"} if name == "plan" else {}
        command.add_argument("config", metavar="CONFIG", help="a YAML file", **count)  # type: ignore[arg-type]
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="such as trainer.lr=2e-6"
        )
        add_cluster_option(command)
        if name == "run":
            add_resume_options(command)
        if name == "plan":
            command.add_argument(
                "--workers", type=int, metavar="N", help="for N workers, whatever CONFIG says"
            )
            command.add_argument(
                "--hosts", metavar="4x8", help="for 4 hosts with 8 workers each; or a list, 8,8,4"
            )
            command.add_argument(
                "--device-memory", metavar="80GB", help="memory of a worker's accelerator"
            )
            command.add_argument(
                "--devices",
                type=int,
                metavar="N",
                help="accelerators of a host; default: all workers'",
            )
            command.add_argument(
                "--on", metavar="h100", help="estimate seconds: cpu, h100, h200, a100, 4090 or 910b"
            )
            command.add_argument(
                "--tokens", metavar="300,800", help="mean tokens of a prompt and of a response"
            )
            command.add_argument(
                "--figure",
                action="append",
                default=[],
                metavar="flops=4e14",
                help="figure of the device",
            )
            command.add_argument(
                "--format", choices=("text", "json", "svg"), default="text", help="default: text"
            )
            command.add_argument(
                "--analyze", metavar="RUN", help="beside it, what this run of the plan has measured"
            )
            command.add_argument(
                "--trust", action="store_true", help="with --analyze: import code that RUN names"
            )
    _add_doctor(
        commands.add_parser(
            "doctor", help="examine this machine, a store and a cluster", epilog=_DOCTOR_CODES
        )
    )
    quick = commands.add_parser(
        "quickstart", help="train a tiny model on this machine", epilog=EXIT_CODES
    )
    quick.add_argument("overrides", nargs="*", metavar="key=value", help="such as run.seed=1")
    add_cluster_option(quick)
    add_questions(
        commands.add_parser("rollouts", help="ask every sample of a run, in SQL or ready questions")
    )
    add_trace(
        commands.add_parser(
            "trace", help="say where a run's time goes and who is slow; write it for Perfetto"
        )
    )
    add_report(
        commands.add_parser(
            "report", help="write one HTML file on a run, or compare several", epilog=EXIT_CODES
        )
    )
    add_watch(
        commands.add_parser(
            "watch", help="show a run, wherever it is, until it ends", epilog=WATCH_EXIT_CODES
        )
    )
    add_serve(
        commands.add_parser(
            "serve",
            help="show the page of a run, or of a folder of runs, without a cluster",
            epilog=EXIT_CODES,
        )
    )
    whole = commands.add_parser("check", help="verify every file of a run", epilog=CHECK_EXIT_CODES)
    whole.add_argument("run", metavar="RUN", help="the run's folder or URL")
    _add_clean(
        commands.add_parser("clean", help="delete what a run does not need", epilog=EXIT_CODES)
    )
    again = commands.add_parser(
        "replay", help="run nodes again on a run's stored rows, changed", epilog=EXIT_CODES
    )
    _add_replay(again)
    _add_eval(
        commands.add_parser(
            "eval", help="sample from a run's model or a folder's and score", epilog=EXIT_CODES
        )
    )
    add_data(commands)
    add_migrate(
        commands.add_parser(
            "migrate", help="turn a verl or siiRL config into one of ours", epilog=EXIT_CODES
        )
    )
    _add_export(
        commands.add_parser(
            "export", help="write a checkpoint as a Hugging Face folder", epilog=EXIT_CODES
        )
    )
    unpacked = commands.add_parser(
        "unpack", help="write a quantized model as one that trains", epilog=EXIT_CODES
    )
    unpacked.add_argument(
        "model", metavar="MODEL", help="the model's folder or URL, such as hf://openai/gpt-oss-20b"
    )
    unpacked.add_argument("to", metavar="DEST", help="a folder or URL where there is nothing yet")
    # key=value or SQL after an option, which argparse leaves over
    chosen, more = parser.parse_known_args(arguments)
    unknown = any(text.startswith("-") for text in more)
    if not unknown and hasattr(chosen, "overrides"):
        chosen.overrides += more
    elif not unknown and hasattr(chosen, "paths"):
        chosen.paths += more
    elif not unknown and len(more) == 1 and getattr(chosen, "sql", more) is None:
        (chosen.sql,) = more
    elif more:
        command = commands.choices[chosen.command]
        known = re.findall(r"--[\w-]+", command.format_usage())
        command.error(f"unrecognized arguments: {' '.join(more)}{did_you_mean(more[0], known)}")
    return chosen


def _add_doctor(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a YAML file; default: this machine alone"
    )
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as cluster.address=tcp://host:8786"
    )
    command.add_argument(
        "--cluster", metavar="FILE", help="the file that describes a cluster (cluster.spec)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_eval(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model", metavar="RUN_OR_MODEL", help="a run's folder or URL, or a Hugging Face folder"
    )
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as data.prompt=question"
    )
    add_cluster_option(command)
    command.add_argument(
        "--data", metavar="URL", required=True, help="dataset: Parquet, or a table of siirl_storage"
    )
    command.add_argument(
        "--step", type=int, metavar="S", help="checkpoint of a run; default: the newest"
    )
    command.add_argument(
        "--out",
        metavar="URL",
        help="where to write; default: RUN/evaluations/..., ./evaluations/...",
    )
    command.add_argument(
        "--world",
        metavar="ROLE",
        help="role of the run with environments; default: that of training",
    )
    for name, (key, metavar, text) in _EVAL_OPTIONS.items():
        command.add_argument(f"--{name}", dest=key, metavar=metavar, help=f"{text} ({key})")


def _add_clean(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="the run's folder or URL")
    command.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    command.add_argument(
        "--keep-stages", type=int, metavar="N", help="rows of the N newest steps; default: of all"
    )
    command.add_argument("--replays", action="store_true", help="tables of replays as well")


def _add_replay(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="the run's folder or URL")
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="where to run, such as cluster.workers=2"
    )
    command.add_argument(
        "--from", dest="first", metavar="NODE", required=True, help="node to begin with"
    )
    command.add_argument(
        "--steps",
        type=steps_between,
        default=":",
        metavar="A:B",
        help="steps A to B, both included; default: all",
    )
    command.add_argument(
        "--checkpoint",
        default="before",
        metavar="STEP|before|latest|none",
        help=(
            "whose weights a model gets that a node asks for; default: before, the newest one "
            "older than each step"
        ),
    )
    command.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="key=value",
        help="such as rewards.function=file.py:f",
    )
    command.add_argument(
        "--node",
        dest="nodes",
        action="append",
        default=[],
        metavar="NAME=file.py:f",
        help="another function for a node",
    )


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="the run's folder or URL")
    command.add_argument("to", metavar="DEST", help="a folder or URL where there is nothing yet")
    command.add_argument(
        "--step", type=int, metavar="N", help="step of the checkpoint; default: the newest"
    )
    command.add_argument("--role", default="policy", metavar="ROLE", help="default: policy")
    command.add_argument(
        "--ema", action="store_true", help="the moving average of the weights (trainer.ema_decay)"
    )
    command.add_argument(
        "--dtype", choices=_EXPORTED, type=Dtype, help="default: as the run's model.dtype"
    )
    command.add_argument(
        "--adapter", action="store_true", help="the adapters alone, for peft (trainer.lora.rank)"
    )
    command.add_argument(
        "--verify", action="store_true", help="load what was written, compare tensors and log-probs"
    )


def _dispatch(chosen: argparse.Namespace) -> None:
    """Call the chosen command. Each is imported here: torch and Dask take seconds, for which
    others need not wait.
    """
    if chosen.command in _NEED_TORCH:
        check_plugins()
    match chosen.command:
        case "run":
            from siirl_dask.driver.phases import dags

            file = load_config_file(chosen.config, overrides_of(chosen))
            train(file.config, *dags(file), chosen)
        case "plan":
            _plan(chosen)
        case "doctor":
            from siirl_dask.commands.doctor import doctor

            sys.exit(doctor(chosen.config, overrides_of(chosen), as_json=chosen.json))
        case "clean":
            from siirl_dask.commands.clean import clean

            given = {
                name: value
                for name, value in vars(chosen).items()
                if name not in ("command", "run")
            }
            print(clean(chosen.run, **given))
        case "replay":
            from siirl_dask.commands.replay import ReplayRequest, render, replay
            from siirl_dask.runs.past_weights import checkpoint_choice

            given = {name: value for name, value in vars(chosen).items() if name != "command"}
            given["checkpoint"] = checkpoint_choice(chosen.checkpoint)
            print(render(replay(ReplayRequest(**given))))
        case "quickstart":
            from siirl_dask.commands.quickstart import quickstart

            quickstart(shipped("quickstart.yaml"), overrides_of(chosen))
        case "rollouts":
            show_rollouts(chosen)
        case "trace":
            show_trace(chosen)
        case "watch":
            sys.exit(watch(chosen))
        case "report":
            write_report(chosen)
        case "serve":
            serve(chosen)
        case "check":
            sys.exit(check(chosen.run))
        case "eval":
            _evaluate(chosen)
        case "data":
            data(chosen)
        case "migrate":
            show_migration(chosen)
        case "export":
            from siirl_dask.runs.export import export

            options = {
                name: getattr(chosen, name)
                for name in ("step", "role", "ema", "dtype", "adapter", "verify")
            }
            step = export(chosen.run, chosen.to, **options)
            verified = ", and gives the log-probs of its weights" if chosen.verify else ""
            print(f"{chosen.role} of step {step} is in {chosen.to}{verified}")
        case "unpack":
            from siirl_dask.commands.unpack import unpack

            method = unpack(chosen.model, chosen.to)
            print(
                f"the weights of {chosen.model}, which were packed by {method}, are in "
                f"{chosen.to}, unpacked"
            )


def _plan(chosen: argparse.Namespace) -> None:
    from siirl_dask.commands.step_time import TimingOptions

    timing = TimingOptions(chosen.on, chosen.tokens, tuple(chosen.figure))
    if chosen.analyze is not None:
        from siirl_dask.commands.analyze import analyze_run

        others = ("workers", "hosts", "device_memory", "devices", "cluster")
        given = [
            f"--{name.replace('_', '-')}" for name in others if getattr(chosen, name) is not None
        ]
        if given := [text for text in (chosen.config, *chosen.overrides) if text] + given:
            raise ConfigError(
                f"--analyze {chosen.analyze} reads that run's own configuration: leave out "
                f"{given[0]}"
            )
        print(analyze_run(chosen.analyze, chosen.format, timing, trust=chosen.trust))
        return
    if chosen.trust:
        raise ConfigError("--trust is for --analyze RUN: the code that CONFIG names is yours")
    if chosen.config is None:
        raise ConfigError("plan needs CONFIG, a YAML file, or --analyze RUN")
    from siirl_dask.commands.hosts import read_hosts
    from siirl_dask.commands.plan import describe_run
    from siirl_dask.driver.phases import dags

    hosts = None if chosen.hosts is None else read_hosts(chosen.hosts, chosen.workers)
    workers = chosen.workers if hosts is None else sum(hosts)
    scaled = [] if workers is None else [f"cluster.workers={workers}"]
    scaled += (
        [] if chosen.device_memory is None else [f"cluster.device_memory={chosen.device_memory}"]
    )
    file = load_config_file(chosen.config, [*overrides_of(chosen), *scaled])
    print(describe_run(file.config, *dags(file), chosen.format, hosts, chosen.devices, timing))


def _evaluate(chosen: argparse.Namespace) -> None:
    from siirl_dask.commands.evaluate import EvalRequest, evaluate
    from siirl_dask.observe import print_eval_result

    texts = {key: getattr(chosen, key) for key, _, _ in _EVAL_OPTIONS.values()}
    lists = ("validation.k",)
    overrides = [
        f"{key}=[{text}]" if key in lists else f"{key}={text}"
        for key, text in texts.items()
        if text is not None
    ]
    request = EvalRequest(
        model=chosen.model,
        data=chosen.data,
        step=chosen.step,
        out=chosen.out,
        world=chosen.world,
        overrides=[*overrides, *overrides_of(chosen)],
    )
    print_eval_result(*evaluate(request))


if __name__ == "__main__":
    main()
