"""A policy goes by given routes: its log-probs and gradients are those of transformers with the
same routes.
"""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import TokenLoss
from siirl_dask.config import ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError, DataError
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.reference_model import load_model, response_logprobs
from siirl_dask.testing.rows import LENGTHS, grouped_rows, random_rows, signs, split_rows
from siirl_dask.training import TrainBatch, build_reference, build_trainer
from siirl_dask.training.packing import micro_batches
from siirl_dask.training.parallel.dtensor import full_tensor
from tests.settings import trainer_config
from tests.training.routes import routed

LAYERS, EXPERTS, CHOSEN = 3, 4, 2
WIDTH = LAYERS * CHOSEN
drawn = partial(routed, layers=LAYERS, experts=EXPERTS, chosen=CHOSEN)
GROUPS = [(9, [4, 1, 6]), (3, [5]), (12, [2, 3])]
BACKENDS = {
    "torch": {},
    "torch, checkpointed": {"gradient_checkpointing": True},
    "fsdp": {"backend": "fsdp"},
    "fsdp, checkpointed": {"backend": "fsdp", "gradient_checkpointing": True},
}


@pytest.fixture(
    scope="module", params=[True, False], ids=["weights of the chosen", "weights of all"]
)
def folder(request, tmp_path_factory):
    folder = tiny_model(
        tmp_path_factory.mktemp("model"), seed=2, layers=LAYERS, family="qwen3_moe", tied=False
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_topk_prob": request.param}))
    return folder


def policy(folder, *, replay=True, rank=None, build=build_trainer, **settings):
    config = trainer_config(
        **{"max_tokens_per_micro_batch": 40, "lr": 1e-9, "max_grad_norm": 1e6, **settings}
    )
    rollout = RolloutConfig(router_replay=replay)
    model = ModelConfig(path=str(folder))
    return build(Device("w0"), rank or Rank(), model=model, trainer=config, rollout=rollout)


def patched(model, routes):
    """Let transformers' routers choose ``routes`` [T, W]. The weights are a softmax over the
    chosen, or over all.
    """
    for at, layer in enumerate(model.model.layers):
        router, own = layer.mlp.gate, routes[:, at * CHOSEN : (at + 1) * CHOSEN].long().clamp(min=0)

        def forward(hidden, router=router, own=own):
            logits = hidden @ router.weight.T
            if router.norm_topk_prob:
                return logits, logits.gather(1, own).softmax(-1), own
            return logits, logits.softmax(-1).gather(1, own), own

        router.forward = forward


def expected(model, rows):
    """Log-probs of each row by itself, as transformers computes them with the rows' routes."""
    scores = []
    for (row, prompt), routes in zip(
        split_rows(rows), rows.routes.split(rows.offsets.diff().tolist()), strict=True
    ):
        patched(model, routes)
        scores.append(response_logprobs(model, row[:prompt].tolist(), row[prompt:].tolist()))
    return torch.cat(scores)


def weighted(inputs):
    return TokenLoss(loss=-inputs.logprobs * inputs.advantages)


def batch_of(rows):
    logprobs = torch.zeros(len(rows.tokens) - int(rows.prompt_lengths.sum()))
    return TrainBatch(
        rows=rows, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(rows)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "rows", [random_rows(LENGTHS[:4]), grouped_rows(GROUPS)], ids=["rows", "shared prompts"]
)
def test_logprobs_and_gradients_are_those_of_transformers_with_these_routes(folder, backend, rows):
    rows, trainer, model = drawn(rows), policy(folder, **BACKENDS[backend]), load_model(folder)
    scores = expected(model, rows)
    assert_close(trainer.logprobs(rows).logprobs, scores.detach(), atol=1e-6, rtol=0)
    own = policy(folder, replay=False).logprobs(rows).logprobs
    assert (own - scores).abs().max() > 1e-2, "the routes change nothing"
    trainer.update([batch_of(rows)], weighted)
    (-(scores * signs(rows)).mean()).backward()
    gradients = {
        name: full_tensor(parameter.grad) for name, parameter in trainer._network.by_name().items()
    }
    for name, parameter in model.named_parameters():
        assert_close(
            gradients[name],
            parameter.grad,
            atol=1e-6,
            rtol=0,
            msg=lambda text, name=name: f"{name}: {text}",
        )
        assert not name.endswith("mlp.gate.weight") or parameter.grad.abs().max() > 1e-5


def test_a_prompt_is_computed_once_where_all_its_rows_have_the_same_routes(folder):
    rows = drawn(grouped_rows([(9, [4, 1, 6])]))
    (shared,) = micro_batches(rows, 10**6)
    assert shared.shared is not None
    assert shared.input_ids.shape[1] == 9 + 4 + 1 + 6
    assert shared.routes.shape == (20, WIDTH)
    other = rows.routes.clone()
    place = int(rows.offsets[1]) + 3  # a token of the second row's prompt
    other[place] = (other[place] + 1) % EXPERTS
    apart = replace(rows, routes=other)
    (batch,) = micro_batches(apart, 10**6)
    assert batch.shared is None
    trainer = policy(folder)
    assert_close(
        trainer.logprobs(apart).logprobs,
        expected(load_model(folder), apart).detach(),
        atol=1e-6,
        rtol=0,
    )


def test_own_routes_replayed_change_no_bit(folder):
    rows, model = random_rows(LENGTHS), load_model(folder)
    chosen = []
    for row, _ in split_rows(rows):
        seen = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda *given, seen=seen: seen.append(given[2][2]))
            for layer in model.model.layers
        ]
        model(row[None])
        chosen.append(torch.cat(seen, dim=1))
        for hook in hooks:
            hook.remove()
    same = replace(rows, routes=torch.cat(chosen).to(torch.int16))
    on, off = policy(folder), policy(folder, replay=False)
    assert torch.equal(on.logprobs(same).logprobs, off.logprobs(rows).logprobs)


