"""A model that waits in the host's memory between phases learns, saves and resumes as one that
stays on its device.
"""

import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.algorithms import ppo_clip, value_clip
from siirl_dask.config import ModelConfig, RolloutConfig
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.devices import accelerator as devices
from siirl_dask.devices.accelerator import share_pieces
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.rows import (
    LENGTHS,
    assert_same_tensors,
    flat,
    load_state,
    random_rows,
    signs,
)
from siirl_dask.training import TrainBatch, ValueBatch, build_critic, build_reference, build_trainer
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from siirl_dask.training.parallel.dtensor import full_tensor, local
from siirl_dask.training.parking import Parked, Scratch
from tests.settings import trainer_config

ROWS = random_rows(LENGTHS)
PPO = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
CASES = {
    "whole": {},
    "averages": {"ema_decay": 0.5},
    "adapters": {"lora_rank": 2},
    "shards": {"backend": "fsdp"},
    "Muon": {"optimizer": "muon"},
    "shards, Muon": {"backend": "fsdp", "optimizer": "muon"},
    "shards, adapters": {"backend": "fsdp", "lora_rank": 2, "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("parking") / "model", seed=1)


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    """Let an accelerator's memory be the CPU's: what lies there has storages of its size, and
    none when it is freed.
    """
    monkeypatch.setattr(Device, "torch_name", property(lambda self: "cpu"))


def build(folder, make=build_trainer, rank=None, kind=DeviceKind.CUDA, **settings):
    arguments = {"model": ModelConfig(path=str(folder))}
    arguments["trainer"] = trainer_config(**{"lr": 1e-2, "eps": 1e-6} | settings)
    if make is not build_critic:
        arguments["rollout"] = RolloutConfig()
    return make(Device("w", kind), rank or Rank(), **arguments)


def advance(trainer):
    logprobs = trainer.logprobs(ROWS).logprobs
    batch = TrainBatch(
        rows=ROWS, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(ROWS)
    )
    return trainer.update([batch, batch], PPO), logprobs


def copied(named):
    return {name: tensor.clone() for name, tensor in named}


def weights_on_device(trainer):
    return sum(
        local(parameter).untyped_storage().nbytes() for parameter in trainer._network.parameters()
    )


def state_on_device(trainer):
    optimizer = trainer._learner.optimizer
    held = [optimizer.gradients.flat, *optimizer.state_tensors()]
    return sum(tensor.untyped_storage().nbytes() for tensor in held)


def test_a_parked_policy_is_the_same_to_the_last_bit(folder):
    for case, settings in CASES.items():
        steady, parked = build(folder, **settings), build(folder, park=True, **settings)
        assert_parks_and_stays_the_same(steady, parked, case)


def assert_parks_and_stays_the_same(steady, parked, case):
    held = weights_on_device(parked), state_on_device(parked)
    for step in range(3):
        parked.sleep()
        parked.sleep()
        assert (weights_on_device(parked), state_on_device(parked)) == (0, 0), case
        expected, got = advance(steady), advance(parked)
        assert got[0] == expected[0], case
        assert torch.equal(got[1], expected[1])
        assert weights_on_device(parked) == held[0]
        assert state_on_device(parked) == 0, "an engine beside it takes memory for new weights now"
        assert_same_tensors(copied(parked.weights()), copied(steady.weights()))
        if step == 1:
            parked.sleep()
            assert_same_tensors(copied(parked.ema_weights()), copied(steady.ema_weights()))
    parked.sleep()
    states = [
        {name: full_tensor(tensor) for name, tensor in flat(one.state()).items()}
        for one in (steady, parked)
    ]
    assert_same_tensors(*states)
    assert (weights_on_device(parked), state_on_device(parked)) == (0, 0), (
        "a checkpoint reads the host's copy"
    )


def on_a_rank(folder, rank):
    Device.torch_name = property(lambda self: "cpu")
    settings = {"backend": "fsdp", "rank": rank}
    assert_parks_and_stays_the_same(
        build(folder, **settings), build(folder, park=True, **settings), str(rank)
    )


@pytest.mark.slow
def test_two_ranks_park_their_shards(folder, tmp_path):
    run_ranks(2, partial(on_a_rank, folder), tmp_path)


@pytest.mark.parametrize("backend", ["torch", "fsdp"])
def test_a_checkpoint_is_written_and_loaded_while_parked(folder, tmp_path, backend):
    steady, stopped = build(folder, backend=backend), build(folder, backend=backend, park=True)
    assert advance(steady)[0] == advance(stopped)[0]
    stopped.sleep()
    DistributedCheckpoint().save(
        str(tmp_path / "state"), stopped.state(), None
    ).result()  # copies, as runs do
    expected, _ = advance(steady)
    for asleep in (True, False):
        fresh = build(folder, backend=backend, park=True)
        if asleep:  # as when an engine is built after it
            fresh.sleep()
        load_state(fresh, tmp_path / "state")
        fresh.sleep()
        assert advance(fresh)[0] == expected
        assert_same_tensors(copied(fresh.weights()), copied(steady.weights()))


def test_references_and_critics_park_as_well(folder):
    reference = build(folder, build_reference, park=True)
    expected = reference.logprobs(ROWS).logprobs
    for _ in range(2):
        reference.sleep()
        assert weights_on_device(reference) == 0
        assert torch.equal(reference.logprobs(ROWS).logprobs, expected)
    critics = build(folder, build_critic), build(folder, build_critic, park=True)
    values = []
    for critic in critics:
        critic.sleep()
        old = critic.values(ROWS)
        batch = ValueBatch(rows=ROWS, old_values=old, returns=signs(ROWS))
        critic.sleep()
        values.append((critic.update([batch], value_clip), critic.values(ROWS)))
    assert state_on_device(critics[1]) == 0
    assert values[0][0] == values[1][0]
    assert torch.equal(values[0][1], values[1][1])


@pytest.mark.parametrize(("kind", "park"), [(DeviceKind.CPU, True), (DeviceKind.CUDA, False)])
def test_nothing_moves_on_a_cpu_nor_unasked(folder, kind, park):
    trainer = build(folder, kind=kind, park=park)
    held = weights_on_device(trainer), state_on_device(trainer)
    trainer.sleep()
    assert (weights_on_device(trainer), state_on_device(trainer)) == held


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (build_trainer, lambda policy: policy.logprobs(ROWS)),
        (build_reference, lambda reference: reference.logprobs(ROWS)),
        (build_critic, lambda critic: critic.values(ROWS)),
    ],
)
def test_the_hosts_memory_is_not_given_back_before_copies_from_it_have_arrived(
    folder, monkeypatch, make, use
):
    trainer = build(folder, make, park=True)
    trainer.sleep()
    copies = [weakref.ref(copy) for copy in trainer._memory._weights._copies.values()]
    use(trainer)  # which fetches, and does not wait
    waits = []
    monkeypatch.setattr(
        devices,
        "synchronize",
        lambda device: waits.append(all(copy() is not None for copy in copies)),
    )
    trainer.close()
    assert waits, "nothing waits for the copies"
    assert waits[0], "the memory was given back first"
    assert not any(copy() is not None for copy in copies)


