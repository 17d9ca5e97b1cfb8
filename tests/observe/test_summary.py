"""summary.json: scripts read it, so its keys and its nulls must not change."""

from __future__ import annotations

import json
import math
import re
from uuid import uuid4

import fsspec
import pytest

from siirl_dask import __version__
from siirl_dask.errors import DataError
from siirl_dask.observe import (
    Accuracy,
    BytesPerStep,
    Restart,
    RunFailure,
    Slowest,
    Status,
    Summary,
    read_summary,
    write_summary,
)

FAILURE = RunFailure(
    kind="NodeError",
    message="it broke",
    worker="1",
    node="reward",
    iteration="train step 3",
    rows=(4, 5),
)


def summary(**changes: object) -> Summary:
    values: dict = {
        "run_id": "quickstart-1",
        "status": Status.COMPLETE,
        "steps": 60,
        "workers": 2,
        "seconds": 61.5,
        "samples_per_second": 249.8,
        "validation": Accuracy(first=0.5, last=0.8125),
        "bytes_per_step": BytesPerStep(peers=1.5e6),
    }
    return Summary(**(values | changes))


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path) -> str:
    return (
        str(tmp_path / "runs" / "a")
        if request.param == "local"
        else f"memory://{uuid4().hex}/runs/a"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"failure": FAILURE, "warnings": ("a step takes 4 s",)},
        {"status": Status.FAILED, "error": "worker w1 left in step 7", "samples_per_second": None},
    ],
)
def test_a_summary_comes_back_as_written(url, changes):
    write_summary(url, summary(**changes))
    assert read_summary(url) == summary(**changes)


def test_the_file_has_the_documented_keys_and_nulls(url):
    write_summary(url, summary(seconds=math.nan))
    found = json.loads(fsspec.open(f"{url}/summary.json").open().read(), parse_constant=pytest.fail)
    assert re.fullmatch("[0-9a-f]{16}", found.pop("sha256"))
    assert found == {
        "run_id": "quickstart-1",
        "status": "complete",
        "error": None,
        "failure": None,
        "steps": 60,
        "workers": 2,
        "seconds": None,
        "samples_per_second": 249.8,
        "validation": {"first": 0.5, "last": 0.8125, "test": None},
        "bytes_per_step": {"peers": 1.5e6, "scheduler_and_client": None},
        "restarts": [],
        "slowest": None,
        "warnings": [],
        "version": __version__,
    }


def test_restarts_are_read_as_they_were_written(url):
    restarts = (Restart(cause="worker '1' left", steps=7, silence=0.4, seconds=1.3, steps_again=1),)
    write_summary(url, summary(restarts=restarts))
    assert read_summary(url).restarts == restarts


def test_what_took_longest_is_read_as_it_was_written(url):
    slowest = Slowest(node="rollout", worker="3", share=0.6, times_others=1.2, steps=8)
    write_summary(url, summary(slowest=slowest))
    assert read_summary(url).slowest == slowest


def test_a_field_that_a_newer_version_added_is_left_out(url):
    write_summary(url, summary())
    fs, path = fsspec.core.url_to_fs(f"{url}/summary.json")
    fs.pipe_file(path, json.dumps({**json.loads(fs.cat_file(path)), "energy": 1}).encode())
    assert read_summary(url) == summary()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"status": "fine"}', b'{"status": "failed", "validation": 3}']
)
def test_a_file_that_is_no_summary_is_an_error_that_names_it(url, content):
    fs, path = fsspec.core.url_to_fs(f"{url}/summary.json")
    write_summary(url, summary())
    fs.pipe_file(path, content)
    with pytest.raises(DataError, match=r"summary\.json is not a run's summary"):
        read_summary(url)


def test_a_run_that_has_not_ended_is_a_clear_error(url):
    with pytest.raises(DataError, match=r"summary\.json does not exist"):
        read_summary(url)
