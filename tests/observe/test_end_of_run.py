"""The report at the end: numbers, samples side by side, files, next commands; escape sequences
are removed.
"""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from siirl_dask.observe import Accuracy, BytesPerStep, EndOfRun, Status, Summary, print_end_of_run

SUMMARY = Summary(
    run_id="quickstart",
    status=Status.COMPLETE,
    steps=60,
    workers=2,
    seconds=61.5,
    samples_per_second=249.8,
    validation=Accuracy(first=0.4961, last=0.8125, test=0.8047),
    bytes_per_step=BytesPerStep(peers=1.5e6, scheduler_and_client=4_200.0),
)


def shown(report: EndOfRun, width: int = 100) -> str:
    console = Console(record=True, file=io.StringIO(), width=width, _environ={})
    print_end_of_run(console, report)
    return console.export_text()


def sample(prompt: object, response: str, reward: float) -> dict[str, object]:
    return {"prompt": prompt, "response": response, "answer": "1 2", "reward": reward}


def test_the_report_has_every_number_file_and_next_line():
    text = shown(
        EndOfRun(
            summary=SUMMARY,
            files={"every sample": "runs/quickstart/rollouts"},
            next_lines={"again": "siirl-dask run x.yaml"},
        )
    )
    for part in (
        "quickstart complete",
        "0.4961 -> 0.8125",
        "0.8047",
        "249.8",
        "60 in 61.5 s on 2 workers",
        "1.50 MB per step",
        "4.2 kB per step",
        "runs/quickstart/rollouts",
        "siirl-dask run x.yaml",
    ):
        assert part in text


def test_samples_of_the_same_prompt_stand_on_one_line():
    prompts = [f"Sort: {n} =" for n in "54321"]
    before = [sample(p, "was", 0.0) for p in prompts]
    after = [sample(p, "now", 1.0) for p in reversed(prompts[1:])]
    lines = [
        line
        for line in shown(EndOfRun(summary=SUMMARY, before=before, after=after)).splitlines()
        if "Sort:" in line
    ]
    assert len(lines) == 3
    assert all("was" in line and "now" in line for line in lines)


def test_a_run_that_failed_early_shows_its_error():
    failed = Summary(
        run_id="a",
        status=Status.FAILED,
        error="worker [w1] left",
        steps=0,
        workers=2,
        seconds=0.0,
        samples_per_second=None,
    )
    text = shown(EndOfRun(summary=failed, before=[sample("p", "was", 0.0)]))
    assert "worker [w1] left" in text
    assert "not measured" in text
    assert "not generated" in text


def test_what_a_model_sampled_cannot_steer_the_terminal():
    text = shown(
        EndOfRun(
            summary=SUMMARY, before=[sample("[bold]p[/nonsense]", "\x1b[2J\x9b31m\rx\ty", 0.0)]
        )
    )
    assert not {"\x1b", "\x9b", "\r", "\t"} & set(text)
    assert "[bold]p[/nonsense]" in text


def test_long_responses_are_cut_and_chat_prompts_are_readable():
    chat = [{"role": "user", "content": "Add them"}]
    text = shown(EndOfRun(summary=SUMMARY, before=[sample(chat, "x" * 10_000, 0.0)]))
    assert "Add them" in text
    assert "…" in text
    assert text.count("x") < 400


@pytest.mark.parametrize("row", [{}, {"prompt": None, "response": None, "reward": None}])
def test_samples_that_lack_columns_are_no_error(row):
    assert "Validation samples" in shown(EndOfRun(summary=SUMMARY, before=[row], after=[row]))


def test_a_command_to_paste_is_one_line_however_narrow_the_terminal():
    command = "siirl-dask eval s3://bucket/a/long/path/to/runs/mine --data s3://bucket/test.parquet"
    text = shown(EndOfRun(summary=SUMMARY, next_lines={"its score": command}), width=40)
    assert f"  its score  {command}\n" in text


def test_a_run_without_a_validation_tells_how_its_training_reward_changed():
    summary = replace(SUMMARY, validation=Accuracy())
    text = shown(EndOfRun(summary=summary, first_reward=0.25, last_reward=0.75))
    assert "0.2500 -> 0.7500" in text
    assert "accuracy" not in text


def test_a_reward_of_one_step_is_one_figure_and_moves_nowhere():
    text = shown(EndOfRun(summary=replace(SUMMARY, validation=Accuracy()), last_reward=0.75))
    (line,) = [line for line in text.splitlines() if "training reward" in line]
    assert line.split() == ["training", "reward", "0.7500"]
