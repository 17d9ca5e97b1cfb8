"""Options of ``siirl-dask chat``."""

from __future__ import annotations

import argparse

from siirl_dask.commands.program.interrupts import EndsAtOnce

_SHORT = {
    "temperature": ("validation.temperature", "T", "default: the run's, or 0: the most likely"),
    "max-tokens": ("rollout.max_response_length", "N", "longest response, in tokens"),
}
"""Options that are short for a key: {option: (key, placeholder, help)}."""


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "model", metavar="RUN_OR_MODEL", help="a run's folder or URL, or a Hugging Face folder"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="such as validation.top_p=0.9",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="answer this one, and end; default: lines of the input"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompts")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without the chat template"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="S",
        help="checkpoint of a run; default: the newest",
    )
    parser.add_argument(
        "--role", metavar="ROLE", help="role of a run whose model answers; default: policy"
    )
    for name, (key, metavar, text) in _SHORT.items():
        parser.add_argument(f"--{name}", dest=key, metavar=metavar, help=f"{text} ({key})")


def run_chat(options: argparse.Namespace) -> None:
    """Answer the prompt, or the lines of standard input."""
    from siirl_dask.devices import check_plugins

    with EndsAtOnce():
        check_plugins()
        from siirl_dask.commands.chat import chat

    texts = vars(options)
    short = {key: texts[key] for key, *_ in _SHORT.values() if texts[key] is not None}
    chat(options, short)
