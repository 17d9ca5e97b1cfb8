"""Turns, tools, self-play, agents and routes on a vLLM engine of two ranks, in the workers and in
processes of their own: the rows of one.
"""

from functools import partial

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")

from siirl_dask.context import Rank
from siirl_dask.tasks.calculator import BETWEEN, CLOSE, OPEN
from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_model
from siirl_dask.testing.ranks import run_ranks

# whole calls of the tool are tokens, so that a random model makes some
CALLS = [f"{OPEN}{first}{BETWEEN}{second}{CLOSE}" for first, second in ((1, 2), (30, 4), (5, 5))]


def play_on_two_and_on_one(rank, folder):
    from tests.rollout import two_ranks_play

    found = []
    for size, process in ((2, False), (2, True), (1, False)):
        alone = rank if size == 2 else Rank()
        engine = two_ranks_play.engine_of(folder, alone, size, process=process)
        try:
            found.append(two_ranks_play.played(engine, folder, rank.rank))
        finally:
            engine.close()
    return found


def assert_same(found, alone):
    assert found.keys() == alone.keys()
    for scene, expected in alone.items():
        assert len(found[scene]) == len(expected), scene
        for row, other in zip(found[scene], expected, strict=True):
            scores = [one["rollout_logprobs"] for one in (row, other)]
            exact = [{**one, "rollout_logprobs": None} for one in (row, other)]
            assert exact[0] == exact[1], scene
            assert scores[0] == pytest.approx(scores[1], abs=1e-5), scene


@pytest.mark.slow
@pytest.mark.timeout(400)  # with more processes than cores
def test_two_ranks_play_the_episodes_that_one_rank_plays(tmp_path):
    """Tokens, turns, rewards and routes are equal to the bit; log-probs within float32's rounding,
    since two ranks add up in another order.
    """
    folder = tiny_model(
        tmp_path / "model",
        seed=2,
        family="qwen3_moe",
        tied=False,
        heads=4,
        kv_heads=2,
        chat_template=CHAT_TEMPLATE,
        pieces=CALLS,
    )
    given = run_ranks(2, partial(play_on_two_and_on_one, folder=folder), tmp_path)
    called = 0
    for *together, alone in given:
        for found in together:
            assert_same(found, alone)
        called += sum(len(row["turns"]) - 1 for row in alone["tools"])
        assert max(len(row["turns"]) for row in alone["turns"]) > 1
        versions = [version for row in alone["over steps"] for version in row["token_versions"]]
        assert {0, 1} <= {*versions}, "an episode went on under new weights"
        longest = max(len(row["response_ids"]) for row in alone["responses with a window"])
        assert longest > 16, "a response was sampled in several parts"
    assert called, "a tool was called"
    for found in zip(*given, strict=True):
        assert [len(rows["turns of one rank"]) for rows in found] == [0, 4]
