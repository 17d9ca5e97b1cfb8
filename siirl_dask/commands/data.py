"""``siirl-dask data``: ``import`` writes datasets of any kind as a table, ``show`` looks into
one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import progress as bars
from rich.text import Text

from siirl_dask.commands.program.ending import EXIT_CODES
from siirl_dask.config import parse_bytes
from siirl_dask.errors import ConfigError, DataError, Interrupted, counted
from siirl_dask.models.cache import folder_here
from siirl_dask.observe import PipeConsole

if TYPE_CHECKING:
    import pyarrow as pa

    from siirl_dask.datasets.summary import DatasetSummary
    from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer

_TOKENIZER = "Hugging Face folder of the model whose tokens are counted, or its URL"


def add_data(command: argparse.ArgumentParser) -> None:
    """Add the command line of ``data``."""
    actions = command.add_subparsers(dest="action", required=True)
    _add_import(
        actions.add_parser(
            "import", help="write datasets of any kind as a table", epilog=EXIT_CODES
        )
    )
    show = actions.add_parser(
        "show", help="show columns, parts, lengths and samples of a dataset", epilog=EXIT_CODES
    )
    show.add_argument("url", metavar="URL", help="a table, or anything that can be imported")
    _add_separator(show)
    show.add_argument("--tokenizer", metavar="PATH", help=f"{_TOKENIZER}; default: characters are")
    show.add_argument(
        "--model",
        metavar="PATH",
        help="as --tokenizer, and print the first prompt as the model sees it",
    )
    show.add_argument(
        "--max-prompt-length",
        type=int,
        metavar="N",
        help="count prompts that are longer",
    )
    show.add_argument(
        "--prompt", metavar="COLUMN", help="column whose lengths are counted; default: prompt"
    )
    show.add_argument(
        "--rows",
        type=int,
        default=100_000,
        metavar="N",
        help="rows to look at; 0: all; default: 100000",
    )
    show.add_argument(
        "--samples",
        type=int,
        default=3,
        metavar="N",
        help="rows to print; default: 3",
    )


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "paths",
        metavar="SRC... DEST",
        nargs="+",
        help=(
            "sources: files, globs, folders, saved datasets, hf://datasets/...; then the URL of "
            "the table"
        ),
    )
    command.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="NAME=PATH[:TYPE]",
        help="add a column: answer=reward_model.truth:text",
    )
    command.add_argument(
        "--chat",
        metavar="PATH",
        help="make the prompts: each text of PATH as a user's message, for the chat template",
    )
    command.add_argument(
        "--system", metavar="TEXT", help="with --chat: a system's message before each user's"
    )
    command.add_argument(
        "--type",
        action="append",
        default=[],
        metavar="NAME=TYPE",
        help="such as answer=text",
    )
    command.add_argument("--select", metavar="A,B", help="the table's columns; default: all")
    command.add_argument("--drop", metavar="A,B", help="columns that the table does not have")
    command.add_argument(
        "--source-column", metavar="NAME", help="add a column with the source of each row"
    )
    command.add_argument("--tokenizer", metavar="PATH", help=_TOKENIZER)
    command.add_argument(
        "--max-prompt-length",
        type=int,
        metavar="N",
        help="count prompts that are longer",
    )
    command.add_argument(
        "--prompt",
        default="prompt",
        metavar="COLUMN",
        help="column of the prompts; default: prompt",
    )
    command.add_argument(
        "--length-column", metavar="NAME", help="add a column with each prompt's tokens"
    )
    command.add_argument(
        "--row-group-bytes",
        default="16MiB",
        metavar="SIZE",
        help="size of row groups, at most; default: 16MiB",
    )
    _add_separator(command)
    command.add_argument(
        "--append", action="store_true", help="add rows to the table that is at DEST"
    )


def _add_separator(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--separator",
        metavar="TEXT",
        help="what CSV files have between columns; default: a comma, or a tab in .tsv",
    )


def data(chosen: argparse.Namespace) -> None:
    """Run ``data import`` or ``data show``."""
    try:
        if chosen.action == "import":
            _import(chosen)
        else:
            _show(chosen)
    except KeyboardInterrupt:
        remark = ""
        if chosen.action == "import":
            remark = f": there is nothing new at {chosen.paths[-1]}"
        raise Interrupted(f"stopped by the user{remark}") from None


def _import(chosen: argparse.Namespace) -> None:
    from siirl_dask.datasets import (
        ChatColumn,
        ColumnMapping,
        ImportRequest,
        PromptLengths,
        import_data,
        parse_type,
    )
    from siirl_dask.views.dataset_tables import print_import

    _check_separator(chosen.separator)
    *sources, to = chosen.paths
    if not sources:
        raise ConfigError(
            f"data import {to}: expected sources and then a destination, as in data import a.jsonl "
            "DEST"
        )
    for option in ("max_prompt_length", "length_column"):
        if getattr(chosen, option) is not None and chosen.tokenizer is None:
            raise ConfigError(f"--{option.replace('_', '-')} counts tokens, and needs --tokenizer")
    columns, types = _columns(chosen.column)
    for name, text in _pairs("--type", chosen.type):
        if name in types:
            raise ConfigError(f"--type {name}={text}: --column {name}=... gives it a type too")
        types[name] = parse_type(text)
    if chosen.system is not None and chosen.chat is None:
        raise ConfigError(
            "--system begins the messages that --chat PATH makes: give --chat as well"
        )
    chat = None
    if chosen.chat is not None:
        if chosen.prompt in columns:
            raise ConfigError(
                f"--column {chosen.prompt}=... and --chat {chosen.chat}: both make the column "
                f"{chosen.prompt!r}; leave one out, or name another with --prompt"
            )
        chat = ChatColumn(name=chosen.prompt, path=chosen.chat, system=chosen.system)
    mapping = ColumnMapping(
        columns=columns,
        types=types,
        select=None if chosen.select is None else _names("--select", chosen.select),
        drop=() if chosen.drop is None else _names("--drop", chosen.drop),
        chat=chat,
    )
    prompts = None
    if chosen.tokenizer is not None:
        tokenizer = _tokenizer(chosen.tokenizer)
        prompts = PromptLengths(
            prompt=chosen.prompt,
            measure=tokenizer.lengths,
            column=chosen.length_column,
            tokenizer=tokenizer.identity,
        )
    nbytes = parse_bytes("--row-group-bytes", chosen.row_group_bytes)
    if nbytes < 1:
        raise ConfigError(f"--row-group-bytes {chosen.row_group_bytes}: expected at least 1 byte")
    remarks: list[str] = []
    request = ImportRequest(
        sources=sources,
        to=to,
        mapping=mapping,
        source_column=chosen.source_column,
        prompts=prompts,
        row_group_bytes=nbytes,
        append=chosen.append,
        remark=remarks.append,
        separator=chosen.separator,
    )
    console = PipeConsole()
    with row_progress(console, "importing") as progress:
        table = import_data(request, progress)
    for text in remarks:
        console.print(Text(text), soft_wrap=True)
    lengths = None
    if prompts is not None:
        lengths = prompts.lengths
    print_import(console, table, lengths, chosen.max_prompt_length)


def _show(chosen: argparse.Namespace) -> None:
    from siirl_dask.datasets import characters
    from siirl_dask.datasets.summary import summarise
    from siirl_dask.views.dataset_tables import print_summary

    _check_separator(chosen.separator)
    for option in ("rows", "samples"):
        if getattr(chosen, option) < 0:
            raise ConfigError(f"--{option} {getattr(chosen, option)}: expected 0 or more")
    if chosen.model is not None and chosen.tokenizer is not None:
        raise ConfigError(
            "--model and --tokenizer: expected one of them, both name the model whose tokens are "
            "counted"
        )
    path = chosen.model
    if not path:
        path = chosen.tokenizer
    if chosen.max_prompt_length is not None and path is None:
        raise ConfigError("--max-prompt-length counts tokens, and needs --tokenizer or --model")
    tokenizer = None
    if path is not None:
        tokenizer = _tokenizer(path, "--model" if chosen.model else "--tokenizer")
    measure = characters if tokenizer is None else tokenizer.lengths
    console = PipeConsole()
    with row_progress(console, "reading") as progress:
        found = summarise(
            chosen.url,
            measure=measure,
            prompt=chosen.prompt,
            rows=chosen.rows or None,
            samples=chosen.samples,
            separator=chosen.separator,
            progress=lambda rows: progress(rows, 0, chosen.rows or None),
        )
    print_summary(
        console, found, "characters" if tokenizer is None else "tokens", chosen.max_prompt_length
    )
    if chosen.model is not None and tokenizer is not None:
        _show_first_prompt(console, found, tokenizer)


def _show_first_prompt(
    console: PipeConsole, found: DatasetSummary, tokenizer: HuggingFaceTokenizer
) -> None:
    """Print the first prompt as the model sees it, or why it cannot be shown."""
    from siirl_dask.driver.checks.prompt_rows import rendered

    if found.first_prompt is None:
        console.print(
            Text("\nThere is no first prompt to show: it is null, or there is no column of prompts")
        )
        return
    try:
        prompt = rendered(tokenizer, found.first_prompt, "it is refused")
    except DataError as error:
        console.print(Text(f"\nFirst prompt: {error}"), soft_wrap=True)
        return
    console.print(
        Text(
            f"\nFirst prompt as the model sees it, {counted(prompt.tokens, 'token')}", style="bold"
        )
    )
    console.print(Text(prompt.text), soft_wrap=True)
    if prompt.remark:
        console.print(Text(f"\n{prompt.remark}"), soft_wrap=True)


@contextmanager
def row_progress(
    console: PipeConsole, text: str
) -> Iterator[Callable[[int, int, int | None], None]]:
    """Show a bar of rows on a terminal; yields the function that moves it: ``(rows, bytes, rows
    in all or None)``.
    """
    with bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TextColumn("{task.completed:,} rows {task.fields[size]}"),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(text, total=None, size="")

        def show(rows: int, nbytes: int, total: int | None) -> None:
            seconds = bar.tasks[0].elapsed
            size = ""
            if nbytes and seconds:
                size = f"{nbytes / 1e6:,.0f} MB, {nbytes / 1e6 / seconds:,.0f} MB/s"
            bar.update(task, completed=rows, total=total, size=size)

        yield show


def _tokenizer(path: str, option: str = "--tokenizer") -> HuggingFaceTokenizer:
    # transformers: seconds that others need not wait for
    from siirl_dask.rollout.tokenizer import load_tokenizer

    return load_tokenizer(folder_here(path, weights=False), f"{option} {path!r}")


def _pairs(option: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Split ``NAME=VALUE`` texts. ConfigError for another text, and for a name that is given
    twice.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not (name and sign and value):
            raise ConfigError(f"{option} {text!r}: expected {option} NAME=VALUE")
        if name in pairs:
            raise ConfigError(f"{option} {text!r}: {name!r} was given before, as {pairs[name]!r}")
        pairs[name] = value
    return list(pairs.items())


def _columns(texts: Sequence[str]) -> tuple[dict[str, str], dict[str, pa.DataType]]:
    """Return paths and types of new columns, of ``NAME=PATH`` or ``NAME=PATH:TYPE``.

    What follows a colon is part of the path where it is no type: names may have colons.
    """
    from siirl_dask.datasets import parse_type

    paths: dict[str, str] = {}
    types: dict[str, pa.DataType] = {}
    for name, path in _pairs("--column", texts):
        paths[name] = path
        head, colon, kind = path.rpartition(":")
        if colon:
            try:
                types[name] = parse_type(kind)
            except ConfigError:
                continue
            paths[name] = head
    return paths, types


def _check_separator(text: str | None) -> None:
    if text is not None and (len(text) != 1 or not text.isascii() or text in '"\r\n'):
        raise ConfigError(f"--separator {text!r}: expected one character, such as ';' or a tab")


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"{option} {text!r}: expected different names with commas between them")
    return names
