"""``siirl-dask serve``: the page of a run, live or over, or of the runs in a folder, without a
cluster.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from rich.text import Text

from siirl_dask.observe import PipeConsole

_ADDRESS = "127.0.0.1"


def add_serve(command: ArgumentParser) -> None:
    """Add the arguments of the command."""
    command.add_argument(
        "run", metavar="RUN_OR_FOLDER", help="a run's folder or URL, or a folder of runs"
    )
    command.add_argument(
        "--port",
        type=_port,
        default=0,
        metavar="N",
        help="default: one that is free",
    )
    command.add_argument(
        "--address",
        default=_ADDRESS,
        metavar="IP",
        help=f"where to listen; whoever reaches it sees prompts and responses (default: {_ADDRESS})",
    )


def _port(text: str) -> int:
    port = -1
    if text.isdecimal():
        port = int(text)
    if not 0 <= port <= 65535:
        raise ArgumentTypeError(f"{text!r}: expected a port from 0 to 65535")
    return port


def serve(chosen: Namespace) -> None:
    """Serve until Ctrl-C. ConfigError where there is no run, and for a port that is taken."""
    # Bokeh: half a second that other commands need not wait for
    from siirl_dask.views.dashboard.served.server import RunServer, served_runs

    runs = served_runs(chosen.run)
    server = RunServer(runs, chosen.address, chosen.port)
    console = PipeConsole()
    what = "runs"
    if runs.alone:
        what = "run"
    console.print(Text(f"{what:<10} {chosen.run}"), soft_wrap=True)
    console.print(Text(f"page       {server.address}"), soft_wrap=True)
    console.print(Text("Ctrl-C ends it", style="dim"))
    server.serve()
