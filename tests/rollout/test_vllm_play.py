"""Turns, tools, self-play, agents and routes on a vLLM engine of two ranks: the rows of one."""

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
    for size in (2, 1):
        alone = rank if size == 2 else Rank()
        engine = two_ranks_play.engine_of(folder, alone, size)
        try:
            found.append(two_ranks_play.played(engine, folder, rank.rank))
        finally:
            engine.close()
    return found


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
    for together, alone in given:
        assert together.keys() == alone.keys()
        for scene, expected in alone.items():
            assert len(together[scene]) == len(expected), scene
            for row, other in zip(together[scene], expected, strict=True):
                scores = row.pop("rollout_logprobs"), other.pop("rollout_logprobs")
                assert row == other, scene
                assert scores[0] == pytest.approx(scores[1], abs=1e-5), scene
        called += sum(len(row["turns"]) - 1 for row in alone["tools"])
        assert max(len(row["turns"]) for row in alone["turns"]) > 1
        versions = [version for row in alone["over steps"] for version in row["token_versions"]]
        assert {0, 1} <= {*versions}, "an episode went on under new weights"
    assert called, "a tool was called"
    assert [len(found[0]["turns of one rank"]) for found in given] == [0, 4]
