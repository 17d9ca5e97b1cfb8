"""Ranks that share a model learn, save and resume here as a single process does, to be compared
with it.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from siirl_dask.algorithms import TokenLoss, ppo_clip
from siirl_dask.config import Backend, MegatronConfig, TrainerConfig
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.rows import LENGTHS, flat, load_state, random_rows, signs
from siirl_dask.training import TrainBatch
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from siirl_dask.training.parallel.dtensor import local

SETTINGS = {
    "lr": 1e-4,
    "eps": 1e-6,
    "max_grad_norm": 1e6,
    "max_tokens_per_micro_batch": 24,
    "ema_decay": 0.5,
}


def config_of(
    tensor,
    pipeline,
    dtype=None,
    backend=Backend.megatron,
    context=1,
    chunks=1,
    experts=None,
    tokens=False,
    divided=False,
    **settings,
):
    megatron = MegatronConfig(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_pipeline=chunks,
        context_parallel=context,
        expert_parallel=experts,
        sequence_parallel=tokens,
        distributed_optimizer=divided,
    )
    return TrainerConfig(**SETTINGS | settings, backend=backend, megatron=megatron)


def sampled(names, more):
    """Return all names, of which those in ``more`` run in the sweep alone."""
    return [pytest.param(name, marks=[pytest.mark.sweep] * (name in more)) for name in names]


def fixtures_of(in_each_rank, more):
    """Return fixtures with the results of four ranks: of the layouts that are not in ``more``, of
    all, in the sweep of either, and for a test that has a ``name``, of those with that layout.

    ``in_each_rank(folders, states, left, world)`` gives the results of a rank by the name of a
    layout, but for those that are left out.
    """

    def run(folders, root, left):
        return run_ranks(
            4, partial(in_each_rank, folders, root.mktemp("states"), left), root.mktemp("ranks")
        )

    @pytest.fixture(scope="module")
    def sample(folders, tmp_path_factory):
        return run(folders, tmp_path_factory, more)

    @pytest.fixture(scope="module")
    def every(folders, tmp_path_factory):
        return run(folders, tmp_path_factory, set())

    @pytest.fixture(params=["sample", pytest.param("every", marks=pytest.mark.sweep)])
    def seen(request):
        return request.getfixturevalue(request.param)

    @pytest.fixture
    def seen_of(name, request):
        return request.getfixturevalue("every" if name in more else "sample")

    return sample, every, seen, seen_of


def learn(trainer, rank, prepared=lambda rows: rows):
    """Take three updates. Rank 0 has most rows, the last of four has none."""
    seen = {"metrics": [advance(trainer, rank, at, prepared) for at in range(3)]}
    scores = trainer.logprobs(prepared(own_rows(rank, LENGTHS)))
    seen |= {"logprobs": scores.logprobs, "entropy": scores.entropy, "collision": scores.collision}
    seen |= {
        "weights": copied(trainer),
        "averages": {name: each.clone() for name, each in trainer.ema_weights()},
    }
    seen["held"] = sum(local(tensor).numel() for tensor in flat(trainer.state()).values())
    return seen


def copied(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def advance(trainer, rank, at, prepared=lambda rows: rows):
    rows = prepared(own_rows(rank, LENGTHS[at:]))
    logprobs = trainer.logprobs(rows).logprobs
    batch = TrainBatch(
        rows=rows, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(rows)
    )
    return trainer.update([batch], partial(ppo_with_entropy, clip_low=0.2, clip_high=0.2))


def ppo_with_entropy(inputs, **clips):
    loss = ppo_clip(inputs, **clips)
    return TokenLoss(
        loss=loss.loss - 0.01 * inputs.entropy, metrics={**loss.metrics, "entropy": inputs.entropy}
    )


def own_rows(rank, lengths):
    ends = (
        [round(len(lengths) * part) for part in (0, 0.6, 1, 1, 1)]
        if rank.size > 1
        else [0, len(lengths)]
    )
    return random_rows(lengths, range(ends[rank.rank], ends[rank.rank + 1]))


def assert_learned(name, size, seen, expected):
    """Compare what each of ``size`` ranks has seen with what a single process has."""
    for rank in range(size):
        result = seen[rank][name]
        for metrics, theirs in zip(result["metrics"], expected["metrics"], strict=True):
            assert metrics == pytest.approx(theirs, abs=2e-6, rel=2e-6)
        for kind in ("weights", "averages"):
            assert list(result[kind]) == list(expected[kind])
            for key, weight in expected[kind].items():
                assert_close(result[kind][key], weight, atol=1e-4, rtol=0)
        for key, weight in result["weights"].items():
            assert torch.equal(weight, seen[0][name]["weights"][key])
    for score in ("logprobs", "entropy", "collision"):
        together = torch.cat([seen[rank][name][score] for rank in range(size)])
        assert_close(together, expected[score], atol=1e-4, rtol=0)


def resumed(trained, moves, root, left):
    """Resume in one layout what another trained, for each pair of ``moves`` of which neither is
    left out.

    Returns the weights and the metrics of the next update.
    """
    moves = [pair for pair in moves if not left & {*pair}]
    for old in {old for old, _ in moves}:
        if old in trained:
            trainer, rank = trained[old]
            DistributedCheckpoint().save(str(root / old), trainer.state(), rank.side_group).result()
    dist.barrier()  # else one of two ranks could load before four have saved
    results = {}
    for old, new in moves:
        if new in trained:
            trainer, rank = trained[new]
            load_state(trainer, root / old, rank)
            results[f"{old} to {new}"] = copied(trainer), advance(trainer, rank, 3)
    return results
