"""Rules of a trained model: backend, mini-batches and optimizer, of the policy and of the
critic.
"""

from __future__ import annotations

from typing import Any

from siirl_dask.commands.migrate.ahead_rules import prompts_between_loads, update_rounds
from siirl_dask.commands.migrate.draft import Draft
from siirl_dask.commands.migrate.loss_rules import agg_mode, aggregation
from siirl_dask.errors import counted

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_STYLES = ("lr_scheduler_type", "warmup_style", "lr_decay_style", "decay_type")
"""Names of the schedule, by backend and version."""
_SCHEDULES = {"veomni": "cosine", "torchtitan": "linear", "automodel": "cosine"}
"""Schedules of verl's backends where none is given; the others' is constant."""


def batch_size(draft: Draft) -> int:
    """Return the prompts of a step. Less than one is lost, and the step has one."""
    name = "data.train_batch_size"
    if draft.given.ahead == "fully_async":
        draft.hold(name, "the step is what is trained on between two loads of weights")
        return prompts_between_loads(draft)
    if (size := int(draft.number(name, 1024))) < 1:
        reason = f"{draft.text(name)} is no number of prompts: expected at least 1"
        draft.lose(name, reason)
        draft.ask(f"data.batch_size: {name}={reason}; 1 stands in")
        return 1
    return size


