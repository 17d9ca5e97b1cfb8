"""Rules that make keys of ours of TRL's options; commands/migrate/trl/options.py has the table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from siirl_dask.commands.migrate.draft import Draft, Fate
from siirl_dask.commands.migrate.training_files import open_here
from siirl_dask.commands.migrate.trl.loss_rules import set_trl_algorithm
from siirl_dask.commands.migrate.trl.trainer_rules import set_trl_trainer
from siirl_dask.config import ENGINES_LOGPROBS, MetricsBackend
from siirl_dask.errors import counted
from siirl_dask.schema import RESPONSE_IDS

_OURS = "siirl_dask.algorithms"
_ANSWERS = ("solution", "answer", "ground_truth", "answers", "target", "label")
"""Columns that are the answer where a reward reads one of them."""


def apply_trl_rules(draft: Draft, rows: int | None) -> None:
    """Fill a draft from TRL's options. ``rows`` is the number of rows to train on, if the caller
    knows it.
    """
    workers = draft.whole("num_processes", 1)
    if not draft.has("num_processes"):
        draft.open_questions.append(
            "cluster.workers: one process is assumed, as of `python SCRIPT`; give "
            "num_processes=N, which the batch follows from"
        )
    _set_names(draft)
    _set_batch(draft, workers)
    _set_steps(draft, rows)
    draft.set("cluster.workers", workers, "num_processes")
    _set_data(draft)
    _set_model(draft)
    _set_sampling(draft)
    _set_rewards(draft)
    set_trl_algorithm(draft)
    set_trl_trainer(draft, _updates(draft))
    _set_observation(draft)
    for key, reason in draft.given.undecided.items():
        draft.leave_open(key, reason)


def _set_names(draft: Draft) -> None:
    name = draft.text("run_name", Path(draft.text("output_dir", "migrated")).name)
    source = "output_dir"
    if draft.has("run_name"):
        source = "run_name"
    draft.set("run.name", name, source)
    draft.copy({"output_dir": "run.url"})
    draft.set("run.seed", int(draft.number("seed", 42)), "seed")


def _accumulated(draft: Draft) -> int:
    return draft.whole("gradient_accumulation_steps", 1)


def _set_batch(draft: Draft, workers: int) -> None:
    """Set the prompts of a step, and the optimizer steps that it is cut into."""
    rows = draft.whole("per_device_train_batch_size", 8) * workers
    samples = draft.whole("num_generations", 8)
    if draft.has("generation_batch_size"):
        completions = draft.whole("generation_batch_size", rows)
        passes = max(1, completions // rows)
    else:
        passes = draft.whole("steps_per_generation", _accumulated(draft))
        completions = rows * passes
    names = (
        "per_device_train_batch_size",
        "generation_batch_size",
        "steps_per_generation",
        "num_processes",
    )
    note = f"{completions} completions / {samples} of each prompt"
    draft.set_from(
        "data.batch_size",
        max(1, completions // samples),
        (*names, "gradient_accumulation_steps"),
        note,
    )
    if completions % samples:
        draft.open_questions.append(
            f"data.batch_size: {completions} completions are no multiple of num_generations="
            f"{samples}, which TRL refuses"
        )
    draft.set("rollout.n", samples, "num_generations")
    accumulated = _accumulated(draft)
    if passes % accumulated:
        draft.open_questions.append(
            f"algorithm.minibatches: steps_per_generation={passes} is no multiple of "
            f"gradient_accumulation_steps={accumulated}: an optimizer step spans two steps there"
        )
    minibatches = max(1, passes // accumulated)
    draft.set(
        "algorithm.minibatches", minibatches, "steps_per_generation", "gradient_accumulation_steps"
    )
    if minibatches > 1:
        draft.set("algorithm.split_groups", True, note="a step's rows are shuffled, as there")
    draft.set("algorithm.epochs", draft.whole("num_iterations", 1), "num_iterations")


def _updates(draft: Draft) -> int:
    """Return the optimizer steps of a step."""
    return int(
        draft.entries["algorithm.minibatches"].value * draft.entries["algorithm.epochs"].value
    )


def _set_steps(draft: Draft, rows: int | None) -> None:
    updates = _updates(draft)
    if draft.number("max_steps", -1) > 0:
        steps = -(-int(draft.number("max_steps", -1)) // updates)
        note = f"{counted(updates, 'optimizer step')} each"
        draft.set("run.steps", steps, "max_steps", note=note)
        draft.hold("num_train_epochs", "max_steps is given")
        return
    epochs = draft.number("num_train_epochs", 3.0)
    prompts = int(draft.entries["data.batch_size"].value)
    file = open_here(draft.text("train_dataset"))
    known = rows
    if rows is None and file is not None:
        known = int(file.metadata.num_rows)
    if known:
        note = f"{counted(known, 'row')} // {counted(prompts, 'prompt')} a step"
        draft.set(
            "run.steps", max(1, int(epochs * (known // prompts))), "num_train_epochs", note=note
        )
        return
    times = f"{epochs:g} epochs"
    if epochs == 1:
        times = "1 epoch"
    question = f"{times} x rows // {prompts}, and no dataset was there to count: give --rows N"
    draft.open_questions.append(f"run.steps: {question}")
    draft.set("run.steps", 100, "num_train_epochs", note=f"TO DECIDE, {question}")


def _set_data(draft: Draft) -> None:
    url = draft.text("train_dataset")
    is_file = url.endswith((".parquet", ".arrow", ".feather"))
    if not is_file:
        is_file = Path(url).expanduser().exists()
    if not draft.has("train_dataset"):
        draft.leave_open("data.url", "no train_dataset is given")
    elif is_file or draft.reason_open("train_dataset"):
        draft.set("data.url", url, "train_dataset")
    else:
        draft.became("train_dataset", "data.url")
        draft.leave_open(
            "data.url",
            f"{url}: `siirl-dask data import` makes a table of it (docs/data.md); give its folder",
        )
    columns = [str(one) for one in draft.items("reward_columns") if one != RESPONSE_IDS]
    answer = "prompt"
    note = "no reward reads an answer"
    if columns:
        answer = next((one for one in _ANSWERS if one in columns), columns[0])
        note = "the column that the rewards read"
    draft.set("data.answer", answer, "reward_columns", note=note)
    limit = "no longer prompt is trained on here, and TRL has no limit"
    if draft.has("max_prompt_length"):
        draft.set(
            "data.max_prompt_length", draft.whole("max_prompt_length", 512), "max_prompt_length"
        )
    elif draft.has("vllm_max_model_length"):
        longest = draft.whole("vllm_max_model_length", 2048) - draft.whole(
            "max_completion_length", 512
        )
        draft.set("data.max_prompt_length", max(1, longest), "vllm_max_model_length", note=limit)
    else:
        draft.set("data.max_prompt_length", 1024, note=limit)
        draft.open_questions.append(f"data.max_prompt_length: {limit}; 1024 stands in")
    draft.hold_or_lose(
        "shuffle_dataset",
        "prompts come in another order in each epoch",
        holds=draft.flag("shuffle_dataset", default=True),
    )
    if draft.has("eval_dataset"):
        draft.set("validation.url", draft.text("eval_dataset"), "eval_dataset")
        every = max(1, int(draft.number("eval_steps", 500)) // _updates(draft))
        if draft.text("eval_strategy", "no") == "steps":
            draft.set("validation.every", every, "eval_steps", "eval_strategy")
    for name in ("eval_steps", "eval_strategy"):
        draft.hold(name, "a validation is run before the first step and after the last")


def _set_model(draft: Draft) -> None:
    path = draft.text("model")
    is_name = len(path.split("/")) == 2
    if not draft.has("model") or path[0] in "./~$" or Path(path).exists():
        is_name = False
    revision = draft.text("model_revision", "main")
    if is_name:
        path = f"hf://{path}"
        if revision != "main":
            path = f"{path}@{revision}"
    if draft.has("model"):
        sources = ["model", "model_name_or_path"]
        if is_name:
            sources.append("model_revision")
        draft.set_from("model.path", path, sources)
    else:
        draft.leave_open("model.path", "no model is given")
    draft.hold("dtype", "weights learn in float32")
    dtype = "float32"
    if draft.flag("bf16", default=True):
        dtype = "bfloat16"
    draft.set("model.dtype", dtype, "bf16")
    if draft.flag("fp16", default=False):
        reason = "float16 is not computed in: bfloat16 or float32"
        draft.leave_out("fp16", reason, ["model.dtype"])
    if draft.flag("cast_lm_head_to_fp32", default=False):
        draft.set("model.float32_head", True, "cast_lm_head_to_fp32")
    draft.hold("cast_lm_head_to_fp32", "the default here")
    draft.hold("fp16", "the default here")
    draft.copy({"chat_template_kwargs": "model.template"})


def _set_sampling(draft: Draft) -> None:
    is_vllm = draft.flag("use_vllm", default=False)
    engine = "transformers"
    if is_vllm:
        engine = "vllm"
    draft.set("rollout.engine", engine, "use_vllm")
    length = draft.whole("max_completion_length", 512)
    draft.set("rollout.max_response_length", length, "max_completion_length")
    if draft.is_null("max_completion_length"):
        reason = "null is no limit, and responses have one here"
        draft.fates["max_completion_length"] = Fate(lost=reason)
        draft.leave_open("rollout.max_response_length", f"max_completion_length: {reason}")
    draft.set("rollout.temperature", draft.number("temperature", 1.0), "temperature")
    draft.set("rollout.top_p", draft.number("top_p", 1.0), "top_p")
    draft.set("rollout.top_k", max(0, int(draft.number("top_k", 0))), "top_k")
    draft.copy({"min_p": "rollout.min_p"})
    if draft.number("repetition_penalty", 1.0) == 1.0:
        draft.hold("repetition_penalty", "none is how it is")
    else:
        reason = "sampling is that of the policy, so that log-probs are its own"
        draft.leave_out("repetition_penalty", reason, ["rollout.temperature"])
    correction = [
        f"vllm_importance_sampling_{name}"
        for name in ("correction", "mode", "clip_max", "clip_min", "cap")
    ]
    if not is_vllm:
        names = (
            "gpu_memory_utilization",
            "tensor_parallel_size",
            "enable_sleep_mode",
            "mode",
            "max_model_length",
        )
        for name in (*(f"vllm_{one}" for one in names), *correction):
            draft.hold(name, "the engine is transformers")
        return
    share = draft.number("vllm_gpu_memory_utilization", 0.3)
    draft.set("rollout.vllm.gpu_memory_utilization", share, "vllm_gpu_memory_utilization")
    size = draft.whole("vllm_tensor_parallel_size", 1)
    draft.set("rollout.tensor_parallel_size", size, "vllm_tensor_parallel_size")
    if draft.has("vllm_enable_sleep_mode"):
        level = 0
        if draft.flag("vllm_enable_sleep_mode", default=False):
            level = 2
        draft.set("rollout.vllm.sleep_level", level, "vllm_enable_sleep_mode")
    if draft.text("vllm_mode", "colocate") == "server":
        draft.open_questions.append(
            "cluster.placement: vllm_mode=server generates on cards of its own: give the role "
            "rollout workers of its own (docs/clusters.md)"
        )
    draft.hold("vllm_mode", "engines are roles of the run's own workers")
    _set_correction(draft, correction)


def _set_correction(draft: Draft, names: list[str]) -> None:
    """Set the weights of what the engine and the trainer compute otherwise."""
    if not draft.flag(names[0], default=True):
        draft.hold(names[0], "the default here: no correction")
        return
    if draft.text("loss_type", "dapo") == "vespo":
        _set_ratio_to_engine(draft, names)
        return
    mode = draft.text(names[1], "sequence_mask")
    level, _, kind = mode.partition("_")
    high = draft.number(names[4], draft.number(names[2], 3.0, finite=False), finite=False)
    low = draft.number(names[3], 0.0)
    if kind == "truncate" and high == math.inf and not draft.has(names[3]):
        draft.lose(names[2], "TRL truncates by a clip_min or a clip_max: give one of them")
        return
    if kind not in ("mask", "truncate") or level not in ("token", "sequence"):
        reason = f"there is no mode {mode!r}: docs/algorithms.md, Corrections"
        draft.leave_out(names[1], reason, ["algorithm.correction"])
        return
    if kind == "mask":
        draft.set_from("algorithm.correction", f"{_OURS}:masked_is", names)
        options: dict[str, Any] = {"low": max(low, 1e-9), "high": high, "level": level}
    else:
        draft.set_from("algorithm.correction", f"{_OURS}:truncated_is", names)
        options = {"cap": high, "level": level}
        if low > 0:
            options["low"] = low
    draft.set_from("algorithm.correction_options", options, names)


def _set_ratio_to_engine(draft: Draft, names: list[str]) -> None:
    """Take the engine's log-probs as the old ones, for a loss whose ratio is to the sampler."""
    if draft.number("top_entropy_quantile", 1.0) < 1:
        for name in names:
            draft.lose(
                name,
                "vespo's ratio to the engine takes the engine's log-probs, and top_entropy_quantile "
                "the pass of the policy, whose entropies choose tokens",
            )
        return
    draft.set("algorithm.old_logprobs", ENGINES_LOGPROBS, names[0], note="vespo's ratio")
    for name in names[1:]:
        draft.lose(name, "no token's share in the row's ratio to the engine is bounded here")


