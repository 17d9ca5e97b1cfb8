"""Learning rates, steps, moving averages and skipped steps, against numbers computed by hand."""

from functools import partial
from math import cos, pi

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from siirl_dask.algorithms import ppo_clip, value_clip
from siirl_dask.config import Backend, Config, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Context, Device, DeviceKind, Rank
from siirl_dask.errors import ConfigError, TrainingError
from siirl_dask.nodes import update_policy
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.rows import LENGTHS, assert_same_tensors, random_rows, signs
from siirl_dask.training import TrainBatch, ValueBatch, build_critic, build_trainer
from siirl_dask.training.optimizer import Optimizer, learning_rate
from tests.nodes.test_learning_nodes import rows as table_of
from tests.settings import trainer_config
from tests.training.roles import policy

PPO = partial(ppo_clip, clip_low=0.2, clip_high=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("optimizer") / "model", seed=1)


def build(folder, **settings):
    return policy(folder, trainer_config(**{"lr": 1e-3} | settings))


def batch(trainer, factor=1.0):
    rows = random_rows(LENGTHS)
    logprobs = trainer.logprobs(rows).logprobs
    return TrainBatch(
        rows=rows, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(rows) * factor
    )


def copied(named):
    return {name: tensor.clone() for name, tensor in named}


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"schedule": "constant", "warmup_steps": 2}, [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear", "total_steps": 4}, [1, 0.75, 0.5, 0.25, 0, 0]),
        (
            {"schedule": "linear", "total_steps": 6, "warmup_steps": 2},
            [0.5, 1, 1, 0.75, 0.5, 0.25, 0],
        ),
        (
            {"schedule": "linear", "total_steps": 4, "min_lr_ratio": 0.2},
            [1, 0.8, 0.6, 0.4, 0.2, 0.2],
        ),
        ({"schedule": "cosine", "total_steps": 3}, [1, 0.75, 0.25, 0, 0]),
        (
            {"schedule": "cosine", "total_steps": 4, "min_lr_ratio": 0.5},
            [1, 0.75 + cos(pi / 4) / 4, 0.75],
        ),
    ],
)
def test_the_learning_rate_follows_the_schedule(settings, rates):
    config = TrainerConfig(lr=2.0, **settings)
    computed = [learning_rate(config, step) for step in range(1, len(rates) + 1)]
    assert computed == pytest.approx([2.0 * rate for rate in rates])


def test_a_falling_rate_without_total_steps_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.schedule=linear needs trainer\.total_steps"):
        learning_rate(TrainerConfig(schedule="linear"), 1)


def test_total_steps_are_those_of_the_run_by_default():
    overrides = [
        "trainer.schedule=cosine",
        "critic.schedule=linear",
        "run.steps=10",
        "algorithm.minibatches=4",
    ]
    file = load_config_file(
        shipped("quickstart_ppo"),
        [*overrides, "algorithm.epochs=2", "algorithm.critic_warmup_steps=3"],
    )
    assert (file.config.trainer.total_steps, file.config.critic.total_steps) == (7 * 8, 10 * 8)
    assert file.roles["policy"]["with"]["trainer"]["total_steps"] == 7 * 8
    explicit = load_config_file(
        shipped("quickstart"), ["trainer.schedule=cosine", "trainer.total_steps=500"]
    )
    assert explicit.config.trainer.total_steps == 500
    assert Config().trainer.total_steps is None


def test_two_steps_of_adamw_equal_a_computation_by_hand():
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = Optimizer(
        {"w": weight},
        TrainerConfig(lr=0.1, betas=(0.5, 0.75), eps=0.5, weight_decay=0.2, ema_decay=0.75),
    )
    optimizer.gradients.flat.fill_(0.5)
    optimizer.step()
    # bias-corrected: mean 0.5, root of the square 0.5
    first = 1.0 * (1 - 0.1 * 0.2) - 0.1 * 0.5 / (0.5 + 0.5)
    assert weight.item() == pytest.approx(first)
    optimizer.gradients.flat.fill_(1.0)
    optimizer.step()
    mean, square = (
        (0.5 * 0.25 + 0.5 * 1.0) / (1 - 0.5**2),
        (0.75 * 0.0625 + 0.25 * 1.0) / (1 - 0.75**2),
    )
    assert optimizer.state()["w"]["exp_avg_sq"].item() == pytest.approx(0.75 * 0.0625 + 0.25)
    second = first * (1 - 0.1 * 0.2) - 0.1 * mean / (square**0.5 + 0.5)
    assert weight.item() == pytest.approx(second)
    ((name, average),) = optimizer.ema()
    assert (name, average.item()) == (
        "w",
        pytest.approx(0.75 * (0.75 * 1.0 + 0.25 * first) + 0.25 * second),
    )


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def counts(monkeypatch, one_thread):
    """Threads with which AdamW has stepped."""
    found, step = [], torch.optim.AdamW.step

    def recorded(self, *arguments):
        found.append(torch.get_num_threads())
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    return found


def many(cores):
    """Weights, moments and averages after three steps of a parameter of an odd size, more than
    one thread takes.
    """
    weight = nn.Parameter(torch.randn(300_007, generator=torch.Generator().manual_seed(1)))
    optimizer = Optimizer(
        {"w": weight}, TrainerConfig(lr=0.1, ema_decay=0.75, weight_decay=0.1), cores=cores
    )
    for step in range(3):
        optimizer.gradients.flat.copy_(weight.detach().cos() + step)
        optimizer.step()
    return {"weight": weight.detach(), **optimizer.state()["w"]}


