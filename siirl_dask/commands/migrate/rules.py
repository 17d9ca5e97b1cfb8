"""Rules that make keys of ours of one or several options; commands/migrate/table.py has what
they are about.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from siirl_dask.commands.migrate.draft import Draft
from siirl_dask.commands.migrate.loss_rules import ACTOR, set_algorithm, set_loss
from siirl_dask.commands.migrate.rollout_rules import set_profile, set_rollout, set_validation
from siirl_dask.commands.migrate.trainer_rules import batch_size, minibatch_count, set_trainer
from siirl_dask.config import MetricsBackend

_MODEL = "actor_rollout_ref.model"
_SOURCES = {
    "gsm8k": "gsm8k",
    "dapo": "dapo_math",
    "aime": "dapo_math",
    "geo3k": "math_answer",
    "mmlu": "multiple_choice",
}
"""Part of a dataset's name, and the reward that verl and siiRL have for it; others are boxed
mathematics."""
_OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
    "custom_reward_function.overlong_buffer",
)


def apply_rules(draft: Draft, rows: int | None) -> None:
    """Fill a draft from what was given. ``rows`` is the number of rows to train on, if the
    caller knows it.
    """
    workers = int(draft.number("trainer.nnodes", 1) * draft.number("trainer.n_gpus_per_node", 8))
    draft.set(
        "run.name", draft.text("trainer.experiment_name", "migrated"), "trainer.experiment_name"
    )
    draft.copy(
        {
            "trainer.default_local_dir": "run.url",
            "trainer.seed": "run.seed",
            "data.seed": "run.seed",
        }
    )
    _set_steps(draft, rows)
    draft.set("cluster.workers", workers, "trainer.nnodes", "trainer.n_gpus_per_node")
    if draft.text("trainer.device") == "cpu":
        draft.set("cluster.device", "cpu", "trainer.device")
    draft.hold("trainer.device", "accelerators are found")
    _set_data(draft)
    _set_model(draft)
    set_rollout(draft, workers)
    _set_reward(draft)
    set_algorithm(draft)
    set_loss(draft)
    set_trainer(draft, "trainer", ACTOR, workers)
    if "dags/ppo.yaml" in draft.bases:
        set_trainer(draft, "critic", "critic", workers)
    set_validation(draft)
    _set_observation(draft)
    set_profile(draft)
    _set_overlong(draft)


def _set_steps(draft: Draft, rows: int | None) -> None:
    """Set ``run.steps``, which the other systems count from epochs and rows."""
    steps = "trainer.total_training_steps"
    if draft.has(steps) and draft.number(steps, 0) > 0:
        draft.set("run.steps", int(draft.number(steps, 0)), steps)
        draft.hold("trainer.total_epochs", f"{steps} is given")
        return
    epochs = int(draft.number("trainer.total_epochs", 30))
    batch = batch_size(draft)
    counts = [_rows_of(url) for url in _files(draft, "data.train_files")]
    known = rows
    if rows is None and counts and all(counts):
        known = sum(filter(None, counts))
    if known:
        note = f"{known} rows // {batch} prompts a step"
        draft.set("run.steps", max(1, epochs * (known // batch)), "trainer.total_epochs", note=note)
        return
    question = (
        f"run.steps: {epochs} epochs x rows // {batch}, and no dataset was there to count: give "
        "--rows N"
    )
    draft.open_questions.append(question)
    draft.set(
        "run.steps", 100, "trainer.total_epochs", note=f"TO DECIDE, {question.partition(': ')[2]}"
    )


def _rows_of(url: str) -> int | None:
    """Return the rows of a local Parquet file; None where there is none."""
    path = Path(url).expanduser()
    return pq.read_metadata(path).num_rows if path.suffix == ".parquet" and path.is_file() else None


def _files(draft: Draft, name: str) -> list[str]:
    return [str(file) for file in draft.items(name)]


def local(path: str) -> str:
    """Return a path of the shell's as one of a configuration: ``~`` is the home folder of who
    starts the run.
    """
    return path.replace("~", "${oc.env:HOME}", 1) if path.startswith("~/") else path


def _set_data(draft: Draft) -> None:
    files = [
        local(file)
        for file in _files(draft, "data.train_files") or ["~/data/rlhf/gsm8k/train.parquet"]
    ]
    if len(files) == 1:
        draft.set("data.url", files[0], "data.train_files")
    else:
        weights = [_rows_of(file) or 1 for file in files]
        sources = {
            f"{Path(file).stem}_{place}": {"url": file, "weight": weight}
            for place, (file, weight) in enumerate(zip(files, weights, strict=True))
        }
        draft.set(
            "data.sources",
            sources,
            "data.train_files",
            note="weights are rows where the file was there",
        )
    draft.set("data.batch_size", batch_size(draft), "data.train_batch_size")
    draft.copy({"data.prompt_key": "data.prompt", "data.image_key": "images.column"})
    draft.set(
        "data.answer", "reward_model.ground_truth", note="where their datasets have the answer"
    )
    length = draft.first(
        ("data.max_prompt_length", "actor_rollout_ref.rollout.prompt_length"),
        "data.max_prompt_length",
    )
    draft.set("data.max_prompt_length", int(draft.number(length, 512)), length)
    draft.hold("actor_rollout_ref.rollout.prompt_length", "it follows data.max_prompt_length")
    for name, wanted, reason in (
        (
            "data.filter_overlong_prompts",
            True,
            "a longer prompt is always dropped from its step, and counted",
        ),
        (
            "data.filter_overlong_prompt",
            True,
            "a longer prompt is always dropped from its step, and counted",
        ),
        ("data.shuffle", True, "prompts come in another order in each epoch, from run.seed"),
        (f"{_MODEL}.use_remove_padding", True, "rows are always packed"),
        (f"{ACTOR}.shuffle", True, "mini-batches are drawn again in each step"),
        ("actor_rollout_ref.rollout.do_sample", True, "responses that train are sampled"),
        ("trainer.val_before_train", True, "a validation is always run before the first step"),
    ):
        as_here = draft.flag(name, wanted) == wanted
        (draft.hold if as_here else draft.lose)(name, reason)
    cut = draft.text("data.truncation", "error")
    (draft.hold if cut == "error" else draft.lose)(
        "data.truncation", "longer prompts are dropped, never cut"
    )


def _set_model(draft: Draft) -> None:
    path = local(draft.text(f"{_MODEL}.path", "~/models/deepseek-llm-7b-chat"))
    draft.set("model.path", f"hf://{path}" if _is_of_hub(path) else path, f"{_MODEL}.path")
    _set_template(draft)
    names = (
        f"{ACTOR}.fsdp_config.dtype",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype",
        "actor_rollout_ref.rollout.dtype",
    )
    given = draft.text(draft.first(names, names[0]), "bfloat16")
    dtype = "float32" if given in ("fp32", "float32", "float") else "bfloat16"
    draft.set_from("model.dtype", dtype, names)
    if given in ("fp16", "float16", "half"):
        draft.lose(draft.first(names, names[0]), "float16 is not computed in: bfloat16 or float32")


def _is_of_hub(path: str) -> bool:
    """Return whether a path is the ``owner/name`` of a model on the Hub, and no folder here."""
    if len(path.split("/")) != 2 or path[0] in "./$" or "{" in path:
        return False
    return not Path(path).exists()


def _set_template(draft: Draft) -> None:
    """Set the arguments of the chat template, which are one mapping here."""
    prefix = "data.apply_chat_template_kwargs."
    names = [name for name in draft.given.values if name.startswith(prefix) and draft.has(name)]
    if names:
        arguments = {name.removeprefix(prefix): draft.value(name) for name in names}
        draft.set_from("model.template", arguments, names)


def _set_reward(draft: Draft) -> None:
    """Set the reward function by the name of the dataset, where the other systems choose by each
    row's source.
    """
    data = " ".join(_files(draft, "data.train_files")).lower()
    function = next((own for part, own in _SOURCES.items() if part in data), "math_answer")
    manager = draft.first(
        ("reward.reward_manager.name", "reward_model.reward_manager"), "reward_model.reward_manager"
    )
    if draft.text(manager) == "dapo":
        function = "dapo_math"
    if draft.text(manager, "naive") not in ("naive", "dapo", "parallel", "batch"):
        draft.lose(
            manager,
            "there is no such reward: docs/rewards.md has those that there are, and how to write "
            "one",
        )
    draft.set(
        "rewards.function",
        f"siirl_dask.rewards:{function}",
        manager,
        note="by the dataset's name; check it",
    )
    custom = draft.first(("custom_reward_function.path", "reward.custom_reward_function.path"), "")
    if custom:
        draft.open_questions.append(f"rewards.function: {draft.text(custom)} is to be written as reward(prompt, "
                                    "response, answer, **columns)")  # fmt: skip


def _set_overlong(draft: Draft) -> None:
    """Add DAPO's penalty of long responses as a node."""
    prefix = next(
        (one for one in _OVERLONG if draft.has(f"{one}.enable", f"{one}.len")), _OVERLONG[0]
    )
    if not draft.flag(f"{prefix}.enable", draft.has(f"{prefix}.len")):
        return
    names = [f"{prefix}.{name}" for name in ("enable", "len", "penalty_factor")]
    options: dict[str, Any] = {
        "buffer": int(draft.number(names[1], 512)),
        "factor": draft.number(names[2], 1.0),
    }
    if "dags/dapo.yaml" in draft.bases:
        draft.nodes["reward"] = {"with": options}
    else:
        options = {"max_length": "${rollout.max_response_length}", **options}
        draft.nodes["overlong"] = {
            "run": "siirl_dask.nodes:penalise_overlong", "role": "reward", "after": "reward", "with": options,
        }  # fmt: skip
        after = draft.nodes.get("advantage", {}).get("after", ["reward", "old_logprobs"])
        changed = ["overlong" if one == "reward" else one for one in after]
        draft.nodes["advantage"] = {**draft.nodes.get("advantage", {}), "after": changed}
    for name in names:
        draft.became(name, "nodes.overlong")


