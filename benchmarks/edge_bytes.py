"""Counts the bytes that the data plane moves for rows of given lengths, from the columns of the
shipped GRPO edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.planner import Edge


def edge_bytes(lengths: Sequence[int], prompt: int) -> dict[str, int]:
    """Return, for each edge, the bytes of values and offsets of rows with ``lengths`` tokens,
    ``prompt`` of them the prompt's. Texts and maps are left out: no trainer reads them.
    """
    with TemporaryDirectory() as folder:
        url = f"{folder}/rows.parquet"
        pq.write_table(pa.table({"prompt": ["2 1"], "answer": ["1 2"]}), url)
        urls = [f"{key}={url}" for key in ("data.url", "validation.url", "validation.test_url")]
        file = load_config_file(shipped("quickstart"), ["cluster.workers=4", *urls])
        plan, _ = plan_phases(file.config, *dags(file), worker_names(file.config))["train"]
    moving = [edge for edge in plan.edges if edge.moves and edge.source != "weights"]
    return {f"{edge.source} to {edge.target}": _bytes_of(edge, lengths, prompt) for edge in moving}


def _bytes_of(edge: Edge, lengths: Sequence[int], prompt: int) -> int:
    columns = [_column(field, lengths, prompt) for field in edge.schema]
    return sum(column.nbytes for column in columns if column is not None)


def _column(field: pa.Field, lengths: Sequence[int], prompt: int) -> pa.Array | None:
    if pa.types.is_primitive(field.type):
        return pa.nulls(len(lengths), pa.int64()).fill_null(0).cast(field.type)
    if not pa.types.is_list(field.type):
        return None
    counts = [prompt if field.name == "prompt_ids" else length - prompt for length in lengths]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    values = pa.array(np.zeros(offsets[-1], dtype=field.type.value_type.to_pandas_dtype()))
    return pa.ListArray.from_arrays(pa.array(offsets), values)
