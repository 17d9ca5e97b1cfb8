"""Adapters learn like peft's, on either backend, and nothing else learns."""

import re
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from siirl_dask.algorithms import ppo_clip
from siirl_dask.cli import main
from siirl_dask.commands.plan import describe_run
from siirl_dask.config import Dtype, ModelConfig, RolloutConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Context, Device, Rank
from siirl_dask.driver.checks.preflight import check
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.driver.run import run as run_it
from siirl_dask.errors import ConfigError
from siirl_dask.models.shapes import count_parameters
from siirl_dask.nodes import base_logprobs, load_weights, publish_weights
from siirl_dask.planner.contract import bare
from siirl_dask.rollout import Sampling, build_engine
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.export import export
from siirl_dask.runs.folder import write_identity
from siirl_dask.schema import PARAMETER
from siirl_dask.tasks.tiny_model import VOCABULARY, tiny_model, tiny_tokenizer
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.reference_model import load_model, response_logprobs
from siirl_dask.testing.rows import (
    LENGTHS,
    assert_same_tensors,
    flat,
    load_state,
    random_rows,
    save_state,
    signs,
    split_rows,
)
from siirl_dask.training import TrainBatch, build_critic, build_reference, build_trainer
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from siirl_dask.training.parallel.dtensor import full_tensor, local
from siirl_dask.training.preflight import count_adapters
from tests.conftest import digits_overrides
from tests.settings import trainer_config