def _set_observation(draft: Draft) -> None:
    draft.copy(
        {
            "trainer.project_name": "observe.project",
            "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
        }
    )
    if draft.has("trainer.logger"):
        loggers = [str(one) for one in draft.items("trainer.logger")]
        known = [one for one in loggers if one in [*MetricsBackend]]
        draft.set("observe.backends", known, "trainer.logger")
        draft.set("observe.progress", "console" in loggers, "trainer.logger")
        if others := [one for one in loggers if one not in (*known, "console", "file")]:
            draft.open_questions.append(
                f"observe.backends: there is no backend {', '.join(others)} (docs/monitoring.md)"
            )
    every = int(draft.number("trainer.save_freq", -1))
    none = "no checkpoint: the model is lost when the run ends, and a run that stops cannot resume"
    draft.set(
        "checkpoint.every", max(0, every), "trainer.save_freq", note="" if every > 0 else none
    )
    resume = draft.text("trainer.resume_mode", "auto")
    reason = "a run resumes by itself; siirl-dask run --fresh begins again"
    (draft.hold if resume == "auto" else draft.lose)("trainer.resume_mode", reason)
    draft.copy({"trainer.critic_warmup": "algorithm.critic_warmup_steps"})


__all__ = ["apply_rules", "minibatch_count"]
