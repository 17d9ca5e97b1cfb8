"""Options that several commands have."""

from __future__ import annotations

import argparse
import json

CONFIG = "a YAML file, or siirl_dask:NAME, which comes with the package (siirl-dask configs)"
"""Help text of an argument CONFIG."""
RUN = "the run's folder or URL"
"""Help text of an argument RUN."""


def add_overrides(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``key=value ...``, with a help text; ``overrides_of`` returns them."""
    # with a default, or argparse names them among the arguments that are required
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)


def add_resume_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--fresh`` and ``--force``; without either, an existing run is resumed."""
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="begin anew: what the run left in its folder is removed",
    )
    parser.add_argument(
        "--force", action="store_true", help="resume the run although CONFIG or the DAG has changed"
    )


def add_cluster_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--cluster``, which is short for a key."""
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="start the Dask cluster that FILE describes (cluster.spec)",
    )


def overrides_of(options: argparse.Namespace) -> list[str]:
    """Return the overrides ``key=value``, with that of ``--cluster`` first."""
    cluster = []
    if options.cluster is not None:
        cluster = [f"cluster.spec={json.dumps(options.cluster)}"]
    return [*cluster, *options.overrides]
