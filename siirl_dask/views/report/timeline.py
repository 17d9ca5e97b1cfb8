"""Draws what each worker did during one step: a lane per worker, a colour per node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from siirl_dask.observe.trace.trace_table import TraceSpan, in_order
from siirl_dask.trace import Lane
from siirl_dask.views.charts.colours import COLOURS
from siirl_dask.views.charts.figures import duration
from siirl_dask.views.html_page import safe

_WIDTH = 1100
_LEFT = 90
_LANE = 20
_APART = 6
_TOP = 4
_WORKERS = 32
_SPANS = 3000
_LEAST = 0.4  # pixels: what is narrower is left out
_NODES = len(COLOURS)  # with a colour of their own
_WORDS = {
    Lane.COMPUTE: "other nodes",
    Lane.TRANSFER: "moves rows or weights",
    Lane.STORAGE: "reads or writes tables",
    Lane.WAIT: "waits",
}


def draw_timeline(spans: Sequence[TraceSpan]) -> str:
    """Return the chains' ``spans`` of one step as a figure; an empty text for none."""
    shown = [span for span in spans if span.lane in _WORDS and span.duration]
    if not shown:
        return ""
    begun = min(span.start for span in shown)
    ended = max(span.end for span in shown)
    workers = in_order({span.worker for span in shown})[:_WORKERS]
    colours = _colours(shown)
    per_pixel = (ended - begun) / (_WIDTH - _LEFT)
    height = _TOP + len(workers) * (_LANE + _APART) + 18
    drawn = sorted((s for s in shown if s.worker in workers), key=lambda s: (s.start, -s.duration))
    wide = [span for span in drawn if span.duration >= _LEAST * per_pixel]
    if len(wide) > _SPANS:
        least = sorted((span.duration for span in wide), reverse=True)[_SPANS - 1]
        wide = [span for span in wide if span.duration > least]
    rects = [_rect(span, begun, per_pixel, workers.index(span.worker), colours) for span in wide]
    names = [
        f'<text x="{_LEFT - 8}" y="{_TOP + at * (_LANE + _APART) + 14}" text-anchor="end">'
        f"{safe(f'worker {name}'[:14])}</text>"
        for at, name in enumerate(workers)
    ]
    anchors = {0: "start", 0.25: "middle", 0.5: "middle", 0.75: "middle", 1: "end"}
    times = [
        f'<text x="{_LEFT + share * (_WIDTH - _LEFT):.0f}" y="{height - 3}" text-anchor="{anchor}">'
        f"{duration(share * (ended - begun) / 1e9) if share else 0}</text>"
        for share, anchor in anchors.items()
    ]
    svg = (
        f'<svg class="wide" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline of a '
        'step">'
        f"{''.join([*names, *rects, *times])}</svg>"
    )
    return f'{svg}<p class="key">{"".join(_key(colours, {span.lane for span in shown}, len(workers), spans))}</p>'


def _colours(spans: Sequence[TraceSpan]) -> dict[str, str]:
    """Return a class for each node, by the time it takes; nodes beyond the last colour share
    one.
    """
    times: dict[str, int] = {}
    for span in spans:
        if span.lane is Lane.COMPUTE:
            times[span.name] = times.get(span.name, 0) + span.duration
    longest = sorted(times, key=lambda name: -times[name])
    return {name: f"c{at}" if at < _NODES else "other" for at, name in enumerate(longest)}


def _rect(
    span: TraceSpan,
    begun: int,
    per_pixel: float,
    lane: int,
    colours: Mapping[str, str],
) -> str:
    kind = str(span.lane)
    if span.lane is Lane.COMPUTE:
        kind = colours.get(span.name, "other")
    x = _LEFT + (span.start - begun) / per_pixel
    wide = span.duration / per_pixel
    title = f"{span.name}, {span.what}: {duration(span.duration / 1e9)}"
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{_TOP + lane * (_LANE + _APART)}" width="{wide:.1f}" '
        f'height="{_LANE}">'
        f"<title>{safe(title)}</title></rect>"
    )


def _key(
    colours: Mapping[str, str],
    lanes: set[Lane],
    workers: int,
    spans: Sequence[TraceSpan],
) -> Iterator[str]:
    for name, colour in colours.items():
        if colour != "other":
            yield f'<span><i class="{colour}"></i>{safe(name)}</span> '
    for lane, words in _WORDS.items():
        if lane in lanes and (lane is not Lane.COMPUTE or "other" in colours.values()):
            kind = str(lane)
            if lane is Lane.COMPUTE:
                kind = "other"
            yield f'<span><i class="{kind}"></i>{words}</span> '
    left = len({span.worker for span in spans}) - workers
    if left > 0:
        yield f"<span>{left} more workers are not shown</span>"
