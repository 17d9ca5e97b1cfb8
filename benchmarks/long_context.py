"""Measures training on a row of 8k to 64k tokens among short ones: memory, seconds, and bytes between workers.

    python benchmarks/long_context.py [--lengths 8192 16384 32768 65536] [--out docs/benchmarks/long_context.md]

Each case is a process of its own, which makes one update of a tiny model (two layers, a vocabulary of 32,000) and tells
how far its memory rose above what it held with the model, its optimiser and one short update behind it. All three keep
only the layers' inputs for the backward pass, and all give the same loss, which is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console

from edge_bytes import edge_bytes
from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import FsdpConfig, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.models.broken_imports import hide
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.training import PackedRows, TrainBatch, Trainer, build_trainer

_VOCABULARY, _HIDDEN, _PROMPT = 32_000, 64, 32
_SHORT_ROWS, _MEDIAN, _SIGMA, _SHORTEST, _LONGEST_SHORT = 15, 200, 0.6, 64, 1024
_LIMIT = 8 * 10**9  # bytes that the padded batch may take before it is left out
# of all logits in float32, in a plain update: they, their log-softmax, and the gradients of both
_COPIES = 4
_WAYS = ("padded", "packed", "shared")
_LOSS = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
_SETTINGS: dict[str, Any] = {
    "lr": 1e-6,
    "gradient_checkpointing": True,
    "max_tokens_per_micro_batch": 16384,
}


@dataclass(frozen=True, slots=True)
class Taken:
    loss: float
    seconds: float
    cpu_seconds: float
    """CPU seconds of all its processes: on a busy machine they say more than wall-clock seconds."""
    bytes: int
    """The most above what was held before, of the process that took more."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--case", nargs=3, metavar=("WAY", "LENGTH", "MODEL"), help="one of them, in this process"
    )
    given = parser.parse_args()
    if given.case:
        way, length, model = given.case
        print(json.dumps(asdict(_in_this_process(way, int(length), model))))
        return
    moved = _moved_table(given.lengths)
    with TemporaryDirectory() as model:
        _make_model(model, max(given.lengths))
        found = {length: dict(_measure(length, model)) for length in given.lengths}
    text = _page(found, moved, given.lengths)
    Console().print(text, markup=False)
    if given.out:
        given.out.write_text(text)


def make_rows(longest: int) -> PackedRows:
    """One row of ``longest`` tokens, then short ones of log-normal lengths; of each the first 32
    are its prompt.
    """
    draw = np.random.default_rng(0)
    short = np.clip(
        draw.lognormal(np.log(_MEDIAN), _SIGMA, _SHORT_ROWS), _SHORTEST, _LONGEST_SHORT
    ).astype(int)
    lengths = torch.tensor([longest, *short.tolist()])
    tokens = torch.from_numpy(draw.integers(0, _VOCABULARY, int(lengths.sum())))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return PackedRows(tokens, offsets, torch.full_like(lengths, _PROMPT))


def _make_model(folder: str, longest: int) -> None:
    hide()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]


def _measure(length: int, model: str) -> Iterator[tuple[str, Taken | None]]:
    """Each way in a process of its own; None for one that is left out."""
    losses: set[float] = set()
    for way in _WAYS:
        if way == "padded" and _padded_bytes(length) > _LIMIT:
            yield way, None
            continue
        # as Dask's nanny sets it for workers
        environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536"}
        command = [sys.executable, __file__, "--case", way, str(length), model]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        taken = Taken(**json.loads(done.stdout.splitlines()[-1]))
        print(f"{way} {length}: {taken}", flush=True)
        losses.add(taken.loss)
        assert max(losses) - min(losses) < 1e-4, (
            f"{way} at {length} tokens gives another loss: {losses}"
        )
        yield way, taken


def _padded_bytes(length: int) -> int:
    return _COPIES * 4 * length * _VOCABULARY


def _in_this_process(way: str, length: int, model: str) -> Taken:
    if way == "shared":
        with TemporaryDirectory() as folder:
            ranks = [
                Taken(**each)
                for each in run_ranks(2, partial(_shared, model, length), Path(folder))
            ]
        return Taken(
            loss=ranks[0].loss,
            seconds=max(rank.seconds for rank in ranks),
            cpu_seconds=sum(rank.cpu_seconds for rank in ranks),
            bytes=max(rank.bytes for rank in ranks),
        )
    if way == "padded":
        return _padded(model, length)
    trainer = _trainer(model, TrainerConfig(**_SETTINGS), Rank())
    return _taken(lambda rows: _update(trainer, rows), make_rows(length))


def _shared(model: str, length: int, rank: Rank) -> dict[str, float]:
    """Two ranks share all tokens; the first has the long row, the second the others."""
    config = TrainerConfig(
        **_SETTINGS, backend="fsdp", fsdp=FsdpConfig(sequence_parallel=rank.size)
    )
    trainer = _trainer(model, config, rank)
    rows = make_rows(length)
    mine = _some(rows, 0, 1) if rank.rank == 0 else _some(rows, 1, len(rows))
    return asdict(_taken(lambda rows: _update(trainer, rows), mine))


def _trainer(model: str, config: TrainerConfig, rank: Rank) -> Trainer:
    return build_trainer(
        Device(""), rank, model=ModelConfig(path=model), trainer=config, rollout=RolloutConfig()
    )


