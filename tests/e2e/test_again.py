"""Workers of an existing cluster that a run has left, however it ended, take the next run: its
engines are closed.
"""

import os
import signal
from importlib.util import find_spec

import pytest

from siirl_dask import Node, columns
from siirl_dask.errors import NodeError, PeerError, SiirlError
from tests.clusters import local_cluster

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
VLLM = [
    "cluster.workers=2",
    "cluster.placement={}",
    "rollout.engine=vllm",
    "rollout.vllm.kv_cache_memory=16MiB",
]
VLLM += ["run.max_restarts=0"]


@pytest.fixture(scope="module")
def workers():
    with local_cluster(2) as cluster:
        yield cluster


@pytest.fixture
def vllm(workers):
    return [*VLLM, f"cluster.address={workers.scheduler_address}"]


@columns()
def fails_on_one_worker(ctx, table):
    """The other worker waits for it, and is told to stop."""
    if ctx.rank.rank == 1:
        raise ValueError("the second worker fails")
    ctx.all_sum([1.0])
    return table


@columns()
def loses_a_peer_on_one_worker(ctx, table):
    if ctx.rank.rank == 1:
        raise PeerError("a peer is gone")
    ctx.all_sum([1.0])
    return table


def with_node(function):
    return lambda dag: dag.add(Node("trouble", function, role="reward", after="reward"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_next_run_begins_after_a_failed_node_a_lost_peer_ctrl_c_and_a_killed_driver(
    start, train, vllm
):
    for function, kind in (
        (fails_on_one_worker, NodeError),
        (loses_a_peer_on_one_worker, PeerError),
    ):
        with pytest.raises(SiirlError) as raised:
            train(kind.__name__, *vllm, change=with_node(function))
        assert type(raised.value) is kind
    for sign in (signal.SIGINT, signal.SIGKILL):
        run = start("run.steps=100000", "--fresh", *vllm)
        run.wait_for_steps(run.steps() + 1)
        os.killpg(run.process.pid, sign)
        run.process.communicate(timeout=60)
    assert train("last", *vllm, "run.steps=1").summary.steps == 1
