"""Tools of a server that speaks MCP: a real one, in a process of its own."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from siirl_dask.errors import ConfigError
from tests.environments import worlds
from tests.environments.conftest import built
from tests.environments.test_failures import children

pytest.importorskip("mcp")
SERVER = shlex.join([sys.executable, str(Path(__file__).with_name("mcp_server.py"))])
CHAT = [{"role": "user", "content": "go"}]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_of_a_server_are_called_beside_functions_and_their_failures_are_texts(play):
    player = play(tools=[worlds.slow], mcp_servers={"numbers": SERVER}, timeout=2)
    opening = player.reset(prompt=CHAT)
    assert [tool["function"]["name"] for tool in opening.tools] == ["slow", "double", "wait"]
    turn = call("double", number=4) + call("double", number=-1) + call("double", number="a") + call("slow", seconds=0)
    good, failed, wrong, own = (message["content"] for message in player.step(turn).observation)
    assert (good, own) == ("8", "done")
    assert failed.startswith("error: double failed:")
    assert "-1 is below 0" in failed
    assert wrong == 'error: double: number is "a", expected integer'
    (late,) = player.step(call("wait")).observation
    assert late["content"] == "error: wait took more than 2 s"


def test_the_server_ends_with_the_environments():
    before = children()
    with built(mcp_servers={"numbers": SERVER}):
        assert children() > before
    assert children() == before


@pytest.mark.parametrize("server", ["no-such-program --x", f"{sys.executable} -c pass", ""])
def test_a_server_that_does_not_start_is_named(server):
    with pytest.raises(ConfigError, match=r"environments\.mcp_servers\.numbers="):
        built(mcp_servers={"numbers": server}).__enter__()