def test_two_ranks_go_by_their_own_rows_routes(folder, tmp_path):
    rows = drawn(random_rows(LENGTHS))
    parts = run_ranks(2, partial(on_rank, folder), tmp_path)
    assert_close(
        torch.cat([scores for scores, _ in parts]),
        policy(folder).logprobs(rows).logprobs,
        atol=1e-6,
        rtol=0,
    )
    trainer = policy(folder)
    trainer.update([batch_of(rows)], weighted)
    for _, gradients in parts:
        for name, parameter in trainer._network.by_name().items():
            assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=0)


def on_rank(folder, rank):
    """Rank 0 has most rows, so that rank 1 has idle passes."""
    whole = drawn(random_rows(LENGTHS))
    first, last = [(0, 5), (5, len(LENGTHS))][rank.rank]
    begin, end = int(whole.offsets[first]), int(whole.offsets[last])
    rows = replace(random_rows(LENGTHS, range(first, last)), routes=whole.routes[begin:end])
    trainer = policy(
        folder, rank=rank, backend="fsdp", max_tokens_per_micro_batch=16, gather_size="0B"
    )
    scores = trainer.logprobs(rows).logprobs
    trainer.update([batch_of(rows)], weighted)
    return scores, {
        name: full_tensor(each.grad).clone() for name, each in trainer._network.by_name().items()
    }


def test_a_reference_chooses_itself(folder):
    rows = drawn(random_rows(LENGTHS))
    reference = policy(folder, build=build_reference)
    plain = policy(folder, replay=False).logprobs(replace(rows, routes=None))
    assert torch.equal(reference.logprobs(rows).logprobs, plain.logprobs)
    adapted = policy(folder, lora_rank=2)
    assert torch.equal(adapted.base_logprobs(rows).logprobs, plain.logprobs)
    assert not torch.equal(adapted.logprobs(rows).logprobs, plain.logprobs)


@pytest.mark.parametrize("call", ["logprobs", "update"])
def test_rows_without_routes_or_with_those_of_another_model_are_refused(folder, call):
    rows, trainer = drawn(random_rows(LENGTHS)), policy(folder)

    def give(routes):
        given = replace(rows, routes=routes)
        return (
            trainer.logprobs(given)
            if call == "logprobs"
            else trainer.update([batch_of(given)], weighted)
        )

    with pytest.raises(
        DataError, match="these rows have no column routed_experts: it comes from generate"
    ):
        give(None)
    with pytest.raises(DataError, match="has 4 experts a token: expected 6, 2 in each of 3 layers"):
        give(rows.routes[:, :4])
    wrong = rows.routes.clone()
    wrong[2, 3] = EXPERTS
    with pytest.raises(DataError, match="names expert 4: expected 0 to 3"):
        give(wrong)
    give(rows.routes)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"backend": "fsdp", "sequence_parallel": 2}, "trainer.fsdp.sequence_parallel=2"),
        ({"backend": "fsdp", "tensor_parallel": 2}, "trainer.fsdp.tensor_parallel=2"),
        ({"compile": True}, "trainer.compile=true"),
    ],
)
def test_layouts_that_replay_no_routes_are_refused(folder, settings, named):
    with pytest.raises(ConfigError, match=f"rollout.router_replay=true with {named}"):
        policy(folder, **settings)


def test_a_model_without_experts_has_no_routes_to_replay(tmp_path):
    folder = tiny_model(tmp_path / "model")
    with pytest.raises(
        ConfigError, match="is a qwen3, and routes are replayed of mixtures of experts"
    ):
        policy(folder)
