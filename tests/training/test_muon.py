"""Muon of matrices beside AdamW of the rest, against torch.optim.Muon and torch.optim.AdamW on
whole parameters.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing import assert_close

from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import Dtype, OptimizerName, TrainerConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Rank
from siirl_dask.driver.checks.preflight import check
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.errors import CheckpointError, ConfigError
from siirl_dask.models.architecture import read_architecture
from siirl_dask.models.shapes import count_parameters
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.rows import (
    LENGTHS,
    assert_same_tensors,
    flat,
    load_state,
    random_rows,
    save_state,
    signs,
)
from siirl_dask.training import TrainBatch
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from siirl_dask.training.memory import ModelOnWorkers, held_bytes
from siirl_dask.training.model.heads import PolicyNetwork
from siirl_dask.training.optimizer import Optimizer, learning_rate
from siirl_dask.training.parallel.dtensor import full_tensor
from siirl_dask.training.parallel.mesh import role_mesh
from siirl_dask.training.parts import count_matrices
from siirl_dask.training.remedies import with_remedies
from tests.conftest import digits_overrides
from tests.settings import trainer_config
from tests.training.families import written
from tests.training.roles import critic, policy

SHAPES = {
    "embedding": (6, 4),
    "tall": (7, 3),
    "wide": (3, 8),
    "square": (5, 5),
    "experts": (3, 4, 6),
    "norm": (5,),
}
MATRICES = ("tall", "wide", "square", "experts")
SETTINGS = {
    "optimizer": "muon",
    "lr": 0.05,
    "weight_decay": 0.1,
    "schedule": "cosine",
    "total_steps": 5,
}
SETTINGS |= {"warmup_steps": 1, "min_lr_ratio": 0.1, "ema_decay": 0.75, "betas": (0.8, 0.9)}
RATES = {"wide": 0.5, "norm": 2.0}
STEPS = 4
FSDP = {"backend": "fsdp", "gather_size": "0B"}
LAYERS = {
    "sharded": FSDP,
    "offloaded": FSDP | {"offload": True},
    "replicated": {},
    "shards of one": FSDP | {"shard_size": 1},
}


def drawn(name, step=0):
    generator = torch.Generator().manual_seed(1000 * step + len(name) + sum(SHAPES[name]))
    return torch.randn(SHAPES[name], generator=generator)


class Plain:
    """torch's own two optimizers on whole parameters; the learning rate of each step is set by
    hand.
    """

    def __init__(self, parameters, matrices, config, rates):
        self.parameters = {name: each.detach().clone() for name, each in parameters.items()}
        self.averages = {name: each.clone() for name, each in self.parameters.items()}
        self.config = config
        self.rates = rates
        self.taken = 0
        self.pairs = {
            name: [*each] if each.ndim == 3 else [each] for name, each in self.parameters.items()
        }
        self.optimizers = {}
        for name, parts in self.pairs.items():
            given = {"lr": 0.0, "weight_decay": config.weight_decay}
            self.optimizers[name] = (
                torch.optim.Muon(parts, adjust_lr_fn="match_rms_adamw", **given)
                if name in matrices
                else torch.optim.AdamW(
                    parts, betas=config.betas, eps=config.eps, fused=True, **given
                )
            )

    def step(self, gradients):
        self.taken += 1
        for name, parts in self.pairs.items():
            for part, gradient in zip(
                parts, gradients[name] if len(parts) > 1 else [gradients[name]], strict=True
            ):
                part.grad = gradient
            for group in self.optimizers[name].param_groups:
                group["lr"] = learning_rate(self.config, self.taken) * self.rates.get(name, 1.0)
            self.optimizers[name].step()
            decay = self.config.ema_decay
            self.averages[name].mul_(decay).add_(self.parameters[name], alpha=1 - decay)

    def momentum(self, name):
        """Return the momentum of a matrix, or of a stack of them."""
        buffers = [
            self.optimizers[name].state[part]["momentum_buffer"] for part in self.pairs[name]
        ]
        return torch.stack(buffers) if self.parameters[name].ndim == 3 else buffers[0].clone()

    def held(self):
        """Return weights, and the momentum of each matrix."""
        matrices = [
            name for name, each in self.optimizers.items() if isinstance(each, torch.optim.Muon)
        ]
        weights = {name: each.clone() for name, each in self.parameters.items()}
        return weights | {f"{name}.momentum": self.momentum(name) for name in matrices}


def whole(name):
    return nn.Parameter(drawn(name))


def stepping(names, make, stepped=None):
    """An Optimizer of parameters that ``make`` makes, and its parameters."""
    parameters = {name: make(name) for name in names}
    config = TrainerConfig(**SETTINGS)
    return Optimizer(parameters, config, RATES, stepped, matrices=MATRICES), parameters


def set_gradients(optimizer, parameters, step):
    for parameter in parameters.values():
        assert parameter.grad is not None
    for name, parameter in parameters.items():
        full = drawn(name, step)
        if hasattr(parameter, "device_mesh"):
            parameter.grad.to_local().copy_(
                distribute_tensor(full, parameter.device_mesh, [Shard(0)]).to_local()
            )
        else:
            parameter.grad.copy_(full)


@pytest.fixture(scope="module")
def expected():
    plain = Plain(
        {name: drawn(name) for name in SHAPES}, MATRICES, TrainerConfig(**SETTINGS), RATES
    )
    for step in range(1, STEPS + 1):
        plain.step({name: drawn(name, step) for name in SHAPES})
    return plain


def test_steps_equal_those_of_torchs_optimizers_bit_for_bit(expected):
    optimizer, parameters = stepping(SHAPES, whole)
    for step in range(1, STEPS + 1):
        set_gradients(optimizer, parameters, step)
        optimizer.step()
    assert_same_tensors(
        {name: each.detach() for name, each in parameters.items()}, expected.parameters
    )
    for name, average in optimizer.ema():
        assert_close(average, expected.averages[name], atol=1e-6, rtol=0)
    state = optimizer.state()
    for name in MATRICES:
        assert set(state[name]) == {"momentum_buffer", "ema"}
        assert torch.equal(state[name]["momentum_buffer"], expected.momentum(name))


@pytest.mark.parametrize(
    "halves",
    [
        (("embedding", "tall", "experts"), ("wide", "square", "norm")),
        (MATRICES, ("embedding", "norm")),
    ],
)
def test_ranks_that_each_step_some_parameters_step_them_alike(expected, halves):
    for own in halves:
        optimizer, parameters = stepping(SHAPES, whole, stepped=own)
        for step in range(1, STEPS + 1):
            set_gradients(optimizer, parameters, step)
            optimizer.step()
        for name, parameter in parameters.items():
            assert torch.equal(
                parameter.detach(), expected.parameters[name] if name in own else drawn(name)
            ), name
        assert set(optimizer.state()) == set(own)


def on_shards(rank):
    """Return whole parameters after the steps of ranks that have shards; 7, 3 and 5 rows are no
    even shares.
    """
    mesh = role_mesh(rank, None, torch.device("cpu"))
    optimizer, parameters = stepping(
        SHAPES, lambda name: nn.Parameter(distribute_tensor(drawn(name), mesh, [Shard(0)]))
    )
    for step in range(1, STEPS + 1):
        set_gradients(optimizer, parameters, step)
        optimizer.step()
    return {name: full_tensor(each) for name, each in parameters.items()} | {
        f"{name}.ema": full_tensor(each) for name, each in optimizer.ema()
    }


def own_batch(trainer, rank):
    rows = random_rows(LENGTHS, range(4) if rank.rank == 0 else range(4, len(LENGTHS)))
    if rank.size == 1:
        rows = random_rows(LENGTHS)
    logprobs = trainer.logprobs(rows).logprobs
    return TrainBatch(
        rows=rows, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(rows)
    )


def advance(trainer, rank):
    return trainer.update(
        [own_batch(trainer, rank)], partial(ppo_clip, clip_low=0.2, clip_high=0.2)
    )


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def held(trainer):
    """Return weights, and the momentum of each matrix."""
    momenta = {
        f"{name}.momentum": full_tensor(state["momentum_buffer"]).clone()
        for name, state in trainer.state()["optimizer"].items()
        if "momentum_buffer" in state
    }
    return weights_of(trainer) | momenta


def followed(folder, rank, **settings):
    """Return what a policy holds after each step, and what torch's optimizers do that were given
    its gradients.
    """
    config = trainer_config(**{**SETTINGS, "lr": 1e-2, **settings})
    trainer = policy(folder, config, rank=rank)
    before = weights_of(trainer)
    plain = Plain(before, {name for name in before if is_matrix(name)}, config, {})
    found = []
    for _ in range(STEPS):
        advance(trainer, rank)
        plain.step(
            {
                name: full_tensor(each.grad).clone()
                for name, each in trainer._network.by_name().items()
            }
        )
        found.append((held(trainer), plain.held()))
    return found


def shared(folder, rank, **settings):
    """Count the matrices that this rank's torch.optim.Muon steps."""
    trainer = policy(folder, trainer_config(**SETTINGS | settings), rank=rank)
    counts = []
    step = torch.optim.Muon.step

    def counted(self):
        counts.append(sum(len(group["params"]) for group in self.param_groups))
        step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Muon, "step", counted)
        for _ in range(STEPS):
            advance(trainer, rank)
    return sum(counts)


