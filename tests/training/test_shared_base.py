"""Policies of several agents over one base: it is there once, and each learns as if it were
alone.
"""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.rows import (
    LENGTHS,
    assert_same_tensors,
    flat,
    load_state,
    random_rows,
    save_state,
    signs,
)
from siirl_dask.training import TrainBatch, build_trainer
from siirl_dask.training.parallel.dtensor import full_tensor
from tests.settings import trainer_config

ROWS = random_rows(LENGTHS)
AGENTS = ("a", "model")  # a name that is part of every parameter's
PPO = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
CASES = {
    "torch": {},
    "averaged, checkpointed": {"gradient_checkpointing": True, "ema_decay": 0.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("base") / "model", seed=1)


def build(folder, device, agent="", base=(), rank=None, temperature=0.7, **settings):
    return build_trainer(
        device,
        rank or Rank(),
        model=ModelConfig(path=str(folder)),
        trainer=trainer_config(**{"lr": 1e-2, "eps": 1e-6, "lora_rank": 3} | settings),
        rollout=RolloutConfig(temperature=temperature),
        agent=agent,
        base=base,
    )


def over_one_base(folder, rank=None, **settings):
    """The second agent learns slower, and at another temperature."""
    device = Device("w")
    first = build(folder, device, AGENTS[0], AGENTS, rank, **settings)
    return first, build(
        folder, device, AGENTS[1], AGENTS, rank, temperature=1.3, **settings | {"lr": 3e-3}
    )


def advance(trainer, at=0, rows=None, loss=PPO):
    rows = random_rows(LENGTHS[at:]) if rows is None else rows
    logprobs = trainer.logprobs(rows).logprobs
    batch = TrainBatch(
        rows=rows, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(rows)
    )
    return trainer.update([batch], loss)


def kept(trainer):
    return {name: full_tensor(tensor).clone() for name, tensor in flat(trainer.state()).items()}


@pytest.mark.parametrize("case", CASES)
def test_an_agent_learns_to_the_bit_as_if_it_were_alone(case, folder):
    agents = over_one_base(folder, **CASES[case])
    alone = [
        build(folder, Device("x"), **CASES[case]),
        build(folder, Device("y"), temperature=1.3, **CASES[case] | {"lr": 3e-3}),
    ]
    for at in range(3):
        for number in (at % 2, 1 - at % 2):
            assert advance(agents[number], at) == advance(alone[number], at)
    for agent, expected in zip(agents, alone, strict=True):
        assert_same_tensors(kept(agent), kept(expected))
        for pairs in ("weights", "adapters", "ema_weights"):
            assert_same_tensors(dict(getattr(agent, pairs)()), dict(getattr(expected, pairs)()))
        assert torch.equal(agent.logprobs(ROWS).logprobs, expected.logprobs(ROWS).logprobs)
        assert torch.equal(
            agent.base_logprobs(ROWS).logprobs, expected.base_logprobs(ROWS).logprobs
        )
        assert torch.equal(agent.logprobs(ROWS).logprobs, expected.logprobs(ROWS).logprobs)


def test_an_update_of_one_agent_changes_only_its_adapters(folder):
    first, second = over_one_base(folder)
    advance(second)
    other, base = (
        kept(second),
        {name: w.clone() for name, w in first._network.merged({}) if "_proj" not in name},
    )
    own = kept(first)
    advance(first)
    assert_same_tensors(kept(second), other)
    assert_same_tensors({name: w for name, w in first._network.merged({}) if name in base}, base)
    moved = kept(first)
    assert any(not torch.equal(moved[name], own[name]) for name in own if "lora_" in name)


def test_the_base_is_held_once_and_as_long_as_one_agent_has_it(folder):
    device = Device("w")
    first, second = (build(folder, device, agent, AGENTS) for agent in AGENTS)
    own, other = (
        {name: tensor.data_ptr() for name, tensor in each.state()["model"].items()}
        for each in (first, second)
    )
    assert own.keys() == other.keys()
    assert set(own.values()).isdisjoint(other.values())
    assert first._network._network is second._network._network
    alone = sum(p.numel() for p in build(folder, Device("x"))._network.parameters())
    both = sum(p.numel() for p in first._network.parameters())
    assert both == alone + sum(tensor.numel() for tensor in second.state()["model"].values())
    first.close()
    assert len(device.held) == 1
    advance(second)
    second.close()
    del first, second
    assert not device.held


def test_each_agent_resumes_from_its_own_state(folder, tmp_path):
    steady, stopped = over_one_base(folder), over_one_base(folder)
    for pair in (steady, stopped):
        for agent in pair:
            advance(agent)
    for name, agent in zip("xy", stopped, strict=True):
        save_state(agent, tmp_path / name)
    fresh = over_one_base(folder)
    for name, agent in zip("xy", fresh, strict=True):
        load_state(agent, tmp_path / name)
    for one, other in zip(steady, fresh, strict=True):
        assert advance(one, 1) == advance(other, 1)
        assert_same_tensors(kept(one), kept(other))


def learned(folder, rank, **settings):
    """Two ranks with rows of their own: what both agents have learned after two updates each."""
    cut = round(0.6 * len(LENGTHS))
    rows = random_rows(
        LENGTHS, {0: range(cut), 1: range(cut, len(LENGTHS))}[rank.rank] if rank.size > 1 else None
    )
    agents = over_one_base(folder, rank, **settings)
    for _ in range(2):
        for agent in agents:
            advance(agent, rows=rows)
    return [
        {name: full_tensor(tensor).clone() for name, tensor in agent.state()["model"].items()}
        | {"scored": agent.logprobs(ROWS).logprobs, "base": agent.base_logprobs(ROWS).logprobs}
        for agent in agents
    ]


def on_a_rank(folder, rank):
    sharded = {"backend": "fsdp", "gradient_checkpointing": True}
    return [
        learned(folder, rank),
        learned(folder, rank, backend="fsdp"),
        learned(folder, rank, **sharded),
    ]


def test_two_ranks_learn_like_one_process_with_either_backend(folder, tmp_path):
    expected = learned(folder, Rank())
    for seen in run_ranks(2, partial(on_a_rank, folder), tmp_path):
        for agents in seen:
            for agent, alone in zip(agents, expected, strict=True):
                assert list(agent) == list(alone)
                for name, tensor in alone.items():
                    assert_close(agent[name], tensor, atol=1e-5, rtol=0, msg=name)
