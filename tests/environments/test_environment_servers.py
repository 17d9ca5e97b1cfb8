"""Environments of OpenEnv and NeMo Gym, behind servers: rows hold what the servers answer, each episode
has a session of its own, and what is no such server is refused.

The packages want other versions of Python and of mcp than this one's tests: OPENENV_PYTHON and
NEMO_GYM_PYTHON are interpreters that have them, for the tests that start their own servers.
"""

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from siirl_dask.environments.ecosystems.environment_servers import JsonSession
from siirl_dask.environments.protocol import Failure, Lost
from siirl_dask.errors import DataError, PlanError
from siirl_dask.planner import resolve
from siirl_dask.planner.spec.dag_spec import bind
from siirl_dask.planner.spec.names import canonical
from tests.clusters import lasting_port
from tests.environments.game_servers import (
    TASKS,
    Endless,
    answer_to,
    guess_in,
    nemo_gym_server,
    openenv_server,
    secret_of,
    serving,
)
from tests.environments.trained_rows import FIRST_SEED, imported, text_of, turns_of, what_rows_say

FUNCTIONS = Path(__file__).with_name("ecosystem_functions.py")
OWN = f"action={FUNCTIONS}:guessed&observation={FUNCTIONS}:heard"
WANTED = "Write a whole number, the guess, each turn."


def entry(secret, **asked):
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "Guess."}], **asked},
        "secret": secret,
    }


