"""Secrets in commands, URLs and options are not in what is recorded; all else is as it was."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.config.file import load, load_config_file, shipped
from siirl_dask.config.file.coerce import plain
from siirl_dask.driver.phases import dags
from siirl_dask.environments.mcp_servers import check_installed
from siirl_dask.errors import ConfigError
from siirl_dask.runs.folder import RunIdentity, read_identity, write_identity
from siirl_dask.runs.reader import open_run
from siirl_dask.wording import REDACTED, redacted

SECRET = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGH0123456789_.", min_size=12, max_size=30).map(
    "S3CR3T".__add__
)
FORMS = [
    "npx server --token {}",
    "npx server --api-key={} --port 3",
    "server --password '{}' x",
    'server --github-token "{}"',
    "OPENAI_API_KEY={} npx server",
    "env HF_TOKEN={} server",
    "https://user:{}@host/path",
    "https://{}@host:80/mcp?x=1",
    "https://host/mcp?key={}",
    "https://host/mcp?a=1&access_token={}&b=2",
    "s3://bucket/x?X-Amz-Signature={}",
    "curl -H 'Authorization: Bearer {}' https://host",
    'mcp-remote https://host --header "X-Api-Key: {}"',
]
PLAIN = [
    "siirl_dask.rewards:exact_match", "mine.py:build", "s3://bucket/a@b/part.parquet", "hub:org/model",
    "Say the token: now", "--tokenizer x", "--max-tokens 5", "http://[::1]:80/mcp", "a = b", "{prompt} =",
    "What is the key? password or token", "<|im_start|>user\n{content}<|im_end|>", "npx @scope/server /data", "",
    "key=value of a column",
]  # fmt: skip


@given(form=st.sampled_from(FORMS), secret=SECRET)
def test_a_secret_in_a_command_or_a_url_is_replaced_once_and_for_all(form, secret):
    shown = redacted(form.format(secret))
    assert secret not in shown
    assert REDACTED in shown
    assert redacted(shown) == shown


@given(
    secret=SECRET, name=st.sampled_from(["token", "api_key", "password", "HF_TOKEN", "access-key"])
)
def test_a_secret_under_a_telling_name_is_replaced_however_deep(secret, name):
    shown = redacted({"a": [{"with": {name: secret, "key": "column", "end_token": "<eos>"}}]})
    assert secret not in json.dumps(shown)
    assert shown["a"][0]["with"] == {name: REDACTED, "key": "column", "end_token": "<eos>"}


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_stays(text):
    assert redacted(text) == text


@pytest.mark.parametrize("config", ["quickstart.yaml", "quickstart_turns.yaml", "grpo_gsm8k.yaml"])
def test_nothing_of_a_shipped_configuration_is_taken_for_a_secret(config):
    values = plain(load(shipped(config), ["data.url=none", "model.path=none"]))
    assert redacted(values) == values


def begin(url, secret):
    server = f"npx server --token {secret}"
    given = [
        f"run.url={url}",
        f"environments.mcp_servers={{web: '{server}'}}",
        "data.url=x",
        "model.path=x",
    ]
    file = load_config_file(shipped("quickstart_turns.yaml"), [*given, "data.prepare=null"])
    return file.config, dags(file)[0], server


def test_no_file_of_a_run_has_the_secret_and_it_resumes_with_this_or_another_one(tmp_path):
    config, dag, server = begin(tmp_path / "run", "S3CR3T-one")
    write_identity(config, dag, replace=False)
    written = [path.read_bytes() for path in (tmp_path / "run").iterdir()]
    assert len(written) >= 2
    assert not any(b"S3CR3T" in text for text in written)
    assert config.environments.mcp_servers["web"] == server  # the run itself has it
    recorded = read_identity(str(tmp_path / "run"))
    for secret in ("S3CR3T-one", "S3CR3T-two"):
        again, its_dag, _ = begin(tmp_path / "run", secret)
        identity = RunIdentity.of(again, its_dag)
        assert recorded.differences(identity) == []
        assert identity.digest() == RunIdentity.of(config, dag).digest()
    with pytest.raises(
        ConfigError, match=r"mcp_servers\.web=.*without its secrets; give the server once more"
    ):
        check_installed(open_run(str(tmp_path / "run")).config.environments.mcp_servers)
