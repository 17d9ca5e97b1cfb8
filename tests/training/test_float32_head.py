"""``model.float32_head``: trainers score with products in float32 of bfloat16 hidden states and a
head rounded to bfloat16.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.config import ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.testing.rows import random_rows
from siirl_dask.training import build_reference, build_trainer
from tests.float32_heads import FAMILIES, WIDE, head_of, logprobs_of, write_model
from tests.settings import trainer_config


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.mark.parametrize("make", [build_trainer, build_reference])
@pytest.mark.parametrize("backend", ["torch", "fsdp", "megatron"])
def test_trainers_score_with_products_in_float32(folder, make, backend):
    if backend == "megatron":
        pytest.importorskip("megatron", reason="megatron-core is not installed: an extra brings it")
    rows = random_rows([(5, 20)] * 4)
    built = make(
        Device("w0"),
        Rank(),
        model=ModelConfig(path=str(folder), **WIDE),
        trainer=trainer_config(backend=backend),
        rollout=RolloutConfig(temperature=0.7),
    )
    seen = states_and_targets(built, backend)
    logprobs = built.logprobs(rows).logprobs
    states, targets = (torch.cat(each) for each in (seen.states, seen.targets))
    assert states.dtype == torch.bfloat16
    assert_close(logprobs, logprobs_of(states, head_of(folder), targets, 0.7), atol=1e-5, rtol=0)


def states_and_targets(built, backend):
    """Return what a trainer's passes will add: the states that predict tokens, and these."""
    seen = SimpleNamespace(states=[], targets=[])
    if backend == "megatron":
        replica = built._replica
        scores_of = replica._scores_of

        def noted(predicting, targets):
            seen.states.append(predicting.detach())
            seen.targets.append(targets)
            return scores_of(predicting, targets)

        replica._scores_of = noted
        return seen
    network = built._network
    predicting_states = network.predicting_states

    def noted_states(batch):
        states = predicting_states(batch)
        seen.states.append(states.detach())
        seen.targets.append(batch.targets)
        return states

    network.predicting_states = noted_states
    return seen
