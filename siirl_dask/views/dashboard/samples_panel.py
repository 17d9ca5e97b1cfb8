"""The panel of samples: the newest, best, worst, or those of groups that taught nothing; a click
shows all of one.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bokeh.layouts import column
from bokeh.models import ColumnDataSource
from bokeh.models.widgets import (
    DataTable,
    Div,
    NumberFormatter,
    RadioButtonGroup,
    StringFormatter,
    TableColumn,
)

from siirl_dask.errors import counted
from siirl_dask.runs.samples.last_message import last_message
from siirl_dask.runs.samples.prompt_images import Picture
from siirl_dask.runs.samples.sample_rows import Choice, SampleRow, WholeSample
from siirl_dask.runs.samples.utterances import FAILED, POLICY, answered
from siirl_dask.views.dashboard.style import TABLE, TEXTS, WIDGETS, grid, redraw_rows
from siirl_dask.views.samples.sample_html import by_logprob, by_ratio, plain_text, thumbnails

_COLOURS = ("colour by ratio", "by log-prob", "plain")
_HINT = '<span class="soft">A click on a sample shows all of it.</span>'


@dataclass(frozen=True, slots=True)
class Seen:
    """A sample as a whole, with what is read for its sake."""

    sample: WholeSample
    pieces: Sequence[tuple[str, int]]
    """Its tokens' texts, each with its number of tokens, if these are known."""
    pictures: Sequence[Picture] = ()
    """The images of its prompt."""


class SamplesPanel:
    """Shows samples in a table; calls ``ask`` when the viewer wants others, and ``look`` with
    one's place to see it.
    """

    def __init__(self, ask: Callable[[], None], look: Callable[[int, int], None]) -> None:
        self._look = look
        self._rows: list[SampleRow] = []
        self._shown: Seen | None = None
        self._choice = RadioButtonGroup(
            labels=[str(choice) for choice in Choice],
            active=0,
            sizing_mode="stretch_width",
            max_width=420,
            stylesheets=[WIDGETS],
        )
        self._choice.on_change("active", lambda attribute, old, new: ask())
        self._colour = RadioButtonGroup(
            labels=list(_COLOURS),
            active=0,
            sizing_mode="stretch_width",
            max_width=330,
            stylesheets=[WIDGETS],
        )
        self._colour.on_change("active", lambda attribute, old, new: self._draw())
        self._caption = Div(
            text="",
            name="samples remark",
            stylesheets=[TEXTS],
            sizing_mode="stretch_width",
        )
        self.source = ColumnDataSource({name: [] for name in _COLUMNS}, name="sample rows")
        self.source.selected.on_change("indices", lambda attribute, old, new: self._click(new))
        whole = NumberFormatter(format="0", nan_format="")
        number = NumberFormatter(format="0.[000]", nan_format="")
        text = StringFormatter(nan_format="")
        formatters = dict.fromkeys(_NUMBERS, number) | dict.fromkeys(_WHOLE_NUMBERS, whole)
        columns = [
            TableColumn(field=name, title=title, width=width, formatter=formatters.get(name, text))
            for name, (title, width) in _COLUMNS.items()
        ]
        self._columns = dict(zip(_COLUMNS, columns, strict=True))
        self._table = DataTable(
            source=self.source, columns=columns, height=265, sizing_mode="stretch_width", index_position=None,
            min_width=900, stylesheets=[TABLE], autosize_mode="force_fit", reorderable=False,
        )  # fmt: skip
        redraw_rows(self._table)
        self._detail = Div(
            text=_HINT,
            name="sample",
            stylesheets=[TEXTS],
            sizing_mode="stretch_width",
        )
        bar = grid([self._choice, self._caption], least=330)
        wide = column(self._table, sizing_mode="stretch_width", styles={"overflow-x": "auto"})
        self.root = column(bar, wide, self._colour, self._detail, sizing_mode="stretch_width")

    @property
    def choice(self) -> Choice:
        """The samples that the viewer wants to see."""
        return list(Choice)[self._choice.active or 0]

    def show(self, rows: Sequence[SampleRow] | None, remark: str) -> None:
        """Show samples; ``remark`` says why there is nothing new."""
        self._rows = list(rows or ())
        steps = sorted({one.step for one in self._rows})
        which = ""
        if steps:
            which = (
                f"{len(self._rows)} of step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
            )
        none = ""
        if rows is not None and not rows:
            none = "none in the last steps"
            if self.choice is Choice.NEWEST:
                none = "none yet"
        bad = ""
        if remark:
            bad = f' <span class="bad">{html.escape(remark)}</span>'
        self._caption.text = f'<span class="soft">{which or none}</span>{bad}'
        self._columns["turns"].visible = any(one.turns is not None for one in self._rows)
        self._columns["parts"].visible = any(one.parts for one in self._rows)
        self.source.selected.indices = []
        self.source.data = {
            "step": [one.step for one in self._rows],
            "group": [one.group_id for one in self._rows],
            "prompt": [_one_line(one.prompt) for one in self._rows],
            "response": [_one_line(one.response) for one in self._rows],
            "answer": [_one_line(one.answer) for one in self._rows],
            "reward": [_or_nan(one.reward) for one in self._rows],
            "parts": [_parts(one) for one in self._rows],
            "advantage": [_or_nan(one.advantage) for one in self._rows],
            "turns": [_or_nan(one.turns) for one in self._rows],
            "tokens": [_or_nan(one.tokens) for one in self._rows],
            "finish": [one.finish_reason for one in self._rows],
        }

    def show_whole(self, seen: Seen | None, remark: str) -> None:
        """Show a sample as a whole; ``remark`` says why there is none."""
        self._shown = seen
        if seen is None:
            hint = _HINT
            if remark:
                hint = f'<span class="bad">{html.escape(remark)}</span>'
            self._detail.text = hint
        else:
            self._draw()

    def _click(self, indices: Sequence[int]) -> None:
        if indices and indices[0] < len(self._rows):
            chosen = self._rows[indices[0]]
            self._detail.text = '<span class="soft">reading ...</span>'
            self._look(chosen.step, chosen.row_id)

    def _draw(self) -> None:
        if self._shown is not None:
            self._detail.text = _detail(self._shown, _COLOURS[self._colour.active or 0])


