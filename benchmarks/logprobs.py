"""Seconds and memory of log-probs, entropy and their gradients at a large vocabulary, by four ways to compute them.

    python benchmarks/logprobs.py [--tokens 512] [--hidden 896] [--rounds 3] [--out docs/benchmarks/training.md]

blocks of the vocabulary    what trainers do (training/model/logprobs.py)
chunks of tokens            128 MiB of logits at a time, each of which adds to the head's whole gradient
all logits                  linear, log_softmax and autograd
liger                       fused linear cross entropy of liger-kernel, where it is installed and runs; without entropy

Hidden states and a head of random numbers in float32, a forward and a backward pass. Each pass has a process of its
own, whose memory is the most that was resident beyond states and head. Ways alternate. Seconds are those that the
process computed, and so nearly the same on a machine that does other work as well.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from torch import Tensor

from sections import replace_section
from siirl_dask.training.model.logprobs import token_logprobs

_VOCABULARY = 151_936  # Qwen2.5's
_TEMPERATURE = 0.9
_CHUNK = 128 * 2**20
_HEADING = "## Log-probs at a large vocabulary"
Way = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Sums log-probs, and entropy where it gives any, of [K, D], [V, D], [K]."""


def blocks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logprobs, entropy, _ = token_logprobs(hidden, weight, None, targets, temperature=_TEMPERATURE)
    return logprobs.sum() + entropy.sum()


def all_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    scores = (torch.nn.functional.linear(hidden, weight) / _TEMPERATURE).log_softmax(-1)
    return scores.gather(1, targets[:, None]).sum() - (scores.exp() * scores).sum()


class _Chunks(torch.autograd.Function):
    """Log-probs by chunks of tokens, of which each reads and writes the head's whole gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        ctx.size = _CHUNK // (4 * len(weight))
        logprobs, entropy = [], []
        for part, chosen in zip(hidden.split(ctx.size), targets.split(ctx.size), strict=True):
            scores = (part @ weight.T).div_(_TEMPERATURE).log_softmax(-1)
            logprobs.append(scores.gather(1, chosen[:, None]).squeeze(1))
            entropy.append(-scores.exp().mul_(scores).sum(-1))
        ctx.save_for_backward(hidden, weight, targets, torch.cat(entropy))
        return torch.cat(logprobs), torch.cat(entropy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, targets, entropy = ctx.saved_tensors
        for_hidden, for_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        by_logprob, by_entropy = (each[:, None] / _TEMPERATURE for each in gradients)
        for start in range(0, len(targets), ctx.size):
            part = slice(start, start + ctx.size)
            scores = (hidden[part] @ weight.T).div_(_TEMPERATURE).log_softmax(-1)
            factor = (scores + entropy[part, None]).mul_(by_entropy[part]).add_(by_logprob[part])
            by_logits = (
                scores.exp_().mul_(-factor).scatter_add_(1, targets[part, None], by_logprob[part])
            )
            for_hidden[part] = by_logits @ weight
            for_weight += by_logits.T @ hidden[part]
        return for_hidden, for_weight, None


def chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    apply: Any = _Chunks.apply
    logprobs, entropy = apply(hidden, weight, targets)
    return logprobs.sum() + entropy.sum()  # type: ignore[no-any-return]


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    result = LigerFusedLinearCrossEntropyFunction.apply(hidden / _TEMPERATURE, weight, targets)
    loss = result[0] if isinstance(result, tuple) else result
    return -loss * len(targets)  # type: ignore[no-any-return]


_WAYS: dict[str, Way] = {
    "blocks of the vocabulary": blocks,
    "chunks of tokens": chunks,
    "all logits": all_logits,
    "liger": liger,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=_VOCABULARY)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="page whose section is replaced")
    parser.add_argument("--way", choices=_WAYS, help="measure one pass and print it as JSON")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.way:
        print(json.dumps(one_pass(_WAYS[given.way], given)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _WAYS}
    failed: dict[str, str] = {}
    for _ in range(given.rounds):
        for name in [name for name in _WAYS if name not in failed]:
            measured = apart(name)
            if isinstance(measured, str):
                failed[name] = measured
            else:
                found[name].append(measured)
    check({name: rounds for name, rounds in found.items() if rounds})
    text = section({name: rounds for name, rounds in found.items() if rounds}, failed, given)
    Console().print(text)
    if given.out:
        replace_section(given.out, text)


def one_pass(way: Way, given: argparse.Namespace) -> dict[str, float]:
    """Seconds, bytes beyond the inputs, and what came out."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(given.tokens, given.hidden, generator=generator)
    weight = torch.randn(given.vocabulary, given.hidden, generator=generator) / given.hidden**0.5
    targets = torch.randint(given.vocabulary, (given.tokens,), generator=generator)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    before, began = psutil.Process().memory_info().rss, time.process_time()
    result = way(hidden, weight, targets)
    gradients = torch.autograd.grad(result, leaves)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    norms = [float(each.double().norm()) for each in gradients]
    return {
        "seconds": seconds,
        "bytes": peak - before,
        "result": float(result),
        "hidden": norms[0],
        "weight": norms[1],
    }


def apart(name: str) -> dict[str, float] | str:
    """Measure one pass in another process; the last line of its error where it could not."""
    done = subprocess.run(
        [sys.executable, *sys.argv, "--way", name], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def check(found: dict[str, list[dict[str, float]]]) -> None:
    """The ways with entropy must give the same, to five digits."""
    expected = found["all logits"][0]
    for name in ("blocks of the vocabulary", "chunks of tokens"):
        for key in ("result", "hidden", "weight"):
            error = abs(found[name][0][key] / expected[key] - 1)
            assert error < 1e-4, f"{name}: {key} differs by {error}"


def section(
    found: dict[str, list[dict[str, float]]], failed: dict[str, str], given: argparse.Namespace
) -> str:
    arguments = " ".join(
        f"--{name} {getattr(given, name)}" for name in ("tokens", "hidden", "rounds", "threads")
    )
    first = middle(found["blocks of the vocabulary"], "seconds")
    lines = [
        _HEADING,
        "",
        f"`python benchmarks/logprobs.py {arguments}` on {date.today():%d %B %Y}: "
        f"{platform.machine()}, {given.threads} threads, torch {torch.__version__}. A forward and "
        f"a backward pass through the head, {given.tokens:,} tokens, width {given.hidden}, a "
        f"vocabulary of {given.vocabulary:,}, float32, medians of {given.rounds} passes, each in a "
        "process of its own, in turns. Memory is the most resident beyond states and head, of "
        f"which the head's gradient is {4 * given.vocabulary * given.hidden / 1e9:.2f} GB. Results "
        "and norms of gradients agree. Liger is Triton, which has no driver for CPUs.",
        "",
        "| | CPU seconds | range | over blocks | GB |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, rounds in found.items():
        seconds = [each["seconds"] for each in rounds]
        lines.append(
            f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} to "
            f"{max(seconds):.2f} | "
            f"{statistics.median(seconds) / first:.2f} | {middle(rounds, 'bytes') / 1e9:.2f} |"
        )
    lines += [f"| {name} | does not run: `{why}` | | | |" for name, why in failed.items()]
    return "\n".join([*lines, ""])


def middle(rounds: list[dict[str, float]], key: str) -> float:
    return statistics.median(each[key] for each in rounds)


if __name__ == "__main__":
    main()