def minibatch_count(draft: Draft) -> int:
    """Return the optimizer steps of a step: prompts of a step over prompts of a mini-batch, both
    counted alike.

    A mini-batch of less than one prompt is lost, and the step is one mini-batch.
    """
    batch = batch_size(draft)
    name = f"{_ACTOR}.ppo_mini_batch_size"
    if (size := int(draft.number(name, 256))) < 1:
        draft.lose(name, f"{draft.text(name)} is no number of prompts: expected at least 1")
        return 1
    return max(1, -(-batch // size))


def set_trainer(draft: Draft, ours: str, theirs: str, workers: int) -> None:
    """Set ``trainer`` or ``critic``."""
    if ours == "trainer":
        mini = f"{_ACTOR}.ppo_mini_batch_size"
        draft.set(
            "algorithm.minibatches",
            minibatch_count(draft),
            mini,
            note="train_batch_size / ppo_mini_batch_size",
        )
        draft.set(
            "algorithm.epochs", int(draft.number(f"{_ACTOR}.ppo_epochs", 1)), f"{_ACTOR}.ppo_epochs"
        )
    _set_layout(draft, ours, theirs, workers)
    if ours == "trainer":
        _set_adapters(draft)
    _set_optimizer(draft, ours, f"{theirs}.optim")
    model = "critic.model"
    if ours == "trainer":
        model = _MODEL
    checkpointing = f"{model}.enable_gradient_checkpointing"
    draft.set(
        f"{ours}.gradient_checkpointing", draft.flag(checkpointing, default=True), checkpointing
    )
    _set_clip(draft, ours, theirs)
    _set_micro_batches(draft, ours, theirs)
    if ours == "critic":
        _set_critic(draft)


def _set_clip(draft: Draft, ours: str, theirs: str) -> None:
    """Set the limit of the gradient's norm, which verl reads by another name in each version."""
    names = [f"{theirs}.{one}" for one in ("grad_clip", "optim.clip_grad", "optim.grad_clip")]
    key = f"{ours}.max_grad_norm"
    limits = {name: draft.number(name, 1.0) for name in names if draft.has(name)}
    limit = next(iter(limits.values()), 1.0)
    draft.set_from(key, limit, names)
    if len({*limits.values()}) > 1:
        shown = " or ".join(f"{value} ({name})" for name, value in limits.items())
        draft.leave_open(key, f"{shown}: verl up to 0.7 reads the first, and 0.9 the last")


def _set_layout(draft: Draft, ours: str, theirs: str, workers: int) -> None:
    strategy = draft.text(f"{theirs}.strategy", draft.given.engine)
    parts = ["fsdp_config"]
    if ours == "critic":
        parts = ["fsdp", "model.fsdp_config"]
    names = {
        option: draft.first(
            [f"{theirs}.{part}.{option}" for part in parts], f"{theirs}.{parts[0]}.{option}"
        )
        for option in ("param_offload", "optimizer_offload", "offload_policy", "fsdp_size")
    }
    backend = "fsdp"
    if strategy == "megatron":
        backend = strategy
    draft.set(f"{ours}.backend", backend, f"{theirs}.strategy")
    for name in ("model_engine", f"{_ACTOR}.model_engine"):
        draft.became(name, f"{ours}.backend")
    if strategy == "megatron":
        _set_megatron(draft, ours, theirs)
    elif strategy not in ("fsdp", "fsdp2"):
        draft.lose(f"{theirs}.strategy", f"there is no backend {strategy!r}; fsdp stands in")
    if draft.flag(names["offload_policy"], default=False):
        draft.set(f"{ours}.fsdp.offload", True, names["offload_policy"])
    elif strategy != "megatron" and any(
        draft.flag(names[one], default=False) for one in ("param_offload", "optimizer_offload")
    ):
        draft.set(f"{ours}.park", True, names["param_offload"], names["optimizer_offload"])
        draft.became("actor_rollout_ref.ref.fsdp_config.param_offload", "trainer.park")
    size = int(draft.number(names["fsdp_size"], -1))
    if 0 < size < workers and workers % size == 0:
        draft.set(f"{ours}.fsdp.shard_size", size, names["fsdp_size"])
    elif size in (-1, workers):
        draft.hold(names["fsdp_size"], "the model is sharded over all workers of its role")
    else:
        draft.lose(names["fsdp_size"], f"{size} is no divisor of {counted(workers, 'worker')}")
    sequence = (
        f"{theirs}.ulysses_sequence_parallel_size",
        f"{theirs}.fsdp_config.ulysses_sequence_parallel_size",
    )
    if (ranks := int(draft.number(draft.first(sequence, sequence[0]), 1))) > 1:
        draft.set_from(f"{ours}.fsdp.sequence_parallel", ranks, sequence)
    for name in (*names.values(), *sequence, "actor_rollout_ref.ref.fsdp_config.param_offload"):
        draft.hold(name, "the default here")


def _set_megatron(draft: Draft, ours: str, theirs: str) -> None:
    """Set Megatron's layout."""
    prefix = f"{theirs}.megatron"
    sizes = {
        "tensor_model_parallel_size": "tensor_parallel",
        "pipeline_model_parallel_size": "pipeline_parallel",
        "virtual_pipeline_model_parallel_size": "virtual_pipeline",
        "context_parallel_size": "context_parallel",
    }
    for option, key in sizes.items():
        if (ranks := int(draft.number(f"{prefix}.{option}", 1))) > 1:
            draft.set(f"{ours}.megatron.{key}", ranks, f"{prefix}.{option}")
        draft.hold(f"{prefix}.{option}", "the default here")
    _set_experts(draft, ours, prefix)
    tokens = f"{prefix}.sequence_parallel"
    if (
        draft.flag(tokens, default=False)
        and draft.number(f"{prefix}.tensor_model_parallel_size", 1) > 1
    ):
        draft.set(f"{ours}.megatron.sequence_parallel", True, tokens)
    else:
        draft.hold(tokens, "tokens are not split, or there are no tensor-parallel workers to do so")
    draft.set(
        f"{ours}.megatron.distributed_optimizer",
        draft.flag(f"{prefix}.use_distributed_optimizer", default=True),
        f"{prefix}.use_distributed_optimizer",
    )
    reason = (
        "with Megatron weights and optimizer stay on the device: trainer.park is of torch and fsdp"
    )
    for name in (f"{prefix}.{one}_offload" for one in ("param", "optimizer", "grad")):
        draft.hold_or_lose(name, reason, holds=not draft.flag(name, default=False))


def _set_experts(draft: Draft, ours: str, prefix: str) -> None:
    """Spread experts over as many ranks as share one's parameters there, whole or in parts."""
    spread = f"{prefix}.expert_model_parallel_size"
    cut = f"{prefix}.expert_tensor_parallel_size"
    tensor = max(1, int(draft.number(f"{prefix}.tensor_model_parallel_size", 1)))
    ranks = max(1, int(draft.number(spread, 1)) * int(draft.number(cut, tensor)))
    if ranks == tensor:
        for name in (spread, cut):
            draft.hold(name, "experts are spread over the tensor-parallel ranks")
    elif ranks % tensor and tensor % ranks:
        draft.lose(
            spread,
            f"experts over {ranks} ranks: expected a divisor or a multiple of {tensor} tensor "
            "ranks",
        )
    else:
        draft.set(
            f"{ours}.megatron.expert_parallel", ranks, spread, cut, note="each expert is whole"
        )


def _set_optimizer(draft: Draft, ours: str, theirs: str) -> None:
    minibatches = minibatch_count(draft) // update_rounds(draft)
    passes = minibatches * int(draft.number(f"{_ACTOR}.ppo_epochs", 1))
    draft.set(
        f"{ours}.lr",
        draft.number(f"{theirs}.lr", 1e-6 if ours == "trainer" else 1e-5),
        f"{theirs}.lr",
    )
    draft.set(
        f"{ours}.weight_decay",
        draft.number(f"{theirs}.weight_decay", 0.01),
        f"{theirs}.weight_decay",
    )
    draft.set(f"{ours}.betas", draft.items(f"{theirs}.betas", [0.9, 0.999]), f"{theirs}.betas")
    steps = f"{theirs}.lr_warmup_steps"
    ratio = f"{theirs}.lr_warmup_steps_ratio"
    warmup = int(draft.number(steps, -1))
    if warmup <= 0:
        warmup = int(draft.number(ratio, 0.0) * int(draft.entries["run.steps"].value))
    note = ""
    if warmup:
        trained = counted(warmup, "training step")
        note = f"{trained} x {counted(passes, 'optimizer step')}"
    draft.set(f"{ours}.warmup_steps", warmup * passes, steps, ratio, note=note)
    _set_schedule(draft, ours, theirs)
    if draft.has(f"{theirs}.lr_decay_steps"):
        draft.set(
            f"{ours}.total_steps",
            int(draft.number(f"{theirs}.lr_decay_steps", 1)) * passes,
            f"{theirs}.lr_decay_steps",
        )
    _set_least_rate(draft, ours, theirs)
    _set_kind(draft, ours, f"{theirs}.optimizer")


def _set_schedule(draft: Draft, ours: str, theirs: str) -> None:
    """Set the schedule, whose default is each backend's own."""
    key = f"{ours}.schedule"
    names = [f"{theirs}.{name}" for name in _STYLES]
    name = draft.first(names, names[0])
    backend = draft.text(f"{theirs.removesuffix('.optim')}.strategy", draft.given.engine)
    schedule = draft.text(name, _SCHEDULES.get(backend, "constant"))
    if schedule in ("constant", "linear", "cosine"):
        draft.set_from(key, schedule, names)
    else:
        draft.set_from(key, "constant", names)
        draft.leave_out(
            name, f"there is no schedule {schedule!r}: constant, linear or cosine", [key]
        )
    cycles = f"{theirs}.num_cycles"
    if schedule == "cosine" and draft.number(cycles, 0.5) != 0.5:
        draft.leave_out(cycles, "a cosine falls once, by half a cycle", [key])
    draft.hold(cycles, "half a cycle is how it is")


def _set_least_rate(draft: Draft, ours: str, theirs: str) -> None:
    """Set the rate at which a schedule ends: a share of the highest one, or a rate itself."""
    key = f"{ours}.min_lr_ratio"
    shares = [f"{theirs}.{name}" for name in ("min_lr_ratio", "min_lr_factor")]
    rates = [f"{theirs}.{name}" for name in ("min_lr", "lr_min")]
    share = draft.first(shares, "")
    least = draft.first(rates, "")
    if share:
        draft.set_from(key, draft.number(share, 0.0), shares)
        return
    if not least:
        return
    rate = draft.entries[f"{ours}.lr"].value
    if rate > 0:
        draft.set_from(key, draft.number(least, 0.0) / rate, rates)
    else:
        draft.lose(least, f"it is a part of the rate, and {theirs}.lr is {rate:g}")


def _set_kind(draft: Draft, ours: str, theirs: str) -> None:
    """Set the optimizer, which is AdamW unless Muon was given and has whole matrices to step."""
    key = f"{ours}.optimizer"
    kind = draft.text(theirs, "AdamW").lower()
    if kind in ("adam", "adamw"):
        draft.hold(theirs, "AdamW is the default here")
        return
    if kind != "muon":
        reason = "there is no such optimizer: AdamW or Muon"
    elif draft.entries[f"{ours}.backend"].value == "megatron":
        reason = "the backend megatron steps by AdamW: docs/training.md"
    elif f"{ours}.lora.rank" in draft.entries:
        reason = "Muon steps no adapters: docs/training.md"
    else:
        note = "its steps are as long as AdamW's, so give AdamW's rate"
        draft.set(key, "muon", theirs, note=note)
        return
    draft.set(key, "adamw", theirs)
    draft.leave_out(theirs, reason, [key])


def _set_micro_batches(draft: Draft, ours: str, theirs: str) -> None:
    """Set the tokens of a pass: given as such, or as rows of the longest length."""
    dynamic = f"{theirs}.use_dynamic_bsz"
    tokens = f"{theirs}.ppo_max_token_len_per_gpu"
    rows = f"{theirs}.ppo_micro_batch_size_per_gpu"
    longest = int(
        draft.entries["data.max_prompt_length"].value
        + draft.entries["rollout.max_response_length"].value
    )
    key = f"{ours}.max_tokens_per_micro_batch"
    if draft.flag(dynamic, draft.flag(f"{_ACTOR}.use_dynamic_bsz", default=False)) or not draft.has(
        rows
    ):
        if draft.has(tokens, dynamic):
            draft.set(
                key,
                int(draft.number(tokens, 16384 if ours == "trainer" else 32768)),
                tokens,
                dynamic,
            )
        draft.hold(rows, "use_dynamic_bsz counts tokens")
    else:
        count = int(draft.number(rows, 1))
        draft.set(
            key, count * longest, rows, dynamic, note=f"{counted(count, 'row')} x {longest} tokens"
        )
        draft.hold(tokens, "it counts with use_dynamic_bsz alone")


def _set_adapters(draft: Draft) -> None:
    rank = draft.first((f"{_MODEL}.lora_rank", f"{_MODEL}.lora.rank"), f"{_MODEL}.lora_rank")
    alpha = draft.first((f"{_MODEL}.lora_alpha", f"{_MODEL}.lora.alpha"), f"{_MODEL}.lora_alpha")
    targets = f"{_MODEL}.target_modules"
    adapters = f"{_MODEL}.lora_adapter_path"
    if draft.text(f"{_ACTOR}.strategy", draft.given.engine) == "megatron":
        reason = "the backend megatron has none: docs/training.md"
        for name in (rank, adapters, f"{_ACTOR}.freeze_vision_tower"):
            if draft.value(name) not in (None, 0, False):
                draft.leave_out(name, reason, ["trainer.backend"])
        if draft.value(f"{_MODEL}.use_liger") not in (None, 0, False):
            draft.lose(f"{_MODEL}.use_liger", reason)
        return
    if int(draft.number(rank, 0)) > 0:
        draft.set("trainer.lora.rank", int(draft.number(rank, 0)), rank)
        draft.set("trainer.lora.alpha", draft.number(alpha, 16), alpha)
        if draft.text(targets, "all-linear") != "all-linear":
            draft.set("trainer.lora.targets", draft.items(targets), targets)
        if draft.value(adapters) is not None:
            draft.set("trainer.lora.path", draft.text(adapters), adapters)
    elif draft.value(adapters) is not None:
        draft.lose(
            adapters,
            "no rank is given: set trainer.lora.rank to r of its adapter_config.json, and "
            "trainer.lora.path",
        )
    for name in (rank, alpha, targets):
        draft.hold(name, "the default here: no adapters, and with them all linear layers")
    if draft.flag(f"{_MODEL}.use_liger", default=False):
        draft.set("trainer.liger", True, f"{_MODEL}.use_liger")
    if draft.flag(f"{_ACTOR}.freeze_vision_tower", default=False):
        draft.set("trainer.freeze", ["visual"], f"{_ACTOR}.freeze_vision_tower")
    draft.hold(
        f"{_MODEL}.use_liger", "the default here takes its kernels where they are installed and run"
    )
    draft.hold(f"{_ACTOR}.freeze_vision_tower", "the default here")


def _set_critic(draft: Draft) -> None:
    clip = draft.number("critic.cliprange_value", 0.5)
    options: dict[str, Any] = {
        "loss": {"run": "siirl_dask.algorithms:value_clip", "with": {"clip": clip}}
    }
    # verl's critic follows the policy; token_mean is the node's own
    default = "token-mean"
    if draft.given.system == "verl":
        default = agg_mode(draft)
    mode = draft.text("critic.loss_agg_mode", default)
    function, chosen = aggregation(draft, mode, "critic.loss_scale_factor")
    if function != "token_mean":
        options["aggregate"] = {"run": f"siirl_dask.algorithms:{function}", "with": chosen}
    draft.nodes["update_critic"] = {"with": options}
    for name in ("cliprange_value", "loss_agg_mode", "loss_scale_factor"):
        draft.became(f"critic.{name}", "nodes.update_critic")
    draft.hold_or_lose(
        "critic.model.path",
        "the critic begins as the policy's model with a head of zeros",
        holds=draft.text("critic.model.path") == draft.text(f"{_MODEL}.path"),
    )
