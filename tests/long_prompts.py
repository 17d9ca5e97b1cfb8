"""Datasets whose prompts are too long in chosen steps."""

import pyarrow as pa
import pyarrow.parquet as pq

from siirl_dask.coordinator.dataloader import Dataloader, Source

LIMIT = 20
"""Tokens that the prompts of the other steps have at most."""
_ROWS = 64


def write_long_prompts(path, *parts, batch_size=8, seed=0):
    """Write prompts that ask for digits, too long in ``parts``: (step, worker, workers), and
    return their Source.
    """
    source = Source(
        url=str(path), prompt="prompt", answer="answer", batch_size=batch_size, seed=seed
    )
    prompts = [f"Digits {number}:" for number in range(_ROWS)]
    _write(path, prompts)
    loader = Dataloader(source)
    loaded = [
        loader.load(step - 1, ["row_id", "prompt"], worker, workers)
        for step, worker, workers in parts
    ]
    loader.close()
    long = {prompt for table in loaded for prompt in table["prompt"].to_pylist()}
    _write(path, [prompt + "9" * LIMIT if prompt in long else prompt for prompt in prompts])
    return source


def _write(path, prompts):
    pq.write_table(pa.table({"prompt": prompts, "answer": [""] * _ROWS}), path, row_group_size=8)
