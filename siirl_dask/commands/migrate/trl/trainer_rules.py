"""Rules for TRL's options of the trainer."""

from __future__ import annotations

import math

from siirl_dask.commands.migrate.draft import Draft


def set_trl_trainer(draft: Draft, updates: int) -> None:
    """Set the policy's optimizer, schedule, memory and adapters. ``updates`` are those of a step."""
    draft.set("trainer.lr", draft.number("learning_rate", 1e-6), "learning_rate")
    _set_optimizer(draft)
    draft.set("trainer.weight_decay", draft.number("weight_decay", 0.0), "weight_decay")
    betas = [draft.number("adam_beta1", 0.9), draft.number("adam_beta2", 0.999)]
    draft.set("trainer.betas", betas, "adam_beta1", "adam_beta2")
    if draft.has("adam_epsilon"):
        draft.set("trainer.eps", draft.number("adam_epsilon", 1e-8), "adam_epsilon")
    largest = draft.number("max_grad_norm", 1.0, finite=False)
    note = ""
    if not largest > 0:
        largest = math.inf
        note = "no limit"
    draft.set("trainer.max_grad_norm", largest, "max_grad_norm", note=note)
    schedule = draft.text("lr_scheduler_type", "linear")
    if schedule == "constant_with_warmup":
        schedule = "constant"
    if schedule not in ("constant", "linear", "cosine"):
        draft.lose(
            "lr_scheduler_type", f"there is no schedule {schedule!r}: constant, linear or cosine"
        )
        draft.leave_open("trainer.schedule", f"{schedule} has no counterpart")
    else:
        draft.set("trainer.schedule", schedule, "lr_scheduler_type")
    total = int(draft.entries["run.steps"].value) * updates
    ratio = draft.number("warmup_ratio", 0.0)
    warmup = draft.number("warmup_steps", 0.0)
    # 0 steps leave it to the ratio, and so did versions of transformers that had both
    if not warmup:
        warmup = ratio
    steps = int(warmup)
    if warmup < 1:
        steps = math.ceil(warmup * total)
    note = ""
    if draft.text("lr_scheduler_type", "linear") == "constant":
        steps = 0
        note = "constant has none there; constant_with_warmup has"
    draft.set("trainer.warmup_steps", steps, "warmup_steps", "warmup_ratio", note=note)
    checkpointing = draft.flag("gradient_checkpointing", default=True)
    draft.set("trainer.gradient_checkpointing", checkpointing, "gradient_checkpointing")
    if draft.flag("use_liger_kernel", default=False):
        draft.set("trainer.liger", True, "use_liger_kernel")
    draft.hold("use_liger_kernel", "the default here takes its kernels where they are installed")
    if not draft.flag("use_peft", default=False):
        names = ("r", "alpha", "target_modules", "dropout", "bias", "use_rslora")
        for name in ("use_peft", "use_rslora", *(f"lora_{one}" for one in names)):
            draft.hold(name, "there are no adapters without use_peft")
        return
    _set_adapters(draft)


def _set_adapters(draft: Draft) -> None:
    """Set the adapters, whose product is scaled by alpha / rank here."""
    rank = draft.whole("lora_r", 16)
    draft.set("trainer.lora.rank", rank, "lora_r", "use_peft")
    alpha = draft.number("lora_alpha", 32)
    by_root = ("use_rslora", "lora_use_rslora")
    if any(draft.flag(name, default=False) for name in by_root):
        alpha = round(alpha * math.sqrt(rank), 6)
    draft.set_from("trainer.lora.alpha", alpha, ("lora_alpha", *by_root))
    targets = draft.items("lora_target_modules", ["all-linear"])
    if targets != ["all-linear"]:
        draft.set("trainer.lora.targets", targets, "lora_target_modules")
    draft.hold("lora_target_modules", "all linear layers are the default here")
    if not draft.has("lora_target_modules"):
        draft.leave_open(
            "trainer.lora.targets",
            "none are given, so peft chooses by the kind of model: write its choice, such as "
            "[q_proj, v_proj] for Llama and Qwen, or [] for all linear layers",
        )
    dropout = draft.number("lora_dropout", 0.05)
    if dropout:
        draft.lose("lora_dropout", "adapters have no dropout")
        draft.ask(f"trainer.lora: lora_dropout={dropout} in TRL, and adapters have no dropout here")
    draft.hold("lora_dropout", "adapters have no dropout")
    if draft.text("lora_bias", "none") == "none":
        draft.hold("lora_bias", "none is how it is")
    else:
        draft.leave_out("lora_bias", "biases stay as they are", ["trainer.lora.rank"])


def _set_optimizer(draft: Draft) -> None:
    name = "optim"
    kind = draft.text(name, "adamw_torch").lower()
    if kind == "muon":
        draft.set("trainer.optimizer", "muon", name)
    elif "adamw" in kind and "bit" in kind:
        draft.lose(name, f"there is no optimizer {kind!r}: its states are in float32 here")
    elif "adamw" in kind:
        draft.hold(name, "AdamW is the default here")
    else:
        draft.set("trainer.optimizer", "adamw", name)
        reason = f"there is no optimizer {kind!r}: AdamW or Muon"
        draft.leave_out(name, reason, ["trainer.optimizer"])
