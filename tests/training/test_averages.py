"""Moving averages of the weights: when they move, and scores under them, which leave the policy
as it is.
"""

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import ModelConfig, RolloutConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Device, Rank
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from siirl_dask.errors import ConfigError
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.reference_model import load_model, plain_scores
from siirl_dask.testing.rows import random_rows, signs
from siirl_dask.training import TrainBatch, build_reference, build_trainer
from tests.settings import digits_overrides, trainer_config

ROWS = random_rows([(3, 9), (5, 4), (2, 12)])
BACKENDS = ["torch", "fsdp"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)


def build(folder, make=build_trainer, **settings):
    return make(
        Device("w0"),
        Rank(),
        model=ModelConfig(path=str(folder)),
        trainer=trainer_config(**{"lr": 1e-2} | settings),
        rollout=RolloutConfig(temperature=0.7),
    )


def step(trainer):
    old = trainer.logprobs(ROWS).logprobs
    batch = TrainBatch(rows=ROWS, old_logprobs=old, rollout_logprobs=old, advantages=signs(ROWS))
    return trainer.update([batch], ppo_clip)


def copied(named):
    return {name: tensor.clone() for name, tensor in named}


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("decay", "every"), [(0.25, 1), (0.25, 2), (0.0, 2), (0.0, 3)])
def test_an_average_moves_every_so_many_steps(folder, backend, decay, every):
    trainer = build(folder, backend=backend, ema_decay=decay, ema_every=every)
    expected = copied(trainer.weights())
    for count in range(1, 5):
        step(trainer)
        if count % every == 0:
            weights = copied(trainer.weights())
            expected = {
                name: decay * expected[name] + (1 - decay) * weights[name] for name in weights
            }
        averages = copied(trainer.ema_weights())
        for name, average in averages.items():
            assert_close(average, expected[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "settings", [{}, {"backend": "fsdp"}, {"park": True}, {"lora_rank": 2}], ids=str
)
def test_scores_under_averages_are_the_averaged_models_and_leave_the_policy_as_it_is(
    folder, settings
):
    trainer = build(folder, ema_decay=0.5, **settings)
    untouched = build(folder, ema_decay=0.5, **settings)
    for _ in range(2):
        assert step(trainer) == step(untouched)
        weights = copied(trainer.weights())
        averages = copied(trainer.ema_weights())
        found = trainer.average_logprobs(ROWS)
        model = load_model(folder)
        model.load_state_dict(averages, strict=False)
        model.tie_weights()
        with torch.no_grad():
            expected = plain_scores(model, ROWS, 0.7)
        assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
        assert_close(found.entropy, expected.entropy, atol=1e-5, rtol=0)
        assert float((found.logprobs - trainer.logprobs(ROWS).logprobs).abs().max()) > 1e-3
        assert same(copied(trainer.weights()), weights)
        assert same(copied(trainer.ema_weights()), averages)
    assert same(copied(trainer.weights()), copied(untouched.weights()))


def test_a_pass_that_fails_under_averages_leaves_the_policy_as_it_is(folder, monkeypatch):
    """With fsdp nothing goes on after a pass that failed: its ranks are built anew."""
    trainer = build(folder, ema_decay=0.5)
    step(trainer)
    weights = copied(trainer.weights())

    def fails(batch):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(trainer._network, "predicting_states", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            trainer.average_logprobs(ROWS)
    assert same(copied(trainer.weights()), weights)


def test_without_averages_scores_under_them_are_refused(folder):
    with pytest.raises(TypeError, match=r"trainer\.ema_decay"):
        build(folder).average_logprobs(ROWS)
    with pytest.raises(TypeError, match="role of a policy"):
        build(folder, build_reference).average_logprobs(ROWS)
    with pytest.raises(ConfigError, match=r"ema_every"):
        trainer_config(ema_every=0)


@pytest.mark.parametrize("override", ["trainer.ema_decay=0", "trainer.backend=megatron"])
def test_a_policy_without_averages_is_refused_before_anything_starts(
    digits_task, tmp_path, override
):
    config = tmp_path / "run.yaml"
    config.write_text(f"base: [{shipped('quickstart.yaml')}, {shipped('dags/grpo_average.yaml')}]")
    given = [
        *digits_overrides(digits_task, tmp_path / "run"),
        "algorithm.kl_coefficient=0.1",
        "trainer.ema_decay=0.9",
    ]
    file = load_config_file(config, [*given, override])
    with pytest.raises(
        ConfigError, match=r"needs a role with averages, .*give its trainer an ema_decay"
    ):
        run(file.config, *dags(file))
    assert not (tmp_path / "run").exists()
