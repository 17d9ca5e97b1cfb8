"""A store that refuses, or that does not answer, is one sentence from every command."""

import socket

import fsspec
import pytest
from fsspec import AbstractFileSystem
from siirl_storage import is_of_store, open_fs, set_retry_seconds
from siirl_storage.retry import retry_seconds

from siirl_dask.cli import main
from tests.written_runs import whole_run


class Refused(Exception):
    """As botocore's: no error of the operating system."""


def refuse(*arguments, **options):
    raise Refused("no credentials")


class RefusingFileSystem(AbstractFileSystem):
    protocol = "refusing"
    ls = info = find = exists = isfile = isdir = cat_file = _open = pipe_file = refuse
    rm_file = makedirs = mkdir = put_file = get_file = glob = refuse


class BrokenFileSystem(AbstractFileSystem):
    protocol = "broken"

    def info(self, path, **options):
        return None + 1


fsspec.register_implementation("refusing", RefusingFileSystem, clobber=True)
fsspec.register_implementation("broken", BrokenFileSystem, clobber=True)
URL = "refusing://bucket/x"
COMMANDS = [
    *(["check", URL], ["report", URL], ["rollouts", URL], ["trace", URL], ["clean", URL]),
    *(["export", URL, "{tmp}/e"], ["watch", URL], ["chat", URL]),
    *(["replay", URL, "--from", "reward"], ["report", "{run}", "-o", f"{URL}.html"]),
    *(["data", "show", URL], ["data", "import", URL, "{tmp}/t"]),
    ["data", "import", "{tmp}/a.jsonl", URL],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_store_that_refuses_is_one_sentence(arguments, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    run = ""
    if "{run}" in arguments:
        run = whole_run(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main([text.format(tmp=tmp_path, run=run) for text in arguments])
    said = capsys.readouterr().err
    assert ended.value.code in (1, 2)
    assert said.startswith("error: ")
    assert "Refused: no credentials" in said
    assert "Traceback" not in said


def test_a_bug_stays_one():
    fs, path = open_fs("broken://x")
    with pytest.raises(TypeError) as raised:
        fs.info(path)
    assert not is_of_store(raised.value)


def test_a_run_on_a_web_server_that_does_not_answer_is_said_to_be(capsys):
    before = retry_seconds()
    set_retry_seconds(0)
    try:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}/run"
            for command in ("check", "rollouts"):
                with pytest.raises(SystemExit):
                    main([command, url])
                assert "cannot be reached: ClientConnector" in capsys.readouterr().err
    finally:
        set_retry_seconds(before)
