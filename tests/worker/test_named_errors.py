"""The name of a failure inside a node: a collective's is that of a peer, anything else the
node's own.
"""

from functools import partial

import pytest
import torch

from siirl_dask import collectives
from siirl_dask.errors import NodeError, PeerError
from siirl_dask.worker.named_errors import named_errors


class Broken:
    """A collective whose end raises a RuntimeError that is not Python's, as that of gloo."""

    wait = partial(torch.zeros(2).reshape, 3)


def test_a_collective_that_fails_is_a_lost_peer():
    with (
        pytest.raises(PeerError, match="node 'update': a collective failed"),
        named_errors("node 'update'", NodeError),
    ):
        collectives.finish(Broken())


def test_a_node_that_raises_a_runtime_error_of_its_own_is_a_node_error():
    with (
        pytest.raises(NodeError, match="node 'update': RuntimeError: mine"),
        named_errors("node 'update'", NodeError),
    ):
        raise RuntimeError("mine")
    with pytest.raises(NodeError, match="shape"), named_errors("node 'update'", NodeError):
        torch.zeros(2).reshape(3)