_COLUMNS = {
    "step": ("step", 45),
    "group": ("group", 45),
    "prompt": ("prompt", 280),
    "response": ("response", 330),
    "answer": ("answer", 110),
    "reward": ("reward", 60),
    "parts": ("parts", 130),
    "advantage": ("advantage", 70),
    "turns": ("turns", 45),
    "tokens": ("tokens", 50),
    "finish": ("end", 50),
}
_NUMBERS = ("reward", "advantage")
_WHOLE_NUMBERS = ("turns", "tokens")


def _detail(seen: Seen, colour: str) -> str:
    sample = seen.sample
    pieces = seen.pieces
    one = sample.row
    facts = [
        ("step", str(one.step)),
        ("row", str(one.row_id)),
        ("agent", one.agent),
        ("turns", "" if one.turns is None else str(one.turns)),
        ("reward", _number(one.reward)),
        *((name, _number(value)) for name, value in one.parts.items()),
        ("advantage", _number(one.advantage)),
        ("end", one.finish_reason),
        ("worker", one.worker),
        ("weights", "" if sample.weights_version is None else str(sample.weights_version)),
    ]
    cells = "".join(
        f"<td><span class='soft'>{html.escape(name)}</span> {html.escape(value)}</td>"
        for name, value in facts
        if value
    )
    response, remark = _response(sample, pieces, colour)
    cut = ""
    if sample.cut:
        cut = " It is longer than what is shown."
    texts = [
        ("prompt", thumbnails(seen.pictures) + _prompt(one.prompt)),
        (f"response. {remark}{cut}", response),
    ]
    if one.answer:
        texts.append(("answer", plain_text(one.answer)))
    boxes = (
        f"<div><span class='soft'>{html.escape(name)}</span>{text}</div>" for name, text in texts
    )
    return f"<table class='parts'><tr>{cells}</tr></table><div class='whole'>{''.join(boxes)}</div>"


