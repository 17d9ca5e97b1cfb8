"""The package uses what Dask documents, but for one module, whose names are there in the version
that is installed.

A run is on a cluster whose Dask its user has chosen. A name without a promise may be gone there;
here it is a line that fails.
"""

from __future__ import annotations

import ast
import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from bokeh.server.tornado import BokehTornado
from distributed import Client, LocalCluster, SchedulerPlugin, SpecCluster, Worker, WorkerPlugin
from distributed.comm import Comm
from tornado.web import Application

from siirl_dask import dask_internals
from tests import parsed
from tests.clusters import local_cluster
from tests.parsed import PACKAGES, ROOT, Nodes

DOOR = ROOT / "siirl_dask" / "dask_internals.py"
DOCUMENTED = {
    "dask": {"config"},
    "dask.base": {"annotate"},
    "dask.delayed": {"Delayed", "delayed"},
    "dask.tokenize": {"tokenize"},
    "distributed": {
        "Client",
        "Future",
        "LocalCluster",
        "Nanny",
        "Scheduler",
        "SchedulerPlugin",
        "Security",
        "SpecCluster",
        "Status",
        "Worker",
        "WorkerPlugin",
        "fire_and_forget",
        "get_client",
        "get_worker",
        "secede",
        "wait",
    },
    # exported by distributed.comm, from where mypy does not take them
    "distributed.comm.addressing": {
        "get_address_host",
        "get_local_address_for",
        "parse_address",
        "parse_host_port",
        "unparse_address",
        "unparse_host_port",
    },
    # what a comm backend is made of: "Communications" of distributed's pages
    "distributed.comm.core": {"Comm", "CommClosedError", "Connector", "connect", "listen"},
    "distributed.comm.registry": {"Backend", "backends"},
    # exported by distributed.deploy
    "distributed.deploy.adaptive": {"Adaptive"},
    "distributed.deploy.cluster": {"Cluster"},
    # "Fine performance metrics", custom ones
    "distributed.metrics": {"context_meter"},
    # "Scheduling state"
    "distributed.scheduler": {"WorkerState"},
}
"""Names that other modules may import: on a page of Dask's, or exported by its package."""
NOWHERE = {
    "asyncio_loop",
    "batched_stream",
    "child_stop_q",
    "connection_args",
    "http_application",
    "init_result_q",
    "scheduler_comm",
    "scheduler_delay",
    "send_all",
    "stream_comms",
    "stream_handlers",
    "unregister_worker_plugin",
    "worker_spec",
}
"""Attributes of Dask's objects that no page of it has, and nothing else here is called."""
NOT_OF = {
    "client": {"futures", "rpc", "scheduler"},
    "cluster": {"scheduler", "plan", "requested", "observed"},
    "comm": {"stream"},
    "nanny": {"process"},
    "scheduler": {"extensions", "handlers", "plugins", "rpc"},
    "worker": {"extensions", "metrics", "plugins", "rpc", "security"},
}
"""The same, of variables whose names end so: what they are called is not Dask's alone."""
LOOKS = {"getattr", "hasattr", "setattr", "delattr"}


def sources() -> list[Path]:
    files = parsed.files_below(*PACKAGES)
    return [path for path in files if path != DOOR and "examples" not in path.parts]


def imports(nodes: Nodes) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of each import of Dask's; no name for a module as a whole."""
    for node in nodes[ast.Import]:
        for alias in node.names:
            if alias.name.partition(".")[0] in ("dask", "distributed"):
                yield node.lineno, alias.name, ""
    for node in nodes[ast.ImportFrom]:
        if node.level == 0 and str(node.module).partition(".")[0] in ("dask", "distributed"):
            for alias in node.names:
                yield node.lineno, node.module, alias.name


def own_privates() -> set[str]:
    """Every name with one underscore that a file of ours gives to an attribute, a function or a
    class.
    """
    found: set[str] = set()
    for path in sources():
        nodes = parsed.nodes_of(path)
        found |= {node.attr for node in nodes[ast.Attribute] if isinstance(node.ctx, ast.Store)}
        found |= {node.id for node in nodes[ast.Name] if isinstance(node.ctx, ast.Store)}
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
            found |= {node.name for node in nodes[kind]}
    return {name for name in found if name.startswith("_")}


