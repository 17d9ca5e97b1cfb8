"""Trains a real model, SmolLM2-135M-Instruct, with GRPO on sums of ``reasoning-gym``, and writes
the curve as a page.

    pip install reasoning-gym gguf
    python benchmarks/real_model.py [--out docs/benchmarks/real_model.md] [key=value ...]

Run it in a folder of its own: it writes ``runs/real_model-data`` (model and rows, 540 MB) and
``runs/real_model``. Options as ``run.steps=100`` are those of ``benchmarks/real_model.yaml``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_HERE = Path(__file__).parent
_DATA = Path("runs/real_model-data")
_RUN = Path("runs/real_model")
_ASK = "Answer with the number alone."
_TRAIN_ROWS = 1024
_VALIDATION_ROWS = 128
_WINDOW = 10  # steps of which the curve shows the mean
_SHOWN = 6  # questions whose answers the page shows


def sum_is_right(prompt: object, response: str, answer: str, **others: object) -> float:
    """Return 1.0 where the last number of a response is the sum, and 0.0 elsewhere."""
    numbers = re.findall(r"-?\d+", response.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == answer)


def write_rows(path: Path, rows: int, seed: int) -> None:
    """Write questions as chat messages, with their answers."""
    import reasoning_gym

    sums = reasoning_gym.create_dataset(
        "chain_sum", size=rows, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    prompts = []
    answers = []
    for each in sums:
        prompts.append([{"role": "user", "content": f"{each['question']} {_ASK}"}])
        answers.append(str(each["answer"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": prompts, "answer": answers}), path)


def task_folder() -> Path:
    """Return the folder of model and rows."""
    return _DATA.absolute()


def prepare() -> None:
    """Write the model and the rows where they are not there yet."""
    from siirl_dask.models.broken_imports import hide

    hide()
    from siirl_dask.testing.real_model import write_smollm2

    if not (_DATA / "model" / "config.json").exists():
        write_smollm2(_DATA / "model")
    for name, rows, seed in (("train", _TRAIN_ROWS, 1), ("validation", _VALIDATION_ROWS, 2)):
        if not (_DATA / f"{name}.parquet").exists():
            write_rows(_DATA / f"{name}.parquet", rows, seed)


def records(phase: str) -> list[dict[str, Any]]:
    """Return the run's metrics of a phase, one record a step."""
    lines = (_RUN / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["phase"] == phase]


def answers_at(step: int) -> dict[str, tuple[str, float]]:
    """Return response and reward of each question of the validation after a step."""
    table = pq.read_table(_RUN / "validation" / f"step={step:06d}").to_pylist()
    return {_question(row["prompt"]): (row["response"], row["reward"]) for row in table}


def _question(prompt: Any) -> str:
    """Return the sum that a prompt asks for."""
    content = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    found = re.search(r"[-+\d][-+\d ]*=", content)
    return content if found is None else found[0]


def page(options: list[str]) -> str:
    """Return the page."""
    train = records("train")
    rewards = [record["metrics"]["reward/mean"] for record in train]
    lines = ["| steps | mean reward of the samples | seconds a step |", "| --- | ---: | ---: |"]
    for start in range(0, len(train), _WINDOW):
        part = slice(start, start + _WINDOW)
        seconds = [record["seconds"] for record in train[part]]
        lines.append(
            f"| {start + 1} to {start + len(rewards[part])} | {statistics.mean(rewards[part]):.3f} "
            f"| {statistics.mean(seconds):.1f} |"
        )
    validation = ["| after step | questions answered rightly, greedily |", "| ---: | ---: |"]
    for record in records("validation"):
        validation.append(f"| {record['step']} | {record['metrics']['reward/mean']:.3f} |")
    before = answers_at(0)
    after = answers_at(train[-1]["step"])
    shown = ["| question | before | after |", "| --- | --- | --- |"]
    for question in list(before)[:_SHOWN]:
        cells = [" ".join(answers[question][0].split()) for answers in (before, after)]
        shown.append(f"| {question} | {cells[0]} | {cells[1]} |")
    command = " ".join(["python benchmarks/real_model.py", *options])
    return f"""\
# A real model

SmolLM2-135M-Instruct (arXiv:2502.02737), whose weights of four bits are unpacked to float32, learns sums and
differences of two digits (`chain_sum` of reasoning-gym) with GRPO: 8 prompts a step, 8 samples each, of at
most 16 tokens; a reward of 1 for the right number. Two workers, each on one core, generate with the transformers engine
and learn; `benchmarks/real_model.yaml` is the configuration.

{chr(10).join(lines)}

Greedy answers to {_VALIDATION_ROWS} other questions:

{chr(10).join(validation)}

The first of them, before and after:

{chr(10).join(shown)}

Measured on {date.today():%d %B %Y} on {os.cpu_count()} cores, {platform.system()} {platform.machine()}. To repeat it:

    {command}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--page-alone", action="store_true", help="make the page of the run that is there"
    )
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    if not arguments.page_alone:
        prepare()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")]),
        }
        command = ["siirl-dask", "run", str(_HERE / "real_model.yaml"), *arguments.options]
        subprocess.run(command, env=environment, check=True)
    text = page(arguments.options)
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