def _prompt(text: str) -> str:
    """Return what was asked, and all that the model saw where that is more."""
    asked = last_message(text)
    if asked.strip() == text.strip():
        return plain_text(text)
    return (
        f"{plain_text(asked)}<details><summary class='soft'>all that the model saw</summary>"
        f"{plain_text(text)}</details>"
    )


def _response(
    sample: WholeSample, pieces: Sequence[tuple[str, int]], colour: str
) -> tuple[str, str]:
    """Return the response as HTML, and a sentence on its colours."""
    own = [at for span in sample.spans if span.own for at in range(span.start, span.stop)]
    if not sample.spans:
        own = list(range(sum(number for _, number in pieces)))
    key, draw = _colours(sample, own, bool(pieces), colour)
    if not pieces or len(sample.spans) < 2:
        return plain_text(sample.row.response) if draw is None else draw(pieces, 0), key
    return "".join(_turns(sample, pieces, draw)), key


_Draw = Callable[[Sequence[tuple[str, int]], int], str]
"""``draw(pieces, first) -> HTML``: pieces in colour, of the tokens from ``first`` on."""


def _colours(
    sample: WholeSample,
    own: Sequence[int],
    known: bool,
    colour: str,
) -> tuple[str, _Draw | None]:
    """Return a sentence on the colours of the policy's ``own`` tokens, and what gives them; None
    for no colours.
    """
    sampled = sample.sampled
    trained = sample.trained
    if colour == "plain" or not known or not sampled:
        if colour == "plain":
            return "", None
        if sampled:
            return "No colours: the tokenizer is not here.", None
        return "No colours: no log-probs are stored.", None
    own = [at for at in own if at < len(sampled)]
    if colour == _COLOURS[0] and len(sampled) == len(trained):
        widest = max((abs(trained[at] - sampled[at]) for at in own), default=0.0)
        key = (
            "Red: likelier to the trainer than to the engine, blue: less likely; at most "
            f"{widest:.2g} nats apart."
        )
        return key, lambda pieces, first: by_ratio(pieces, sampled[first:], trained[first:])
    mean = sum(sampled[at] for at in own) / max(1, len(own))
    tokens = counted(len(own), "token")
    key = (
        f"The stronger the colour, the less likely the token was; {tokens} of {mean:.3g} nats on "
        "average."
    )
    return key, lambda pieces, first: by_logprob(pieces, sampled[first:])


def _turns(
    sample: WholeSample, pieces: Sequence[tuple[str, int]], draw: _Draw | None
) -> Iterator[str]:
    """Yield a conversation as HTML: each turn of the policy, in colour, and what the environment
    answered, in none.
    """
    left = list(pieces)
    turn = 0
    begins = {*sample.begins}
    for span in sample.spans:
        count = 0
        own: list[tuple[str, int]] = []
        while left and count < span.stop - span.start:
            own.append(left.pop(0))
            count += own[-1][1]
        text = "".join(said for said, _ in own)
        if span.start in begins:
            yield _said("the history was rewritten: another segment", "")
        if span.own:
            turn += 1
            reward = ""
            if span.reward is not None:
                reward = f", reward {_number(span.reward)}"
            shown = plain_text(text) if draw is None else draw(own, span.start)
            yield _said(f"{sample.row.agent or POLICY}, turn {turn}{reward}", shown)
        else:
            yield from (_said(one.who, plain_text(one.text)) for one in answered(text))
    if sample.row.finish_reason == FAILED:
        yield (
            '<div class="said bad">a call of the environment failed: the episode has no '
            "reward</div>"
        )


def _said(who: str, shown: str) -> str:
    return f"<div class='said'><span class='soft'>{html.escape(who)}</span>{shown}</div>"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _or_nan(value: float | None) -> float:
    if value is None:
        return math.nan
    return float(value)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}"


def _parts(one: SampleRow) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in one.parts.items())
