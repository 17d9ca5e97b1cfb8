"""Conformance tests of a Trainer of models that see images, to inherit.

    class TestMyTrainer(ImageTrainerTests):
        @classmethod
        def make_trainer(cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank) -> Trainer:
            return MyTrainer(folder, config, temperature, rank)

Trainers are built to see images, as ``image_rows.READ`` says. ``folder`` is a tiny random model in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import policy_gradient
from siirl_dask.config import TrainerConfig, VisionPart
from siirl_dask.context import Rank
from siirl_dask.errors import DataError
from siirl_dask.images.families import VlmFamily
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.testing.image_rows import PlainModel, Row, image_rows, pack
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.rows import (
    assert_same_tensors,
    copied_weights,
    load_state,
    random_rows,
    save_state,
    signs,
)
from siirl_dask.training import PackedRows, TrainBatch, Trainer

_TEMPERATURE = 0.7


class ImageTrainerTests:
    """Conformance of a trainer with images. ``make_trainer`` builds one from a Hugging Face
    folder, in float32.
    """

    families: tuple[VlmFamily, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    """Model families whose scores must equal those of a plain forward pass."""

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
    def folders(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[VlmFamily, Path]:
        parent = tmp_path_factory.mktemp("image-trainer")
        return {
            family: tiny_vlm(parent / family, seed=1, family=family, depth=2)
            for family in cls.families
        }

    @pytest.fixture(
        params=[pytest.param("qwen2_vl", marks=pytest.mark.slow), "qwen2_5_vl", "qwen3_vl"]
    )
    def folder(self, folders: dict[VlmFamily, Path], request: pytest.FixtureRequest) -> Path:
        if request.param not in folders:
            pytest.skip("the trainer does not train this family")
        return folders[request.param]

    def build(self, folder: Path, **settings: object) -> Trainer:
        config = TrainerConfig(**{"lr": 1e-3, **settings})  # type: ignore[arg-type]
        return self.make_trainer(folder, config, _TEMPERATURE, Rank())

    @pytest.mark.parametrize("budget", [50, 100_000])
    def test_packed_rows_score_and_learn_as_each_by_itself(self, folder: Path, budget: int) -> None:
        rows = pack(image_rows(folder))
        trainer = self.build(folder, max_tokens_per_micro_batch=budget)
        plain = PlainModel(folder)
        expected = plain.logprobs(rows, _TEMPERATURE)
        assert_close(trainer.logprobs(rows).logprobs, expected.detach(), atol=1e-5, rtol=0)
        (-(expected * signs(rows))).mean().backward()
        gradients = [
            p.grad.double().square().sum() for p in plain.model.parameters() if p.grad is not None
        ]
        metrics = trainer.update([_batch(trainer, rows)], policy_gradient)
        assert metrics["grad_norm"] == pytest.approx(
            torch.stack(gradients).sum().sqrt().item(), rel=1e-5
        )

    def test_a_placeholder_that_was_sampled_is_an_ordinary_token(self, folder: Path) -> None:
        rows = image_rows(folder, sampled=True)
        trainer = self.build(folder)
        alone = torch.cat([trainer.logprobs(pack([row])).logprobs for row in rows])
        assert_close(trainer.logprobs(pack(rows)).logprobs, alone, atol=1e-5, rtol=0)
        prompt, response, images = rows[0]
        seen = trainer.logprobs(pack([(prompt, response[:-1], images)])).logprobs
        assert_close(seen, alone[: len(response) - 1], atol=1e-5, rtol=0)

    def test_what_an_image_shows_changes_the_scores(self, folder: Path) -> None:
        rows = image_rows(folder)
        trainer = self.build(folder)
        (prompt, response, _) = rows[0]
        other = rows[3][2]
        one, same = (
            trainer.logprobs(pack([(prompt, response, images)])).logprobs
            for images in (rows[0][2], other)
        )
        assert float((one - same).abs().max()) > 1e-4

    def test_an_image_of_another_size_than_its_places_is_refused(self, folder: Path) -> None:
        rows = image_rows(folder)
        trainer = self.build(folder)
        prompt, response, _ = rows[0]
        with pytest.raises(DataError, match="row 1"):
            trainer.logprobs(pack([rows[0], (prompt, response, rows[6][2][:1])]))

    def test_a_frozen_part_stays_as_it_is_and_the_rest_learns(self, folder: Path) -> None:
        rows = pack(image_rows(folder))
        for part, stays in {
            VisionPart.visual: "model.visual.",
            VisionPart.language_model: "model.language_model.",
        }.items():
            trainer = self.build(folder, freeze=[part], weight_decay=0.1)
            before = copied_weights(trainer)
            trainer.update([_batch(trainer, rows)], policy_gradient)
            changed = {
                name
                for name, tensor in copied_weights(trainer).items()
                if not torch.equal(tensor, before[name])
            }
            assert changed
            assert changed == {name for name in before if not name.startswith(stays)} - {
                "lm_head.weight"
            }
            assert not [name for name in trainer.state()["optimizer"] if name.startswith(stays)]

    def test_the_tower_learns_at_its_own_rate(self, folder: Path) -> None:
        """The first step of AdamW is as long as the rate, in the direction of the gradient's
        sign.
        """
        rows = pack(image_rows(folder))
        trainer = self.build(folder, visual_lr=1e-5, eps=1e-12)
        before = copied_weights(trainer)
        trainer.update([_batch(trainer, rows)], policy_gradient)
        steps = {
            name: float((tensor - before[name]).abs().max())
            for name, tensor in copied_weights(trainer).items()
        }
        for name, step in steps.items():
            assert step == pytest.approx(
                1e-5 if name.startswith("model.visual.") else 1e-3, rel=0.05
            ), name

    def test_rows_of_text_alone_leave_the_tower_as_it_is(self, folder: Path) -> None:
        trainer = self.build(folder)
        before = copied_weights(trainer)
        rows = random_rows([(3, 4), (5, 6)])
        trainer.update([_batch(trainer, rows)], policy_gradient)
        after = copied_weights(trainer)
        changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
        assert changed == {name for name in before if not name.startswith("model.visual.")}

    def test_weights_are_the_models_parameters_by_name(self, folder: Path) -> None:
        expected = {name: p.detach() for name, p in PlainModel(folder).model.named_parameters()}
        assert_same_tensors(copied_weights(self.build(folder)), expected)

    def test_training_resumes_from_a_checkpoint_bit_for_bit(
        self, folder: Path, tmp_path: Path
    ) -> None:
        rows = [pack(image_rows(folder)[at:]) for at in range(3)]
        steady, stopped, fresh = (self.build(folder, visual_lr=1e-4) for _ in range(3))
        for trainer in (steady, stopped):
            trainer.update([_batch(trainer, rows[0])], policy_gradient)
        save_state(stopped, tmp_path / "state")
        load_state(fresh, tmp_path / "state")
        seen = [
            trainer.update([_batch(trainer, each) for each in rows[1:]], policy_gradient)
            for trainer in (steady, fresh)
        ]
        assert seen[0] == seen[1]
        assert_same_tensors(copied_weights(fresh), copied_weights(steady))

    def test_two_ranks_learn_like_one_where_one_has_no_images(
        self, folder: Path, tmp_path: Path
    ) -> None:
        module = sys.modules[type(self).__module__]
        # a rank may be unable to import the subclass's module
        cloudpickle.register_pickle_by_value(module)
        try:
            both = run_ranks(2, partial(_learn, self.make_trainer, folder), tmp_path)
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        alone = _learn(self.make_trainer, folder, Rank())
        for seen in both:
            assert seen["metrics"] == pytest.approx(alone["metrics"], abs=1e-5)
            assert_close(seen["logprobs"], alone["logprobs"], atol=1e-4, rtol=0)
        assert_same_tensors(both[0]["weights"], both[1]["weights"])


def _learn(make_trainer: object, folder: Path, rank: Rank) -> dict[str, object]:
    """Learn from two mini-batches: of two ranks the first has all images of one, and both have
    some of the other.
    """
    assert callable(make_trainer)
    trainer: Trainer = make_trainer(folder, TrainerConfig(lr=1e-4), _TEMPERATURE, rank)
    rows = image_rows(folder)
    with_images = [row for row in rows if row[2]]
    text = [row for row in rows if not row[2]]

    def own(first: Sequence[Row], second: Sequence[Row]) -> PackedRows:
        if rank.size == 1:
            return pack([*first, *second])
        return pack(first if rank.rank == 0 else second)

    batches = [_batch(trainer, own(with_images, text)), _batch(trainer, own(rows[:4], rows[4:]))]
    metrics = trainer.update(batches, policy_gradient)
    seen = {
        "metrics": metrics,
        "logprobs": trainer.logprobs(pack(rows)).logprobs,
        "weights": copied_weights(trainer),
    }
    trainer.close()
    return seen


def _batch(trainer: Trainer, rows: PackedRows) -> TrainBatch:
    """Make a batch whose old log-probs are the policy's current ones."""
    logprobs = trainer.logprobs(rows).logprobs
    return TrainBatch(
        rows=rows,
        old_logprobs=logprobs,
        advantages=signs(rows),
        rollout_logprobs=logprobs,
    )
