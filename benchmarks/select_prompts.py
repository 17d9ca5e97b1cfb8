"""Times ``pipelines/select_prompts.py`` without its training beside pandas in one process: read, filter by length,
remove duplicates, score with a model, choose. Both choose the same rows.

    python benchmarks/select_prompts.py --prompts 1000000

Prompts are the quickstart's, of six digits: some come again in another case or with other spaces, and a tenth is too
long. The model is a random one of its size. pandas has torch with a thread a core; Dask has a worker a core.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from dask.delayed import delayed
from distributed import Client, LocalCluster

from siirl_dask.models.broken_imports import hide

SCRIPT = Path(__file__).parents[1] / "pipelines" / "select_prompts.py"
STEPS = ("read and filtered", "without duplicates", "scored", "chosen")
CORES = len(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=32)
    arguments = parser.parse_args()
    hide()
    from siirl_dask.tasks.tiny_model import tiny_model

    script = load_script()
    with TemporaryDirectory() as place:
        folder = Path(place)
        tiny_model(folder / "model", hidden=128, heads=4, kv_heads=2)
        write_prompts(folder / "parts", arguments.prompts, arguments.parts)
        print(f"{arguments.prompts:,} prompts in {arguments.parts} files, {CORES} cores")
        by_dask = choose_with_dask(script, folder)
        by_pandas = choose_with_pandas(script, folder)
    check_same(by_dask, by_pandas)


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("select_prompts_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_prompts(folder: Path, prompts: int, parts: int) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(parts):
        rows = []
        start = prompts * number // parts
        end = prompts * (number + 1) // parts
        for digits, kind in zip(
            rng.integers(0, 10**6, end - start), rng.integers(0, 10, end - start), strict=True
        ):
            text = " ".join(f"{digits:06d}")
            prompt = f"Sort: {text} ="
            if kind == 0:
                prompt = f"  SORT:  {text} = "
            if kind == 1:
                prompt += "." * 200
            rows.append({"prompt": prompt, "answer": " " + " ".join(sorted(f"{digits:06d}"))})
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{number:03d}.parquet")


def choose_with_dask(script: ModuleType, folder: Path) -> pd.DataFrame:
    """Choose as the script does, which prints the seconds of each step."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    with (
        LocalCluster(
            n_workers=CORES, threads_per_worker=1, memory_limit=0, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        paths = sorted((folder / "parts").glob("*.parquet"))
        began = time.monotonic()
        parts = [delayed(script.read)(path) for path in paths]
        futures = script.selected(client, parts, str(folder / "model"), script.Choice())
        print(f"Dask, {CORES} workers: {time.monotonic() - began:.1f} s")
        return pa.concat_tables(client.gather(futures)).to_pandas()


def choose_with_pandas(script: ModuleType, folder: Path) -> pd.DataFrame:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(CORES)
    choice = script.Choice()
    began = time.monotonic()

    def read() -> pd.DataFrame:
        table = pd.read_parquet(folder / "parts", columns=["prompt", "answer"])
        return table[table["prompt"].str.len() <= choice.longest]

    short = timed(STEPS[0], read)

    def without_duplicates() -> pd.DataFrame:
        plain = short["prompt"].str.lower().str.replace(r"\s+", " ", regex=True).str.strip()
        return short[~plain.duplicated()]

    unique = timed(STEPS[1], without_duplicates)

    def scored() -> pd.DataFrame:
        model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        table = pa.Table.from_pandas(unique, preserve_index=False)
        return unique.assign(difficulty=script.difficulties(table, model, tokenizer))

    hard = timed(STEPS[2], scored)

    def chosen() -> pd.DataFrame:
        limits = hard["difficulty"].quantile([choice.easiest, 1 - choice.hardest])
        return hard[hard["difficulty"].between(limits.iloc[0], limits.iloc[1])]

    found = timed(STEPS[3], chosen)
    print(f"pandas: {time.monotonic() - began:.1f} s")
    return found.reset_index(drop=True)


def timed(what: str, work: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    began = time.monotonic()
    frame = work()
    print(f"{what}: {len(frame):,} prompts, {time.monotonic() - began:.1f} s", flush=True)
    return frame


def check_same(by_dask: pd.DataFrame, by_pandas: pd.DataFrame) -> None:
    """Exit unless both have the same rows, but for a few whose difficulty lies at a bound: sums of other batches differ
    in their last bits.
    """
    ours = set(zip(by_dask["prompt"], by_dask["answer"], strict=True))
    theirs = set(zip(by_pandas["prompt"], by_pandas["answer"], strict=True))
    differing = len(ours ^ theirs)
    print(f"chosen by one alone: {differing} of {len(ours | theirs):,}")
    if differing > len(ours | theirs) / 1000:
        raise SystemExit("Dask and pandas chose different prompts")


if __name__ == "__main__":
    main()