ROWS = random_rows(LENGTHS)
LORA = {"lora_rank": 3, "lora_alpha": 8.0}
PPO = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
CASES = {
    "fsdp": {},
    "fsdp, checkpointed and offloaded": {"gradient_checkpointing": True, "offload": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(
        tmp_path_factory.mktemp("lora") / "model", seed=1, hidden=36, heads=3, head_dim=12
    )


def build(folder, make=build_trainer, rank=None, dtype=Dtype.float32, **settings):
    arguments = {"model": ModelConfig(path=str(folder), dtype=dtype)}
    arguments["trainer"] = trainer_config(
        **{"lr": 1e-3, "eps": 1e-6, "max_grad_norm": 1e6} | LORA | settings
    )
    if make is not build_critic:
        arguments["rollout"] = RolloutConfig(temperature=0.7)
    return make(Device("w0"), rank or Rank(), **arguments)


def advance(trainer, at=0, rank=None, loss=PPO):
    """Take one update. The first of two ranks has most rows."""
    lengths = LENGTHS[at:]
    cut = round(0.6 * len(lengths))
    own = {None: None, 0: range(cut), 1: range(cut, len(lengths))}[
        rank.rank if rank and rank.size > 1 else None
    ]
    rows = random_rows(lengths, own)
    logprobs = trainer.logprobs(rows).logprobs
    batch = TrainBatch(
        rows=rows, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(rows)
    )
    return trainer.update([batch], loss)


def gradients(trainer):
    return {
        name: full_tensor(parameter.grad).clone()
        for name, parameter in trainer._network.trainable().items()
    }


def copied(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def learn(trainer, rank=None):
    metrics = [advance(trainer, 0, rank)]
    result = {"gradients": gradients(trainer)}
    metrics += [advance(trainer, at, rank) for at in (1, 2)]
    held = sum(local(tensor).numel() for tensor in flat(trainer.state()).values())
    return result | {
        "metrics": metrics,
        "weights": copied(trainer),
        "held": held,
        "base": scores(trainer),
    }


def scores(trainer):
    """Score the same rows on every rank, with the adapters and without."""
    return trainer.logprobs(ROWS).logprobs, trainer.base_logprobs(ROWS).logprobs


@pytest.fixture(scope="module")
def alone(folder):
    return learn(build(folder))


@pytest.fixture(scope="module")
def pair(folder, tmp_path_factory):
    return run_ranks(
        2,
        partial(on_a_rank, folder, tmp_path_factory.mktemp("state")),
        tmp_path_factory.mktemp("ranks"),
    )


def on_a_rank(folder, states, rank):
    results = {"torch": learn(build(folder, rank=rank), rank)}
    for name, options in CASES.items():
        trainer = build(folder, rank=rank, backend="fsdp", **options)
        results[name] = learn(trainer, rank)
    save_state(trainer, states / "state", rank)
    fresh = build(folder, rank=rank)
    load_state(fresh, states / "state", rank)
    return results | {"resumed": copied(fresh)}


@pytest.mark.parametrize("name", ["torch", *CASES])
def test_two_ranks_learn_like_one_process(name, pair, alone):
    for seen in pair:
        result = seen[name]
        for metrics, expected in zip(result["metrics"], alone["metrics"], strict=True):
            assert metrics == pytest.approx(expected, abs=1e-5)
        for key in ("gradients", "weights"):
            assert list(result[key]) == list(alone[key])
            for parameter, tensor in alone[key].items():
                assert_close(result[key][parameter], tensor, atol=1e-5, rtol=0)
        assert_close(result["base"], alone["base"], atol=1e-5, rtol=0)


def test_a_state_holds_adapters_only_and_loads_on_another_backend(folder, pair, alone):
    parameters = count_adapters(str(folder), trainer_config(**LORA))
    # steps of each, and progress
    assert alone["held"] == 3 * parameters.total + parameters.tensors + 2
    for seen in pair:
        assert seen["fsdp"]["held"] < 0.6 * alone["held"]
        assert_same_tensors(seen["resumed"], seen["fsdp, checkpointed and offloaded"]["weights"])


def test_gradients_equal_those_of_peft(folder, alone):
    trainer, model = build(folder), load_model(folder)
    peft = get_peft_model(model, LoraConfig(r=3, lora_alpha=8, target_modules="all-linear"))
    adapters = trainer.state()["model"]
    named = {
        name.removeprefix("base_model.model.").replace(".default", ""): p
        for name, p in peft.named_parameters()
    }
    with torch.no_grad():
        for name, tensor in adapters.items():
            named[name].copy_(tensor)
    parts = [
        response_logprobs(peft, row[:n].tolist(), row[n:].tolist(), 0.7)
        for row, n in split_rows(ROWS)
    ]
    (-(torch.cat(parts) * signs(ROWS)).mean()).backward()
    learned = {name: p.grad for name, p in named.items() if p.requires_grad}
    assert learned.keys() == adapters.keys()
    for name, gradient in alone["gradients"].items():
        assert_close(gradient, learned[name], atol=1e-6, rtol=1e-4)
    assert max(gradient.abs().max() for gradient in learned.values()) > 1e-3


def test_base_weights_never_change_and_adapters_begin_without_effect(folder):
    trainer, base = build(folder), load_model(folder)
    before = {name: tensor.clone() for name, tensor in trainer._network.by_name().items()}
    began = copied(trainer)
    advance(trainer)
    for name, weight in base.named_parameters():
        assert torch.equal(began[name], weight), name
        assert torch.equal(trainer._network.by_name()[name], weight), name
    moved = {
        name
        for name, tensor in trainer.state()["model"].items()
        if not torch.equal(tensor, before[name])
    }
    # A is next: B was 0
    assert moved == {name for name in trainer.state()["model"] if name.endswith("lora_B.weight")}
    merged = copied(trainer)
    assert {name for name in merged if not torch.equal(merged[name], began[name])} == {
        name for name in began if "_proj" in name
    }


def test_every_start_draws_the_same_adapters_and_leaves_other_seeds_alone(folder):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first = build(folder).state()["model"]
        drawn = torch.rand(3)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), drawn)
        assert_same_tensors(build(folder).state()["model"], first)
    a = first["model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert a.abs().max() <= 1 / 36**0.5  # peft's bound: Kaiming-uniform with a = sqrt(5)
    assert not torch.equal(a, first["model.layers.1.self_attn.q_proj.lora_A.weight"])


@pytest.fixture
def mixture(tmp_path):
    """A mixture of experts whose first layer has none."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 36,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
    }
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).save_pretrained(
        tmp_path / "mixture"
    )
    tiny_tokenizer().save_pretrained(tmp_path / "mixture")
    return tmp_path / "mixture"


def test_the_experts_of_a_mixture_get_no_adapters_beside_a_layer_that_has_none(mixture):
    state = build(mixture).state()["model"]
    assert {name.split(".")[-3] for name in state if "layers.0" in name} >= {
        "q_proj",
        "gate_proj",
        "down_proj",
    }
    assert not any("experts" in name for name in state)
    parameters = count_adapters(str(mixture), trainer_config(**LORA))
    assert (parameters.total, parameters.tensors) == (
        sum(t.numel() for t in state.values()),
        len(state),
    )


@pytest.mark.parametrize("kind", ["folder", "mixture"])
def test_merged_weights_score_like_the_trainer(kind, request):
    folder = request.getfixturevalue(kind)
    trainer = build(folder, lr=3e-2)
    advance(trainer)
    model = load_model(folder)
    model.load_state_dict(copied(trainer), strict=False)
    model.tie_weights()
    logprobs = [
        response_logprobs(model, row[:n].tolist(), row[n:].tolist(), 0.7)
        for row, n in split_rows(ROWS)
    ]
    now, before = scores(trainer)
    assert_close(torch.cat(logprobs).detach(), now, atol=1e-5, rtol=0)
    assert (now - before).abs().max() > 0.01


@pytest.mark.parametrize("backend", ["torch", "fsdp"])
def test_base_logprobs_equal_a_references(folder, backend):
    trainer, reference = (
        build(folder, lr=1e-2, backend=backend),
        build(folder, build_reference, backend=backend),
    )
    for _ in range(2):  # scoring without adapters must not stop learning
        norm = advance(trainer)["grad_norm"]
        now, base = scores(trainer)
        assert_close(base, reference.logprobs(ROWS).logprobs, atol=1e-6, rtol=0)
        assert_close(base, reference.base_logprobs(ROWS).logprobs, atol=1e-6, rtol=0)
        assert (now - base).abs().max() > 1e-3
    untouched = build(folder, lr=1e-2, backend=backend)
    advance(untouched)
    assert advance(untouched)["grad_norm"] == norm
    with pytest.raises(TypeError, match=r"lora\.rank"):
        build(folder, lora_rank=0).base_logprobs(ROWS)


def test_training_resumes_from_a_checkpoint_bit_for_bit(folder, tmp_path):
    settings = {"ema_decay": 0.5, "warmup_steps": 2}
    steady, stopped = build(folder, **settings), build(folder, **settings)
    assert [advance(steady, at) for at in (0, 1)] == [advance(stopped, at) for at in (0, 1)]
    save_state(stopped, tmp_path / "state")
    fresh = build(folder, **settings)
    load_state(fresh, tmp_path / "state")
    assert [advance(steady, at) for at in (2, 3)] == [advance(fresh, at) for at in (2, 3)]
    assert_same_tensors(copied(fresh), copied(steady))
    average = dict(fresh.ema_weights())
    assert_same_tensors(average, dict(steady.ema_weights()))
    assert list(average) == list(copied(fresh))
    with pytest.raises(ValueError, match="it lacks"):
        build(folder, lora_rank=0).load_state(fresh.state())


def test_a_critic_learns_adapters_and_its_head(folder):
    critics = [build(folder, build_critic, backend=backend) for backend in ("torch", "fsdp")]
    states = [critic.state()["model"] for critic in critics]
    assert list(states[0]) == list(states[1])
    assert [name for name in states[0] if "lora_" not in name] == [
        "value_head.weight",
        "value_head.bias",
    ]
    for name, tensor in states[0].items():
        assert torch.equal(full_tensor(states[1][name]), tensor)
    names = {name for name, _ in critics[0].weights()}
    assert names == {name for name, _ in build(folder, build_critic, lora_rank=0).weights()}


def test_bfloat16_learns_in_float32(folder):
    trainer, exact = build(folder, dtype=Dtype.bfloat16), build(folder)
    assert advance(trainer)["grad_norm"] == pytest.approx(advance(exact)["grad_norm"], rel=0.1)
    assert {tensor.dtype for tensor in trainer.state()["model"].values()} == {torch.float32}
    assert {tensor.dtype for _, tensor in trainer.weights()} == {torch.bfloat16}


def test_only_named_targets_get_adapters(folder):
    state = build(folder, lora_targets=["v_proj", "q_proj"]).state()["model"]
    assert {name.split(".")[-3] for name in state} == {"q_proj", "v_proj"}
    parameters = count_adapters(
        str(folder), trainer_config(**LORA, lora_targets=["v_proj", "q_proj"])
    )
    assert (parameters.total, parameters.tensors) == (
        sum(t.numel() for t in state.values()),
        len(state),
    )


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_prj"])
def test_a_target_that_is_no_linear_layer_is_refused(folder, target):
    with pytest.raises(
        ConfigError, match=rf"no linear layer '{target}' \(there are: \['down_proj'"
    ):
        build(folder, lora_targets=["q_proj", target])


def context(resource):
    return Context(step=1, run_seed=0, rank=Rank(), device=Device("w0"), resource=resource)


def test_an_engine_merges_published_adapters_into_the_same_weights(folder, tmp_path):
    bare = tmp_path / "half"
    tiny_model(bare, seed=1)
    file = bare / "model.safetensors"
    save_file(
        {name: tensor.half() for name, tensor in load_file(file).items()}, file, {"format": "pt"}
    )
    trainer = build(bare, lr=1e-2)
    advance(trainer)
    model = ModelConfig(path=str(bare))
    lora = trainer_config(**LORA).lora
    table = publish_weights(context(trainer), pa.table({}), lora=lora)
    assert set(table[PARAMETER].to_pylist()) == set(trainer.state()["model"])
    engines = [
        build_engine(
            Device("w0"), Rank(), model=model, rollout=RolloutConfig(engine="transformers")
        )
        for _ in "ab"
    ]
    load_weights(context(engines[0]), table, lora=lora)
    engines[1].load_weights(trainer.weights(), 1)
    loaded = [dict(engine._model.named_parameters()) for engine in engines]
    assert_same_tensors(*loaded)
    assert engines[0].generate([[1, 2]], [0], Sampling(max_tokens=4))[0].token_ids
    with pytest.raises(
        TypeError, match=r"object has no load_adapters: leave lora out of the options"
    ):
        load_weights(context(object()), table, lora=lora)
    whole = publish_weights(context(trainer), pa.table({}), lora=trainer_config(lora_rank=0).lora)
    assert set(whole[PARAMETER].to_pylist()) == {name for name, _ in trainer.weights()}
    for wrong, said in (
        (table.slice(1), "lora_A.weight is missing"),
        (whole, "there is no weight"),
    ):
        with pytest.raises(ValueError, match=f"adapters of version 1 do not fit: .*{said}"):
            load_weights(context(engines[0]), wrong, lora=lora)
    assert_same_tensors(*loaded)


def test_adapters_of_a_model_whose_files_have_other_names_are_refused_with_the_cure(tmp_path):
    bare = tmp_path / "renamed"
    model = ModelConfig(path=str(tiny_model(bare, seed=1)))
    engine = build_engine(
        Device("w0"), Rank(), model=model, rollout=RolloutConfig(engine="transformers")
    )
    file = bare / "model.safetensors"
    save_file(
        {f"other.{name}": tensor for name, tensor in load_file(file).items()},
        file,
        {"format": "pt"},
    )
    with pytest.raises(
        ConfigError, match=r"its \*.safetensors lack .*leave lora out of the options"
    ):
        engine.load_adapters(adapters_of(engine), 1.0, 1)


def adapters_of(engine):
    """Yield an adapter of rank 2 for one weight of the engine."""
    name, shape = next(
        (name, shape)
        for name, shape in engine._parameters.shapes.items()
        if "q_proj.weight" in name
    )
    layer = name.removesuffix(".weight")
    yield f"{layer}.lora_A.weight", torch.zeros(2, shape[1])
    yield f"{layer}.lora_B.weight", torch.zeros(shape[0], 2)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def run(request, digits_task, tmp_path):
    """Folders of a run with a checkpoint and of its base model, and the trainer that was saved."""
    url, base = str(tmp_path / "run"), tiny_model(tmp_path / "base", tied=request.param)
    settings = {
        "model.path": base,
        "trainer.ema_decay": 0.9,
        "trainer.lora.rank": 4,
        "trainer.lora.alpha": 6.5,
    }
    overrides = [
        *digits_overrides(digits_task, url),
        *(f"{key}={value}" for key, value in settings.items()),
    ]
    file = load_config_file(shipped("quickstart.yaml"), overrides)
    config = file.config
    write_identity(config, dags(file)[0], replace=False)
    trainer = build_trainer(
        Device("w"), Rank(), model=config.model, trainer=config.trainer, rollout=config.rollout
    )
    for at in range(3):
        advance(trainer, at)
    attempt = take(url, 30.0, print)
    checkpoints = Checkpoints(attempt=attempt, keep=9)
    at = checkpoints.folder(1)
    written = (
        DistributedCheckpoint(asynchronous=False)
        .save(f"{at}/policy", trainer.state(), None)
        .result()
    )
    checkpoints.commit(
        at,
        CheckpointState(step=1, roles=["policy"]),
        {f"policy/{name}": one for name, one in written.items()},
    )
    return url, base, trainer


def plain_scores(model):
    with torch.no_grad():
        logprobs = [
            response_logprobs(model, row[:n].tolist(), row[n:].tolist())
            for row, n in split_rows(ROWS)
        ]
    return torch.cat(logprobs)


def test_an_export_is_the_merged_model_or_peft_adapters(run, tmp_path):
    url, base, trainer = run
    main(["export", url, str(tmp_path / "merged")])
    main(["export", url, str(tmp_path / "adapter"), "--adapter"])
    merged, bare = load_model(tmp_path / "merged"), load_model(base)
    adapted = PeftModel.from_pretrained(load_model(base), tmp_path / "adapter").eval()
    now, before = scores(trainer)
    assert (now - before).abs().max() > 1e-3
    for model, expected in ((merged, now), (adapted, now), (bare, before)):
        assert_close(plain_scores(model), expected, atol=1e-5, rtol=0)
    assert_same_tensors(
        {name: p.detach() for name, p in merged.named_parameters()}, copied(trainer)
    )
    export(url, str(tmp_path / "average"), ema=True)
    average = {name: p.detach() for name, p in load_model(tmp_path / "average").named_parameters()}
    assert_same_tensors(average, dict(trainer.ema_weights()))


def test_adapters_of_another_model_are_not_exported(run, tmp_path):
    url, base, _ = run
    file = Path(url, "config.yaml")
    text = file.read_text()
    file.write_text(text.replace("rank: 4", "rank: 2"))
    with pytest.raises(
        ConfigError, match=r"adapters of rank \[4\], and the config .* trainer.lora.rank=2"
    ):
        export(url, str(tmp_path / "out"))
    file.write_text(text)
    tiny_model(base, hidden=32)
    with pytest.raises(ConfigError, match="do not fit it; is that folder another model by now"):
        export(url, str(tmp_path / "out"))


BARE = {
    "trainer.lora.rank=-1": r"trainer\.lora\.rank=-1: expected at least 0",
    "trainer.lora.alpha=0": r"trainer\.lora\.alpha=0\.0: expected more than 0",
    "trainer.lora.targets=[q_proj]": r"no adapters with trainer\.lora\.rank=0",
}


@pytest.mark.parametrize("override", BARE)
def test_invalid_adapter_options_are_refused(override):
    with pytest.raises(ConfigError, match=BARE[override]):
        load_config_file(shipped("quickstart.yaml"), [override])


def test_impossible_adapters_are_refused_before_anything_starts(digits_task, tmp_path):
    def start(*overrides, text=""):
        file = tmp_path / "run.yaml"
        file.write_text(f"base: {shipped('quickstart.yaml')}\n{text}\n")
        file = load_config_file(
            file, [*digits_overrides(digits_task, tmp_path / "run"), *overrides]
        )
        run_it(file.config, *dags(file))

    with pytest.raises(ConfigError, match=r"no linear layer 'q_prj' .*did you mean 'q_proj'"):
        start("trainer.lora.rank=4", "trainer.lora.targets=[q_prj]")
    with pytest.raises(
        ConfigError, match=r"node 'update' runs .*base_logprobs, which needs a role with adapters"
    ):
        start(text='nodes: {update: {run: "siirl_dask.nodes:base_logprobs", with: null}}')
    assert not (tmp_path / "run").exists()


def test_the_configs_in_the_docs_can_be_planned(digits_task, tmp_path):
    docs = (
        (Path(__file__).parents[2] / "docs" / "training.md").read_text().partition("## Adapters")[2]
    )
    first, second = re.findall(
        r"```yaml\nbase: quickstart.yaml\n(.*?)```.*?```yaml\n(.*?)```", docs, re.DOTALL
    )[0]
    for at, text in enumerate((first, f"trainer: {{lora: {{rank: 8}}}}\n{second}")):
        file = tmp_path / f"{at}.yaml"
        file.write_text(f"base: {shipped('quickstart.yaml')}\n{text}")
        read = load_config_file(file, digits_overrides(digits_task, tmp_path / "run"))
        dag, validation = dags(read)
        describe_run(read.config, dag, validation)
        assert any(bare(node.fn) is base_logprobs for node in dag.nodes) == (not at)
        assert any("lora" in dag.node(name).options for name in ("weights", "load_weights")) == (
            not at
        )


@pytest.mark.parametrize("backend", ["torch", "fsdp"])
def test_the_planned_memory_is_one_copy_of_the_weights_and_the_adapters(digits_task, backend):
    overrides = [
        *digits_overrides(digits_task, "run"),
        "trainer.lora.rank=4",
        f"trainer.backend={backend}",
    ]
    file = load_config_file(shipped("quickstart"), overrides)
    phases = plan_phases(file.config, *dags(file), worker_names(file.config))
    held = {
        role: size
        for memory in check(file.config, phases).memory
        for role, size in memory.roles.items()
    }
    model = str(digits_task.model)
    all_of_it, adapters = count_parameters(model), count_adapters(model, file.config.trainer)
    size = 4 * all_of_it.total + 16 * adapters.total
    gathered = 16 * all_of_it.largest + 2 * 4 * all_of_it.total
    assert held["policy"] == (size if backend == "torch" else -(-size // 2) + gathered)
