"""Conformance tests of a Trainer, to inherit.

    class TestMyTrainer(TrainerTests):
        @classmethod
        def make_trainer(cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank) -> Trainer:
            return MyTrainer(folder, config, temperature, rank)

pytest collects the inherited tests; ``folder`` is a tiny random model in float32.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import (
    LossInputs,
    TokenLoss,
    policy_gradient,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
)
from siirl_dask.config import TrainerConfig
from siirl_dask.context import DeviceKind, Rank
from siirl_dask.errors import TrainingError
from siirl_dask.tasks.tiny_model import Family, tiny_model
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.reference_model import load_model, plain_scores
from siirl_dask.testing.rows import (
    LENGTHS,
    Lengths,
    assert_same_tensors,
    batch_of,
    copied_weights,
    grouped_rows,
    random_rows,
    response_tokens,
    signs,
)
from siirl_dask.testing.trainer_states import PPO, TrainerStateTests
from siirl_dask.training import EpisodeSpans, NonFinite, TrainBatch, Trainer

_TEMPERATURE = 0.7


class TrainerTests(TrainerStateTests):
    """Conformance of a trainer. ``make_trainer`` builds one from a Hugging Face folder, in float32,
    on a device.

    ``make_trainer`` also runs in other processes, one per rank, where ``rank.group`` is a process
    group and the rank's device is the current one.
    """

    families: tuple[Family, ...] = ("qwen3", "qwen2", "llama", "qwen3_moe")
    """Model families whose scores must equal those of a plain forward pass."""

    @classmethod
    def device_kind(cls) -> DeviceKind:
        """Return the kind of the device on which the trainer computes; its scores are compared
        with a CPU's.
        """
        return DeviceKind.CPU

    @classmethod
    def make_trainer(
        cls,
        folder: Path,
        config: TrainerConfig,
        temperature: float,
        rank: Rank,
    ) -> Trainer:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_model(tmp_path_factory.mktemp("trainer") / "model", seed=1)

    @pytest.fixture(scope="class")
    @classmethod
    def two_ranks(
        cls, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> list[dict[str, object]]:
        """Results of ``_learn`` on each of two ranks, computed once because processes take
        seconds to start.
        """
        module = sys.modules[cls.__module__]
        # a rank may be unable to import the subclass's module
        cloudpickle.register_pickle_by_value(module)
        try:
            learn = partial(_learn, cls.make_trainer, folder)
            return run_ranks(2, learn, tmp_path_factory.mktemp("ranks"), cls.device_kind())
        finally:
            cloudpickle.unregister_pickle_by_value(module)

    def build(
        self, folder: Path, *, temperature: float = _TEMPERATURE, **settings: object
    ) -> Trainer:
        config = TrainerConfig(**{"lr": 1e-3, **settings})  # type: ignore[arg-type]
        return self.make_trainer(folder, config, temperature, Rank())

    def test_scores_equal_a_plain_forward_pass(self, tmp_path: Path) -> None:
        rows = random_rows(LENGTHS)
        for family in self.families:
            folder = tiny_model(tmp_path / family, seed=3, family=family, tied=family != "llama")
            scores = self.build(folder).logprobs(rows)
            expected = plain_scores(load_model(folder), rows, _TEMPERATURE)
            assert_close(scores.logprobs, expected.logprobs, atol=1e-5, rtol=0)
            assert_close(scores.entropy, expected.entropy, atol=1e-4, rtol=0)
            assert_close(scores.collision, expected.collision, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("lengths", [[], [(4, 0), (2, 0)]], ids=["no rows", "no responses"])
    def test_rows_without_responses_have_no_scores(self, folder: Path, lengths: Lengths) -> None:
        scores = self.build(folder).logprobs(random_rows(lengths))
        assert (scores.logprobs.shape, scores.entropy.shape, scores.collision.shape) == (
            (0,),
            (0,),
            (0,),
        )

    def test_loss_and_gradient_norm_are_a_mean_over_tokens(self, folder: Path) -> None:
        trainer = self.build(folder)
        batch = batch_of(trainer, random_rows(LENGTHS))
        model = load_model(folder)
        logprobs = plain_scores(model, batch.rows, _TEMPERATURE).logprobs
        loss = -(batch.advantages * (logprobs - logprobs.detach()).exp()).mean()
        loss.backward()
        squares = torch.stack(
            [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        )
        metrics = trainer.update([batch], PPO)
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(squares.sum().sqrt().item(), rel=1e-5)

    @pytest.mark.parametrize("budget", [30, 100_000])
    def test_rows_that_share_a_prompt_score_and_learn_as_if_each_had_its_own(
        self, folder: Path, budget: int
    ) -> None:
        rows = grouped_rows([(9, [4, 0, 6]), (1, [3]), (9, [2, 2]), (5, [7, 7, 1, 2])])
        trainer = self.build(folder, max_tokens_per_micro_batch=budget)
        model = load_model(folder)
        scores = trainer.logprobs(rows)
        expected = plain_scores(model, rows, _TEMPERATURE)
        assert_close(scores.logprobs, expected.logprobs.detach(), atol=1e-5, rtol=0)
        assert_close(scores.entropy, expected.entropy, atol=1e-4, rtol=0)
        (-(expected.logprobs * signs(rows))).mean().backward()
        squares = torch.stack(
            [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        )
        metrics = trainer.update([batch_of(trainer, rows, signs(rows))], policy_gradient)
        assert metrics["grad_norm"] == pytest.approx(squares.sum().sqrt().item(), rel=1e-5)

    def test_an_update_raises_good_responses_and_lowers_bad_ones(self, folder: Path) -> None:
        trainer = self.build(folder)
        rows = random_rows([(3, 6), (3, 6)])
        before = trainer.logprobs(rows).logprobs
        advantages = torch.tensor([1.0, -1.0]).repeat_interleave(6)
        trainer.update([batch_of(trainer, rows, advantages)], PPO)
        good, bad = (trainer.logprobs(rows).logprobs - before).split(6)
        assert good.sum() > 0 > bad.sum()

    def test_the_micro_batch_size_does_not_change_the_update(self, folder: Path) -> None:
        results = []
        for budget in (1, 20, 100_000):
            trainer = self.build(folder, max_tokens_per_micro_batch=budget)
            batch = batch_of(trainer, random_rows(LENGTHS))
            results.append((trainer.update([batch], PPO), trainer.logprobs(batch.rows).logprobs))
        for metrics, logprobs in results[1:]:
            assert metrics == pytest.approx(results[0][0], abs=1e-5)
            assert_close(logprobs, results[0][1], atol=1e-4, rtol=0)

    def test_the_loss_function_gets_each_tokens_own_columns(self, folder: Path) -> None:
        trainer = self.build(folder, max_tokens_per_micro_batch=20)
        batch = batch_of(trainer, random_rows(LENGTHS))
        seen: list[LossInputs] = []

        def loss(inputs: LossInputs) -> TokenLoss:
            seen.append(inputs)
            return TokenLoss(
                loss=inputs.logprobs,
                metrics={"age": inputs.old_logprobs - inputs.logprobs.detach()},
            )

        metrics = trainer.update([batch], loss)
        for name in ("old_logprobs", "advantages", "rollout_logprobs"):
            assert torch.equal(
                torch.cat([getattr(inputs, name).cpu() for inputs in seen]), getattr(batch, name)
            )
        lengths = torch.cat([inputs.offsets.diff() for inputs in seen])
        assert lengths.tolist() == [response for _, response in LENGTHS]
        assert metrics["age"] == pytest.approx(0.0, abs=1e-5)

    def test_masked_tokens_do_not_reach_the_loss(self, folder: Path) -> None:
        rows = random_rows(LENGTHS)
        mask = torch.arange(response_tokens(rows)) % 3 != 0
        mask[:4] = False  # this row keeps no token
        seen: list[LossInputs] = []

        def loss(inputs: LossInputs) -> TokenLoss:
            seen.append(inputs)
            return TokenLoss(loss=-inputs.advantages * inputs.logprobs)

        trainer = self.build(folder, max_tokens_per_micro_batch=20)
        batch = batch_of(trainer, rows, mask=mask)
        metrics = trainer.update([batch], loss)
        assert torch.equal(
            torch.cat([inputs.advantages.cpu() for inputs in seen]), batch.advantages[mask]
        )
        lengths = torch.cat([inputs.offsets.diff() for inputs in seen])
        assert lengths.tolist() == [
            int(m.sum()) for m in mask.split([response for _, response in LENGTHS])
        ]
        expected = -(batch.advantages * batch.old_logprobs)[mask].mean()
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)

    @pytest.mark.parametrize("budget", [20, 100_000])
    def test_an_aggregation_counts_all_rows_of_the_minibatch(
        self, folder: Path, budget: int
    ) -> None:
        trainer = self.build(folder, max_tokens_per_micro_batch=budget)
        batch = batch_of(trainer, random_rows(LENGTHS))
        metrics = trainer.update(
            [batch], lambda inputs: TokenLoss(loss=inputs.logprobs), sequence_mean_token_sum
        )
        rows_with_tokens = sum(response > 0 for _, response in LENGTHS)
        assert metrics["loss"] == pytest.approx(
            batch.old_logprobs.sum().item() / rows_with_tokens, rel=1e-5
        )

    @pytest.mark.parametrize("budget", [20, 100_000])
    def test_an_episode_of_several_rows_counts_as_one(self, folder: Path, budget: int) -> None:
        trainer = self.build(folder, max_tokens_per_micro_batch=budget)
        # the first three rows are one episode, with 7 tokens elsewhere
        batch = batch_of(trainer, random_rows(LENGTHS))
        spans = EpisodeSpans(
            torch.tensor([0, 4, 17, 0, 0, 0, 0]), torch.tensor([21, 21, 21, 1, 0, 11, 6])
        )
        metrics = trainer.update(
            [replace(batch, episodes=spans)],
            lambda inputs: TokenLoss(loss=inputs.logprobs),
            sequence_mean_token_mean,
        )
        lengths = spans.lengths.repeat_interleave(
            torch.tensor([response for _, response in LENGTHS])
        )
        assert metrics["loss"] == pytest.approx(
            float((batch.old_logprobs / (4 * lengths)).sum()), rel=1e-5
        )

    def test_the_learning_rate_rises_during_warmup(self, folder: Path) -> None:
        trainer = self.build(folder, lr=1e-3, warmup_steps=4)
        batch = batch_of(trainer, random_rows(LENGTHS))
        rates = [trainer.update([batch], PPO)["lr"] for _ in range(5)]
        assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])

    def test_a_minibatch_without_tokens_is_counted_and_takes_no_step(self, folder: Path) -> None:
        trainer = self.build(folder)
        before = copied_weights(trainer)
        metrics = trainer.update(
            [batch_of(trainer, random_rows([])), batch_of(trainer, random_rows([(3, 0)]))], PPO
        )
        assert metrics["empty_minibatches"] == 2
        assert "loss" not in metrics
        assert_same_tensors(copied_weights(trainer), before)

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_nonfinite_numbers_stop_training_before_a_step(
        self, folder: Path, number: float
    ) -> None:
        trainer = self.build(folder)
        rows = random_rows(LENGTHS)
        advantages = torch.ones(response_tokens(rows))
        advantages[3] = number
        before = copied_weights(trainer)
        with pytest.raises(TrainingError, match="mini-batch 1 of 1"):
            trainer.update([batch_of(trainer, rows, advantages)], PPO)
        assert_same_tensors(copied_weights(trainer), before)
        trainer.update([batch_of(trainer, rows)], PPO)  # the failed update left no trace
        assert all(bool(tensor.isfinite().all()) for tensor in copied_weights(trainer).values())

    def test_what_is_not_finite_is_found_by_row_and_its_step_left_out_where_asked(
        self, folder: Path
    ) -> None:
        """In micro-batches of at most 20 tokens: an advantage in row 5, and a gradient that a
        loss of 0 hides.
        """
        trainer = self.build(folder, max_tokens_per_micro_batch=20)
        rows = random_rows(LENGTHS)
        found: list[NonFinite] = []
        advantages = signs(rows)
        # row 5 has all but the last six of its response tokens before it
        advantages[-7] = float("nan")
        before = copied_weights(trainer)
        metrics = trainer.update(
            [batch_of(trainer, rows, advantages)], PPO, on_nonfinite=found.append
        )
        assert metrics["skipped_steps"] == 1
        assert "loss" not in metrics
        assert_same_tensors(copied_weights(trainer), before)
        assert (found[0].minibatch, found[0].in_a_row, found[0].may_skip) == (0, 1, True)
        assert {name: [*at] for name, at in found[0].rows.items()} == {
            "advantages": [5],
            "loss": [5],
        }
        assert len(found[0].micro_batches) == 1
        trainer.update(
            [batch_of(trainer, rows)], _hidden_in_the_gradient, on_nonfinite=found.append
        )
        assert_same_tensors(copied_weights(trainer), before)
        assert found[1].loss == 0
        assert found[1].in_a_row == 2
        assert found[1].micro_batches
        assert trainer.update([batch_of(trainer, rows)], PPO)["skipped_steps"] == 0

    def test_weights_are_the_models_parameters_by_name(self, folder: Path) -> None:
        trainer = self.build(folder)
        assert_same_tensors(
            copied_weights(trainer),
            {name: p.detach() for name, p in load_model(folder).named_parameters()},
        )

    def test_two_ranks_learn_like_one(
        self, folder: Path, two_ranks: list[dict[str, object]]
    ) -> None:
        """Rows are split unevenly. In the second mini-batch one rank has none, in the third no
        rank has any.
        """
        alone = _learn(self.make_trainer, folder, Rank())
        for seen in two_ranks:
            assert seen["metrics"] == pytest.approx(alone["metrics"], abs=1e-5)
            assert_close(seen["logprobs"], alone["logprobs"], atol=1e-4, rtol=0)

    def test_ranks_stay_equal_bit_for_bit(self, two_ranks: list[dict[str, object]]) -> None:
        assert_same_tensors(two_ranks[0]["weights"], two_ranks[1]["weights"])  # type: ignore[arg-type]

    def test_every_rank_leaves_a_step_out_if_one_has_nonfinite_numbers(
        self, two_ranks: list[dict[str, object]]
    ) -> None:
        assert [seen["found"] for seen in two_ranks] == [[["advantages", "loss"]], [[]]]
        assert [seen["skipped"] for seen in two_ranks] == [1.0, 1.0]
        first = two_ranks[0]["weights after"]
        second = two_ranks[1]["weights after"]
        before = two_ranks[0]["weights"]
        assert isinstance(first, dict)
        assert isinstance(second, dict)
        assert isinstance(before, dict)
        assert_same_tensors(first, second)
        assert any(not torch.equal(tensor, before[name]) for name, tensor in first.items()), (
            "the next one took a step"
        )

    def test_every_rank_stops_if_one_has_nonfinite_numbers(
        self, two_ranks: list[dict[str, object]]
    ) -> None:
        assert [seen["error"] for seen in two_ranks] == ["TrainingError", "TrainingError"]


def _learn(make_trainer: object, folder: Path, rank: Rank) -> dict[str, object]:
    """Learn from three mini-batches, then fail on a fourth. Returns this rank's metrics, scores,
    weights and error.
    """
    assert callable(make_trainer)
    trainer: Trainer = make_trainer(folder, TrainerConfig(lr=1e-4), _TEMPERATURE, rank)
    probe = random_rows(LENGTHS)

    def own_batch(lengths: Lengths, rows_of_rank_0: int) -> TrainBatch:
        if rank.size == 1:
            return batch_of(trainer, random_rows(lengths))
        rows = range(rows_of_rank_0) if rank.rank == 0 else range(rows_of_rank_0, len(lengths))
        return batch_of(trainer, random_rows(lengths, rows))

    metrics = trainer.update(
        [own_batch(LENGTHS, 2), own_batch(LENGTHS[:4], 4), own_batch([], 0)], PPO
    )
    seen: dict[str, object] = {
        "metrics": metrics,
        "logprobs": trainer.logprobs(probe).logprobs,
        "weights": copied_weights(trainer),
    }
    advantages = torch.full((response_tokens(probe),), float("nan") if rank.rank == 0 else 1.0)
    bad = batch_of(trainer, probe, advantages)
    found: list[NonFinite] = []
    try:
        trainer.update([bad], PPO)
    except TrainingError as error:
        seen["error"] = type(error).__name__
    later = trainer.update([bad, batch_of(trainer, probe)], PPO, on_nonfinite=found.append)
    seen |= {"found": [[*one.rows] for one in found], "skipped": later["skipped_steps"]}
    seen["weights after"] = copied_weights(trainer)
    trainer.close()
    return seen


def _hidden_in_the_gradient(inputs: LossInputs) -> TokenLoss:
    """Return losses of 0 whose gradient is not finite."""
    return TokenLoss(loss=(inputs.logprobs * 0).sqrt())
