"""The numbers of an evaluation, written as ``metrics.json`` and printed as a table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich import box
from rich.table import Table
from rich.text import Text
from siirl_storage import join, open_fs, write_atomic

from siirl_dask import __version__
from siirl_dask.observe.console import PipeConsole
from siirl_dask.wording import redacted

EVAL_FILE = "metrics.json"
_ALL = "all"
_WIDEST = 1000  # characters
_NAME = re.compile(r"(mean|pass|best|maj)@(\d+)(?:/(.+))?", re.DOTALL)
_ORDER = ("mean", "pass", "best", "maj")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """The result of an evaluation. It does not depend on the number of workers."""

    model: str
    """Folder or URL of the run, or the Hugging Face folder."""
    step: int | None
    """Step of the run's checkpoint; null for a folder."""
    data: str
    """URL of the dataset."""
    reward: str
    """Name of the reward function; of the environments or the agent that reward episodes."""
    prompts: Mapping[str | None, int]
    """Number of prompts from each source; those without a source are under None."""
    samples: int
    """Number of samples in all; an episode is one."""
    n: int
    """Samples per prompt."""
    k: Sequence[int]
    """Values of k for which pass@k is estimated."""
    temperature: float
    top_p: float
    max_tokens: int
    """Longest response, in tokens."""
    seed: int
    failures: int
    """Samples whose reward function, or environment, failed."""
    dropped_prompts: int
    """Prompts longer than ``data.max_prompt_length``, which were not answered."""
    truncated: float
    """Share of samples that ended at ``max_tokens``."""
    metrics: Mapping[str, float]
    """Numbers by name: ``pass@8`` over all prompts, ``pass@8/gsm8k`` over those of one source."""
    turns: float | None = None
    """Mean number of turns of an episode; null for single responses."""
    version: str = __version__
    """Version of siirl_dask that wrote the result."""

    def to_json(self) -> str:
        """Return the text of ``metrics.json``."""
        named = {name: count for name, count in self.prompts.items() if name is not None}
        prompts = {_ALL: sum(self.prompts.values()), "sources": named}
        return json.dumps({**asdict(self), "prompts": prompts}, indent=2, allow_nan=False) + "\n"


def write_eval_result(url: str, result: EvalResult) -> None:
    """Write ``<url>/metrics.json``, atomically."""
    fs, path = open_fs(join(url, EVAL_FILE))
    write_atomic(fs, path, result.to_json().encode())


def print_eval_result(result: EvalResult, url: str) -> None:
    """Print the numbers, and the folder of the samples."""
    console = PipeConsole()
    table = eval_result_table(result)
    needed = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    console.width = max(console.width, needed)  # rich would cut numbers
    console.print(table)
    console.print(Text(f"every sample and {EVAL_FILE}: {redacted(url)}"), soft_wrap=True)


def eval_result_table(result: EvalResult) -> Table:
    """Return a table with a row for each source and one for all prompts, and a column for each
    number.
    """
    parsed = {
        name: matched.groups() for name in result.metrics if (matched := _NAME.fullmatch(name))
    }
    kinds = sorted(
        {(kind, int(k)) for kind, k, _ in parsed.values()},
        key=lambda one: (_ORDER.index(one[0]), one[1]),
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("source")
    for heading in ("prompts", *(f"{kind}@{k}" for kind, k in kinds)):
        table.add_column(heading, justify="right")
    sources = sorted({source for *_, source in parsed.values() if source})
    for source in (*sources, None):
        end = ""
        if source:
            end = f"/{source}"
        values = (result.metrics.get(f"{kind}@{k}{end}") for kind, k in kinds)
        prompts = result.prompts.get(source, 0) if source else sum(result.prompts.values())
        shown = ("-" if value is None else f"{value:.4f}" for value in values)
        table.add_row(Text(source or _ALL), f"{prompts:,}", *shown, style="" if source else "bold")
    return table
