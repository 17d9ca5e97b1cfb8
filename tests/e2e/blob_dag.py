"""A DAG of one's own with images: prompts have them, samples are made of prompts, two nodes of the
samples read them.

Each image tells its step and group, so a wrong one shows, and each reader logs the memory that its
images lie in.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from siirl_dask.context import Reduce
from siirl_dask.planner import DAG, Node, Role, Rows, columns
from siirl_dask.schema import fields
from siirl_dask.tables.rows import rows_at, rows_where
from siirl_dask.testing.rows import build_nothing

IMAGES = pa.large_list(pa.struct({"bytes": pa.large_binary(), "path": pa.large_string()}))
SIZE = 20_000
"""Bytes of an image."""
ROLES = tuple(Role(name, build_nothing) for name in ("rollout", "policy"))


def painted(step: int, group: int) -> bytes:
    return np.random.default_rng((step, group)).bytes(SIZE)


@columns(writes={"images": IMAGES}, new_rows=True, groups="kept")
def paint(ctx, table, *, notes: str = ""):
    """Leave some prompts out, as those that are too long are, and give each other one its image."""
    if notes:
        with Path(notes).open("a") as file:
            file.write(f"{ctx.step}\n")
    table = rows_where(table, table["group_id"].to_numpy() % 7 != 3)
    images = [
        [{"bytes": painted(ctx.step, group), "path": None}]
        for group in table["group_id"].to_pylist()
    ]
    return table.append_column("images", pa.array(images, IMAGES))


def _samples(table, n, groups=None):
    rows = rows_at(table, np.repeat(np.arange(table.num_rows), n))
    ids = table["row_id"].to_numpy().repeat(n) * n + np.tile(np.arange(n), table.num_rows)
    changed = {"row_id": ids, "tokens": ids * 37 % 50 + 1} | (
        {} if groups is None else {"group_id": groups(table).repeat(n)}
    )
    for name, values in changed.items():
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(values, pa.int64()))
    return rows.append_column("painted_as", rows["group_id"]) if groups is None else rows


@columns(expand="n", groups="kept", optional=["images"], writes={"painted_as": pa.int64()})
def sample(ctx, table, *, n: int):
    return _samples(table, n)


@columns(expand="n", groups="kept", writes={"painted_as": pa.int64()})
def sample_unseen(ctx, table, *, n: int):
    assert "images" not in table.column_names
    return _samples(table, n)


@columns(expand="n", groups="new", writes={"painted_as": pa.int64()})
def sample_renumbered(ctx, table, *, n: int):
    rows = _samples(table, n, lambda table: 1000 - table["group_id"].to_numpy())
    return rows.append_column("painted_as", pa.array(1000 - rows["group_id"].to_numpy()))


@columns(expand="n", groups="kept", writes={"painted_as": pa.int64()})
def sample_and_lie(ctx, table, *, n: int):
    rows = _samples(table, n, lambda table: 1000 - table["group_id"].to_numpy())
    return rows.append_column("painted_as", rows["group_id"])


@columns(new_rows=True, groups="kept")
def drop_some(ctx, table):
    return rows_where(table, table["group_id"].to_numpy() % 5 != 1)


def _buffers(table):
    found = {}
    for chunk in table["images"].chunks:
        values = chunk.values.field("bytes").buffers()[2]
        found[values.address] = values.size
    return found


@columns(reads=["images", "painted_as"], writes={"wrong": pa.int64()} | fields("minibatch"))
def look(ctx, table):
    images = [images[0]["bytes"] for images in table["images"].to_pylist()]
    wrong = [
        int(image != painted(ctx.step, group))
        for image, group in zip(images, table["painted_as"].to_pylist(), strict=True)
    ]
    ctx.log("look/wrong", sum(wrong), Reduce.SUM)
    ctx.log("look/rows", len(wrong), Reduce.SUM)
    ctx.log("look/groups", len(set(table["painted_as"].to_pylist())), Reduce.SUM)
    ctx.log("look/bytes", sum(_buffers(table).values()), Reduce.MAX)
    table = table.append_column("wrong", pa.array(wrong, pa.int64()))
    return table.append_column(
        "minibatch", pa.array(table["painted_as"].to_numpy() % 2, pa.int32())
    )


@columns(reads=["images", "painted_as", "minibatch"])
def learn(ctx, table):
    held = _buffers(table)
    for minibatch in range(2):
        part = rows_where(table, table["minibatch"].to_numpy() == minibatch)
        assert _buffers(part).keys() <= held.keys()
        for images, group in zip(
            part["images"].to_pylist(), part["painted_as"].to_pylist(), strict=True
        ):
            assert images[0]["bytes"] == painted(ctx.step, group)
    ctx.log("learn/bytes", sum(held.values()), Reduce.MAX)
    ctx.log("learn/groups", len(set(table["painted_as"].to_pylist())), Reduce.SUM)
    return table


def blob_dag(make=sample, n=8, between=(), stage=False):
    """paint -> make -> ``between`` -> look (saved) -> learn."""
    nodes = [
        Node("paint", paint, role="rollout"),
        Node("sample", make, role="rollout", after="paint", options={"n": n}, stage=stage),
        *between,
    ]
    before = nodes[-1].name
    return DAG(
        ROLES,
        (
            *nodes,
            Node("look", look, role="policy", after=before, rows=Rows.BALANCED, save_as="rollouts"),
            Node("learn", learn, role="policy", after="look", rows=Rows.BALANCED),
        ),
    )
