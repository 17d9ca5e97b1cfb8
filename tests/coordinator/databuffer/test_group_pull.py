"""Edges by group: every worker gets the blob of each group that it has rows of, once, and no
other.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.databuffer.limits import BufferLimits
from siirl_dask.errors import DataError
from siirl_dask.planner import Rows
from tests.coordinator.rows import ITERATION, WAYS, buffers_of, edge, names, wait_for_acks

IMAGE = pa.large_list(pa.struct({"bytes": pa.large_binary(), "path": pa.large_string()}))
PROMPTS = pa.schema(
    {
        "row_id": pa.int64(),
        "group_id": pa.int64(),
        "tokens": pa.int64(),
        "blob": pa.large_binary(),
        "images": IMAGE,
    }
)
SAMPLES = PROMPTS.remove(4).remove(3)


def prompts(count, seed=0, size=300):
    """Return a row a group, with bytes that belong to it alone, and images of which some are
    null.
    """
    rng = np.random.default_rng(seed)
    blobs = [rng.bytes(int(rng.integers(1, size))) for _ in range(count)]
    images = [
        None if len(blob) % 5 == 0 else [{"bytes": blob, "path": None}] * (len(blob) % 3)
        for blob in blobs
    ]
    groups = rng.permutation(count) * 3 + 1  # neither the row ids nor in their order
    columns = {
        "row_id": range(count),
        "group_id": groups,
        "tokens": [1] * count,
        "blob": blobs,
        "images": images,
    }
    return pa.table(columns, schema=PROMPTS)


def samples(table, n, seed=0, kept=1.0):
    """Return ``n`` rows of each group, without the groups that are dropped."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(table["group_id"].to_numpy(), n)
    rows = {
        "row_id": np.arange(len(groups)),
        "group_id": groups,
        "tokens": rng.integers(1, 60, len(groups)),
    }
    left = np.isin(groups, table["group_id"].to_numpy()[rng.random(table.num_rows) < kept])
    return pa.table(rows, schema=SAMPLES).filter(pa.array(left))


def edges(sources, targets, rows, *, guides=None):
    by_group = edge(sources, targets, rows, source="prompts", guide="a", schema=PROMPTS)
    guide = edge(guides or sources, targets, rows, schema=SAMPLES)
    return replace(by_group, by_group=True), guide


async def pulled(by_group, guide, values, rows, way, have=None, **settings):
    """Publish both edges, and return for each target its rows of the guide and its groups, and
    the buffers.
    """
    buffers, transport = buffers_of([by_group, guide], way, **settings)
    for source in by_group.sources:
        await buffers[source].publish(by_group, ITERATION, values[source])
    for source in guide.sources:
        await buffers[source].publish(guide, ITERATION, rows[source])
    got = {}
    for target in guide.targets:
        own = await buffers[target].pull(guide, guide, ITERATION)
        tables = (have or {}).get(target, ())
        got[target] = (
            own,
            await buffers[target].pull(by_group, guide, ITERATION, already_here=tables),
        )
    await wait_for_acks(buffers)
    return got, buffers, transport


def scatter(table, workers, seed):
    owner = np.random.default_rng(seed).integers(0, len(workers), table.num_rows)
    return {worker: table.filter(pa.array(owner == index)) for index, worker in enumerate(workers)}


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.sampled_from(list(Rows)), st.integers(0, 12),
    st.integers(1, 5), st.integers(0, 9), st.sampled_from([1.0, 0.6]), st.sampled_from(list(WAYS)), st.booleans(),
)  # fmt: skip
def test_every_owner_of_a_row_has_the_blob_of_its_group_once_and_nothing_is_left_behind(
    s, t, shift, rows, count, n, seed, kept, way, here
):
    by_group, guide = edges(names(s), names(t, shift), rows)
    table = prompts(count, seed)
    values, lines = (
        scatter(table, by_group.sources, seed),
        scatter(samples(table, n, seed, kept), guide.sources, seed),
    )
    have = {w: [values[w]] for w in values} if here and rows is not Rows.REPLICATED else None
    got, buffers, _ = asyncio.run(pulled(by_group, guide, values, lines, way, have))
    for own, groups in got.values():
        ids = groups["group_id"].to_pylist()
        assert sorted(ids) == sorted(set(own["group_id"].to_pylist()))
        assert groups["row_id"].to_pylist() == sorted(groups["row_id"].to_pylist())
        wanted = table.filter(pa.array(np.isin(table["group_id"].to_numpy(), ids)))
        assert groups.combine_chunks() == wanted.combine_chunks()
    if rows is not Rows.REPLICATED:
        assert [buffer.unacked_bytes for buffer in buffers.values()] == [0] * len(buffers)


