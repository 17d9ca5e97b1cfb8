"""Models at URLs come to a host once, whole or not at all; what is wrong is told by name before
anything starts.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from siirl_storage import open_fs
from transformers.utils.hub import CHAT_TEMPLATE_DIR

from siirl_dask.errors import ConfigError
from siirl_dask.models.cache import FOLDER, cache_folder, fetch, folder_here, forget, is_here
from siirl_dask.models.remote import find_model, hub_name
from siirl_dask.models.shapes import count_parameters, read_widths
from siirl_dask.rollout.tokenizer import load_tokenizer
from siirl_dask.tasks.tiny_model import tiny_model
from tests.hub import COMMIT, hub

TOOLS = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with chat templates: that of its tokenizer, and one for prompts with tools."""
    folder = tiny_model(tmp_path_factory.mktemp("model") / "tiny", chat_template=TEMPLATE)
    (folder / CHAT_TEMPLATE_DIR).mkdir()
    (folder / CHAT_TEMPLATE_DIR / "tool_use.jinja").write_text(f"{TOOLS}{TEMPLATE}")
    return folder


@pytest.fixture
def remote(s3, model, tmp_path, monkeypatch):
    """The model on an S3 API, with weights of another framework beside it, and an empty cache."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    url = f"{s3}/{uuid4().hex}/tiny"
    fs, path = open_fs(url)
    for name in files(model):
        fs.put_file(str(model / name), f"{path}/{name}")
    others = (
        "original/model.safetensors",
        "consolidated.safetensors",
        f"{CHAT_TEMPLATE_DIR}/notes.txt",
    )
    for name in ("pytorch_model.bin", ".gitattributes", *others):
        fs.pipe_file(f"{path}/{name}", b"not needed")
    return url


def files(folder):
    there = [file for file in Path(folder).rglob("*") if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in there}


def replace(url, name, data):
    fs, path = open_fs(url)
    fs.pipe_file(f"{path}/{name}", data)


def test_a_model_comes_once_however_many_ask_for_it_at_once(remote, model):
    found, came = find_model(remote), []
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: fetch(found, came.append), range(4)))
    assert len(folders) == 1
    assert files(*folders) == files(model)
    assert sum(came) == found.nbytes, "it was fetched more than once"
    assert is_here(found)


def test_a_model_that_is_forgotten_leaves_nothing_and_other_models_stay(remote, model):
    found = find_model(remote)
    other = fetch(found.without_weights())
    before = set(cache_folder().rglob("*"))
    fetch(found)
    with ThreadPoolExecutor(4) as pool:  # the workers of a host
        assert [*pool.map(lambda _: forget(found), range(4))] == [None] * 4
    assert set(cache_folder().rglob("*")) == before
    assert (other / "config.json").is_file()
    fs, path = open_fs(remote)
    fs.rm_file(f"{path}/tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        fetch(found)  # a part has come
    forget(found)
    assert set(cache_folder().rglob("*")) == before


def test_a_model_that_lacks_a_file_is_not_there_and_the_next_try_fetches_what_is_missing(
    remote, model, tmp_path
):
    found, came = find_model(remote), []
    fs, path = open_fs(remote)
    fs.rm_file(f"{path}/tokenizer.json")
    with pytest.raises(ConfigError, match=f"model '{remote}'.*tokenizer.json"):
        fetch(found)
    assert not is_here(found)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("config.json")}
    replace(remote, "tokenizer.json", (model / "tokenizer.json").read_bytes())
    found = find_model(remote)
    folder = fetch(found, came.append)
    assert files(folder) == files(model)
    assert len(before) == 1
    assert sum(came) == found.nbytes


def test_a_model_that_changes_gets_another_folder(remote, model):
    first = fetch(find_model(remote))
    config = (model / "config.json").read_bytes()
    replace(remote, "config.json", config.replace(b"\n", b" \n", 1))
    second = fetch(find_model(remote))
    assert files(first) == files(model)
    assert files(second) == {**files(model), "config.json": config.replace(b"\n", b" \n", 1)}


def test_a_model_that_changes_after_it_was_listed_is_refused(remote, model):
    found = find_model(remote)
    data = (model / "tokenizer.json").read_bytes()
    replace(remote, "tokenizer.json", data[:-1] + b" ")
    with pytest.raises(ConfigError, match="have changed while they were fetched: try again"):
        fetch(found)
    assert not is_here(found)


def test_without_weights_come_config_and_tokenizer_alone(remote):
    folder = Path(folder_here(remote, weights=False))
    assert (folder / "tokenizer.json").exists()
    assert not list(folder.glob("*.safetensors"))


def test_prompts_with_tools_get_the_template_that_a_folder_beside_the_others_has(remote):
    """A run on a URL would render them by another template than one on a copy of its files."""
    tokenizer = load_tokenizer(folder_here(remote, weights=False), remote)
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    prompt = [{"role": "user", "content": "a question"}]
    rendered = tokenizer.encode(prompt, [tool])
    assert tokenizer.decode(rendered, skip_special=False) == "look_upa question"
    assert tokenizer.decode(tokenizer.encode(prompt), skip_special=False) == "a question"


def test_sizes_are_read_where_the_model_is_and_nothing_is_fetched_for_them(remote, model):
    assert count_parameters(remote) == count_parameters(str(model))
    assert read_widths(remote) == read_widths(str(model))
    assert not cache_folder().exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda url: f"{url[:-1]}", "is not there.*did you mean 'tiny'"),
        (lambda url: "s3://no-such-bucket/model", "model 's3://no-such-bucket/model' is not there"),
        (lambda url: f"{url}/original", "there is no config.json .there is: model.safetensors."),
        (lambda url: "s33://bucket/model", "did you mean s3://"),
        (lambda url: "hf://datasets/org/name", "expected hf://org/name"),
        (lambda url: "hf://name", "expected hf://org/name"),
    ],
)
def test_a_model_that_is_not_there_is_told_by_name(remote, change, said):
    with pytest.raises(ConfigError, match=said):
        folder_here(change(remote), weights=True)


def test_a_cache_that_cannot_be_written_is_told_by_name(remote, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=f"cannot be stored in .*; {FOLDER} names another folder"):
        fetch(find_model(remote))


NO_CREDENTIALS = """
from siirl_dask.models.remote import find_model
find_model("s3://tests/model")
"""


def run(script, *arguments, **environment):
    given = {
        name: value for name, value in os.environ.items() if environment.get(name, "") is not None
    }
    given |= {name: str(value) for name, value in environment.items() if value is not None}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=60)


def test_missing_credentials_are_told_by_name(s3, tmp_path):
    nobody = {
        "AWS_ACCESS_KEY_ID": None,
        "AWS_SECRET_ACCESS_KEY": None,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    done = run(NO_CREDENTIALS, **nobody, HOME=tmp_path)
    assert (
        "ConfigError: model 's3://tests/model': its store cannot be reached: NoCredentialsError"
        in done.stderr
    )


FROM_THE_HUB = """
import sys
from siirl_dask.errors import ConfigError
from siirl_dask.models.cache import fetch, is_here
from siirl_dask.models.remote import find_model
from siirl_dask.models.shapes import count_parameters
for url in sys.argv[1:]:
    try:
        found = find_model(url)
        print(found.commit, is_here(found), count_parameters(url).total, fetch(found))
    except ConfigError as error:
        print(error)
