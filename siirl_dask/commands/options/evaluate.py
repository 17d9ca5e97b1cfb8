"""Options of ``siirl-dask eval``."""

from __future__ import annotations

import argparse

from siirl_dask.commands.options.common import add_cluster_option, add_overrides, overrides_of
from siirl_dask.commands.program.interrupts import EndsAtOnce

_SHORT = {
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
"""Options that are short for a key: {option: (key, placeholder, help)}."""
_LISTS = ("validation.k",)


def add_eval(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "model", metavar="RUN_OR_MODEL", help="a run's folder or URL, or a Hugging Face folder"
    )
    add_overrides(parser, "such as data.prompt=question")
    add_cluster_option(parser)
    parser.add_argument(
        "--data",
        metavar="URL",
        required=True,
        help="dataset: Parquet, or a table of siirl_storage",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="S",
        help="checkpoint of a run; default: the newest",
    )
    parser.add_argument(
        "--out",
        metavar="URL",
        help="where to write; default: RUN/evaluations/..., ./evaluations/...",
    )
    parser.add_argument(
        "--world",
        metavar="ROLE",
        help="role of the run with environments; default: that of training",
    )
    for name, (key, metavar, text) in _SHORT.items():
        parser.add_argument(f"--{name}", dest=key, metavar=metavar, help=f"{text} ({key})")


def run_eval(options: argparse.Namespace) -> None:
    """Sample and score, and print the result."""
    from siirl_dask.devices import check_plugins

    with EndsAtOnce():
        check_plugins()
        from siirl_dask.commands.evaluate import EvalRequest, evaluate
        from siirl_dask.observe import print_eval_result

    request = EvalRequest(
        model=options.model,
        data=options.data,
        step=options.step,
        out=options.out,
        world=options.world,
        overrides=[*_overrides(options), *overrides_of(options)],
    )
    result, url = evaluate(request)
    print_eval_result(result, url)


def _overrides(options: argparse.Namespace) -> list[str]:
    texts = {key: getattr(options, key) for key, _, _ in _SHORT.values()}
    return [
        f"{key}=[{text}]" if key in _LISTS else f"{key}={text}"
        for key, text in texts.items()
        if text is not None
    ]
