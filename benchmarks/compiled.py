"""Measures torch.compile on a CPU: a trainer with ``trainer.compile`` and without, and
FlexAttention against the loop.

    python benchmarks/compiled.py [--rows 4] [--length 512] [--rounds 5]

Both trainers score and learn from the same packed rows, in turns, in one process with one thread;
seconds are those that it computed. Losses must be equal within 1e-5 in each round. Attention is of
one layer of that model, without gradients, which FlexAttention does not have on a CPU. What
compiles, the building of a trainer and the first call of each, is told apart, by the clock.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from packing import make_batch
from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.models.broken_imports import hide
from siirl_dask.training import PackedRows, Trainer, build_trainer

_SIZES = {
    "hidden": 512,
    "layers": 10,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "intermediate": 1536,
}
_PROMPT, _LR = 32, 1e-6
_LOSS = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
Seconds = Mapping[str, list[float]]
"""Seconds of each round, the first one apart, by what is timed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    hide()
    rows = _rows(given.rows, given.length)
    Console().print(
        _table(rows, {**_trainers(rows, given.rounds), **_attention(rows, given.rounds)}),
        markup=False,
    )


def _rows(count: int, length: int) -> PackedRows:
    tokens = torch.randint(0, 256, (count * length,), generator=torch.Generator().manual_seed(0))
    return PackedRows(
        tokens, torch.arange(0, count * length + 1, length), torch.full((count,), _PROMPT)
    )


def _trainers(rows: PackedRows, rounds: int) -> Seconds:
    from siirl_dask.tasks.tiny_model import tiny_model

    with TemporaryDirectory() as folder:
        tiny_model(folder, **_SIZES)
        trainers = {
            name: _trainer(folder, compile=name == "compiled") for name in ("plain", "compiled")
        }
    batch = make_batch(trainers["plain"], rows)
    losses: dict[str, list[float]] = {name: [] for name in trainers}
    calls: dict[str, Callable[[], object]] = {}
    for name, trainer in trainers.items():
        calls[f"log-probs, {name}"] = partial(trainer.logprobs, rows)
        calls[f"update, {name}"] = lambda own=losses[name], trainer=trainer: own.append(
            trainer.update([batch], _LOSS)["loss"]
        )
    seconds = _timed(calls, rounds)
    off = max(
        abs(one - other) for one, other in zip(losses["plain"], losses["compiled"], strict=True)
    )
    assert off < 1e-5, f"the losses are {losses}"
    return seconds


def _trainer(folder: str, *, compile: bool) -> Trainer:
    config, began = TrainerConfig(lr=_LR, compile=compile), time.perf_counter()
    trainer = build_trainer(
        Device("0"), Rank(), model=ModelConfig(path=folder), trainer=config, rollout=RolloutConfig()
    )
    print(f"built with {compile=} in {time.perf_counter() - began:.1f} s", flush=True)
    return trainer


def _attention(rows: PackedRows, rounds: int) -> Seconds:
    from siirl_dask.training.model.attention import packed_attention, row_ends
    from siirl_dask.training.model.flex import attend_flex, compiled_flex
    from siirl_dask.training.packing import Packing

    runs, tokens = ((len(rows), int(rows.offsets[1])),), len(rows.tokens)
    heads = [
        torch.randn(1, _SIZES[kind], tokens, _SIZES["head_dim"])
        for kind in ("heads", "kv_heads", "kv_heads")
    ]
    flex, ends, packing = compiled_flex(), row_ends(runs, torch.device("cpu")), Packing(runs)

    def loop() -> torch.Tensor:
        return packed_attention(torch.nn.Identity(), *heads, None, packing=packing)[0][0]

    def by_flex() -> torch.Tensor:
        return attend_flex(flex, *heads, ends, packing, None, None)

    with torch.no_grad():
        seconds = _timed({"attention, plain": loop, "attention, compiled": by_flex}, 4 * rounds)
        torch.testing.assert_close(by_flex(), loop(), atol=1e-5, rtol=1e-5)
    return seconds


def _timed(calls: Mapping[str, Callable[[], object]], rounds: int) -> Seconds:
    """Call all in turns; return the seconds that this process's thread computed, of the first
    round by the clock.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(rounds + 1):
        for name, call in calls.items():
            clock = time.process_time if at else time.perf_counter
            began = clock()
            call()
            seconds[name].append(clock() - began)
            print(f"{name}: {seconds[name][-1]:.3f} s", flush=True)
    return seconds


def _table(rows: PackedRows, seconds: Seconds) -> str:
    lines = [
        "| | plain, tokens/s | compiled | ratio | first call, compiled |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for what in dict.fromkeys(name.partition(",")[0] for name in seconds):
        plain, compiled = seconds[f"{what}, plain"], seconds[f"{what}, compiled"]
        rates = [f"{len(rows.tokens) / median(each[1:]):,.0f}" for each in (plain, compiled)]
        lines.append(
            f"| {what} | {' | '.join(rates)} | {_ratio(plain[1:], compiled[1:])} | "
            f"{compiled[0]:.0f} s |"
        )
    machine = (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    return "\n".join([*lines, "", f"{date.today():%d %B %Y}, {machine}, torch {torch.__version__}"])


def _ratio(plain: Sequence[float], compiled: Sequence[float]) -> str:
    each = [one / other for one, other in zip(plain, compiled, strict=True)]
    return f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


if __name__ == "__main__":
    main()
