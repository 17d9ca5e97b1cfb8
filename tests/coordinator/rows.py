"""Rows, edges and databuffers that the coordinator's tests share: several workers in one
process.
"""

import asyncio

import numpy as np
import pyarrow as pa

from siirl_dask.config import TransportMode
from siirl_dask.coordinator.databuffer.databuffer import Databuffer
from siirl_dask.coordinator.databuffer.limits import BufferLimits
from siirl_dask.planner import Edge, Iteration
from siirl_dask.testing.local_pool import LocalTransport

SCHEMA = pa.schema(
    {
        "row_id": pa.int64(),
        "group_id": pa.int64(),
        "tokens": pa.int64(),
        "ids": pa.list_(pa.int32()),
        "minibatch": pa.int32(),
        "logprobs": pa.large_list(pa.float64()),
        "pair": pa.list_(pa.float32(), 2),
        "text": pa.string(),
        "image": pa.large_binary(),
        "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "maybe": pa.list_(pa.int16()),
    }
)
ITERATION = Iteration("train", 1, 0)
SMALL = BufferLimits(memory=2**20, message=200, inline_lengths=0)
WAYS = {
    "large messages": {"limits": BufferLimits(), "transport_mode": TransportMode.dask},
    "messages": {"limits": SMALL, "transport_mode": TransportMode.dask},
    "shared memory": {"limits": SMALL, "transport_mode": TransportMode.shm},
}
"""Settings that have every row copied, by how it travels."""
SHARED_TABLES = {"limits": BufferLimits(share_from=0), "transport_mode": TransportMode.shm}
"""Settings that have replicated rows read where they lie."""


def names(count, first=0):
    return tuple(str(first + i) for i in range(count))


def edge(sources, targets, rows, *, by_minibatch=False, source="a", guide="a", schema=SCHEMA):
    return Edge(source, "b", sources, targets, rows, by_minibatch, schema, guide)


def make_rows(count, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, count)
    columns = {
        "row_id": np.arange(count),
        "group_id": np.arange(count) // 3,
        "tokens": lengths,
        "ids": [list(range(n)) for n in lengths],
        "minibatch": np.arange(count) // 3 % 2,
        "logprobs": [rng.normal(size=n) for n in lengths],
        "pair": [[n, -n] for n in lengths],
        "text": ["é" * n for n in lengths],
        "image": [bytes(rng.bytes(n)) for n in lengths],
        "messages": [[{"role": "user", "content": "x" * n}] * (n % 3) for n in lengths],
        "maybe": [None if n % 4 == 1 else [n] * n for n in lengths],
    }
    return pa.table(columns, schema=SCHEMA)


def scatter(table, sources, seed=0):
    """Put rows on random sources, in random order."""
    rng = np.random.default_rng(seed)
    order, owner = rng.permutation(table.num_rows), rng.integers(0, len(sources), table.num_rows)
    return {source: table.take(order[owner == index]) for index, source in enumerate(sources)}


def buffers_of(edges, way="large messages", *, of_worker=None, **settings):
    """Return a databuffer for each worker of the edges, and their transport.

    ``way`` names one of WAYS, or is "shared tables"; ``settings`` replace some of its settings,
    ``of_worker`` those of one worker: {worker: settings}.
    """
    transport = LocalTransport({})
    workers = {worker for e in edges for worker in (*e.sources, *e.targets)}
    keyed = {f"train/{e.name}": e for e in edges}
    common = (WAYS | {"shared tables": SHARED_TABLES})[way] | settings
    buffers = {
        w: Databuffer("run", w, keyed, transport, **(common | (of_worker or {}).get(w, {})))
        for w in workers
    }
    transport.handlers.update({w: buffer.handle for w, buffer in buffers.items()})
    return buffers, transport


async def wait_for_acks(buffers):
    for buffer in buffers.values():
        await buffer.wait_for_acks()


async def move(e, parts, way="large messages", delay=None):
    """Publish ``parts`` in random order while the targets already ask, and return what each
    target pulled.
    """
    buffers, transport = buffers_of([e], way)
    pulls = {
        target: asyncio.create_task(buffers[target].pull(e, e, ITERATION)) for target in e.targets
    }
    for source in sorted(e.sources, key=lambda s: hash((s, delay))):
        await asyncio.sleep(0)
        await buffers[source].publish(e, ITERATION, parts[source])
    pulled = {target: await pull for target, pull in pulls.items()}
    await wait_for_acks(buffers)
    return pulled, buffers, transport
