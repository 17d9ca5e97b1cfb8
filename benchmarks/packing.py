"""Tokens a second that a model learns from: packed as a trainer packs rows, and padded, in plain transformers.

    python benchmarks/packing.py [--rows 16] [--longest 1024] [--rounds 3] [--out docs/benchmarks/packing.md]

Both learn from the same micro-batches of the same rows, whose lengths are log-normal with a mean of 0.3 of the longest,
with the same loss, gradient clipping and AdamW. Before the rounds their log-probs must be equal within 1e-5, and in
each round their losses. Rounds alternate, in one process with one thread; seconds are those that it computed, and so
the same on a machine that does other work as well.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from statistics import NormalDist
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from siirl_dask.algorithms import LossInputs, ppo_clip
from siirl_dask.config import ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.models.broken_imports import hide
from siirl_dask.training import PackedRows, TrainBatch, Trainer, build_trainer

_FAMILIES = ("qwen2", "qwen3", "llama")
_WAYS = ("packed", "padded", "padded_less")
_VOCABULARY, _PROMPT, _MEAN, _SIGMA = 4096, 32, 0.3, 0.8
_LR, _MAX_NORM = 1e-6, 1.0
_LOSS = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
Rates = Mapping[str, Sequence[float]]
"""Throughput by method: tokens of a round over the seconds that this process's one thread
computed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=_FAMILIES, default=list(_FAMILIES))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--longest", type=int, default=1024, help="tokens")
    parser.add_argument("--micro-batch", type=int, default=4096, help="tokens, without padding")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = make_rows(given.rows, given.longest)
    found, parameters = {}, 0
    for family in given.families:
        with TemporaryDirectory() as folder:
            parameters = _make_model(folder, family, given)
            found[family] = _measure(family, folder, rows, given)
    text = _page(found, rows, parameters, given)
    Console().print(text, markup=False)
    if given.out:
        given.out.write_text(text)


def make_rows(rows: int, longest: int) -> PackedRows:
    """Random tokens, in rows whose lengths are the quantiles of the distribution in a random order,
    and so the same share of the longest for any number of rows; the first 32 of each row are its
    prompt.
    """
    draw = np.random.default_rng(0)
    normal = [NormalDist().inv_cdf((row + 0.5) / rows) for row in draw.permutation(rows)]
    low, high = 0.0, float(longest)
    for _ in range(50):  # the median for which lengths, cut off, have the mean that is wanted
        median = (low + high) / 2
        cut_off = np.clip(median * np.exp(_SIGMA * np.array(normal)), _PROMPT + 1, longest)
        low, high = (low, median) if cut_off.mean() > _MEAN * longest else (median, high)
    lengths = torch.from_numpy(cut_off.astype(int))
    tokens = torch.from_numpy(draw.integers(0, _VOCABULARY, int(lengths.sum())))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return PackedRows(tokens, offsets, torch.full_like(lengths, _PROMPT))


