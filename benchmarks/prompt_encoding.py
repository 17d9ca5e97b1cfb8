"""Measures what it costs to turn prompts into tokens, which a worker does again in every epoch.

    python benchmarks/prompt_encoding.py

The tokenizer is a byte-level BPE with 32,000 tokens, trained here on Python's standard library,
whose text it encodes.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from siirl_dask.models.broken_imports import hide

VOCABULARY, TRAINED_ON = 32_000, 4_000_000
CASES = ((512, 600), (64, 7_000), (16, 115_000))  # prompts, characters of each
ROUNDS = 3


def library() -> str:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files += sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))
    return "".join(file.read_text(errors="ignore") for file in files)


def trained_encoder(text: str) -> Callable[[str], list[int]]:
    hide()
    from transformers import PreTrainedTokenizerFast

    from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<eos>"], show_progress=False
    )
    backend.train_from_iterator(
        (text[at : at + 4000] for at in range(0, TRAINED_ON, 4000)), trainer
    )
    return HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"), "trained here"
    ).encode


def main() -> None:
    text = library()
    encode = trained_encoder(text)
    print("| prompts | tokens of each | ms a prompt | tokens/s | MB/s |\n|---|---|---|---|---|")
    for count, characters in CASES:
        starts = (number * characters % (len(text) - characters) for number in range(count))
        prompts = [text[start : start + characters] for start in starts]
        best = tokens = 0.0
        for _ in range(ROUNDS):
            start = time.perf_counter()
            tokens = sum(len(encode(prompt)) for prompt in prompts)
            best = max(best, 1 / (time.perf_counter() - start))
        cells = (f"{tokens / count:,.0f}", f"{1000 / count / best:.2f}", f"{tokens * best:,.0f}")
        print(f"| {count} | {' | '.join(cells)} | {count * characters * best / 1e6:.1f} |")


if __name__ == "__main__":
    main()
