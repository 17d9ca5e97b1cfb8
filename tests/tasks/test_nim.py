"""Tests of Nim: its rules, that the game is zero-sum, and that the fixed opponent's moves are
the seed's alone.
"""

import random
from itertools import pairwise

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from siirl_dask.errors import RunError
from siirl_dask.tasks import nim
from siirl_dask.tasks.nim import (
    AGENTS,
    FIRST,
    HEAPS,
    SECOND,
    FixedOpponent,
    SelfPlay,
    asked,
    demonstration,
    legal,
    move_of,
    opponents_move,
    write_nim_task,
)


def heap_in(step):
    """Return the heap that an answer tells whoever is next."""
    return int((step.observation or step.history).strip(" :"))


def self_play(heap, moves):
    """Return the answers to moves of both agents, and who made each."""
    game, speaker, answers = SelfPlay(), FIRST, []
    assert game.reset({"prompt": asked(heap), "answer": ""}, 0).agent == FIRST
    for move in moves:
        answers.append((speaker, game.step(move)))
        if answers[-1][1].done:
            break
        speaker = answers[-1][1].agent
    return answers


def against(side, heap, seed, choose):
    """Return the reward of a game against the fixed opponent, and the heaps that it left."""
    game, heard = FixedOpponent(), []
    opening = game.reset({"prompt": asked(heap), "answer": side}, seed)
    assert opening.agent == side
    left = int((opening.prompt or asked(heap)).rstrip(":"))
    while True:
        heard.append(left)
        step = game.step(str(choose(left)))
        if step.done:
            return step.reward, heard
        left = heap_in(step)


def best(heap):
    return heap % 4 or 1


@given(
    st.sampled_from(HEAPS),
    st.lists(st.sampled_from(["1", "2", "3", "4", "x", "", "²"]), min_size=15, max_size=15),
)
@example(5, ["1", "4", *["1"] * 13])  # four counters are left, and taking four is not allowed
def test_agents_take_turns_and_the_rewards_of_both_sum_to_zero(heap, moves):
    answers = self_play(heap, moves)
    assert [speaker for speaker, _ in answers] == [AGENTS[turn % 2] for turn in range(len(answers))]
    assert all(step.reward == 0.0 for _, step in answers[:-1])
    speaker, last = answers[-1]
    assert last.done
    assert {*last.reward} == {*AGENTS}
    assert sum(last.reward.values()) == 0.0
    left = heap - sum(int(move) for move in moves[: len(answers) - 1])
    took_the_last = left <= 3 and moves[len(answers) - 1] == str(left)
    assert last.reward[speaker] == (1.0 if took_the_last else -1.0)
    assert last.parts == {"illegal": float(not took_the_last)}


def test_an_agent_hears_the_heap_and_nothing_that_the_other_was_told():
    answers = [step for _, step in self_play(9, "123")]
    assert (answers[0].history, answers[0].observation) == ("8:", None)
    assert [step.observation for step in answers[1:]] == [" 6:", " 3:"][: len(answers) - 1]
    assert all(step.history is None for step in answers[1:])


@pytest.mark.parametrize("text", ["0", "4", "", "1 ", "01", "-1", "٣", "many"])
def test_a_move_against_the_rules_loses(text):
    (_, step), *_ = self_play(5, [text])
    assert step.reward == {FIRST: -1.0, SECOND: 1.0}
    game = FixedOpponent()
    game.reset({"prompt": "5:", "answer": FIRST}, 0)
    lost = game.step(text)
    assert (lost.reward, lost.done) == (0.0, True)


def test_no_more_than_the_heap_can_be_taken():
    assert [move_of("3", heap) for heap in (1, 2, 3, 4)] == [None, None, 3, 3]
    assert [*legal(2)] == [1, 2]


@given(st.sampled_from(AGENTS), st.sampled_from(HEAPS), st.integers(0, 2**62))
def test_the_fixed_opponent_is_the_seeds_alone_and_keeps_to_the_rules(side, heap, seed):
    games = []
    for noise in (1, 2):
        random.seed(noise)
        games.append(against(side, heap, seed, best))
    assert games[0] == games[1]
    _, heard = games[0]
    assert heap - heard[0] in (range(1) if side == FIRST else legal(heap))
    for before, after in pairwise(heard):
        assert before - best(before) - after in legal(before - best(before))


def test_the_fixed_opponent_makes_the_best_move_in_two_of_three_and_all_others_too():
    draw = random.Random(0)
    moves = [opponents_move(7, draw) for _ in range(3000)]
    assert {*moves} == {1, 2, 3}
    assert moves.count(3) / 3000 == pytest.approx(0.5 + 0.5 / 3, abs=0.03)
    assert {opponents_move(8, draw) for _ in range(100)} == {1, 2, 3}


def test_perfect_play_wins_all_it_can_and_random_play_a_quarter():
    def wins(choose):
        games = [
            against(side, heap, seed, choose)[0]
            for side in AGENTS
            for heap in HEAPS
            for seed in range(100)
        ]
        return sum(games) / len(games)

    draw = random.Random(0)
    assert 0.8 < wins(best) < 0.9  # a heap that is a multiple of 4 is the opponent's to lose
    assert 0.15 < wins(lambda heap: draw.choice(legal(heap))) < 0.35
    lost = [heap for heap in HEAPS if heap % 4 and against(FIRST, heap, heap, best)[0] != 1.0]
    assert not lost


def test_demonstrations_are_legal_moves_from_every_heap():
    order = random.Random(0)
    moves = {move for _ in range(2000) for move in demonstration(order)}
    assert moves == {(heap, taken) for heap in range(1, 16) for taken in legal(heap)}


def test_the_warm_start_learns_moves_alone_and_writes_every_heap_and_side(tmp_path, monkeypatch):
    monkeypatch.setattr(nim, "_LEGAL", 0.01)
    seen = []
    task = write_nim_task(tmp_path, progress=lambda *given: seen.append(given))
    assert len(seen) == 1
    rows = pq.read_table(task.validation).to_pylist()
    assert {(row["prompt"], row["answer"]) for row in rows} == {
        (asked(heap), side) for heap in HEAPS for side in AGENTS
    }
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    inputs, labels = nim._encoded(tokenizer, [[(12, 3), (7, 2)], [(5, 1)]])
    learned = [
        [tokenizer.decode([label]) for label in row if label >= 0] for row in labels.tolist()
    ]
    assert learned == [["3", "2"], ["1"]]
    assert inputs.shape == labels.shape
    again = write_nim_task(tmp_path / "again")
    weights = [
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (task.model, again.model)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_warm_start_that_never_gets_there_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(nim, "_MAX_STEPS", 20)
    monkeypatch.setattr(nim, "_LEGAL", 1.1)
    with pytest.raises(RunError, match=r"after 20 steps .* of the model.s moves are legal"):
        write_nim_task(tmp_path)
    assert not (tmp_path / "train.parquet").exists()
