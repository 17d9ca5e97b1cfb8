"""Tools of a server that speaks MCP: a real one, in a process of its own."""

import json
import shlex
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from siirl_dask.environments import mcp_servers
from siirl_dask.environments.protocol import Failure, ToolCalls
from siirl_dask.errors import ConfigError
from tests.clusters import lasting_port
from tests.environments import worlds
from tests.environments.conftest import Player, built
from tests.environments.test_failures import children

pytest.importorskip("mcp")
SERVER = shlex.join([sys.executable, str(Path(__file__).with_name("mcp_server.py"))])
CHAT = [{"role": "user", "content": "go"}]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_of_a_server_are_called_beside_functions_and_their_failures_are_texts(play):
    player = play(tools=[worlds.slow], mcp_servers={"numbers": SERVER}, timeout=2)
    opening = player.reset(prompt=CHAT)
    assert [tool["function"]["name"] for tool in opening.tools] == [
        "slow",
        "double",
        "wait",
        "end",
        "hang",
    ]
    turn = (
        call("double", number=4)
        + call("double", number=-1)
        + call("double", number="a")
        + call("slow", seconds=0)
    )
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
        assert children() - before
    assert children() <= before


@pytest.mark.parametrize("server", ["no-such-program --x", f"{sys.executable} -c pass", ""])
def test_a_server_that_does_not_start_is_named(server):
    with pytest.raises(ConfigError, match=r"environments\.mcp_servers\.numbers="):
        built(mcp_servers={"numbers": server}).__enter__()


@pytest.mark.parametrize(
    ("way", "on_tool_error"), [("end", "text"), ("end", "failure"), ("hang", "text")]
)
def test_a_server_that_is_lost_fails_its_episode_and_is_started_once_more_for_the_next(
    way, on_tool_error, play, monkeypatch
):
    """Its calls were texts for the model, for ever: the policy learnt that the tool does not
    work.
    """
    monkeypatch.setattr(mcp_servers, "_ANSWER_TIMEOUT", 1.0)
    options = {"timeout": 1.0} if way == "hang" else {}
    player = play(mcp_servers={"numbers": SERVER}, on_tool_error=on_tool_error, **options)
    player.reset(prompt=CHAT)
    lost = player.step(call(way))
    assert isinstance(lost, Failure)
    assert "has lost its server, environments.mcp_servers.numbers" in lost.reason
    player.reset(1, prompt=CHAT)
    assert player.step(call("double", number=1), 1).observation[0]["content"] == "2"


def test_the_next_calls_fail_too_where_the_server_does_not_come_back(play, tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_servers, "_AGAIN_TIMEOUT", 3.0)
    script = tmp_path / "server.py"
    script.write_text(Path(__file__).with_name("mcp_server.py").read_text())
    player = play(mcp_servers={"numbers": shlex.join([sys.executable, str(script)])})
    player.reset(prompt=CHAT)
    script.unlink()
    assert isinstance(player.step(call("end")), Failure)
    player.reset(1, prompt=CHAT)
    gone = player.step(call("double", number=1), 1)
    assert isinstance(gone, Failure)
    assert "which does not come back" in gone.reason


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def served(port):
    """The server of tools at a URL."""
    command = [*shlex.split(SERVER), str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while not listens(port):
                assert process.poll() is None
                assert time.monotonic() < deadline, "it does not listen"
                time.sleep(0.05)
            yield
        finally:
            process.kill()


def test_a_server_at_a_url_that_is_lost_fails_its_episode_and_is_reached_once_it_is_back(play):
    port = lasting_port()
    with served(port):
        player = play(mcp_servers={"numbers": f"http://127.0.0.1:{port}/mcp"})
        player.reset(prompt=CHAT)
        assert player.step(call("double", number=4)).observation[0]["content"] == "8"
    lost = player.step(call("double", number=5))
    assert isinstance(lost, Failure)
    assert "has lost its server, environments.mcp_servers.numbers" in lost.reason
    with served(port):
        player.reset(1, prompt=CHAT)
        assert player.step(call("double", number=6), 1).observation[0]["content"] == "12"


def test_well_formed_calls_are_counted_with_those_that_failed():
    with built(tools=[worlds.slow], mcp_servers={"numbers": SERVER}) as environments:
        player = Player(environments)
        with player.session:
            player.reset(prompt=CHAT)
            good, wrong, no_call = (
                call("double", number=1),
                call("double", number=-1),
                call("double", number="a"),
            )
            player.step(good + wrong + no_call + call("slow", seconds=0))
        made = environments.take_tool_calls()
        assert (made.calls, made.failed) == (3, 1)
        assert "-1 is below 0" in made.reason
        assert environments.take_tool_calls() == ToolCalls()