@pytest.fixture
def tasks(tmp_path):
    """A file of NeMo Gym's tasks, with the secrets 0 to 23."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f"{json.dumps(entry(secret % 10))}\n" for secret in range(24)))
    return path


def played(factory, row, *turns, seed=0):
    """The opening and the steps of an episode."""

    async def play():
        game = factory()
        answers = [await game.reset(row, seed)]
        for turn in turns:
            answers.append(await game.step(turn))
        closed = game.close()
        if closed is not None:
            await closed
        return answers

    return asyncio.run(play())


@pytest.mark.parametrize("package", ["openenv", "nemo_gym"])
@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "behind a server: expected its address"),
        ("?url=8000", "behind a server: expected its address"),
        ("?url=ftp://127.0.0.1/", "behind a server: expected its address"),
        ("?url=http://[::1", "behind a server: expected its address"),
        ("?url=http://127.0.0.1:http", "behind a server: expected its address"),
        ("?url=http://127.0.0.1:99999", "behind a server: expected its address"),
        ("?url=http://me:secret@127.0.0.1:8000", "without a password or a query"),
    ],
)
def test_a_name_without_a_plain_address_is_refused(package, query, said):
    with pytest.raises(PlanError, match=said):
        resolve(f"{package}:guess_env{query}")


@pytest.mark.parametrize("package", ["openenv", "nemo_gym"])
def test_a_server_that_is_not_there_is_named_when_it_is_planned(package):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PlanError, match=f"no server answers at {url}.*start it first"):
            resolve(f"{package}:guess_env?url={url}")


@pytest.mark.parametrize("package", ["openenv", "nemo_gym"])
def test_a_server_that_does_not_speak_http_is_refused(package):
    def greet():
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        greeting = threading.Thread(target=greet)
        greeting.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PlanError, match="answers, and not in HTTP"):
            resolve(f"{package}:guess_env?url={url}")
        greeting.join()


def test_a_server_of_something_else_is_refused():
    with openenv_server() as url:
        with pytest.raises(PlanError, match="neither /step nor /verify"):
            resolve(f"nemo_gym:guess?url={url}")
        with pytest.raises(PlanError, match="did you mean 'guess_env'"):
            resolve(f"openenv:gess_env?url={url}")
    with (
        nemo_gym_server("/verify") as url,
        pytest.raises(PlanError, match="does not describe actions"),
    ):
        resolve(f"openenv:guess_env?url={url}")


def test_an_episode_that_was_recorded_is_made_without_asking_its_server():
    with openenv_server() as url:
        factory = resolve(f"openenv:guess_env?url={url}&level=3")
    recorded = json.loads(json.dumps(canonical(factory)))
    again = bind(resolve(recorded["run"]), recorded["with"], "recorded")
    assert canonical(again) == canonical(factory)


def test_options_of_a_name_and_the_row_s_seed_and_index_reach_openenv_s_reset():
    with openenv_server() as url:
        factory = resolve(f"openenv:guess_env?url={url}&level=3")
        opening, low, right = played(factory, {"prompt": "Go. ", "seed": 4}, "it is 3", "4")
        assert opening.prompt == "Go. guess 3\n"
        assert (low.observation, low.reward, low.done) == ("\nhigher\n", -0.1, False)
        assert (right.reward, right.done) == (1.0, True)
        row = {"prompt": "", "seed": 4, "index": 6}
        assert played(factory, row, "6")[1].done


@pytest.mark.parametrize("turn", ["", "none", "9" * 30])
def test_a_turn_without_an_action_is_answered_by_what_was_expected(turn):
    with openenv_server() as url:
        _, step = played(resolve(f"openenv:guess_env?url={url}"), {"prompt": []}, turn)
    assert step.observation == WANTED
    assert not step.done


@pytest.mark.parametrize(
    ("fields", "turn", "understood"),
    [
        ({"guess": {"type": "string"}}, "7", False),
        ({"guess": {"type": "integer"}, "why": {"type": "string"}}, '{"guess": 7}', True),
        ({"guess": {"type": "integer"}, "why": {"type": "string"}}, '{"guess": "x"}', False),
        ({"guess": {"type": "integer"}, "why": {"type": "string"}}, "[7]", False),
        ({"guess": {"type": "integer"}, "why": {"type": "string"}}, "[" * 5000, False),
    ],
)
def test_an_action_has_the_form_that_the_server_describes(fields, turn, understood):
    with openenv_server(fields) as url:
        factory = resolve(f"openenv:guess_env?url={url}")
        _, step = played(factory, {"prompt": [{"role": "user", "content": "Go."}], "seed": 7}, turn)
    if understood:
        assert step.done
    else:
        assert step.observation.startswith("Write ")


def test_a_server_s_failures_are_failures_and_a_lost_session_is_no_text_for_the_model():
    with openenv_server() as url:
        factory = resolve(f"openenv:guess_env?url={url}")
        assert played(factory, {"prompt": ""}, "99")[1] == Failure(
            "the server says EXECUTION_ERROR: it broke"
        )
        lost = played(factory, {"prompt": ""}, "13")[1]
        assert isinstance(lost, Lost)
    assert isinstance(played(factory, {"prompt": ""})[0], Lost)
    with nemo_gym_server("/step", "/reset") as url:
        factory = resolve(f"nemo_gym:guess?url={url}")
        row = {"prompt": "", "entry": json.dumps({"secret": None})}
        failed = played(factory, row, "1")[1]
        assert isinstance(failed, Failure)
        assert failed.reason.startswith("/step answers 500")
    assert isinstance(played(factory, row)[0], Lost)


def test_episodes_wait_for_a_session_where_a_server_has_fewer():
    state = {}
    with openenv_server(most_sessions=2, state=state) as url:
        factory = resolve(f"openenv:guess_env?url={url}")

        async def play(seed):
            game = factory()
            await game.reset({"prompt": "", "seed": seed}, 0)
            steps = [await game.step(str(guess)) for guess in range(secret_of(seed) + 1)]
            await game.close()
            return steps[-1].done

        async def play_all():
            return await asyncio.gather(*map(play, range(6)))

        assert all(asyncio.run(play_all()))
    assert state["most"] == 2
    assert state["refused"] > 0


def test_a_session_that_opens_after_its_episode_was_given_up_is_ended():
    """The server takes longer to open it than environments.timeout allows."""
    state = {}
    with openenv_server(state=state, seconds=0.3) as url:
        factory = resolve(f"openenv:guess_env?url={url}")

        async def give_up():
            game = factory()
            beginning = asyncio.ensure_future(game.reset({"prompt": ""}, 0))
            while not state["asked"]:
                await asyncio.sleep(0.02)
            beginning.cancel()
            await asyncio.wait([beginning])
            await game.close()
            until = time.monotonic() + 20
            while (not state["most"] or state["open"]) and time.monotonic() < until:
                await asyncio.sleep(0.02)

        asyncio.run(give_up())
        assert (state["most"], state["open"]) == (1, 0)


def test_a_request_of_an_episode_that_was_given_up_is_ended(caplog):
    """The server would go on with it, and hold the connection, for ten minutes."""
    state = {"begun": 0, "ended": 0}
    with serving([("/step", Endless)], state=state) as url:

        async def give_up():
            session = JsonSession(url)
            asking = asyncio.ensure_future(session.post("/step", {}))
            while not state["begun"]:
                await asyncio.sleep(0.02)
            asking.cancel()
            await asyncio.wait([asking])
            session.close()
            await asyncio.sleep(0.1)

        asyncio.run(give_up())
        until = time.monotonic() + 20
        while not state["ended"] and time.monotonic() < until:
            time.sleep(0.02)
        assert state == {"begun": 1, "ended": 1}
    assert "Traceback" not in caplog.text, "nobody was to hear of it"


def test_a_turn_goes_to_no_other_address_that_the_server_names():
    with nemo_gym_server("/step", "/reset") as url:
        factory = resolve(f"nemo_gym:guess?url={url}")
        row = {"prompt": "", "entry": json.dumps({"secret": 3, "elsewhere": "/openapi.json"})}
        _, step = played(factory, row, "3")
    assert isinstance(step, Failure)
    assert step.reason.startswith("/step answers 302")


def test_cookies_go_back_as_they_came_whatever_their_names():
    """Balancers in front of a server give such names, by which they find it again."""
    with nemo_gym_server("/step", "/reset") as url:
        factory = resolve(f"nemo_gym:guess?url={url}")
        cookies = ["route@1/x=a=b", 'quoted="a b"']
        row = {"prompt": "", "entry": json.dumps({"secret": 3, "cookies": cookies})}
        _, step = played(factory, row, "3")
    assert step.reward == 1.0


def test_rows_of_openenv_are_its_server_s_answers_and_the_same_in_another_run(trained, tmp_path):
    with openenv_server() as url:
        name = f"openenv:guess_env?url={url}&{OWN}"
        rows = trained("one", name, f"openenv:guess_env?url={url}")
        again = trained("two", name, f"openenv:guess_env?url={url}", "environments.processes=1")
    assert [*map(what_rows_say, again)] == [*map(what_rows_say, rows)]
    for row in rows:
        secret = secret_of(FIRST_SEED + row["data_row"])
        assert row["prompt_text"] == f"{row['prompt']}heard guess 1\n"
        written = ""
        total = 0.0
        for text in turns_of(row):
            written += text
            if not text:
                written += f"\n{WANTED}\n"
                continue
            said, reward, _ = answer_to(secret, sum(text.encode()) % 10)
            written += f"\nheard {said}\n"
            total += reward
        assert written.startswith(text_of(row["response_ids"]))
        assert row["reward"] == pytest.approx(total)


def test_tasks_of_a_split_are_imported_with_their_index(tmp_path):
    with openenv_server() as url:
        rows = imported(f"openenv:guess_env?url={url}&split=train", tmp_path / "table")
        assert [row["index"] for row in rows] == [*range(TASKS)]
        with pytest.raises(PlanError, match="lists no tasks of split='dev'"):
            imported(f"openenv:guess_env?url={url}&split=dev", tmp_path / "other")


@pytest.mark.parametrize("paths", [("/reset", "/step"), ("/seed_session", "/verify")])
def test_rows_of_nemo_gym_are_its_server_s_answers_and_rewards(trained, tasks, paths):
    with nemo_gym_server(*paths) as url:
        source = f"nemo_gym:guess?rows={tasks}"
        rows = trained("one", f"nemo_gym:guess?url={url}", source, columns="[prompt, entry]")
    # the file's rows, in another order with a seed
    lines = imported(f"{source}&size=24&seed={FIRST_SEED}", tasks.parent / "read")
    for row in rows:
        said = turns_of(row)
        secret = json.loads(lines[row["data_row"]]["entry"])["secret"]
        answers = [answer_to(secret, guess_in(text)) for text in said]
        assert row["reward"] == pytest.approx(sum(reward for _, reward, _ in answers))
        assert row["prompt_text"] == ("Guess.guess\n" if "/step" in paths else "Guess.")
        if "/verify" in paths:
            assert len(said) == 1
            parts = dict(row["reward_parts"])
            assert parts == {"length": len(said[0]), "correct": float(answers[0][2])}
            assert row["finish_reason"] == "environment"


WRONG_LINES = {
    "{": "line 1: .*expected a JSON object",
    "[]": "line 1: expected a JSON object with responses_create_params",
    json.dumps({"responses_create_params": {"input": 3}}): "expected a text or messages",
    json.dumps(entry(1, tools=[{"name": "look"}])): "has tools.*docs/endpoint.md",
    json.dumps(
        {
            "responses_create_params": {
                "input": [{"role": "user", "content": [{"type": "input_image"}]}]
            }
        }
    ): "expected messages of text",
}


@pytest.mark.parametrize(("line", "said"), WRONG_LINES.items(), ids=range(len(WRONG_LINES)))
def test_lines_that_are_no_tasks_of_messages_are_refused(tmp_path, line, said):
    path = tmp_path / "tasks.jsonl"
    path.write_text(line)
    with pytest.raises(PlanError, match=said):
        imported(f"nemo_gym:guess?rows={path}", tmp_path / "table")


def test_a_file_of_tasks_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PlanError, match="expected a file of JSON lines"):
        imported(f"nemo_gym:guess?rows={tmp_path}/nothing.jsonl", tmp_path / "table")
    with pytest.raises(PlanError, match=r"expected rows=FILE\.jsonl"):
        imported("nemo_gym:guess", tmp_path / "table")


def test_tasks_without_a_row_are_refused(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match="has no rows"):
        imported(f"nemo_gym:guess?rows={path}", tmp_path / "table")


def test_a_reward_that_the_task_s_line_has_as_well_is_that_of_the_answer():
    row = {"prompt": "", "entry": json.dumps({**entry(4), "reward": 7.0, "length": 9})}
    with nemo_gym_server("/seed_session", "/verify") as url:
        step = played(resolve(f"nemo_gym:guess?url={url}"), row, "4")[1]
    assert (step.reward, dict(step.parts)) == (1.0, {"correct": 1.0})


def test_instructions_and_parts_of_text_become_messages(tmp_path):
    path = tmp_path / "tasks.jsonl"
    parts = [{"type": "input_text", "text": "Gu"}, {"type": "input_text", "text": "ess."}]
    given = {"input": [{"role": "user", "content": parts}], "instructions": "Be brief."}
    path.write_text(json.dumps({"responses_create_params": given}))
    (row,) = imported(f"nemo_gym:guess?rows={path}", tmp_path / "table")
    assert row["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Guess."},
    ]


@pytest.fixture
def started(tmp_path):
    """Start a server of a package itself from code for ``python -c`` that ends by serving ``app``;
    gives its address.
    """
    processes = []

    def start(python, code):
        port = lasting_port()
        serve = f"{code}\nimport uvicorn\nuvicorn.run(app, host='127.0.0.1', port={port})"
        processes.append(subprocess.Popen([python, "-c", serve], cwd=tmp_path))
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert processes[-1].poll() is None
            try:
                urllib.request.urlopen(f"{url}/openapi.json").close()
            except OSError:
                time.sleep(0.1)
            else:
                return url
        raise AssertionError("the server did not start")

    yield start
    for process in processes:
        process.kill()
        process.wait()


OPENENV = os.environ.get("OPENENV_PYTHON")
NEMO_GYM = os.environ.get("NEMO_GYM_PYTHON")


@pytest.mark.skipif(OPENENV is None, reason="OPENENV_PYTHON names no interpreter with openenv")
def test_openenv_s_own_template_is_trained_in_as_it_is(trained, started, tmp_path):
    command = [OPENENV, "-m", "openenv.cli", "init", "echo_env"]
    subprocess.run(command, cwd=tmp_path, check=True)
    url = started(OPENENV, "from echo_env.server.app import app")
    rows = trained("one", f"openenv:echo_env?url={url}", f"openenv:echo_env?url={url}")
    for row in rows:
        said = turns_of(row)
        assert "environment ready!" in row["prompt_text"]
        assert row["reward"] == pytest.approx(sum(min(0.1 * len(text), 1.0) for text in said))
        assert json.dumps(said[0], ensure_ascii=False) in text_of(row["response_ids"])


@pytest.mark.skipif(NEMO_GYM is None, reason="NEMO_GYM_PYTHON names no interpreter with nemo_gym")
def test_nemo_gym_s_own_blackjack_is_trained_in_as_it_is(trained, started):
    found = "import resources_servers.blackjack as b; print(b.__path__[0])"
    process = subprocess.run([NEMO_GYM, "-c", found], check=True, capture_output=True, text=True)
    url = started(
        NEMO_GYM,
        "from unittest.mock import MagicMock\n"
        "from nemo_gym.base_resources_server import BaseResourcesServerConfig\n"
        "from nemo_gym.server_utils import ServerClient\n"
        "from resources_servers.blackjack.app import BlackjackEnv\n"
        "config = BaseResourcesServerConfig(host='', port=1, entrypoint='', name='')\n"
        "client = MagicMock(spec=ServerClient)\n"
        "app = BlackjackEnv(config=config, server_client=client).setup_webserver()\n",
    )
    source = f"nemo_gym:blackjack?rows={process.stdout.strip()}/data/example.jsonl"
    rows = trained("one", f"nemo_gym:blackjack?url={url}", source, columns="[prompt, entry]")
    for row in rows:
        assert "Your hand: [" in row["prompt_text"]
        # a turn without an action stands
        assert len(turns_of(row)) == 1
        assert row["reward"] in (-1.0, 0.0, 1.0)
        assert row["finish_reason"] == "environment"