def test_a_step_in_the_hosts_memory_takes_its_cores_and_gives_them_back_with_the_same_bits(counts):
    by_one = many(cores=0)
    assert counts == [1, 1, 1]
    by_four = many(cores=4)
    assert counts == [1, 1, 1, 4, 4, 4]
    assert torch.get_num_threads() == 1
    assert_same_tensors(by_four, by_one)


def test_a_step_that_fails_gives_its_cores_back(monkeypatch, one_thread):
    def fails(self):
        raise RuntimeError(f"with {torch.get_num_threads()} threads")

    monkeypatch.setattr(torch.optim.AdamW, "step", fails)
    optimizer = Optimizer({"w": nn.Parameter(torch.ones(3))}, TrainerConfig(), cores=4)
    with pytest.raises(RuntimeError, match="with 4 threads"):
        optimizer.step()
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("kind", "offload", "threads"),
    [(DeviceKind.CUDA, True, 3), (DeviceKind.CUDA, False, 1), (DeviceKind.CPU, True, 1)],
)
@pytest.mark.parametrize("make", [build_trainer, build_critic])
def test_the_optimizer_of_an_offloaded_model_alone_takes_the_workers_cores(
    folder, monkeypatch, counts, make, kind, offload, threads
):
    monkeypatch.setattr(Device, "torch_name", property(lambda self: "cpu"))
    settings = trainer_config(backend=Backend.fsdp, offload=offload)
    arguments = {"model": ModelConfig(path=str(folder)), "trainer": settings}
    if make is build_trainer:
        arguments["rollout"] = RolloutConfig()
    built = make(Device("w", kind, cores=3), Rank(), **arguments)
    if make is build_trainer:
        built.update([batch(built)], PPO)
    else:
        rows = random_rows(LENGTHS)
        built.update(
            [ValueBatch(rows=rows, old_values=built.values(rows), returns=signs(rows))], value_clip
        )
    assert counts == [threads]
    assert torch.get_num_threads() == 1


def test_ema_weights_average_the_weights_under_the_same_names(folder):
    trainer = build(folder, ema_decay=0.9)
    before = copied(trainer.weights())
    trainer.update([batch(trainer)], PPO)
    after = copied(trainer.weights())
    average = copied(trainer.ema_weights())
    assert list(average) == list(after)
    for name, tensor in average.items():
        assert_close(tensor, 0.9 * before[name] + 0.1 * after[name], atol=1e-6, rtol=0)
    assert not list(build(folder).ema_weights())


def test_nonfinite_steps_may_be_skipped_up_to_a_limit_in_a_row(folder):
    trainer = build(folder, max_skipped_steps=1, max_grad_norm=1e6)
    good, bad = batch(trainer), batch(trainer, float("nan"))
    before, found = copied(trainer.weights()), []
    metrics = trainer.update([bad], PPO, on_nonfinite=found.append)
    assert (metrics["skipped_steps"], "loss" in metrics) == (1, False)
    assert_same_tensors(copied(trainer.weights()), before)
    assert not any(
        state["exp_avg"].any() or state["step"] for state in trainer.state()["optimizer"].values()
    )
    alone = build(folder, max_grad_norm=1e6).update([good], PPO)
    metrics = trainer.update([good, bad], PPO, on_nonfinite=found.append)
    assert metrics == alone | {"skipped_steps": 1}
    state = trainer.state()
    assert {name: int(value) for name, value in state["progress"].items()} == {
        "steps": 1,
        "skipped_steps": 1,
    }
    trainer.update([bad], PPO, on_nonfinite=found.append)
    assert [one.may_skip for one in found] == [True, True, False]
    with pytest.raises(TrainingError, match=r"mini-batch 1 of 1: .*the last 3 were so"):
        trainer.update([bad], PPO)


def test_epochs_repeat_the_minibatches_and_critic_warmup_skips_the_policy(folder):
    trainer = build(folder)
    logprobs = [[-1.0, -2.0], [-1.0]]
    table = table_of(
        prompt_ids=[[1], [1, 2]], response_ids=[[4, 5], [6]], rollout_logprobs=logprobs, old_logprobs=logprobs,
        advantage=[1.0, -1.0], minibatch=[0, 1],
    )  # fmt: skip
    before = copied(trainer.weights())
    steps = {}
    for step in (1, 2, 3):
        context = Context(step=step, run_seed=0, rank=Rank(), device=Device("w"), resource=trainer)
        update_policy(context, table, loss=PPO, minibatches=2, epochs=3, critic_warmup_steps=2)
        steps[step] = int(trainer.state()["progress"]["steps"])
        assert ("policy/loss" in context.metrics) == (step > 2)
        if step == 2:
            assert_same_tensors(copied(trainer.weights()), before)
    assert steps == {1: 0, 2: 0, 3: 6}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": 0.0}, "trainer.eps=0.0: expected more than 0"),
        ({"min_lr_ratio": 1.5}, "trainer.min_lr_ratio=1.5: expected 0 to 1"),
        ({"ema_decay": 1.0}, "trainer.ema_decay=1.0: expected 0 to below 1"),
        ({"max_skipped_steps": -1}, "trainer.max_skipped_steps=-1: expected at least 0"),
        (
            {"warmup_steps": 5, "total_steps": 5},
            "trainer.total_steps=5: expected more than trainer.warmup_steps=5",
        ),
        ({"shard_size": 2}, "trainer.fsdp.shard_size=2"),
        ({"offload": True}, "trainer.fsdp.offload=True"),
        ({"backend": "fsdp", "shard_size": 0}, "trainer.fsdp.shard_size=0: expected at least 1"),
    ],
)
def test_invalid_options_are_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        trainer_config(**settings)
    assert message in str(error.value)