def _make_model(folder: str, family: str, given: argparse.Namespace) -> int:
    """Random weights, with heads of 64 and half as many of keys; how many numbers they are."""
    hide()
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=_VOCABULARY,
        hidden_size=given.hidden,
        intermediate_size=3 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 64,
        num_key_value_heads=max(1, given.hidden // 128),
        head_dim=64,
        max_position_embeddings=given.longest,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _measure(family: str, folder: str, rows: PackedRows, given: argparse.Namespace) -> Rates:
    config = TrainerConfig(
        lr=_LR, max_grad_norm=_MAX_NORM, max_tokens_per_micro_batch=given.micro_batch
    )
    trainer = build_trainer(
        Device("0"), Rank(), model=ModelConfig(path=folder), trainer=config, rollout=RolloutConfig()
    )
    cuts = _cuts(rows, given.micro_batch)
    all_as_long = _Padded(folder, cuts, int(rows.offsets.diff().max()))
    each_its_own = _Padded(folder, cuts, None)
    batch = make_batch(trainer, rows)
    off = (all_as_long.logprobs(rows) - batch.old_logprobs).abs().max().item()
    assert off < 1e-5, f"{family}: log-probs from padded rows are off by {off}"
    updates: dict[str, Callable[[], float]] = {
        "packed": lambda: trainer.update([batch], _LOSS)["loss"],
        "padded": partial(all_as_long.update, batch),
        "padded_less": partial(each_its_own.update, batch),
    }
    rates: dict[str, list[float]] = {way: [] for way in updates}
    for at in range(given.rounds + 1):
        losses = []
        for way, update in updates.items():
            began = time.process_time()
            losses.append(update())
            if at:  # the first round warms up
                rates[way].append(len(rows.tokens) / (time.process_time() - began))
        assert max(losses) - min(losses) < 1e-5, f"{family}: the losses are {losses}"
        print(
            family,
            *(f"{way} {values[-1]:.0f}" for way, values in rates.items() if values),
            flush=True,
        )
    return rates


def make_batch(trainer: Trainer, rows: PackedRows) -> TrainBatch:
    """Return a batch with the current policy's log-probs and advantages of 1 and -1 by row."""
    logprobs = trainer.logprobs(rows).logprobs
    signs = 1.0 - 2.0 * (torch.arange(len(rows)) % 2)
    advantages = signs.repeat_interleave(rows.offsets.diff() - rows.prompt_lengths)
    return TrainBatch(
        rows=rows, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=advantages
    )


def _cuts(rows: PackedRows, budget: int) -> list[range]:
    """The trainer's micro-batches: neighbouring rows, as many as there is room for."""
    cuts, first = [], 0
    for row in range(1, len(rows) + 1):
        if row == len(rows) or int(rows.offsets[row + 1] - rows.offsets[first]) > budget:
            cuts.append(range(first, row))
            first = row
    return cuts


class _Padded:
    """Plain transformers: rows padded to ``length``, or to the longest of their micro-batch, and
    an attention mask.
    """

    def __init__(self, folder: str, cuts: Sequence[range], length: int | None) -> None:
        from transformers import AutoModelForCausalLM

        self._network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._network.train()
        self._optimizer = torch.optim.AdamW(
            self._network.parameters(), lr=_LR, weight_decay=0.0, fused=True
        )
        self._cuts, self._length = cuts, length

    @torch.no_grad()
    def logprobs(self, rows: PackedRows) -> Tensor:
        return torch.cat([self._score(rows, cut) for cut in self._cuts])

    def update(self, batch: TrainBatch) -> float:
        """The loss, a mean over all response tokens, before one step."""
        rows, total, done = batch.rows, 0.0, 0
        self._optimizer.zero_grad(set_to_none=False)
        for cut in self._cuts:
            logprobs = self._score(rows, cut)
            part = slice(done, done + len(logprobs))
            loss = _LOSS(_inputs(batch, part, logprobs)).loss.sum() / len(batch.old_logprobs)
            loss.backward()
            total, done = total + loss.item(), part.stop
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), _MAX_NORM)
        self._optimizer.step()
        return total

    def _score(self, rows: PackedRows, cut: range) -> Tensor:
        """Return the log-probs of the response tokens of the rows in ``cut``, without a
        log-softmax of all logits.
        """
        lengths = rows.offsets.diff()[cut.start : cut.stop]
        texts = [rows.tokens[rows.offsets[row] : rows.offsets[row + 1]] for row in cut]
        tokens = pad_sequence(texts, batch_first=True)
        if self._length is not None:
            tokens = torch.nn.functional.pad(tokens, (0, self._length - tokens.shape[1]))
        places = torch.arange(tokens.shape[1])
        mask = places < lengths[:, None]
        logits = self._network(
            input_ids=tokens, attention_mask=mask.long(), use_cache=False
        ).logits[:, :-1]
        response = mask[:, 1:] & (places[1:] >= rows.prompt_lengths[cut.start : cut.stop, None])
        chosen = logits.gather(2, tokens[:, 1:, None]).squeeze(2)
        return (chosen - logits.logsumexp(-1))[response]


def _inputs(batch: TrainBatch, part: slice, logprobs: Tensor) -> LossInputs:
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs[part],
        advantages=batch.advantages[part],
        rollout_logprobs=batch.rollout_logprobs[part],
        entropy=torch.zeros_like(logprobs),
        offsets=torch.tensor([0, len(logprobs)]),
    )


def _page(
    found: Mapping[str, Rates], rows: PackedRows, parameters: int, given: argparse.Namespace
) -> str:
    lengths = rows.offsets.diff()
    options = f"--rows {given.rows} --longest {given.longest} --rounds {given.rounds}"
    return f"""# Packed and padded rows

Tokens a second, prompts and responses, that an update learns from: forward, backward and the optimiser's step.

* {len(rows)} rows, {int(lengths.sum()):,} tokens, in micro-batches of at most {given.micro_batch:,}.
* Lengths are log-normal (sigma {_SIGMA}) with a mean of {_MEAN} of {given.longest:,}; the longest is \
{int(lengths.max()):,}.
* Random models of {parameters / 1e6:.1f} million parameters, {given.layers} layers, a vocabulary of {_VOCABULARY:,}, \
float32 on a CPU.
* Medians of {given.rounds} rounds, the three in turns, in one process with one thread; seconds are those it computed.

* *packed*: a trainer as a run has it (`build_trainer`, `trainer.backend=torch`).
* *padded*: plain transformers on the same micro-batches, each row padded to the longest of the batch, with an attention
  mask, torch's sdpa, all logits at once, the same loss, clipping and AdamW.
* *padded less*: the same, each row padded to the longest of its micro-batch.

Log-probs are equal within 1e-5, which is checked before the rounds, and losses in each round. The ratios are medians of
those of the rounds, with the least and the most.

{_table(found)}

Measured on {date.today():%d %B %Y} on {os.cpu_count()} cores, {platform.system()} {platform.machine()}, load \
{os.getloadavg()[0]:.1f}, torch {torch.__version__}. To repeat it:

    python benchmarks/packing.py {options} --out docs/benchmarks/packing.md
"""


def _table(found: Mapping[str, Rates]) -> str:
    lines = [
        "| model | packed, tokens/s | padded | padded less | packed over padded | packed over "
        "padded less |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for family, rates in found.items():
        cells = [f"{statistics.median(rates[way]):,.0f}" for way in _WAYS]
        ratios = [_ratio(rates["packed"], rates[way]) for way in _WAYS[1:]]
        lines.append(f"| {' | '.join([family, *cells, *ratios])} |")
    return "\n".join(lines)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    each = [one / other for one, other in zip(ours, theirs, strict=True)]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


if __name__ == "__main__":
    main()