def is_matrix(name):
    return ".layers." in name and (
        name.endswith(("_proj.weight", ".gate.weight")) or ".experts." in name
    )


def in_each_rank(folders, rank):
    results = {"shards": on_shards(rank), "shared": {}}
    for kind, settings in LAYERS.items():
        results[kind] = followed(folders["dense"], rank, **settings)
        results["shared"][kind] = shared(folders["dense"], rank, **settings)
    results["experts, sharded"] = followed(folders["experts"], rank, **FSDP)
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("muon")
    sizes = {"seed": 1, "hidden": 36, "heads": 3, "head_dim": 12}
    return {
        "dense": tiny_model(root / "dense", **sizes),
        "experts": tiny_model(root / "experts", family="qwen3_moe", **sizes),
    }


@pytest.fixture(scope="module")
def ranks(folders, tmp_path_factory):
    return run_ranks(2, partial(in_each_rank, folders), tmp_path_factory.mktemp("ranks"))


def test_two_workers_share_the_matrices(ranks):
    shared = [seen["shared"] for seen in ranks]
    layers = 2 * 7 * STEPS  # matrices of two layers
    for kind in LAYERS:
        each = layers if kind == "shards of one" else layers // 2
        assert [counts[kind] for counts in shared] == [each, each], kind


def test_shards_of_any_size_step_like_whole_parameters(ranks, expected):
    for seen in ranks:
        for name in SHAPES:
            assert_close(seen["shards"][name], expected.parameters[name], atol=1e-6, rtol=0)
            assert_close(seen["shards"][f"{name}.ema"], expected.averages[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", [*LAYERS, "experts, sharded"])
def test_two_workers_step_like_torchs_optimizers(ranks, kind):
    for seen, other in zip(ranks, reversed(ranks), strict=True):
        for (weights, plain), (same, _) in zip(seen[kind], other[kind], strict=True):
            assert_same_tensors(weights, same)
            if kind == "replicated":
                assert_same_tensors(weights, plain)
            for name, weight in plain.items():
                assert_close(weights[name], weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_a_worker_steps_like_torchs_optimizers_bit_for_bit(folders, model):
    for weights, plain in followed(folders[model], Rank()):
        assert_same_tensors(weights, plain)


def test_the_matrices_are_those_of_the_layers(folders):
    trainer = policy(folders["experts"], trainer_config(optimizer="muon"))
    state = trainer.state()["optimizer"]
    assert {name for name, moments in state.items() if set(moments) == {"momentum_buffer"}} == {
        name for name in state if is_matrix(name)
    }
    values = critic(folders["dense"], trainer_config(optimizer="muon")).state()["optimizer"]
    assert set(values["value_head.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert [name for name in values if "momentum_buffer" in values[name]]


@pytest.mark.parametrize(
    ("family", "others"),
    [
        ("mamba", {"mixer.A_log", "mixer.conv1d.weight"}),
        ("gpt_oss", {"experts.gate_up_proj_bias", "experts.down_proj_bias"}),
        ("qwen2_moe", {"mlp.shared_expert_gate.weight"}),
    ],
)
def test_what_is_no_linear_map_inside_a_layer_stays_adamws(tmp_path, family, others):
    config = trainer_config(optimizer="muon")
    network = PolicyNetwork(
        written(tmp_path, family), device=torch.device("cpu"), temperature=1.0, trainer=config
    )
    matrices = network.matrices()
    found = set()
    for name, parameter in network.trainable().items():
        if ".layers." in name and parameter.ndim > 1 and name not in matrices:
            found.add(next((other for other in others if name.endswith(f".{other}")), name))
    assert found == others
    assert matrices


@pytest.mark.parametrize("settings", [{}, {"backend": "fsdp"}])
def test_training_resumes_from_a_checkpoint_bit_for_bit(folders, tmp_path, settings):
    config = trainer_config(**{**SETTINGS, "lr": 1e-3, **settings})
    steady, stopped, fresh = (policy(folders["dense"], config) for _ in range(3))
    for _ in range(2):
        advance(steady, Rank())
        advance(stopped, Rank())
    save_state(stopped, tmp_path / "state")
    load_state(fresh, tmp_path / "state")
    for _ in range(2):
        assert advance(steady, Rank()) == advance(fresh, Rank())
    states = [
        {name: full_tensor(each) for name, each in flat(one.state()).items()}
        for one in (fresh, steady)
    ]
    assert_same_tensors(*states)


@pytest.mark.parametrize(("written", "other"), [("muon", "adamw"), ("adamw", "muon")])
def test_the_state_of_the_other_optimizer_is_refused(folders, tmp_path, written, other):
    trained, resumed = (
        policy(folders["dense"], trainer_config(optimizer=name)) for name in (written, other)
    )
    url = str(tmp_path / "policy")
    DistributedCheckpoint().save(url, trained.state(), None).result()
    said = (
        rf"trainer\.optimizer={written}, and this run has trainer\.optimizer={other}: go on with "
        rf"{written}, or begin"
    )
    with pytest.raises(CheckpointError, match=said):
        DistributedCheckpoint().load(url, resumed.state(), None)
    with pytest.raises(ValueError, match=r"it lacks \[.* and has \["):
        resumed.load_state(trained.state())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"lora_rank": 2},
            r"trainer\.optimizer=muon with trainer\.lora\.rank=2: Muon steps whole matrices",
        ),
        (
            {"backend": "fsdp", "tensor_parallel": 2},
            r"does not go together with trainer\.optimizer=muon",
        ),
        (
            {"backend": "megatron"},
            r"trainer\.backend=megatron: it does not go together with trainer\.optimizer=muon",
        ),
    ],
)
def test_layouts_without_muon_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        trainer_config(optimizer="muon", **settings)


def test_a_config_has_adamw_unless_it_says_muon():
    assert (
        load_config_file(shipped("quickstart"), []).config.trainer.optimizer is OptimizerName.adamw
    )
    config = load_config_file(shipped("quickstart_ppo"), ["trainer.optimizer=muon"]).config
    assert (config.trainer.optimizer, config.critic.optimizer) == (
        OptimizerName.muon,
        OptimizerName.adamw,
    )
    with pytest.raises(ConfigError, match=r"trainer\.optimizer"):
        load_config_file(shipped("quickstart"), ["trainer.optimizer=sgd"])


@pytest.mark.parametrize("backend", ["torch", "fsdp"])
def test_a_plan_counts_one_moment_of_each_matrix(digits_task, backend):
    held = {}
    for optimizer in OptimizerName:
        changes = [f"trainer.optimizer={optimizer}", f"trainer.backend={backend}"]
        file = load_config_file(
            shipped("quickstart"), [*digits_overrides(digits_task, "run"), *changes]
        )
        phases = plan_phases(file.config, *dags(file), worker_names(file.config))
        roles = {
            role: size
            for memory in check(file.config, phases).memory
            for role, size in memory.roles.items()
        }
        held[optimizer] = roles["policy"]
    counted = count_matrices(str(digits_task.model), file.config.trainer, None)
    assert counted > 0
    assert held["adamw"] - held["muon"] == 4 * counted // (2 if backend == "fsdp" else 1)


def on_one_worker(path, config):
    return ModelOnWorkers(
        size=count_parameters(path),
        architecture=read_architecture(path),
        trainer=config,
        dtype=Dtype.float32,
        ranks=1,
        tokens=64,
        matrices=count_matrices(path, config, None),
    )


def test_a_plan_that_proposes_adapters_proposes_adamw_for_them(folders):
    proposed = {}
    for optimizer in OptimizerName:
        one = on_one_worker(str(folders["dense"]), trainer_config(optimizer=optimizer))
        remedies = with_remedies(one, "trainer", lambda trainer: 64, lambda trainer: 10).remedies
        (proposed[optimizer],) = (remedy for remedy in remedies if "lora.rank" in remedy.setting)
    assert proposed["adamw"].setting == "trainer.lora.rank=16"
    assert proposed["muon"].setting == "trainer.optimizer=adamw trainer.lora.rank=16"
    assert proposed["muon"].footprint == proposed["adamw"].footprint


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_the_planned_memory_is_that_of_one_moment_of_each_matrix(folders, model):
    config = trainer_config(optimizer="muon", ema_decay=0.5)
    planned = held_bytes(on_one_worker(str(folders[model]), config))
    trainer = policy(folders[model], config)
    held = sum(each.nbytes for each in trainer._learner.optimizer.state_tensors())
    assert planned["optimizer state"] + planned["moving average"] == held
