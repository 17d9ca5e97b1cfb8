"""The benchmarks run as their README says, on a case that takes a moment."""

import json
from pathlib import Path

import pytest

from tests.clusters import local_cluster
from tests.forked_programs import run_forked

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def run(tmp_path):
    """Runs a script to its end, and returns what it printed."""

    def run(script, *arguments):
        done = run_forked(FOLDER / script, *arguments, folder=tmp_path, timeout=150)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("transport", ["auto", "dask"])
def test_ours_gives_every_destination_its_rows_without_the_driver(run, transport):
    arguments = [
        "--rows",
        32,
        "--tokens",
        500,
        "--from",
        2,
        "--to",
        4,
        "--ragged",
        "--n",
        3,
        "--transport",
        transport,
    ]
    (record,) = map(json.loads, run("dataplane.py", *arguments, "--json").splitlines())
    assert record["verified"]
    assert record["driver_bytes"] < 20_000
    assert record["n"] == 3


@pytest.mark.slow
def test_ours_runs_on_a_cluster_that_knows_nothing_of_the_scripts(run):
    arguments = [
        "--rows",
        32,
        "--tokens",
        500,
        "--from",
        2,
        "--to",
        2,
        "--apart",
        "--n",
        2,
        "--json",
    ]
    with local_cluster(4) as cluster:
        (line,) = run(
            "dataplane.py", *arguments, "--cluster", cluster.scheduler_address
        ).splitlines()
    record = json.loads(line)
    assert record["verified"]
    assert record["received_bytes"] == record["payload_bytes"]
    assert record["between_hosts_bytes"] == 0


def test_the_exchange_is_tabled_for_any_number_of_workers(run, tmp_path):
    out = tmp_path / "exchange.md"
    run("exchange.py", "--workers", 1, 5, 40, "--rows", 3, "--out", out)
    assert "| 40 | 120 | 2 | 78 |" in out.read_text()


def test_rows_that_leave_their_host_are_tabled(run, tmp_path):
    out = tmp_path / "hosts.md"
    run("hosts.py", "--workers", 16, "--rows", 32, "--out", out)
    text = out.read_text()
    assert (
        text.count("| both roles on every worker |")
        == text.count("| a role on each half of every host |")
        == 3
    )


@pytest.mark.slow
def test_every_question_to_a_run_is_timed(run, tmp_path):
    lines = run("questions.py", "--steps", 2, "--folder", tmp_path).splitlines()
    assert lines[0].startswith("2 steps, 1,024 rows")
    assert len(lines) == 4 + 10


@pytest.mark.sweep
def test_the_cost_of_a_step_to_the_scheduler_is_measured(run):
    record = json.loads(run("scale/scheduler.py", "--workers", 3, "--steps", 2, "--json"))
    assert record["workers"] == 3
    assert record["megabytes"] > 0


@pytest.mark.sweep
def test_packed_and_padded_rows_are_learned_from_alike(run, tmp_path):
    """The script itself holds log-probs and losses of the two against each other."""
    out = tmp_path / "packing.md"
    size = ["--rows", 8, "--longest", 384, "--micro-batch", 1024, "--hidden", 64, "--layers", 1]
    run("packing.py", "--families", "llama", *size, "--rounds", 2, "--out", out)
    cells = out.read_text().partition("| llama |")[2].split("|")
    packed, padded = (float(cell.replace(",", "")) for cell in cells[:2])
    assert min(packed, padded) > 0


@pytest.mark.slow
def test_log_probs_are_tabled_beside_other_ways_to_compute_them(run, tmp_path):
    """The script itself holds results and gradients of the ways against each other."""
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n## Log-probs at a large vocabulary\n\nbefore\n\n## Next\n\nstays\n")
    size = ["--tokens", 40, "--hidden", 16, "--vocabulary", 3000, "--rounds", 1]
    run("logprobs.py", *size, "--out", page)
    text = page.read_text()
    assert "before" not in text
    assert "| blocks of the vocabulary |" in text
    assert text.endswith("\n\n## Next\n\nstays\n")


@pytest.mark.slow
def test_rows_with_images_are_learned_from_alike_packed_and_padded(run, tmp_path):
    """The script itself holds log-probs and gradients of the ways against each other."""
    out = tmp_path / "page.md"
    run("vlm_training.py", "--prompts", 2, "--n", 2, "--side", 32, "--rounds", 1, "--out", out)
    for family in ("qwen2_5_vl", "qwen3_vl"):
        cells = out.read_text().partition(f"| {family} |")[2].split("|")[:4]
        assert min(map(float, cells)) > 0
