"""Writes answers as one HTML page that needs nothing else. All text is escaped: what a model
says is not trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from siirl_storage import StorageError, open_fs, write_atomic

from siirl_dask.errors import ConfigError
from siirl_dask.views.html_page import html_page, safe
from siirl_dask.views.samples.answer import (
    AnswerLayout,
    QueryResult,
    cell,
    conversation,
    headings,
    lineage,
    reward_parts,
    speaker,
    summary,
)
from siirl_dask.views.samples.sample_html import pictures_as_html

_ROWS = 1000  # of a table, and of prompts that two steps share
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222 }
h1 { font-size: 1.3rem } h2 { font-size: 1.1rem; margin-top: 2.5rem } .note { color: #666 }
table { border-collapse: collapse } th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
article { border: 1px solid #ddd; border-radius: .4rem; margin: 1rem 0; padding: .5rem 1rem }
h3 { font-size: 1rem; margin: .3rem 0 } h4 { font-size: .85rem; margin: .6rem 0 .2rem; color: #666 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: 13px/1.45 ui-monospace, monospace }
article section { border-left: .2rem solid #58c; padding-left: .7rem; margin: .4rem 0 }
.call { border-color: #86b } .answer, .result { border-color: #bbb; margin-left: 2rem } .result { border-color: #5a7 }
.segment { border-color: #c93 } .failure { border-color: #c44 } .answer pre, .result pre, .segment pre { color: #555 }
.bar { background: #58c; height: .8rem; display: inline-block }
""".strip()


def write_page(url: str, title: str, answers: Sequence[QueryResult]) -> None:
    """Write or replace the page at ``url``, a file or any fsspec URL. ConfigError if that fails."""
    try:
        fs, path = open_fs(url)
        write_atomic(fs, path, page(title, answers).encode())
    except (OSError, StorageError) as error:
        raise ConfigError(
            f"--html={url!r} cannot be written: {type(error).__name__}: {error}"
        ) from error


def page(title: str, answers: Sequence[QueryResult]) -> str:
    """Return the page."""
    sections = "\n".join(part for answer in answers for part in _section(answer))
    return html_page(title, _STYLE, f"<h1>{safe(title)}</h1>\n{sections}")


def _section(answer: QueryResult) -> Iterator[str]:
    yield f"<section><h2>{safe(answer.title)}</h2>"
    if answer.note:
        yield f'<p class="note">{safe(answer.note)}</p>'
    rows = answer.table.slice(0, _ROWS).to_pylist()
    match answer.layout:
        case AnswerLayout.TABLE | AnswerLayout.HISTOGRAM:
            yield from _table(
                answer.table.schema, rows, bars=answer.layout is AnswerLayout.HISTOGRAM
            )
        case AnswerLayout.SAMPLES:
            for sample in rows:
                texts = {name: sample.get(name) for name in ("prompt", "response", "answer")}
                texts |= {"parts": reward_parts(sample), "from": lineage(sample)}
                yield _article(
                    headings(sample), texts, conversation(sample), pictures_as_html(sample)
                )
        case AnswerLayout.CHANGES:
            yield f"<p>{safe(summary(answer.table.to_pylist()))}</p>"
            for row in rows:
                said = f"{cell('reward', row['then'])} then, {cell('reward', row['now'])} now"
                texts = {"prompt": row["prompt"], "answer": row["answer"]}
                texts |= {"then": row["then_response"], "now": row["now_response"]}
                yield _article(said, texts, pictures=pictures_as_html(row))
    if answer.table.num_rows > _ROWS:
        yield f'<p class="note">{answer.table.num_rows - _ROWS} more</p>'
    yield "</section>"


def _table(schema: pa.Schema, rows: Sequence[Mapping[str, Any]], *, bars: bool) -> Iterator[str]:
    heads = "".join(f"<th>{safe(name)}</th>" for name in schema.names)
    most = 0
    if bars:
        most = max((row["samples"] for row in rows), default=0)
    yield f"<table><tr>{heads}</tr>"
    for row in rows:
        cells = "".join(f"<td>{safe(cell(name, value))}</td>" for name, value in row.items())
        bar = ""
        if bars:
            bar = f'<td><span class="bar" style="width: {15 * row["samples"] / most:.2f}rem"></span></td>'
        yield f"<tr>{cells}{bar}</tr>"
    yield "</table>"


def _article(
    heading: str,
    texts: Mapping[str, object],
    said: Sequence[Mapping[str, Any]] = (),
    pictures: str = "",
) -> str:
    """Return a sample. What was said in turns, where there is any of it, stands in place of the
    response.
    """
    parts = []
    for name, text in texts.items():
        if name == "response" and said:
            parts += [
                f'<section class="{one["kind"]}">{_part(speaker(one), one["text"])}</section>'
                for one in said
            ]
        elif text not in (None, ""):
            parts.append(_part(name, text))
    return f"<article><h3>{safe(heading)}</h3>{pictures}{''.join(parts)}</article>"


def _part(name: str, text: object) -> str:
    return f"<h4>{safe(name)}</h4><pre>{safe(text)}</pre>"