def last_word(node: ast.expr) -> str:
    """Return what an expression is called: ``worker`` for ``self._dask_worker``; nothing for a call."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.rpartition("_")[2]
    return ""


def attributes(nodes: Nodes) -> Iterator[tuple[int, str, str]]:
    """Line, what the object is called, and the attribute, of each that is read or set."""
    for node in nodes[ast.Attribute]:
        yield node.lineno, last_word(node.value), node.attr
    for node in nodes[ast.Call]:
        match node:
            case ast.Call(func=ast.Name(id=look), args=[value, ast.Constant(value=str(name)), *_]):
                if look in LOOKS:
                    yield node.lineno, last_word(value), name


def faults_of(nodes: Nodes, own: set[str]) -> list[str]:
    """Names in a file that Dask promises to nobody."""
    faults = []
    imported = list(imports(nodes))
    for line, module, name in imported:
        allowed = name in DOCUMENTED.get(module, set()) if name else module == "dask"
        if not allowed:
            faults.append(f"{line}: import of {module} {name}")
    for line, owner, name in attributes(nodes):
        if name in NOWHERE or name in NOT_OF.get(owner, set()):
            faults.append(f"{line}: {owner}.{name}")
        if imported and name.startswith("_") and not name.startswith("__") and name not in own:
            faults.append(f"{line}: {owner}.{name}")
    return faults


def test_no_other_module_uses_a_name_without_a_promise():
    own = own_privates()
    assert len(sources()) > 400
    faults = {
        path.relative_to(ROOT).as_posix(): faults_of(parsed.nodes_of(path), own)
        for path in sources()
    }
    assert {path: found for path, found in faults.items() if found} == {}, (
        "what Dask does not document belongs in siirl_dask/dask_internals.py"
    )


@pytest.mark.parametrize(
    "text",
    [
        "import distributed.comm.tcp",
        "from distributed.comm.core import BaseListener",
        "from dask.utils import parse_timedelta",
        "def f():\n    from distributed.dashboard.core import BokehApplication",
        "from distributed import Cluster, Client\ncluster._correct_state()",
        "from distributed import Client\nClient.current()._handle_report",
        "self._client.scheduler.identity()",
        "scheduler.handlers['a'] = f",
        "self._dask_worker.plugins[name]",
        "loop.asyncio_loop",
        "getattr(comm, 'stream', None)",
    ],
)
def test_a_name_without_a_promise_is_found(text):
    assert faults_of(parsed.by_kind(ast.parse(text)), set())


def test_documented_names_pass():
    text = (
        "import dask\nfrom distributed import Client, LocalCluster\n"
        "client.scheduler_info()\nself._scheduler.workers\nrun.plugins\nself._own"
    )
    assert faults_of(parsed.by_kind(ast.parse(text)), {"_own", "_scheduler"}) == []


class Echo(SchedulerPlugin):
    name = "echo"

    async def start(self, scheduler):
        self.scheduler = scheduler
        dask_internals.add_handlers(scheduler, {"echo-say": self.say, "echo-send": self.send})

    def say(self, word):
        return f"{word} {dask_internals.plugins_of(self.scheduler)['echo'].name}"

    def send(self, word):
        workers = self.scheduler.workers
        dask_internals.send_to_workers(
            self.scheduler, [*workers, "tcp://127.0.0.1:1"], {"op": "echo", "word": word}
        )


class Listening(WorkerPlugin):
    name = "listening"

    def setup(self, worker: Worker) -> None:
        self.heard: list[str] = []
        dask_internals.handle_messages(worker, "echo", lambda word: self.heard.append(word))
        dask_internals.heartbeat_metrics(worker)["echo"] = lambda worker: 7


def heard(dask_worker):
    return dask_internals.plugin_of(dask_worker, "listening").heard


def inside(dask_worker):
    dask_internals.releases_of(dask_worker).append("held")
    listens, connects, must_encrypt = dask_internals.certificates_of(dask_worker)
    assert listens["ssl_context"] is None
    assert connects is not None
    return (
        dask_internals.releases_of(dask_worker),
        dask_internals.plugin_of(dask_worker, "absent"),
        must_encrypt,
        dask_internals.clock_offset(dask_worker),
    )


def on_scheduler(dask_scheduler):
    comms = list(dask_internals.connections_of(dask_scheduler))
    assert all(isinstance(comm, Comm) for comm in comms)
    (dashboard,) = dask_internals.dashboards_of(dask_scheduler, BokehTornado)
    assert isinstance(dashboard, Application)
    assert (
        "dask diagnostic"
        in dask_internals.page_template("{% extends 'base.html' %}").render().lower()
    )
    (state,) = dask_scheduler.workers.values()
    return (
        [dask_internals.connection_bytes(comm) for comm in comms],
        dask_internals.heartbeat_seconds(1),
        dask_internals.heartbeat_seconds(10_000),
        state.metrics.get("echo"),
    )


def eventually(look, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def remove_plugin(dask_scheduler):
    await dask_internals.remove_worker_plugin(dask_scheduler, "listening")


@pytest.fixture(scope="module")
def cluster():
    with local_cluster(1) as cluster:
        yield cluster


def test_the_names_behind_the_door_are_there_in_the_scheduler_and_in_workers(cluster):
    with Client(cluster, set_as_default=False) as client:
        assert dask_internals.is_connected(client)
        rpc = dask_internals.SchedulerRpc(client)
        assert rpc.address == cluster.scheduler_address
        client.register_plugin(Echo())
        client.register_plugin(Listening())
        assert client.sync(rpc.call, "echo-say", word="well") == "well echo"
        assert client.sync(rpc.call, "echo-absent") is None
        whole = client.sync(rpc.identity, n_workers=-1)
        assert list(whole["workers"]) == list(client.scheduler_info()["workers"])
        client.sync(rpc.call, "echo-send", word="hallo")
        eventually(lambda: list(client.run(heard).values()) == [["hallo"]])
        (found,) = client.run(inside).values()
        assert found[:3] == (["held"], None, False)
        assert abs(found[3]) < 60
        eventually(lambda: client.run_on_scheduler(on_scheduler)[3] == 7)
        counted, least, most, _ = client.run_on_scheduler(on_scheduler)
        assert max(count or 0 for count in counted) > 1000
        assert 0 < least <= most
        client.run_on_scheduler(remove_plugin)
        assert list(client.run(lambda dask_worker: len(dask_worker.plugins)).values())
        assert dask_internals.start_on_loop(client, asyncio.sleep(0, "done")).result(10) == "done"


def test_a_client_that_hangs_up_waits_for_nothing_more(cluster):
    client = Client(cluster, set_as_default=False)
    try:
        waiting = client.submit(time.sleep, 2.0, pure=False)
        client.sync(dask_internals.hang_up, client)
        assert waiting.status in ("cancelled", "lost")
        assert dask_internals.start_on_loop(client, asyncio.sleep(0, "done")).result(10) == "done"
    finally:
        with suppress(TimeoutError, RuntimeError):
            client.close(timeout=0.5)


def test_the_names_behind_the_door_are_there_in_clusters(cluster):
    assert dask_internals.can_scale(cluster)
    assert isinstance(cluster, SpecCluster)
    (nanny,) = dask_internals.processes_of(cluster)
    assert len(dask_internals.queues_of(nanny)) == 2
    dask_internals.start_on_loop(cluster, dask_internals.scale(cluster, 2)).result(60)
    assert len(dask_internals.processes_of(cluster)) == 2
    with Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(2)
        before = {
            info["name"]: address for address, info in client.scheduler_info()["workers"].items()
        }
        rpc = dask_internals.SchedulerRpc(client)
        client.sync(rpc.end_workers, [before[1]], 5.0)

        def others() -> bool:
            info = client.scheduler_info()["workers"]
            return len(info) == 2 and before[1] not in info

        eventually(others, 60.0)
    assert list(dask_internals.jobs_without_workers(cluster, {"1"})) == [], "its worker is back"
    with LocalCluster(n_workers=0, dashboard_address=None, silence_logs=50) as empty:
        assert dask_internals.processes_of(empty) == []