@pytest.mark.parametrize("n", [1, 8])
def test_the_bytes_that_come_to_a_worker_do_not_grow_with_the_samples(n):
    by_group, guide = edges(("0",), ("1", "2"), Rows.GROUPED)
    table = prompts(16, size=2**16).drop_columns(["images"])
    by_group = replace(by_group, schema=table.schema)
    given = {"0": table}, {"0": samples(table, n)}
    got, buffers, _ = asyncio.run(
        pulled(by_group, guide, *given, "shared memory", limits=BufferLimits())
    )
    blobs = sum(map(len, table["blob"].to_pylist()))
    assert sum(groups.num_rows for _, groups in got.values()) == 16
    assert blobs <= sum(buffer.traffic.total for buffer in buffers.values()) <= blobs + 16 * n * 200


def test_groups_that_a_worker_has_are_neither_fetched_nor_copied():
    by_group, guide = edges(("0", "1"), ("1", "2"), Rows.BALANCED)
    table = prompts(12, size=2**14)
    values, rows = scatter(table, by_group.sources, 1), scatter(samples(table, 4), guide.sources, 1)
    earlier = table.slice(0, 6)
    have = {"1": [values["1"]], "2": [earlier]}
    got, _, _ = asyncio.run(pulled(by_group, guide, values, rows, "large messages", have))
    for worker, tables in have.items():
        there = {chunk.buffers()[-1].address for part in tables for chunk in part["blob"].chunks}
        groups = got[worker][1]
        here = np.isin(groups["group_id"].to_numpy(), tables[0]["group_id"].to_numpy())
        assert here.any()
        for row in np.flatnonzero(here).tolist():
            (chunk,) = groups["blob"].slice(row, 1).chunks
            assert chunk.buffers()[-1].address in there


def test_of_several_rows_of_a_group_one_is_published():
    """As of a node that numbers its groups anew, whose samples have the blobs."""
    by_group, guide = edges(("0",), ("1", "2"), Rows.BALANCED)
    table = prompts(6)
    rows = samples(table, 4)
    place = {group: at for at, group in enumerate(table["group_id"].to_pylist())}
    at = pa.array([place[group] for group in rows["group_id"].to_pylist()])
    wide = rows.append_column("blob", table["blob"].take(at)).append_column(
        "images", table["images"].take(at)
    )
    got, buffers, _ = asyncio.run(pulled(by_group, guide, {"0": wide}, {"0": rows}, "messages"))
    found = {
        group: blob
        for _, t in got.values()
        for group, blob in zip(*t.select([1, 3]).to_pydict().values(), strict=True)
    }
    assert found == dict(zip(table["group_id"].to_pylist(), table["blob"].to_pylist(), strict=True))
    assert [buffer.unacked_bytes for buffer in buffers.values()] == [0] * len(buffers)


def test_a_group_that_no_source_has_is_an_error_that_names_it():
    by_group, guide = edges(("0",), ("1",), Rows.GROUPED)
    table = prompts(4)
    gone = table["group_id"][2].as_py()
    some = table.filter(pa.array([group != gone for group in table["group_id"].to_pylist()]))
    with pytest.raises(
        DataError, match=f"edge prompts->b by group.*first group_id {gone}.*groups='new'"
    ):
        asyncio.run(pulled(by_group, guide, {"0": some}, {"0": samples(table, 2)}, "messages"))


def test_groups_of_a_table_that_is_spilled_arrive(tmp_path):
    by_group, guide = edges(("0",), ("1", "2"), Rows.BALANCED)
    table = prompts(8, size=2**16)
    limits = BufferLimits(memory=2**16, spill_folder=str(tmp_path))
    got, buffers, _ = asyncio.run(
        pulled(by_group, guide, {"0": table}, {"0": samples(table, 3)}, "messages", limits=limits)
    )
    assert {group for _, t in got.values() for group in t["group_id"].to_pylist()} == set(
        table["group_id"].to_pylist()
    )
    assert [buffer.unacked_bytes for buffer in buffers.values()] == [0] * len(buffers)


@pytest.mark.parametrize("rows", [Rows.GROUPED, Rows.BALANCED, Rows.REPLICATED])
def test_between_hosts_every_worker_has_its_groups(rows):
    hosts = {"0": "h0", "1": "h0", "2": "h1", "3": "h1", "4": "h1"}
    by_group, guide = edges(("0", "1"), ("2", "3", "4"), rows)
    table = prompts(10)
    values, lines = (
        scatter(table, by_group.sources, 3),
        scatter(samples(table, 4), guide.sources, 3),
    )

    async def together():
        buffers, _ = buffers_of([by_group, guide], "messages", hosts=hosts)
        for source in ("0", "1"):
            await buffers[source].publish(by_group, ITERATION, values[source])
            await buffers[source].publish(guide, ITERATION, lines[source])

        async def pull(target):
            own = await buffers[target].pull(guide, guide, ITERATION)
            return own, await buffers[target].pull(by_group, guide, ITERATION)

        return await asyncio.gather(*map(pull, by_group.targets))

    for own, groups in asyncio.run(together()):
        assert set(groups["group_id"].to_pylist()) == set(own["group_id"].to_pylist())
        wanted = table.filter(
            pa.array(np.isin(table["group_id"].to_numpy(), groups["group_id"].to_numpy()))
        )
        assert groups.combine_chunks() == wanted.combine_chunks()
