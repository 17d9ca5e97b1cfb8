"""Log-probs by a plain forward pass of one row, as the reference for engines and trainers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel

from siirl_dask.algorithms import LossInputs, TokenLoss
from siirl_dask.config import Dtype, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.models.loading import no_progress_bars
from siirl_dask.rollout import Generation, RolloutEngine, Sampling
from siirl_dask.testing.rows import split_rows
from siirl_dask.training import PackedRows, TokenScores, TrainBatch, build_trainer


def load_model(folder: Path) -> PreTrainedModel:
    """Load the model of ``folder`` in float32, in evaluation mode."""
    with no_progress_bars():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def response_scores(
    model: PreTrainedModel,
    prompt: Sequence[int],
    response: Sequence[int],
    temperature: float = 1.0,
) -> Tensor:
    """Return log-probs of the whole vocabulary at each response position. [len(response), V],
    with gradient.
    """
    logits: Tensor = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def response_logprobs(
    model: PreTrainedModel,
    prompt: Sequence[int],
    response: Sequence[int],
    temperature: float = 1.0,
) -> Tensor:
    """Return the log-prob of each response token. [len(response)], with gradient."""
    scores = response_scores(model, prompt, response, temperature)
    return scores.gather(1, torch.tensor(response, dtype=torch.int64)[:, None]).squeeze(1)


def plain_scores(model: PreTrainedModel, rows: PackedRows, temperature: float) -> TokenScores:
    """Score each row by itself, as a Trainer scores packed rows."""
    logprobs = []
    entropy = []
    collision = []
    for row, prompt in split_rows(rows):
        prompt_tokens = row[:prompt].tolist()
        response = row[prompt:].tolist()
        scores = response_scores(model, prompt_tokens, response, temperature)
        logprobs.append(response_logprobs(model, prompt_tokens, response, temperature))
        entropy.append(-(scores.exp() * scores).sum(-1).detach())
        collision.append((2 * scores).exp().sum(-1).detach())
    return TokenScores(torch.cat(logprobs), torch.cat(entropy), torch.cat(collision))


PROMPTS = [
    [(7 * row + place) % 256 for place in range(length)]
    for row, length in enumerate((1, 5, 140, 140, 9, 260))
]
"""Prompts of one token and of many, two of them of equal length."""


def assert_agrees_with_trainer(
    engine: RolloutEngine,
    folder: Path,
    after: Sequence[int],
    device: Device = Device("w0"),  # noqa: B008  # frozen
    dtype: Dtype = Dtype.float32,
    tolerance: float = 1e-4,
) -> None:
    """Check that engine and trainer agree on log-probs of samples, within ``tolerance``, after each
    number of updates in ``after``. The trainer is on ``device``, and the engine loads its weights
    after every update, from there.
    """
    sampling = Sampling(max_tokens=6, temperature=0.7)
    trainer = build_trainer(
        device,
        Rank(),
        model=ModelConfig(path=str(folder), dtype=dtype),
        trainer=TrainerConfig(lr=3e-3),
        rollout=RolloutConfig(temperature=sampling.temperature),
    )
    for updates in range(max(after) + 1):
        samples = engine.generate(PROMPTS, range(len(PROMPTS)), sampling)
        sampled = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
        rows = pack_samples(PROMPTS, samples)
        trained = trainer.logprobs(rows).logprobs
        if updates in after:
            assert_close(sampled, trained, atol=tolerance, rtol=0)
        batch = TrainBatch(
            rows=rows,
            old_logprobs=trained,
            rollout_logprobs=sampled,
            advantages=torch.ones_like(trained),
        )
        trainer.update([batch], _likelier)
        assert float((trainer.logprobs(rows).logprobs - trained).abs().max()) > 1e-2, (
            "the update changed nothing"
        )
        engine.load_weights(trainer.weights(), updates + 1)


def pack_samples(prompts: Sequence[Sequence[int]], samples: Sequence[Generation]) -> PackedRows:
    """Pack prompts and their samples into rows for a trainer."""
    rows = [[*prompt, *sample.token_ids] for prompt, sample in zip(prompts, samples, strict=True)]
    return PackedRows(
        torch.tensor([token for row in rows for token in row]),
        torch.tensor([0, *map(len, rows)]).cumsum(0),
        torch.tensor([len(prompt) for prompt in prompts]),
    )


def _likelier(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(loss=-inputs.logprobs)
