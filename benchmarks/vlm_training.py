"""Seconds of a forward and backward pass over rows that show images: packed, and padded in plain
transformers.

    python benchmarks/vlm_training.py [--prompts 8] [--n 8] [--side 96] [--rounds 3] [--out PAGE.md]

All ways compute the log-probs of the same responses, and the gradient of the sum of their squares.
Before the rounds, log-probs must be equal within 1e-5, and the gradients of the tower within 1e-5
of the largest. Rounds alternate, in one process with one thread; seconds are those that it
computed. Pixels are made before.
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
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from siirl_dask.models.broken_imports import hide

hide()

from siirl_dask.images import Image, load_processor  # noqa: E402  # after hide()
from siirl_dask.images.families import VlmFamily  # noqa: E402
from siirl_dask.images.noise import noise  # noqa: E402
from siirl_dask.models.loading import load_pretrained, model_class  # noqa: E402
from siirl_dask.tasks.tiny_vlm import tiny_vlm  # noqa: E402
from siirl_dask.testing.image_rows import READ, Row, pack  # noqa: E402
from siirl_dask.training.batch_images import ImageInputs  # noqa: E402
from siirl_dask.training.model.heads import PolicyNetwork  # noqa: E402
from siirl_dask.training.model.trial import use_row_layout  # noqa: E402
from siirl_dask.training.packing import MicroBatch, micro_batches  # noqa: E402

_FAMILIES: tuple[VlmFamily, ...] = ("qwen2_5_vl", "qwen3_vl")
_WAYS = ("packed", "prompts in each row", "tower in each row", "padded")
_QUESTION, _ANSWER, _TEXT = 24, 48, 200  # tokens of text, longest response, ordinary tokens
Seconds = Mapping[str, Sequence[float]]
"""Seconds of each round by way."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--side", type=int, default=96, help="pixels; 8 x 8 of them are a token")
    parser.add_argument("--micro-batch", type=int, default=8192, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for family in _FAMILIES:
        with TemporaryDirectory() as folder:
            tiny_vlm(folder, family=family, layers=3, depth=3, most_pixels=given.side**2)
            found[family] = _measure(folder, family, given)
    text = _page(found, given)
    Console().print(text, markup=False)
    if given.out:
        given.out.write_text(text)


def _measure(folder: str, family: str, given: argparse.Namespace) -> Seconds:
    rows = _rows(folder, given)
    apart = [
        (prompt, response, (_another(*images, row),))
        for row, (prompt, response, images) in enumerate(rows)
    ]
    network = _network(folder)
    cut = partial(micro_batches, budget=given.micro_batch, inputs=network.inputs)
    ways: dict[str, Callable[[], Tensor]] = {
        "packed": partial(_packed, network, cut(pack(rows))),
        "prompts in each row": partial(_packed, network, cut(pack(rows), share=False)),
        "tower in each row": partial(_packed, network, cut(pack(apart), share=False)),
        "padded": partial(_padded, _plain(folder), folder, _cuts(rows, given.micro_batch)),
    }
    scores, gradients = {}, {}
    for way, score in ways.items():
        scores[way] = score()
        gradients[way] = _tower_gradient(network if way != "padded" else score.args[0])  # type: ignore[attr-defined]
    for way in _WAYS[1:]:
        off = float((scores[way] - scores["packed"]).abs().max())
        assert off < 1e-5, f"{family}: log-probs of {way!r} are off by {off}"
        off = float(
            (gradients[way] - gradients["packed"]).abs().max() / gradients["packed"].abs().max()
        )
        assert off < 1e-5, f"{family}: gradients of {way!r} are off by {off}"
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(given.rounds):
        for way, score in ways.items():
            began = time.process_time()
            score()
            seconds[way].append(time.process_time() - began)
        print(family, *(f"{way} {times[-1]:.2f}" for way, times in seconds.items()), flush=True)
    return seconds


def _rows(folder: str, given: argparse.Namespace) -> list[Row]:
    processor = load_processor(folder, READ)
    assert processor is not None
    numbers = torch.Generator().manual_seed(0)

    def text(length: int) -> list[int]:
        return torch.randint(0, _TEXT, (length,), generator=numbers).tolist()

    rows: list[Row] = []
    for number in range(given.prompts):
        image = noise(given.side, given.side, number)
        prompt = [*text(1), *[processor.image_token] * processor.tokens(image), *text(_QUESTION)]
        lengths = torch.randint(1, _ANSWER + 1, (given.n,), generator=numbers).tolist()
        rows += [(prompt, text(length), (image,)) for length in lengths]
    return rows


def _another(image: Image, number: int) -> Image:
    """Return the same image as one that nothing knows to be the same."""
    return Image(image.data, f"copy {number}")


def _network(folder: str) -> PolicyNetwork:
    model = load_pretrained(model_class(folder, folder), folder, torch.float32, folder)
    inputs = ImageInputs.load(folder, READ, model)
    network = PolicyNetwork(model, device=torch.device("cpu"), temperature=1.0, inputs=inputs)
    use_row_layout(network, folder)
    return network


def _plain(folder: str) -> Any:
    return load_pretrained(model_class(folder, folder), folder, torch.float32, folder)


def _packed(network: PolicyNetwork, batches: Sequence[MicroBatch]) -> Tensor:
    network.zero_grad()
    return torch.cat([_learn(network(batch)[0]) for batch in batches])


def _padded(model: Any, folder: str, cuts: Sequence[Sequence[Row]]) -> Tensor:
    """Score with the model's own forward: rows padded to the longest of their micro-batch, and
    pixels for each row.
    """
    model.zero_grad()
    processor = load_processor(folder, READ)
    assert processor is not None
    found = []
    for rows in cuts:
        texts = [torch.tensor([*prompt, *response]) for prompt, response, _ in rows]
        tokens = pad_sequence(texts, batch_first=True)
        mask = torch.arange(tokens.shape[1]) < torch.tensor([[len(text)] for text in texts])
        pixels = [processor.pixels(image) for *_, images in rows for image in images]
        logits = model(
            input_ids=tokens,
            attention_mask=mask.long(),
            mm_token_type_ids=(tokens == processor.image_token).int(),
            pixel_values=torch.cat([each.values for each in pixels]),
            image_grid_thw=torch.tensor([each.grid for each in pixels]),
            use_cache=False,
        ).logits[:, :-1]
        prompts = torch.tensor([[len(prompt)] for prompt, *_ in rows])
        response = mask[:, 1:] & (torch.arange(1, tokens.shape[1]) >= prompts)
        chosen = logits.gather(2, tokens[:, 1:, None]).squeeze(2)
        found.append(_learn((chosen - logits.logsumexp(-1))[response]))
    return torch.cat(found)


def _learn(logprobs: Tensor) -> Tensor:
    """Compute the gradients of a sum that does not depend on micro-batches; return the
    log-probs.
    """
    logprobs.square().sum().backward()
    return logprobs.detach()


def _tower_gradient(model: torch.nn.Module) -> Tensor:
    named = {
        name: each.grad for name, each in model.named_parameters() if "visual.patch_embed" in name
    }
    return torch.cat([gradient.flatten() for gradient in named.values() if gradient is not None])


def _cuts(rows: Sequence[Row], budget: int) -> list[list[Row]]:
    """Neighbouring rows, as many as there is room for: the micro-batches of packed rows."""
    cuts: list[list[Row]] = [[]]
    for row in rows:
        if sum(len(prompt) + len(response) for prompt, response, _ in [*cuts[-1], row]) > budget:
            cuts.append([])
        cuts[-1].append(row)
    return cuts


def _page(found: Mapping[str, Seconds], given: argparse.Namespace) -> str:
    tokens = (given.side // 8) ** 2
    options = f"--prompts {given.prompts} --n {given.n} --side {given.side} --rounds {given.rounds}"
    return f"""# Training with images

Seconds of a forward and backward pass over {given.prompts} prompts of {given.n} samples, each with an image of \
{given.side} x {given.side} pixels ({tokens} tokens), {_QUESTION} tokens of text and responses of 1 to {_ANSWER}.

* *packed*: as a trainer has it. A group's prompt goes through the decoder once, and its image through the tower once.
* *prompts in each row*: packed, the tower once a group, and each row with its own prompt.
* *tower in each row*: the same, and the tower once a row.
* *padded*: plain transformers, rows padded to the longest of their micro-batch, pixels once a row, all logits at once.

Log-probs are equal within 1e-5, and the gradients of the tower's first layer within 1e-5 of the largest. Random \
models of 3 layers and a tower of 3, float32 on a CPU; medians of {given.rounds} rounds in turns, with one thread.

{_table(found)}

Measured on {date.today():%d %B %Y} on {os.cpu_count()} cores, {platform.system()} {platform.machine()}, load \
{os.getloadavg()[0]:.1f}, torch {torch.__version__}. To repeat it:

    python benchmarks/vlm_training.py {options} --out docs/benchmarks/vlm_training.md
"""


def _table(found: Mapping[str, Seconds]) -> str:
    head = [f"{way}, s" if way == "packed" else way for way in _WAYS]
    lines = [
        f"| model | {' | '.join(head)} | padded over packed | tower in each row over once a group "
        "|",
        f"| --- |{' ---: |' * (len(_WAYS) + 2)}",
    ]
    for family, seconds in found.items():
        cells = [f"{statistics.median(seconds[way]):.2f}" for way in _WAYS]
        ratios = [("padded", "packed"), ("tower in each row", "prompts in each row")]
        cells += [_ratio(seconds[slow], seconds[fast]) for slow, fast in ratios]
        lines.append(f"| {' | '.join([family, *cells])} |")
    return "\n".join(lines)


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> str:
    each = [one / other for one, other in zip(slow, fast, strict=True)]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


if __name__ == "__main__":
    main()
