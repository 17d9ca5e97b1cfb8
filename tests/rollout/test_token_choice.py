"""The logits processor that chooses tokens inside vLLM, without an engine."""

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from siirl_dask.rollout import Sampling
from siirl_dask.rollout.token_sampling import TokenSampler
from siirl_dask.rollout.vllm_engine import token_choice
from siirl_dask.rollout.vllm_engine.token_choice import VllmTokenSampler, request_params
from tests.device_waits import device_without_waits

WAYS = {0: {}, 1: {"temperature": 0.0}, 2: {}, 4: {"top_k": 3}, 5: {}}
"""Sampling of each row of the batch; row 3 is not ours."""


@pytest.fixture
def batch():
    """A processor with a batch of rows that differ in their limits, and the logits of the batch."""
    processor = VllmTokenSampler(None, torch.device("cpu"), False)
    added = [
        (
            row,
            request_params(row, Sampling(max_tokens=9 + row, stop_token_ids=(row,), **way), []),
            None,
            [7] * row,
        )
        for row, way in WAYS.items()
    ]
    processor.update_state(BatchUpdate(batch_size=6, removed=[], added=added, moved=[]))
    return processor, 3 * torch.randn(6, 400, generator=torch.Generator().manual_seed(0))


def chosen(row, logits):
    """Token and log-prob of a row by itself, whose position is its number."""
    sampler = TokenSampler(Sampling(max_tokens=1, **WAYS[row]))
    return [
        each.item()
        for each in sampler(logits[row : row + 1].clone(), np.array([row], dtype=np.uint64), row)
    ]


def test_each_row_gets_its_token_and_log_prob_and_others_stay(batch):
    processor, logits = batch
    left = processor.apply(logits.clone())
    assert torch.equal(left[3], logits[3])
    for row in WAYS:
        token, logprob = chosen(row, logits)
        assert left[row].argmax() == token
        assert -left[row, token] == pytest.approx(logprob)


def test_rows_that_differ_in_their_ends_alone_are_drawn_together(batch, monkeypatch):
    processor, logits = batch
    sizes = []

    class Recorded(TokenSampler):
        def __call__(self, logits, seeds, positions):
            sizes.append(len(logits))
            return super().__call__(logits, seeds, positions)

    monkeypatch.setattr(token_choice, "TokenSampler", Recorded)
    processor.apply(logits.clone())
    assert sorted(sizes) == [1, 1, 3]


def test_rows_that_move_and_leave_take_their_seeds_along(batch):
    processor, logits = batch
    expected = chosen(0, logits)[0], chosen(5, logits)[0]
    processor.update_state(
        BatchUpdate(
            batch_size=5,
            removed=[1],
            added=[],
            moved=[(0, 2, MoveDirectionality.SWAP), (5, 1, "unidirectional")],
        )
    )
    moved = logits[[2, 5, 0, 3, 4]]
    left = processor.apply(moved.clone())
    assert (left[2].argmax(), left[1].argmax()) == expected


def test_choosing_tokens_does_not_wait_for_the_device(batch):
    """Rows 0, 2 and 5 are no neighbours: their places travel as well."""
    processor, logits = batch
    with device_without_waits() as device:
        assert processor.apply(logits.new_empty(6, 400, device=device)).device == device
