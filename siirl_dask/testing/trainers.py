"""What every Trainer must do, as tests to inherit.

    class TestMyTrainer(TrainerTests):
        @classmethod
        def make_trainer(cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank) -> Trainer:
            return MyTrainer(folder, config, temperature, rank)

pytest collects what is inherited; ``folder`` is a tiny random model in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from siirl_dask.algorithms import LossInputs, TokenLoss, ppo_clip
from siirl_dask.config import TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.errors import TrainingError
from siirl_dask.testing.forward import load_model, response_logprobs, response_scores
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.tiny import VOCABULARY, Family, tiny_model
from siirl_dask.training import PackedRows, TokenScores, TrainBatch, Trainer

_TEMPERATURE = 0.7
_PPO = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
_LENGTHS = [(3, 4), (1, 6), (3, 4), (9, 1), (5, 0), (2, 11), (1, 6)]
"""(prompt, response) of each row: equal and unequal lengths, and a row without a response."""


class TrainerTests:
    """Conformance of a trainer; ``make_trainer`` builds one from a Hugging Face folder, in float32, on a CPU.

    It runs in other processes as well, one a rank, where ``rank.group`` is a gloo process group.
    """

    families: tuple[Family, ...] = ("qwen3", "qwen2", "llama")
    """Model families it must score as a plain forward pass does."""

    @classmethod
    def make_trainer(cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank) -> Trainer:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_model(tmp_path_factory.mktemp("trainer") / "model", seed=1)

    @pytest.fixture(scope="class")
    @classmethod
    def two_ranks(cls, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
        """What each of two ranks saw of ``_learn``; processes cost seconds, so it is run once."""
        module = sys.modules[cls.__module__]
        cloudpickle.register_pickle_by_value(module)  # a rank may not find the subclass's file by its name
        try:
            return run_ranks(2, partial(_learn, cls.make_trainer, folder), tmp_path_factory.mktemp("ranks"))
        finally:
            cloudpickle.unregister_pickle_by_value(module)

    def build(self, folder: Path, *, temperature: float = _TEMPERATURE, **settings: object) -> Trainer:
        config = TrainerConfig(**{"lr": 1e-3, **settings})  # type: ignore[arg-type]
        return self.make_trainer(folder, config, temperature, Rank())

    def test_scores_are_those_of_a_plain_forward_pass(self, tmp_path: Path) -> None:
        rows = _rows(_LENGTHS)
        for family in self.families:
            folder = tiny_model(tmp_path / family, seed=3, family=family, tied=family != "llama")
            scores = self.build(folder).logprobs(rows)
            expected = _plain_scores(load_model(folder), rows)
            assert_close(scores.logprobs, expected.logprobs, atol=1e-5, rtol=0)
            assert_close(scores.entropy, expected.entropy, atol=1e-4, rtol=0)

    @pytest.mark.parametrize("lengths", [[], [(4, 0), (2, 0)]], ids=["no rows", "no responses"])
    def test_without_response_tokens_there_are_no_scores(self, folder: Path, lengths: list[tuple[int, int]]) -> None:
        scores = self.build(folder).logprobs(_rows(lengths))
        assert (scores.logprobs.shape, scores.entropy.shape) == ((0,), (0,))

    def test_loss_and_gradient_norm_are_those_of_the_mean_over_tokens(self, folder: Path) -> None:
        trainer = self.build(folder)
        batch = _batch(trainer, _rows(_LENGTHS))
        model = load_model(folder)
        logprobs = _plain_scores(model, batch.rows).logprobs
        loss = -(batch.advantages * (logprobs - logprobs.detach()).exp()).mean()
        loss.backward()
        squares = torch.stack([p.grad.double().square().sum() for p in model.parameters() if p.grad is not None])
        metrics = trainer.update([batch], _PPO)
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(squares.sum().sqrt().item(), rel=1e-5)

    def test_good_responses_become_likelier_and_bad_ones_less(self, folder: Path) -> None:
        trainer = self.build(folder)
        rows = _rows([(3, 6), (3, 6)])
        before = trainer.logprobs(rows).logprobs
        advantages = torch.tensor([1.0, -1.0]).repeat_interleave(6)
        trainer.update([_batch(trainer, rows, advantages)], _PPO)
        good, bad = (trainer.logprobs(rows).logprobs - before).split(6)
        assert good.sum() > 0 > bad.sum()

    def test_micro_batches_change_nothing_but_memory(self, folder: Path) -> None:
        results = []
        for budget in (1, 20, 100_000):
            trainer = self.build(folder, max_tokens_per_micro_batch=budget)
            batch = _batch(trainer, _rows(_LENGTHS))
            results.append((trainer.update([batch], _PPO), trainer.logprobs(batch.rows).logprobs))
        for metrics, logprobs in results[1:]:
            assert metrics == pytest.approx(results[0][0], abs=1e-5)
            assert_close(logprobs, results[0][1], atol=1e-4, rtol=0)

    def test_the_loss_function_sees_each_token_with_its_own_numbers(self, folder: Path) -> None:
        trainer = self.build(folder, max_tokens_per_micro_batch=20)
        batch = _batch(trainer, _rows(_LENGTHS))
        seen: list[LossInputs] = []

        def loss(inputs: LossInputs) -> TokenLoss:
            seen.append(inputs)
            return TokenLoss(loss=inputs.logprobs, metrics={"age": inputs.old_logprobs - inputs.logprobs.detach()})

        metrics = trainer.update([batch], loss)
        for name in ("old_logprobs", "advantages", "rollout_logprobs"):
            assert torch.equal(torch.cat([getattr(inputs, name) for inputs in seen]), getattr(batch, name))
        lengths = torch.cat([inputs.offsets.diff() for inputs in seen])
        assert lengths.tolist() == [response for _, response in _LENGTHS]
        assert metrics["age"] == pytest.approx(0.0, abs=1e-5)

    def test_the_first_steps_learn_at_a_growing_rate(self, folder: Path) -> None:
        trainer = self.build(folder, lr=1e-3, warmup_steps=4)
        batch = _batch(trainer, _rows(_LENGTHS))
        rates = [trainer.update([batch], _PPO)["lr"] for _ in range(5)]
        assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])

    def test_a_minibatch_without_tokens_is_skipped_and_counted(self, folder: Path) -> None:
        trainer = self.build(folder)
        before = _copy(trainer)
        metrics = trainer.update([_batch(trainer, _rows([])), _batch(trainer, _rows([(3, 0)]))], _PPO)
        assert metrics["empty_minibatches"] == 2
        assert "loss" not in metrics
        _assert_equal(_copy(trainer), before)

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_numbers_that_are_not_finite_stop_training_before_a_step(self, folder: Path, number: float) -> None:
        trainer = self.build(folder)
        rows = _rows(_LENGTHS)
        advantages = torch.ones(_tokens(rows))
        advantages[3] = number
        before = _copy(trainer)
        with pytest.raises(TrainingError, match="mini-batch 1 of 1"):
            trainer.update([_batch(trainer, rows, advantages)], _PPO)
        _assert_equal(_copy(trainer), before)
        trainer.update([_batch(trainer, rows)], _PPO)  # nothing of it is left behind
        assert all(bool(tensor.isfinite().all()) for tensor in _copy(trainer).values())

    def test_weights_are_the_models_parameters_by_their_names(self, folder: Path) -> None:
        trainer = self.build(folder)
        _assert_equal(_copy(trainer), {name: p.detach() for name, p in load_model(folder).named_parameters()})

    def test_two_ranks_learn_what_one_does(self, folder: Path, two_ranks: list[dict[str, object]]) -> None:
        """Rows are shared unevenly; in the second mini-batch one rank has none, in the third nobody has."""
        alone = _learn(self.make_trainer, folder, Rank())
        for seen in two_ranks:
            assert seen["metrics"] == pytest.approx(alone["metrics"], abs=1e-5)
            assert_close(seen["logprobs"], alone["logprobs"], atol=1e-4, rtol=0)

    def test_ranks_stay_equal_to_the_last_bit(self, two_ranks: list[dict[str, object]]) -> None:
        _assert_equal(two_ranks[0]["weights"], two_ranks[1]["weights"])  # type: ignore[arg-type]

    def test_every_rank_stops_when_one_has_numbers_that_are_not_finite(
        self, two_ranks: list[dict[str, object]]
    ) -> None:
        assert [seen["error"] for seen in two_ranks] == ["TrainingError", "TrainingError"]


def _learn(make_trainer: object, folder: Path, rank: Rank) -> dict[str, object]:
    """Three mini-batches, then one that cannot be learned from; what this rank saw of it."""
    assert callable(make_trainer)
    trainer: Trainer = make_trainer(folder, TrainerConfig(lr=1e-4), _TEMPERATURE, rank)
    probe = _rows(_LENGTHS)

    def mine(lengths: list[tuple[int, int]], rows_of_rank_0: int) -> TrainBatch:
        whole = _rows(lengths)
        if rank.size == 1:
            return _batch(trainer, whole)
        rows = range(rows_of_rank_0) if rank.rank == 0 else range(rows_of_rank_0, len(lengths))
        return _batch(trainer, _rows(lengths, rows))

    metrics = trainer.update([mine(_LENGTHS, 2), mine(_LENGTHS[:4], 4), mine([], 0)], _PPO)
    seen: dict[str, object] = {
        "metrics": metrics,
        "logprobs": trainer.logprobs(probe).logprobs,
        "weights": _copy(trainer),
    }
    advantages = torch.full((_tokens(probe),), float("nan") if rank.rank == 0 else 1.0)
    try:
        trainer.update([_batch(trainer, probe, advantages)], _PPO)
    except TrainingError as error:
        seen["error"] = type(error).__name__
    trainer.close()
    return seen


def _rows(lengths: list[tuple[int, int]], only: range | None = None) -> PackedRows:
    """Random tokens, the same for a row whichever others are asked for."""
    tokens = []
    for row, (prompt, response) in enumerate(lengths):
        generator = torch.Generator().manual_seed(row)
        if only is None or row in only:
            tokens.append(torch.randint(0, VOCABULARY, (prompt + response,), generator=generator))
    prompts = [prompt for row, (prompt, _) in enumerate(lengths) if only is None or row in only]
    offsets = torch.tensor([0, *(len(row) for row in tokens)]).cumsum(0)
    return PackedRows(torch.cat([torch.zeros(0, dtype=torch.int64), *tokens]), offsets, torch.tensor(prompts).long())


def _tokens(rows: PackedRows) -> int:
    return len(rows.tokens) - int(rows.prompt_lengths.sum())


def _batch(trainer: Trainer, rows: PackedRows, advantages: Tensor | None = None) -> TrainBatch:
    """As the policy is now; advantages of +-1 that follow from the tokens, so from no rank."""
    logprobs = trainer.logprobs(rows).logprobs
    if advantages is None:
        responses = [row[prompt:] for row, prompt in _split(rows)]
        advantages = torch.cat([torch.zeros(0), *(1.0 - 2.0 * (response % 2) for response in responses)])
    return TrainBatch(rows=rows, old_logprobs=logprobs, advantages=advantages, rollout_logprobs=logprobs)


def _split(rows: PackedRows) -> list[tuple[Tensor, int]]:
    lengths = rows.offsets.diff().tolist()
    return list(zip(rows.tokens.split(lengths), rows.prompt_lengths.tolist(), strict=True))


def _plain_scores(model: PreTrainedModel, rows: PackedRows) -> TokenScores:
    logprobs, entropy = [], []
    for row, prompt in _split(rows):
        given = row[:prompt].tolist(), row[prompt:].tolist()
        scores = response_scores(model, *given, _TEMPERATURE)
        logprobs.append(response_logprobs(model, *given, _TEMPERATURE))
        entropy.append(-(scores.exp() * scores).sum(-1).detach())
    return TokenScores(torch.cat(logprobs), torch.cat(entropy))


def _copy(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def _assert_equal(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(given) == list(expected)
    for name, tensor in given.items():
        assert torch.equal(tensor, expected[name]), f"{name} differs"