def test_a_model_that_was_never_parked_waits_for_nothing_at_its_end(folder, monkeypatch):
    trainer = build(folder, park=False)
    trainer.logprobs(ROWS)
    waits = []
    monkeypatch.setattr(devices, "synchronize", waits.append)
    trainer.close()
    assert waits == []


def test_what_has_not_changed_is_not_copied_again_and_the_hosts_memory_stays_the_same():
    tensor = torch.arange(6.0)
    parked = Parked([tensor])
    parked.park()
    memory = parked.here(tensor).data_ptr()
    parked.here(tensor).fill_(7.0)  # as a checkpoint that is loaded does
    parked.fetch()
    assert tensor.tolist() == [7.0] * 6
    tensor.fill_(8.0)
    parked.park()
    assert parked.here(tensor).tolist() == [7.0] * 6, "nobody said that it changed"
    parked.fetch()
    tensor.fill_(9.0)
    parked.changed()
    parked.park()
    assert parked.here(tensor).tolist() == [9.0] * 6
    assert parked.here(tensor).data_ptr() == memory


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3000), st.sampled_from([torch.float32, torch.bfloat16, torch.int8])
        )
    )
)
def test_any_tensors_come_back_as_they_were(drawn):
    tensors = [torch.randint(0, 99, (size,)).to(dtype) for size, dtype in drawn]
    views, before = [tensor[1:] for tensor in tensors], [tensor.clone() for tensor in tensors]
    parked = Parked(tensors)
    parked.park()
    assert all(
        torch.equal(parked.here(view), old[1:]) for view, old in zip(views, before, strict=True)
    )
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    parked.fetch()
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    assert all(torch.equal(view, old[1:]) for view, old in zip(views, before, strict=True))


@given(st.dictionaries(st.integers(), st.integers(1, 10**6), min_size=1, max_size=40))
def test_copies_do_not_overlap_and_share_pieces_that_torch_need_not_round_up_much(sizes):
    places, pieces = share_pieces(sizes)
    ranges = sorted((piece, start, start + sizes[key]) for key, (piece, start) in places.items())
    assert all(one[0] < other[0] or one[2] <= other[1] for one, other in pairwise(ranges))
    assert all(end <= pieces[piece] for piece, _, end in ranges)
    rounded = sum(1 << (size - 1).bit_length() for size in pieces)
    assert rounded <= 2 * sum(sizes.values()) + 2 * max(sizes.values()) + 4 * 512 * len(sizes)


def test_scratch_memory_is_there_only_between_take_and_free():
    tensor = torch.ones(5)
    scratch = Scratch(tensor)
    scratch.free()
    scratch.free()
    assert tensor.untyped_storage().nbytes() == 0
    scratch.take()
    tensor.fill_(3.0)
    scratch.take()
    assert tensor.tolist() == [3.0] * 5