"""


def test_a_model_of_the_hub_goes_to_the_hubs_cache_and_is_there_when_the_hub_is_not(
    model, tmp_path
):
    shutil.copytree(model, tmp_path / "hub" / "models" / "org" / "name" / "inner")
    (tmp_path / "hub" / "models" / "org" / "name" / "inner" / "pytorch_model.bin").write_bytes(
        b"not needed"
    )
    size = count_parameters(str(model)).total
    wrong = {
        "hf://org/nmae": "'hf://org/nmae': the hub has no such repository, or it is private: HF_TOKEN names",
        "hf://org/name@v2/inner": "its repository has no such revision",
        "hf://org/name/iner": "its repository has no such folder",
        "hf://org/name": "there is no config.json",
    }
    with hub(tmp_path / "hub") as (endpoint, asked):
        place = {"HF_ENDPOINT": endpoint, "HF_HOME": tmp_path / "home", "HF_HUB_OFFLINE": "0"}
        first, *others = run(
            FROM_THE_HUB, "hf://org/name@main/inner", *wrong, **place
        ).stdout.splitlines()
        commit, here, parameters, folder = first.split(" ", 3)
        assert (commit, here, parameters) == (COMMIT, "False", str(size))
        assert files(folder) == files(model)
        assert "inner/pytorch_model.bin" not in asked
        for (url, expected), told in zip(wrong.items(), others, strict=True):
            assert expected in told, url
    inner = f"hf://org/name@{COMMIT}/inner"
    first, second = run(
        FROM_THE_HUB, inner, "hf://org/other", **{**place, "HF_HUB_OFFLINE": "1"}
    ).stdout.splitlines()
    assert first == f"{COMMIT} True {size} {folder}"
    assert "its cache on this machine has not all of it" in second
    assert "the hub cannot be reached" in run(FROM_THE_HUB, "hf://org/other", **place).stdout


def test_a_revision_and_a_folder_may_follow_a_repository():
    assert hub_name("hf://org/name.x-1@refs%2Fpr%2F1/a/b") == hub_name(
        "hf://org/name.x-1@refs%2Fpr%2F1/a/b/"
    )
    assert hub_name("hf://org/name@v1").revision == "v1"
    assert re.fullmatch("a/b", hub_name("hf://org/name.x-1@refs%2Fpr%2F1/a/b").folder)
