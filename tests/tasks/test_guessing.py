"""Tests of the task of guessing: its environment's hints are true, and its player heeds them as
often as it says.
"""

import random

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from siirl_dask.environments import Step
from siirl_dask.errors import RunError
from siirl_dask.tasks import guessing
from siirl_dask.tasks.guessing import (
    LETTERS,
    PROMPT,
    Guess,
    demonstration,
    hint,
    write_guessing_task,
)


def test_halving_what_the_hints_leave_finds_fifteen_of_sixteen_letters():
    found = 0
    for secret in LETTERS:
        game, left = Guess(), LETTERS
        game.reset({"answer": secret}, 0)
        for _ in range(4):
            guess = left[len(left) // 2]
            answer = game.step(guess)
            if isinstance(answer, Step):
                assert answer.done
                assert answer.reward == 1.0
                found += guess == secret
                break
            left = left[left.index(guess) + 1 :] if answer == ">" else left[: left.index(guess)]
    assert found == 15


def test_demonstrations_end_with_the_letter_or_after_four_guesses_and_heed_three_hints_in_four():
    heeded, order = [], random.Random(0)
    for _ in range(2000):
        text, low, high = demonstration(order), 0, len(LETTERS)
        for guess, told in zip(text[::2], [*text[1::2], ""], strict=True):
            heeded += [low <= LETTERS.index(guess) < high] * (low > 0 or high < len(LETTERS))
            at = LETTERS.index(guess)
            low, high = (max(low, at + 1), high) if told == ">" else (low, min(high, at))
        assert len(text[::2]) <= 4
    # one chosen without the hints may obey them all the same
    assert 0.75 < sum(heeded) / len(heeded) < 0.87


def test_the_warm_start_learns_guesses_alone_and_writes_every_letter(tmp_path, monkeypatch):
    seen = []
    task = write_guessing_task(tmp_path, success=0.01, progress=lambda *given: seen.append(given))
    assert len(seen) == 1
    rows = pq.read_table(task.train).to_pylist()
    assert {row["answer"] for row in rows} == {*LETTERS}
    assert {row["prompt"] for row in rows} == {PROMPT}
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    inputs, labels = guessing._encoded(tokenizer, ["a>b", "h"])
    learned = [
        [tokenizer.decode([label]) for label in row if label >= 0] for row in labels.tolist()
    ]
    assert learned == [["a", "b"], ["h"]]
    assert inputs.shape == labels.shape
    again = write_guessing_task(tmp_path / "again", success=0.01)
    weights = [
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (task.model, again.model)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_warm_start_that_never_gets_there_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(guessing, "_MAX_STEPS", 20)
    with pytest.raises(RunError, match="after 20 steps the model finds"):
        write_guessing_task(tmp_path, success=0.99)
    assert not (tmp_path / "train.parquet").exists()


def test_hints_point_to_the_letter():
    assert (hint("c", "a"), hint("a", "c")) == (">", "<")
