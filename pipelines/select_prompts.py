"""Prompts chosen with a model on Dask's workers, then trained on: read, filter by length, remove duplicates, score how
hard each is for the model, keep those that are neither known nor out of reach, train. One cluster does all of it.

    python pipelines/select_prompts.py configs/quickstart.yaml parts data.prepare=null run.name=selected

Each step works on one partition at a time, but for the duplicates: eight bytes of each prompt meet on one worker.
"""

import hashlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from dask.delayed import Delayed, delayed
from dask.distributed import Client, Future, LocalCluster, get_worker

import siirl_dask
from siirl_dask.models.broken_imports import hide

BATCH = 1024  # rows that the model scores at once


@dataclass(frozen=True)
class Choice:
    longest: int = 200  # characters of a prompt
    easiest: float = 0.1  # share of prompts that are left out because the model knows the answer
    hardest: float = 0.2  # share that are left out because it has no idea


def read(path: Path) -> pa.Table:
    return pq.read_table(path, columns=["prompt", "answer"])


def of_length(table: pa.Table, longest: int) -> pa.Table:
    return table.filter(pc.less_equal(pc.utf8_length(table["prompt"]), longest))


def fingerprints(table: pa.Table) -> np.ndarray:
    """One number of 64 bits for each prompt, whatever its case and spaces: two of a million meet by chance once in 40
    million times.
    """
    plain = pc.replace_substring_regex(pc.utf8_lower(table["prompt"]), r"\s+", " ")
    digests = [
        hashlib.blake2b(text.encode(), digest_size=8).digest()
        for text in pc.utf8_trim_whitespace(plain).to_pylist()
    ]
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def first_of_each(parts: list[np.ndarray]) -> list[np.ndarray]:
    """For each partition which of its rows come before all others with the same number."""
    _, firsts = np.unique(np.concatenate(parts), return_index=True)
    is_first = np.zeros(sum(map(len, parts)), dtype=bool)
    is_first[firsts] = True
    return np.split(is_first, np.cumsum([len(part) for part in parts])[:-1])


def rows_of(table: pa.Table, masks: list[np.ndarray], number: int) -> pa.Table:
    return table.filter(pa.array(masks[number]))


def model_at(path: str) -> tuple[Any, Any]:
    """The model and its tokenizer, loaded once in each worker."""
    hide()  # or a torchvision that does not fit to torch keeps transformers from loading
    from transformers import AutoModelForCausalLM, AutoTokenizer

    worker = get_worker()
    if not hasattr(worker, "scorer"):
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        worker.scorer = (model, AutoTokenizer.from_pretrained(path))
    return worker.scorer


def scored(table: pa.Table, path: str) -> pa.Table:
    """The table with a column ``difficulty``."""
    if not table.num_rows:  # all were duplicates
        return table.append_column("difficulty", pa.array([], pa.float32()))
    model, tokenizer = model_at(path)
    return table.append_column("difficulty", pa.array(difficulties(table, model, tokenizer)))


def difficulties(table: pa.Table, model: Any, tokenizer: Any) -> np.ndarray:
    """For each row the mean of -log p of its answer's tokens."""
    import torch

    prompts = tokenizer(table["prompt"].to_pylist())["input_ids"]
    answers = tokenizer(table["answer"].to_pylist(), add_special_tokens=False)["input_ids"]
    difficulty = np.zeros(len(prompts), dtype=np.float32)
    # rows of one length next to each other: little padding
    order = np.argsort(
        [len(a) + len(b) for a, b in zip(prompts, answers, strict=True)], kind="stable"
    )
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        width = max(len(prompts[row]) + len(answers[row]) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        is_answer = torch.zeros(len(rows), width, dtype=torch.bool)
        for place, row in enumerate(rows):
            whole = prompts[row] + answers[row]
            ids[place, : len(whole)] = torch.tensor(whole)
            is_answer[place, len(prompts[row]) : len(whole)] = True
        with torch.inference_mode():  # padding is on the right, where no token before it looks
            logprobs = model(ids).logits[:, :-1].float().log_softmax(-1)
        taken = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        counted = is_answer[:, 1:]
        mean = -(taken * counted).sum(-1) / counted.sum(-1).clamp(min=1)
        difficulty[rows] = mean.numpy()
    return difficulty


def bounds(parts: list[pa.Table], choice: Choice) -> tuple[float, float]:
    values = np.concatenate([part["difficulty"].to_numpy() for part in parts])
    low, high = np.quantile(values, [choice.easiest, 1 - choice.hardest])
    return float(low), float(high)


def between(table: pa.Table, limits: tuple[float, float]) -> pa.Table:
    difficulty = table["difficulty"]
    low, high = limits
    return table.filter(pc.and_(pc.greater_equal(difficulty, low), pc.less_equal(difficulty, high)))


def selected(client: Client, parts: list[Delayed], model: str, choice: Choice) -> list[Future]:
    """Futures of the chosen rows, in the order of the parts; says how long each step takes."""
    short = done(
        client, "read and filtered", [delayed(of_length)(part, choice.longest) for part in parts]
    )
    masks = delayed(first_of_each)([delayed(fingerprints)(table) for table in short])
    unique = done(
        client, "without duplicates", [delayed(rows_of)(t, masks, i) for i, t in enumerate(short)]
    )
    hard = done(client, "scored", [delayed(scored)(table, model) for table in unique])
    limits = delayed(bounds)(
        [delayed(pa.Table.select)(table, ["difficulty"]) for table in hard], choice
    )
    return done(client, "chosen", [delayed(between)(table, limits) for table in hard])


def done(client: Client, what: str, tasks: list[Delayed]) -> list[Future]:
    began = time.monotonic()
    futures = client.compute(tasks)
    rows = sum(client.gather(client.map(len, futures)))
    print(f"{what}: {rows:,} prompts, {time.monotonic() - began:.1f} s", flush=True)
    return futures


if __name__ == "__main__":
    file, folder, *overrides = sys.argv[1:]
    config = siirl_dask.load(file, [*overrides, "data.url=${run.url}/data"])
    with (
        LocalCluster(
            n_workers=config.cluster.workers, threads_per_worker=1, memory_limit=0
        ) as cluster,
        Client(cluster) as client,
    ):
        parts = [delayed(read)(path) for path in sorted(Path(folder).absolute().glob("*.parquet"))]
        chosen = selected(client, parts, config.model.path, Choice())
        siirl_dask.run(config, siirl_dask.grpo, client=client, data=chosen)
