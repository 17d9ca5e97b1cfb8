"""Options of ``siirl-dask export``."""

from __future__ import annotations

import argparse

from siirl_dask.commands.options.common import RUN
from siirl_dask.commands.program.interrupts import EndsAtOnce

_DTYPES = ("float32", "bfloat16")


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("to", metavar="DEST", help="a folder or URL where there is nothing yet")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="step of the checkpoint; default: the newest",
    )
    parser.add_argument("--role", default="policy", metavar="ROLE", help="default: policy")
    parser.add_argument(
        "--ema", action="store_true", help="the moving average of the weights (trainer.ema_decay)"
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="of all weights; default: as in the base's files, and not less than model.dtype",
    )
    parser.add_argument(
        "--adapter", action="store_true", help="the adapters alone, for peft (trainer.lora.rank)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="load what was written, compare tensors and log-probs"
    )


def run_export(options: argparse.Namespace) -> None:
    """Write the checkpoint, and print where it is."""
    from siirl_dask.devices import check_plugins

    with EndsAtOnce():
        check_plugins()
        from siirl_dask.config import Dtype
        from siirl_dask.runs.export import export

    step = export(
        options.run,
        options.to,
        step=options.step,
        role=options.role,
        ema=options.ema,
        dtype=None if options.dtype is None else Dtype(options.dtype),
        adapter=options.adapter,
        verify=options.verify,
    )
    verified = ""
    if options.verify:
        verified = ", and gives the log-probs of its weights"
    print(f"{options.role} of step {step} is in {options.to}{verified}")
