"""The data plane between processes: real Dask workers, real connections, real shared memory."""

import asyncio
import ctypes
import os
import signal
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
from distributed import Client, WorkerPlugin, get_worker, wait

from siirl_dask.comms.proofs import new_secret
from siirl_dask.config import TransportMode
from siirl_dask.coordinator.databuffer.limits import BufferLimits
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge, Iteration, Rows
from siirl_dask.worker.peers.data_plane import DataPlane, DataSettings
from tests.clusters import local_cluster

pytestmark = pytest.mark.alone

MIB = 2**20
SCHEMA = pa.schema(
    {
        "row_id": pa.int64(),
        "group_id": pa.int64(),
        "tokens": pa.int64(),
        "ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "text": pa.string(),
    }
)


def make_part(index, count, rows, tokens):
    """Rows ``index``, ``index + count``, ... so that those of different sources alternate."""
    ids = np.arange(index, rows, count)
    lengths = tokens - ids % 7
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    values = np.arange(offsets[-1].as_py(), dtype=np.int32) + index
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(values)),
        pa.ListArray.from_arrays(offsets, pa.array(values.astype(np.float32))),
        pa.array([f"row {i}" for i in ids]),
    ]
    return pa.table([pa.array(ids), pa.array(ids // 4), pa.array(lengths), *columns], schema=SCHEMA)


class Plane(WorkerPlugin):
    """A data plane on a worker, and nothing else."""

    def __init__(self, members, edges, settings):
        self.name = f"plane-{uuid.uuid4().hex}"
        self.members, self.edges, self.settings = members, edges, settings
        self.secret = new_secret()

    async def setup(self, worker):
        self.loop = asyncio.get_running_loop()
        keyed = {f"train/{edge.name}": edge for edge in self.edges}
        self.plane = DataPlane(
            worker, self.name, self.members, keyed, self.settings, secret=self.secret
        )
        await self.plane.start()

    async def teardown(self, worker):
        await self.plane.close()

    def publish(self, edge, sequence, table):
        buffer = self.plane.databuffer
        asyncio.run_coroutine_threadsafe(
            buffer.publish(edge, Iteration("train", 3, sequence), table), self.loop
        ).result()

    def pull(self, edge, sequence):
        buffer = self.plane.databuffer
        return asyncio.run_coroutine_threadsafe(
            buffer.pull(edge, edge, Iteration("train", 3, sequence)), self.loop
        ).result()


def plane(name):
    return get_worker().plugins[name]


def port_of(name, dask_worker):
    return dask_worker.plugins[name].plane.port


def meet(name, ports, dask_worker):
    dask_worker.plugins[name].plane.meet(ports)


def publish_part(name, edge, sequence, index, rows, tokens):
    plane(name).publish(edge, sequence, make_part(index, len(edge.sources), rows, tokens))


def pull_part(name, edge, sequence):
    return plane(name).pull(edge, sequence)


def keep(name, edge, sequence):
    plane(name).kept = plane(name).pull(edge, sequence)


def kept(name):
    """The table, and how many bytes of memory of its own this worker received it into."""
    return plane(name).kept, plane(name).plane.databuffer.arena.held


def seconds_until_it_fails(name, edge, sequence):
    began = time.monotonic()
    try:
        plane(name).pull(edge, sequence)
    except PeerError as error:
        return time.monotonic() - began, str(error)
    return None


def hold_the_lock_for(seconds):
    """Keep the interpreter's lock, as an extension may that computes or waits without giving it
    up.
    """
    ctypes.PyDLL(None).sleep(seconds)


def compute_for(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def peak_memory_of(work):
    """Most bytes resident while ``work`` ran, above what was before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def publish_all_and_measure(name, edges, sequence, rows, tokens):
    def work():
        for edge in edges:
            publish_part(name, edge, sequence, 0, rows, tokens)

    return peak_memory_of(work)


def serve_and_measure(name, seconds):
    return peak_memory_of(lambda: time.sleep(seconds))


def pull_all_and_measure(name, edges, sequence):
    rows = []

    def work():
        rows.extend(pull_part(name, edge, sequence).num_rows for edge in edges)

    return peak_memory_of(work), rows


def place(client, edges, **settings):
    """Put a plane on each worker: {worker: address}, and the name of the plugin that holds it."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    members = {str(worker["name"]): address for address, worker in workers.items()}
    plugin = Plane(members, edges, DataSettings(**settings))
    client.register_plugin(plugin)
    ports = client.run(port_of, plugin.name, workers=list(members.values()))
    client.run(meet, plugin.name, {name: ports[address] for name, address in members.items()})
    return members, plugin.name


@contextmanager
def planes(client, edges, **settings):
    members, name = place(client, edges, **settings)
    try:
        yield members, name
    finally:
        client.unregister_worker_plugin(name)


def edge_of(sources, targets, rows=Rows.GROUPED, source="a"):
    return Edge(source, "b", tuple(sources), tuple(targets), rows, False, SCHEMA, source)


@pytest.fixture
def client(cluster_address):
    with Client(cluster_address) as client:
        yield client


@pytest.fixture
def own_client():
    """A client of a cluster whose three workers a test may kill."""
    with local_cluster(3) as cluster, Client(cluster) as client:
        yield client


@pytest.mark.parametrize("way", TransportMode)
@pytest.mark.parametrize(("sources", "targets"), [("01", "0123"), ("0123", "1"), ("012", "123")])
@pytest.mark.parametrize(("rows", "tokens"), [(12, 9), (300, 3000)])
def test_processes_hand_rows_over_as_one_process_would_hold_them(
    client, way, sources, targets, rows, tokens
):
    edge = edge_of(sources, targets)
    with planes(client, [edge], transport=way, limits=BufferLimits(message=MIB)) as (members, name):
        for sequence in range(2):  # the second time into memory that was used before
            calls = [
                client.submit(
                    publish_part,
                    name,
                    edge,
                    sequence,
                    i,
                    rows,
                    tokens,
                    workers=[members[s]],
                    pure=False,
                )
                for i, s in enumerate(sources)
            ]
            pulls = [
                client.submit(pull_part, name, edge, sequence, workers=[members[t]], pure=False)
                for t in targets
            ]
            parts = client.gather(pulls)
            client.gather(calls)
            oracle = pa.concat_tables(
                [make_part(i, len(sources), rows, tokens) for i in range(len(sources))]
            )
            assert pa.concat_tables(parts).sort_by("row_id").equals(oracle.sort_by("row_id"))
            for part in parts:
                assert part["row_id"].to_pylist() == sorted(part["row_id"].to_pylist())
                part.validate(full=True)


@pytest.mark.parametrize("first", ["requests", "signal"])
@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL])
def test_a_dead_or_stopped_peer_is_named_within_5_s(own_client, slowdown, sign, first):
    edge = edge_of("012", "012")
    members, name = place(own_client, [edge])
    pids = {
        w: own_client.submit(os.getpid, workers=[members[w]], pure=False).result() for w in members
    }
    for index in (0, 1):
        own_client.submit(
            publish_part, name, edge, 0, index, 12, 9, workers=[members[str(index)]]
        ).result()

    def pull_on_both():
        return [
            own_client.submit(
                seconds_until_it_fails, name, edge, 0, workers=[members[w]], pure=False
            )
            for w in "01"
        ]

    victim = psutil.Process(pids["2"])
    before = 1.0 if first == "requests" else 0.0  # seconds, in which both ask
    try:
        if first == "requests":
            waits = pull_on_both()
            time.sleep(before)
            victim.send_signal(sign)
        else:
            victim.send_signal(sign)
            if sign == signal.SIGKILL:
                victim.wait(30)
            waits = pull_on_both()
        done, _ = wait(waits, timeout=60)
        assert len(done) == 2
        for seconds, message in own_client.gather(waits):
            assert seconds < before + 5 * slowdown.factor
            assert "train step 3" in message
            assert "edge train/a->b" in message
            assert "worker '2'" in message
    finally:
        if sign == signal.SIGSTOP:
            victim.kill()


def test_shared_rows_stay_readable_after_their_source_was_killed(own_client):
    edge, rows, tokens = edge_of("0", "12", Rows.REPLICATED), 100, 10_000
    members, name = place(own_client, [edge])
    on = {worker: {"workers": [members[worker]], "pure": False} for worker in members}
    source = own_client.submit(os.getpid, **on["0"]).result()
    own_client.submit(publish_part, name, edge, 0, 0, rows, tokens, **on["0"]).result()
    own_client.gather([own_client.submit(keep, name, edge, 0, **on[target]) for target in "12"])
    psutil.Process(source).kill()
    oracle = make_part(0, 1, rows, tokens)
    for table, own_memory in own_client.gather(
        [own_client.submit(kept, name, **on[target]) for target in "12"]
    ):
        assert table.equals(oracle)
        assert own_memory == 0


def test_a_peer_that_is_only_busy_is_waited_for(client):
    edge = edge_of("01", "0")
    with planes(client, [edge], peer_timeout=0.5) as (members, name):
        client.submit(publish_part, name, edge, 0, 0, 12, 9, workers=[members["0"]]).result()
        pull = client.submit(pull_part, name, edge, 0, workers=[members["0"]], pure=False)
        busy = client.submit(compute_for, 2.0, workers=[members["1"]], pure=False)
        late = client.submit(
            publish_part, name, edge, 0, 1, 12, 9, workers=[members["1"]], pure=False
        )
        assert pull.result(timeout=60).num_rows == 12
        del busy, late


@pytest.mark.parametrize("way", [TransportMode.auto, TransportMode.dask])
def test_a_peer_whose_code_holds_the_interpreters_lock_is_waited_for(client, way):
    """For six times the peer timeout, on its host or over a link: no answer comes, and the
    kernel says it is there.
    """
    edge = edge_of("01", "0")
    with planes(client, [edge], transport=way, peer_timeout=0.5) as (members, name):
        on = {worker: {"workers": [members[worker]], "pure": False} for worker in members}
        for sequence in (0, 1):  # the first makes the connections
            client.submit(publish_part, name, edge, sequence, 0, 12, 9, **on["0"]).result()
            held = [client.submit(hold_the_lock_for, 3, **on["1"])] * sequence
            pull = client.submit(pull_part, name, edge, sequence, **on["0"])
            late = client.submit(publish_part, name, edge, sequence, 1, 12, 9, **on["1"])
            assert pull.result(timeout=60).num_rows == 12
        del held, late


def test_four_times_the_budget_moves_within_the_budget(client):
    """Four partitions wait, each as large as the whole budget: what does not fit spills and
    comes back.
    """
    budget, rows, tokens = 64 * MIB, 256, 32 * 1024 + 6
    part = make_part(0, 1, rows, tokens).nbytes
    assert part > budget - MIB
    edges = [edge_of("0", "1", source=source) for source in "acde"]
    for way in (TransportMode.dask, TransportMode.shm):
        limits = BufferLimits(memory=budget, message=4 * MIB)
        with planes(client, edges, transport=way, limits=limits) as (members, name):
            on = {w: {"workers": [members[w]], "pure": False} for w in members}
            published = client.submit(
                publish_all_and_measure, name, edges, 0, rows, tokens, **on["0"]
            ).result()
            # one being made: its numbers and their copy as float
            assert published < 2 * part + budget
            served = client.submit(serve_and_measure, name, 3, **on["0"])
            pulled, counts = client.submit(pull_all_and_measure, name, edges, 0, **on["1"]).result()
            assert counts == [rows] * 4
            assert pulled < part + budget
            # what it wrote into the target's memory counts for both
            mapped = part if way is TransportMode.shm else 0
            assert served.result() < budget + mapped
