"""Rules that make keys of ours of one or several options; commands/migrate/table.py has what
they are about.
"""

from __future__ import annotations

from pathlib import Path

from siirl_dask.commands.migrate.ahead_rules import (
    BATCH,
    TOTAL,
    generating_devices,
    set_ahead,
    steps_of_total,
)
from siirl_dask.commands.migrate.draft import Draft
from siirl_dask.commands.migrate.loss_rules import ACTOR, set_algorithm, set_loss
from siirl_dask.commands.migrate.reward_rules import columns_of_reward, set_overlong, set_reward
from siirl_dask.commands.migrate.rollout_rules import set_profile, set_rollout, set_validation
from siirl_dask.commands.migrate.trainer_rules import batch_size, minibatch_count, set_trainer
from siirl_dask.commands.migrate.training_files import files_of, open_here, training_files
from siirl_dask.config import MetricsBackend
from siirl_dask.errors import counted

_MODEL = "actor_rollout_ref.model"


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
    generating = generating_devices(draft)
    set_rollout(draft, generating if generating else workers)
    set_ahead(draft, workers)
    set_reward(draft)
    set_algorithm(draft)
    set_loss(draft)
    set_trainer(draft, "trainer", ACTOR, workers)
    if "dags/ppo.yaml" in draft.bases:
        set_trainer(draft, "critic", "critic", workers)
    set_validation(draft)
    _set_observation(draft)
    set_profile(draft)
    set_overlong(draft)
    columns = columns_of_reward(draft)
    if columns:
        draft.pass_to_reward(columns)
    for key, reason in draft.given.undecided.items():
        draft.leave_open(key, reason)


def _set_steps(draft: Draft, rows: int | None) -> None:
    """Set ``run.steps``, which the other systems count from epochs and rows."""
    steps = "trainer.total_training_steps"
    epochs = int(draft.number("trainer.total_epochs", 30))
    batch = batch_size(draft)
    if draft.has(steps) and draft.number(steps, 0) > 0:
        number = int(draft.number(steps, 0))
        known = _known_rows(draft, rows)
        draft.set("run.steps", number, steps)
        if known and epochs * (known // batch) < number:
            draft.leave_open(
                "run.steps",
                f"{steps} says {number}, and {counted(epochs, 'epoch')} of {counted(known, 'row')} "
                f"end after {epochs * (known // batch)}, as there training does",
            )
        draft.hold("trainer.total_epochs", f"{steps} is given")
        return
    generated = steps_of_total(draft, batch)
    if generated is not None:
        note = f"// {counted(batch, 'prompt')} a step"
        draft.set("run.steps", generated, TOTAL, note=note)
        draft.hold("trainer.total_epochs", f"{TOTAL} is given")
        return
    known = _known_rows(draft, rows)
    if known:
        note = f"{counted(known, 'row')} // {counted(batch, 'prompt')} a step"
        draft.set("run.steps", max(1, epochs * (known // batch)), "trainer.total_epochs", note=note)
        return
    question = (
        f"run.steps: {counted(epochs, 'epoch')} x rows // {batch}, and no dataset was there to count: give "
        "--rows N"
    )
    draft.open_questions.append(question)
    draft.set(
        "run.steps", 100, "trainer.total_epochs", note=f"TO DECIDE, {question.partition(': ')[2]}"
    )


def _known_rows(draft: Draft, rows: int | None) -> int | None:
    """Return the rows to train on: as the caller says, or of files that are all here."""
    counts = [_rows_of(url) for url in files_of(draft, "data.train_files")]
    if rows is None and counts and all(counts):
        return sum(filter(None, counts))
    return rows


def _rows_of(url: str) -> int | None:
    """Return the rows of a local Parquet file; None where there is none."""
    file = open_here(url)
    if file is None:
        return None
    return int(file.metadata.num_rows)


def local(path: str) -> str:
    """Return a path of the shell's as one of a configuration: ``~`` is the home folder of who
    starts the run.
    """
    if path.startswith("~/"):
        return path.replace("~", "${oc.env:HOME}", 1)
    return path


def _set_data(draft: Draft) -> None:
    files = [local(file) for file in training_files(draft)]
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
    if draft.given.ahead == "fully_async":
        note = "trained on between two loads of weights"
        mini = f"{ACTOR}.ppo_mini_batch_size"
        draft.set_from("data.batch_size", batch_size(draft), [*BATCH, mini], note)
    else:
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
        draft.hold_or_lose(name, reason, holds=draft.flag(name, wanted) == wanted)
    draft.hold_or_lose(
        "data.truncation",
        "longer prompts are dropped, never cut",
        holds=draft.text("data.truncation", "error") == "error",
    )


def _set_model(draft: Draft) -> None:
    path = local(draft.text(f"{_MODEL}.path", "~/models/deepseek-llm-7b-chat"))
    if _is_of_hub(path):
        path = f"hf://{path}"
    draft.set("model.path", path, f"{_MODEL}.path")
    _set_template(draft)
    names = (
        f"{ACTOR}.fsdp_config.dtype",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype",
        "actor_rollout_ref.rollout.dtype",
    )
    given = draft.text(draft.first(names, names[0]), "bfloat16")
    dtype = "bfloat16"
    if given in ("fp32", "float32", "float"):
        dtype = "float32"
    draft.set_from("model.dtype", dtype, names)
    if given in ("fp16", "float16", "half"):
        reason = "float16 is not computed in: bfloat16 or float32"
        draft.leave_out(draft.first(names, names[0]), reason, ["model.dtype"])


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
    note = ""
    if every <= 0:
        note = (
            "no checkpoint: the model is lost when the run ends, and a run that stops cannot resume"
        )
    draft.set("checkpoint.every", max(0, every), "trainer.save_freq", note=note)
    draft.hold_or_lose(
        "trainer.resume_mode",
        "a run resumes by itself; siirl-dask run --fresh begins again",
        holds=draft.text("trainer.resume_mode", "auto") == "auto",
    )
    draft.copy({"trainer.critic_warmup": "algorithm.critic_warmup_steps"})


__all__ = ["apply_rules", "minibatch_count"]