def _set_rewards(draft: Draft) -> None:
    functions = [str(one) for one in draft.items("reward_funcs")]
    columns = [str(one) for one in draft.items("reward_columns")]
    answer = draft.entries["data.answer"].value
    draft.set("rewards.function", "siirl_dask.rewards:from_trl", "reward_funcs")
    options: dict[str, Any] = {"functions": functions}
    if draft.has("reward_weights"):
        options["weights"] = draft.items("reward_weights")
    if answer in columns and answer != "answer":
        options["answer_name"] = answer
    draft.set("rewards.options", options, "reward_funcs", "reward_weights")
    if not functions and not draft.reason_open("reward_funcs"):
        draft.leave_open("rewards.options", "no reward function is given that can be read")
    others = [one for one in columns if one != answer]
    if others:
        draft.pass_to_reward(others)
    draft.became("reward_columns", "data.answer")


def _set_observation(draft: Draft) -> None:
    reported = [str(one) for one in draft.items("report_to", ["none"])]
    known = [one for one in reported if one in [*MetricsBackend]]
    draft.set("observe.backends", known, "report_to")
    others = [one for one in reported if one not in (*known, "none")]
    if others:
        draft.open_questions.append(
            f"observe.backends: there is no backend {', '.join(others)} (docs/monitoring.md)"
        )
    strategy = draft.text("save_strategy", "steps")
    every = int(draft.number("save_steps", 500))
    if strategy == "no":
        draft.set("checkpoint.every", 0, "save_strategy")
        draft.hold("save_steps", "save_strategy is no")
    else:
        draft.set(
            "checkpoint.every", max(1, every // _updates(draft)), "save_steps", "save_strategy"
        )
    if strategy not in ("no", "steps"):
        draft.open_questions.append(f"checkpoint.every: save_strategy={strategy}, in steps here")
    draft.copy({"save_total_limit": "checkpoint.keep"})
