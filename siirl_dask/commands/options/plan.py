"""Options of ``siirl-dask plan``."""

from __future__ import annotations

import argparse

from siirl_dask.commands.options.common import (
    CONFIG,
    add_cluster_option,
    add_overrides,
    overrides_of,
)
from siirl_dask.commands.program.interrupts import EndsAtOnce
from siirl_dask.commands.program.terminal import output_columns
from siirl_dask.errors import ConfigError

_OF_A_CONFIG = ("workers", "hosts", "device_memory", "devices", "cluster")
"""Options that a run's own configuration stands in for."""


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("config", metavar="CONFIG", nargs="?", help=CONFIG)
    add_overrides(parser, "such as trainer.lr=2e-6")
    add_cluster_option(parser)
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="for N workers, whatever CONFIG says",
    )
    parser.add_argument(
        "--hosts", metavar="4x8", help="for 4 hosts with 8 workers each; or a list, 8,8,4"
    )
    parser.add_argument("--device-memory", metavar="80GB", help="memory of a worker's accelerator")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="accelerators of a host; default: all workers'",
    )
    parser.add_argument(
        "--on", metavar="h100", help="estimate seconds: cpu, h100, h200, a100, 4090 or 910b"
    )
    parser.add_argument(
        "--tokens", metavar="300,800", help="mean tokens of a prompt and of a response"
    )
    parser.add_argument(
        "--figure",
        action="append",
        default=[],
        metavar="flops=4e14",
        help="figure of the device",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json", "svg"),
        default="text",
        help="default: text",
    )
    parser.add_argument(
        "--analyze", metavar="RUN", help="beside it, what this run of the plan has measured"
    )
    parser.add_argument(
        "--trust", action="store_true", help="with --analyze: import code that RUN names"
    )


def run_plan(options: argparse.Namespace) -> None:
    """Print the plan of a configuration, or of a run beside what it measured."""
    with EndsAtOnce():
        if options.analyze is None:
            _plan(options)
        else:
            _analyze(options)


def _plan(options: argparse.Namespace) -> None:
    """Print what the configuration would do. ConfigError without one."""
    if options.trust:
        raise ConfigError("--trust is for --analyze RUN: the code that CONFIG names is yours")
    if options.config is None:
        raise ConfigError("plan needs CONFIG, a YAML file, or --analyze RUN")
    # read before what takes seconds is imported, for a name that is mistyped
    from siirl_dask.commands.planning.hosts import read_hosts
    from siirl_dask.config.file import load_config_file
    from siirl_dask.devices import check_plugins

    hosts = None
    if options.hosts is not None:
        hosts = read_hosts(options.hosts, options.workers)
    overrides = [*overrides_of(options), *_scaled(options, hosts)]
    file = load_config_file(options.config, overrides)
    check_plugins()
    from siirl_dask.commands.plan import describe_run
    from siirl_dask.commands.planning.step_time import TimingOptions
    from siirl_dask.driver.phases import dags
    from siirl_dask.wording import tables_within

    timing = TimingOptions(options.on, options.tokens, tuple(options.figure))
    training, validation = dags(file)
    with tables_within(output_columns()):
        text = describe_run(
            file.config,
            training,
            validation,
            options.format,
            hosts=hosts,
            devices=options.devices,
            timing=timing,
        )
    print(text)


def _scaled(options: argparse.Namespace, hosts: list[int] | None) -> list[str]:
    """Return the overrides of ``--workers``, ``--hosts`` and ``--device-memory``."""
    workers = options.workers if hosts is None else sum(hosts)
    scaled = []
    if workers is not None:
        scaled = [f"cluster.workers={workers}"]
    if options.device_memory is not None:
        scaled.append(f"cluster.device_memory={options.device_memory}")
    return scaled


def _analyze(options: argparse.Namespace) -> None:
    """Print what a run of the plan has measured. ConfigError for what belongs to a CONFIG."""
    texts = [text for text in (options.config, *options.overrides) if text]
    texts += [
        f"--{name.replace('_', '-')}" for name in _OF_A_CONFIG if getattr(options, name) is not None
    ]
    if texts:
        raise ConfigError(
            f"--analyze {options.analyze} reads that run's own configuration: leave out {texts[0]}"
        )
    from siirl_dask.devices import check_plugins

    check_plugins()
    from siirl_dask.commands.planning.analyze import analyze_run
    from siirl_dask.commands.planning.step_time import TimingOptions
    from siirl_dask.wording import tables_within

    timing = TimingOptions(options.on, options.tokens, tuple(options.figure))
    with tables_within(output_columns()):
        text = analyze_run(options.analyze, options.format, timing, trust=options.trust)
    print(text)
