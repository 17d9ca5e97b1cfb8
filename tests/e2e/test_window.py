"""Runs whose steps take the first groups that are whole, on several workers, of responses of many
lengths or with environments that answer late: nothing is lost, and the run that repeats the table of
samples equals it to the bit.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from siirl_dask.config.file import shipped
from siirl_dask.errors import ConfigError
from tests.e2e.test_resume import weights

STEPS, PROMPTS, WINDOW, N = 6, 6, 3, 4
COMMON = (
    "trainer.lr=1e-3",
    f"run.steps={STEPS}",
    f"rollout.window={WINDOW}",
    f"rollout.n={N}",
    "rollout.max_staleness=3",
    "rollout.steps_ahead=1",
    f"data.batch_size={PROMPTS}",
    f"checkpoint.every={STEPS}",
    "cluster.workers=3",
)


@dataclass(frozen=True)
class Kind:
    """Episodes or responses: their configuration, and what a run of them is given."""

    config: Path
    given: tuple[str, ...]
    apart: str
    """Where one worker generates and one learns."""


EPISODES = Kind(
    shipped("quickstart_turns.yaml"),
    (
        *COMMON,
        "rollout.max_response_length=24",
        "environments.turn_tokens=4",
        "environments.turns=4",
        "environments.environment=tests.e2e.worlds:LogNormal",
        "cluster.placement={rollout: [0, 1], environments: [0, 1], policy: [2]}",
    ),
    "cluster.placement={rollout: [0], environments: [0], policy: [1]}",
)
RESPONSES = Kind(
    shipped("quickstart.yaml"),
    (
        *COMMON,
        "rollout.max_response_length=64",
        "rollout.max_rows=4",
        "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2]}",
    ),
    "cluster.placement={rollout: [0], reward: [0], policy: [1]}",
)
KINDS = pytest.mark.parametrize("kind", [EPISODES, RESPONSES], ids=["episodes", "responses"])


def check_steps(run):
    """Each prompt of the data once, as many rows in each step but the first and last, none older
    than it may be.
    """
    seeds = Counter()
    spans = set()
    for step in range(1, STEPS + 1):
        rows = run.table("rollouts", step)
        groups = {1: PROMPTS - WINDOW, STEPS: PROMPTS + WINDOW}.get(step, PROMPTS)
        assert rows.num_rows == groups * N, step
        seeds.update(rows["sampling_seed"].to_pylist())
        for versions in rows["token_versions"].to_pylist():
            own = {version for version in versions if version >= 0}
            spans.add(len(own))
            assert step - 1 - min(own) <= 3
    assert len(seeds) == STEPS * PROMPTS * N
    assert set(seeds.values()) == {1}
    return spans


def check_same(expected, got):
    """Rows and weights, to the bit."""
    for step in range(1, STEPS + 1):
        left, right = expected.table("rollouts", step), got.table("rollouts", step)
        for name in left.column_names:
            if name != "worker":
                assert right[name].equals(left[name]), (step, name)
    own = weights(got)
    assert all(tensor.equal(own[name]) for name, tensor in weights(expected).items())


@KINDS
def test_a_run_and_its_repetition_from_the_ledger_are_the_same_to_the_bit(train, tmp_path, kind):
    run = train("run", *kind.given, config_file=kind.config)
    spans = check_steps(run)
    assert max(spans) > 1  # some have tokens of several weights
    logged = [record["metrics"] for record in run.records()]
    assert [metrics["rollout/kept_for_next_step"] for metrics in logged][:-1] == [WINDOW * N] * (
        STEPS - 1
    )
    assert logged[-1]["rollout/kept_for_next_step"] == 0
    ledger = f"rollout.ledger={tmp_path / 'run' / 'rollouts'}"
    again = train("again", *kind.given, ledger, config_file=kind.config)
    check_same(run, again)
    with pytest.raises(ConfigError, match=rf"has no step {STEPS + 1}, and run.steps is"):
        train("longer", *kind.given, ledger, f"run.steps={STEPS + 1}", config_file=kind.config)


@pytest.mark.slow
@KINDS
def test_after_kill_9_no_group_is_lost_and_the_ledger_of_both_parts_is_repeated(
    start, train, tmp_path, kind
):
    run = start(*kind.given, config=kind.config)
    run.wait_for_steps(3)
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()
    before = {step: run.url / "rollouts" / f"step={step:06d}" for step in (1, 2)}
    parts = {
        step: {path.name: path.read_bytes() for path in folder.iterdir()}
        for step, folder in before.items()
    }
    resumed = train("run", *kind.given, config_file=kind.config)
    for step, folder in before.items():
        now = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert parts[step].items() <= now.items(), step  # replayed, not generated again
    check_steps(resumed)
    ledger = f"rollout.ledger={tmp_path / 'run' / 'rollouts'}"
    again = train("again", *kind.given, ledger, config_file=kind.config)
    check_same(resumed, again)


def test_a_window_without_a_node_that_reads_it_is_refused_before_anything_starts(train):
    given = (
        "rollout.window=2",
        "rollout.max_staleness=1",
        "rollout.steps_ahead=0",
        "nodes.rollout.run=siirl_dask.nodes:generate_with_greedy",
    )
    with pytest.raises(ConfigError, match=r"rollout\.window=2 and no node takes the first groups"):
        train("greedy", *given, "cluster.workers=1", "cluster.placement={}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@KINDS
def test_transformers_repeats_the_ledger_of_vllm(train, tmp_path, kind):
    """The engine of vLLM has turns, or parts of responses, under way when a step has enough."""
    pytest.importorskip("vllm")
    vllm = ("rollout.engine=vllm", "rollout.vllm.kv_cache_memory=16MiB", "rollout.max_rows=3")
    vllm += ("cluster.workers=2", kind.apart)
    run = train("run", *kind.given, *vllm, config_file=kind.config)
    check_steps(run)
    ledger = f"rollout.ledger={tmp_path / 'run' / 'rollouts'}"
    check_same(run, train("again", *kind.given, ledger, config_file=kind.config))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_transformers_repeats_the_ledger_of_a_server_that_gets_merged_adapters(
    train, digits_task, tmp_path
):
    """Parts of responses are requests to the server, each under the weights that it has then."""
    pytest.importorskip("vllm")
    from tests.rollout.vllm_servers import servers

    given = (
        *RESPONSES.given,
        "trainer.lora.rank=2",
        "cluster.workers=2",
        RESPONSES.apart,
    )
    with servers(digits_task.model, tmp_path) as (server,):
        run = train(
            "run",
            *given,
            "rollout.engine=server",
            f"rollout.server.urls=[{server.url}]",
            f"rollout.server.weights_folder={tmp_path / 'weights'}",
        )
    assert max(check_steps(run)) > 1  # some have tokens of several weights
    ledger = f"rollout.ledger={tmp_path / 'run' / 'rollouts'}"
    check_same(run, train("again", *given, ledger, "rollout.engine=transformers"))
