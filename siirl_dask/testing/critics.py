"""Conformance tests of a Critic, to inherit.

class TestMyCritic(CriticTests):
    @classmethod
    def make_critic(cls, folder: Path, config: TrainerConfig, rank: Rank) -> Critic:
        return MyCritic(folder, config, rank)
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from siirl_dask.algorithms import TokenLoss, ValueInputs, value_clip
from siirl_dask.config import TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.errors import TrainingError
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.reference_model import load_model
from siirl_dask.testing.rows import (
    LENGTHS,
    assert_same_tensors,
    copied_weights,
    load_state,
    random_rows,
    response_tokens,
    save_state,
    signs,
)
from siirl_dask.training import Critic, NonFinite, PackedRows, ValueBatch

_LOSS = partial(value_clip, clip=1e6)


class CriticTests:
    """Conformance of a critic. ``make_critic`` builds one from a Hugging Face folder, in
    float32, on a CPU.
    """

    @classmethod
    def make_critic(cls, folder: Path, config: TrainerConfig, rank: Rank) -> Critic:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_model(tmp_path_factory.mktemp("critic") / "model", seed=1)

    def build(self, folder: Path, **settings: object) -> Critic:
        return self.make_critic(folder, TrainerConfig(**{"lr": 1e-2, **settings}), Rank())  # type: ignore[arg-type]

    def test_values_are_zero_before_the_first_update(self, folder: Path) -> None:
        assert torch.equal(self.build(folder).values(random_rows(LENGTHS)), torch.zeros(32))

    def test_values_learn_to_predict_the_returns(self, folder: Path) -> None:
        critic = self.build(folder)
        rows = random_rows(LENGTHS)
        losses = [critic.update([_batch(critic, rows)], _LOSS)["loss"] for _ in range(60)]
        assert losses[-1] < 0.1 * losses[0]
        error = (critic.values(rows) - signs(rows)).square().mean()
        assert error < 0.2

    def test_a_value_depends_on_earlier_tokens_only(self, folder: Path) -> None:
        critic = self.build(folder)
        rows = random_rows([(3, 6)])
        critic.update([_batch(critic, rows)], _LOSS)
        before = critic.values(rows)
        changed = rows.tokens.clone()
        changed[3 + 2] = (changed[3 + 2] + 1) % 7
        after = critic.values(PackedRows(changed, rows.offsets, rows.prompt_lengths))
        assert torch.equal(before[:3], after[:3])
        assert not torch.allclose(before[3:], after[3:])

    def test_values_of_packed_rows_equal_those_of_single_rows(self, folder: Path) -> None:
        critic = self.build(folder, max_tokens_per_micro_batch=20)
        rows = random_rows(LENGTHS)
        critic.update([_batch(critic, rows)], _LOSS)
        alone = [
            critic.values(random_rows(LENGTHS, range(row, row + 1))) for row in range(len(LENGTHS))
        ]
        assert_close(critic.values(rows), torch.cat(alone), atol=1e-5, rtol=0)

    def test_masked_tokens_do_not_reach_the_loss(self, folder: Path) -> None:
        critic = self.build(folder)
        seen: list[ValueInputs] = []

        def loss(inputs: ValueInputs) -> TokenLoss:
            seen.append(inputs)
            return _LOSS(inputs)

        rows = random_rows(LENGTHS)
        mask = torch.arange(response_tokens(rows)) % 3 != 0
        critic.update([_batch(critic, rows, mask)], loss)
        assert torch.equal(torch.cat([inputs.returns for inputs in seen]), signs(rows)[mask])

    def test_nonfinite_returns_stop_training_before_a_step(self, folder: Path) -> None:
        critic = self.build(folder)
        rows = random_rows(LENGTHS)
        before = copied_weights(critic)
        values = critic.values(rows)
        with pytest.raises(TrainingError, match="mini-batch 1 of 1"):
            critic.update(
                [ValueBatch(rows=rows, old_values=values, returns=values + float("nan"))], _LOSS
            )
        assert_same_tensors(copied_weights(critic), before)
        returns = signs(rows)
        found: list[NonFinite] = []
        returns[0] = float("inf")
        bad = ValueBatch(rows=rows, old_values=values, returns=returns)
        assert critic.update([bad], _LOSS, on_nonfinite=found.append)["skipped_steps"] == 1
        assert_same_tensors(copied_weights(critic), before)
        assert found[0].rows["returns"] == [0]

    def test_weights_are_the_decoders_and_one_head(self, folder: Path) -> None:
        weights = copied_weights(self.build(folder))
        model = {
            name: p.shape
            for name, p in load_model(folder).named_parameters()
            if name.startswith("model.")
        }
        head = {name: tensor for name, tensor in weights.items() if name not in model}
        assert {name: weights[name].shape for name in model} == model
        assert (
            sum(tensor.numel() for tensor in head.values())
            == load_model(folder).config.hidden_size + 1
        )

    def test_training_resumes_from_a_checkpoint_bit_for_bit(
        self, folder: Path, tmp_path: Path
    ) -> None:
        steady, stopped, fresh = (self.build(folder) for _ in range(3))
        for critic in (steady, stopped):
            critic.update([_batch(critic, random_rows(LENGTHS))], _LOSS)
        save_state(stopped, tmp_path / "state")
        load_state(fresh, tmp_path / "state")
        rows = random_rows(LENGTHS[:4])
        seen = [critic.update([_batch(critic, rows)], _LOSS) for critic in (steady, fresh)]
        assert seen[0] == seen[1]
        assert_same_tensors(copied_weights(fresh), copied_weights(steady))

    def test_two_ranks_learn_like_one(self, folder: Path, tmp_path: Path) -> None:
        """Rows are split unevenly. In the second mini-batch one rank has none, in the third no
        rank has any.
        """
        module = sys.modules[type(self).__module__]
        # a rank may be unable to import the subclass's module
        cloudpickle.register_pickle_by_value(module)
        try:
            both = run_ranks(2, partial(_learn, self.make_critic, folder), tmp_path)
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        alone = _learn(self.make_critic, folder, Rank())
        for seen in both:
            assert seen["metrics"] == pytest.approx(alone["metrics"], abs=1e-5)
            assert_close(seen["values"], alone["values"], atol=1e-4, rtol=0)
        assert_same_tensors(both[0]["weights"], both[1]["weights"])


def _learn(make_critic: object, folder: Path, rank: Rank) -> dict[str, object]:
    """Learn from three mini-batches. Returns this rank's metrics, values and weights."""
    assert callable(make_critic)
    critic: Critic = make_critic(folder, TrainerConfig(lr=1e-4), rank)

    def own_batch(first: int, last: int, rows_of_rank_0: int) -> ValueBatch:
        cut = first + rows_of_rank_0
        rows = range(first, last)
        if rank.size > 1:
            rows = range(first, cut) if rank.rank == 0 else range(cut, last)
        return _batch(critic, random_rows(LENGTHS, rows))

    metrics = critic.update([own_batch(0, 7, 2), own_batch(0, 4, 4), own_batch(0, 0, 0)], _LOSS)
    seen: dict[str, object] = {
        "metrics": metrics,
        "values": critic.values(random_rows(LENGTHS)),
        "weights": copied_weights(critic),
    }
    critic.close()
    return seen


def _batch(critic: Critic, rows: PackedRows, mask: Tensor | None = None) -> ValueBatch:
    return ValueBatch(rows=rows, mask=mask, old_values=critic.values(rows), returns=signs(rows))