def _update(trainer: Trainer, rows: PackedRows) -> float:
    """On old log-probs of -10 and advantages of 1."""
    numbers = torch.full((len(rows.tokens) - int(rows.prompt_lengths.sum()),), -10.0)
    batch = TrainBatch(
        rows=rows,
        old_logprobs=numbers,
        rollout_logprobs=numbers,
        advantages=torch.ones_like(numbers),
    )
    return trainer.update([batch], _LOSS)["loss"]


def _padded(model: str, length: int) -> Taken:
    """Rows padded to the longest, one at a time, through transformers' forward with all its
    logits.
    """
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.train()
    network.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6)
    return _taken(partial(_padded_update, network, optimizer), make_rows(length))


def _padded_update(network: Any, optimizer: torch.optim.Optimizer, rows: PackedRows) -> float:
    texts = rows.tokens.split(rows.offsets.diff().tolist())
    longest, responses = max(map(len, texts)), len(rows.tokens) - _PROMPT * len(rows)
    total = 0.0
    for text in texts:
        padded = torch.nn.functional.pad(text, (0, longest - len(text)))[None]
        mask = (torch.arange(longest) < len(text)).long()[None]
        logits = network(input_ids=padded, attention_mask=mask, use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, padded[0, 1:, None]).squeeze(1)
        ratio = (logprobs[_PROMPT - 1 : len(text) - 1] + 10).exp()
        loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).sum() / responses
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def _taken(update: Callable[[PackedRows], float], rows: PackedRows) -> Taken:
    update(_some(make_rows(_SHORTEST), 0, 1))
    before = psutil.Process().memory_info().rss
    began, used = time.perf_counter(), time.process_time()
    loss = update(rows)
    return Taken(
        loss=loss,
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - used,
        bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
    )


def _some(rows: PackedRows, first: int, last: int) -> PackedRows:
    offsets = rows.offsets[first : last + 1]
    return PackedRows(
        rows.tokens[offsets[0] : offsets[-1]], offsets - offsets[0], rows.prompt_lengths[first:last]
    )


def _page(found: dict[int, dict[str, Taken | None]], moved: str, lengths: Sequence[int]) -> str:
    rows = make_rows(lengths[0])
    short = int(rows.offsets[-1]) - lengths[0]
    return f"""# Long rows

One update on one long row and {_SHORT_ROWS} short ones ({short:,} tokens together), as in a batch with a long tail: a
model of {_HIDDEN} dimensions, 2 layers, 2 heads and a vocabulary of {_VOCABULARY:,}, in float32 on CPUs. MB are those
by which a process rose at most above what it held with its model, optimiser and one short update; where two share, of
the one that rose more. Most of it are blocks of logits, 64 MiB each, whatever the length: the rest is what grows.

* *padded*: plain transformers, rows padded to the longest, one at a time, all logits at once, two threads. Left out
  where the logits alone, their log-softmax and the gradients of both, would take more than {_LIMIT / 1e9:.0f} GB.
* *packed*: `trainer.backend=torch` on one process, two threads.
* *shared*: `trainer.backend=fsdp trainer.fsdp.sequence_parallel=2` on two processes, one thread each. One of
  them has the long row, the other the short ones.

All with gradient checkpointing; losses of the three are equal within 1e-4. *CPU s* are of all processes together; on a
machine that does other work as well, they say more than *s*, which are of the clock.

{_table(found)}

## Between workers

Bytes that the data plane moves for the same rows along the edges of the shipped GRPO (`configs/quickstart.yaml`), from
the types of their columns, texts left out; sharing tokens does not add to them: a row goes to one worker, and those
that share tokens exchange token ids, and what attention and scores take, among themselves.

{moved}

Measured on {date.today():%d %B %Y} on {os.cpu_count()} cores, {platform.system()} {platform.machine()}, load \
{os.getloadavg()[0]:.1f}, torch {torch.__version__}. To repeat it:

    python benchmarks/long_context.py --lengths {" ".join(map(str, lengths))} --out docs/benchmarks/long_context.md
"""


def _table(found: dict[int, dict[str, Taken | None]]) -> str:
    heads = " | ".join(f"{way}, MB | s | CPU s" for way in _WAYS)
    lines = [f"| longest row | {heads} |", f"| ---: |{' ---: |' * 3 * len(_WAYS)}"]
    for length, ways in found.items():
        cells = [
            f"{taken.bytes / 1e6:,.0f} | {taken.seconds:,.0f} | {taken.cpu_seconds:,.0f}"
            if taken
            else f"left out ({_padded_bytes(length) / 1e9:.1f} GB) | |"
            for taken in ways.values()
        ]
        lines.append(f"| {length:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _moved_table(lengths: Sequence[int]) -> str:
    lines = []
    for length in lengths:
        each = make_rows(length).offsets.diff().tolist()
        packed, padded = edge_bytes(each, _PROMPT), edge_bytes([length] * len(each), _PROMPT)
        if not lines:
            names = " | ".join([*packed, "all", "all, if padded"])
            lines = [f"| longest row | {names} |", f"| ---: |{' ---: |' * (len(packed) + 2)}"]
        cells = [
            f"{size / 1e6:.2f} MB"
            for size in (*packed.values(), sum(packed.values()), sum(padded.values()))
        ]
        lines.append(f"| {length:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
