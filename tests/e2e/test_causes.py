"""A failure on a worker is told once, by its cause: the error's own type and text, the worker
and its host.
"""

import socket

import pytest

from siirl_dask import Node, columns
from siirl_dask.errors import NodeError, PeerError, RunError

TWO = ["cluster.workers=2", "cluster.placement={}", "run.max_restarts=0"]
HOST = socket.gethostname()


class JudgeError(Exception):
    """Takes more arguments than Python gives back to it when it is unpickled."""

    def __init__(self, judge, text):
        super().__init__(f"{judge}: {text}")


def _after_many_retries():
    failure = TimeoutError("the judge does not answer")
    for attempt in range(1000):
        try:
            raise ConnectionError(f"attempt {attempt}") from failure
        except ConnectionError as error:
            failure = error
    return failure


@columns()
def fails_after_many_retries(ctx, table):
    """Its chain of causes is longer than Python can pickle."""
    raise _after_many_retries()


@columns()
def raises_what_does_not_unpickle(ctx, table):
    raise JudgeError("judge-7", "the judge does not answer")


@columns()
def loses_a_peer_on_one_worker(ctx, table):
    """The other worker is told to stop in the middle of its own step."""
    if ctx.rank.rank == 1:
        raise PeerError("worker '0' gave no sign of life") from _after_many_retries()
    ctx.all_sum([1.0])
    return table


def with_node(function):
    return lambda dag: dag.add(Node("trouble", function, role="reward", after="reward"))


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (
            fails_after_many_retries,
            NodeError,
            "node 'trouble', train step 1, worker '[01]': ConnectionError: attempt",
        ),
        (
            raises_what_does_not_unpickle,
            NodeError,
            "worker '[01]': JudgeError: judge-7: the judge does not answer",
        ),
        (loses_a_peer_on_one_worker, PeerError, "worker '0' gave no sign of life"),
    ],
)
def test_an_error_that_dask_cannot_send_arrives_by_its_own_type_and_text(
    train, function, kind, said
):
    with pytest.raises(RunError, match=said) as raised:
        train("run", *TWO, change=with_node(function))
    assert type(raised.value) is kind
    assert "Aborted" not in str(raised.value)
    assert f"on host {HOST!r}" in "\n".join(raised.value.__notes__)
    # a group that the frames keep would hold its peer up
    assert train("next", *TWO, "run.steps=1").summary.steps == 1
