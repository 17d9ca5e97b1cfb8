"""Runs the conformance suite on one vLLM engine of two workers, in their processes and in its own."""

import io
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")

from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_model
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.testing.ranks import run_ranks

MODELS = {
    "tied": {"seed": 1, "chat_template": CHAT_TEMPLATE},
    "other": {"seed": 2},
    "untied": {"seed": 3, "family": "llama", "tied": False, "heads": 4, "kv_heads": 2},
    "odd": {"heads": 3},
}


def run_suite(rank, folder, suite):
    options = ["-q", "-x", "--durations=6", "-p", "no:cacheprovider", "-p", "no:xdist"]
    path, said = Path(__file__).with_name(suite), io.StringIO()
    with redirect_stdout(said):
        code = pytest.main([str(path), *options, f"--basetemp={folder}/tests-{rank.rank}"])
    assert code == 0, said.getvalue()  # raised at once: the other rank would wait for this one
    return said.getvalue()


def run_in_both(suite, folder):
    # here: with a process group transformers writes them on one rank only
    for name, settings in MODELS.items():
        tiny_model(folder / name, **settings)
    tiny_vlm(folder / "vlm", seed=1, family="qwen3_vl")
    for said in run_ranks(2, partial(run_suite, folder=folder, suite=suite), folder):
        assert " passed" in said
        print(said)


@pytest.mark.sweep
@pytest.mark.timeout(400)  # with more processes than cores
def test_an_engine_of_two_ranks_is_an_engine(tmp_path):
    run_in_both("two_ranks.py", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_of_two_ranks_in_processes_is_an_engine(tmp_path):
    run_in_both("two_ranks_in_processes.py", tmp_path)
