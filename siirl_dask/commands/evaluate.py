"""``siirl-dask eval``: samples from a model over a dataset, scores the samples and reports metrics.

The pass over the data is a phase like a validation: the same workers, plan and nodes, without a
trainer. Seeds are made of run seed, checkpoint step and row id, so the result equals that of the
run's own validation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from siirl_storage import join, open_table, set_retry_seconds

from siirl_dask.commands.evaluation_dag import TABLE, Answering, answering_of, evaluation_dag
from siirl_dask.config import Config
from siirl_dask.config.file import load_text
from siirl_dask.coordinator import Source, open_source, source_schema
from siirl_dask.driver.checks.reachable import Unreachable
from siirl_dask.driver.single_pass import one_pass
from siirl_dask.errors import ConfigError
from siirl_dask.models.remote import is_remote
from siirl_dask.nodes import validation_sampling
from siirl_dask.nodes.evaluate import SOURCE
from siirl_dask.observe import EvalResult, write_eval_result
from siirl_dask.planner import DAG, compile_chains
from siirl_dask.runs.checkpoint_model import (
    folder_for_workers,
    is_run_or_model,
    write_checkpoint,
)
from siirl_dask.runs.export import check_unused
from siirl_dask.runs.reader import Run
from siirl_dask.runs.whole_checkpoint import with_whole_checkpoint
from siirl_dask.schema import GROUP_ID
from siirl_dask.tables import step_folder
from siirl_dask.wording import redacted

_FOLDER = "evaluations"
_ARGUMENTS = {"model.path": "its first argument", "data.url": "--data", "run.url": "--out"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRequest:
    """A model, a dataset, and how to sample."""

    model: str
    """A run's folder or URL, or a Hugging Face folder, or its URL."""
    data: str
    """URL of the dataset."""
    step: int | None = None
    """Step of the run's checkpoint; None takes the newest."""
    out: str | None = None
    """URL to write to; None takes a folder below the run, or below ``evaluations`` in the
    working directory."""
    world: str | None = None
    """Role of the run's DAG with the environments to play in; None takes those in which it was
    trained."""
    overrides: Sequence[str] = ()
    """Overrides, ``key=value``, of the run's configuration, or of the defaults for a Hugging
    Face folder."""


def evaluate(request: EvalRequest) -> tuple[EvalResult, str]:
    """Write every sample and ``metrics.json``, and return the result with the URL that it is
    written to.

    UserError before anything starts.
    """
    run = is_run_or_model(request.model, request.step)
    step = None
    if run:
        step = Run(request.model).checkpoint_step(request.step)
    out = request.out
    if not out:
        out = _default_out(request, step)
    check_unused(out, "--out")
    config = _config(request, out, run)
    if config.agents:
        raise ConfigError(
            f"run {request.model!r} has the agents {[*config.agents]}, and eval samples from one "
            "model: the run's own validation (validation.url) answers with all of them; to "
            "evaluate one of them, write its model with `siirl-dask export --role policy_NAME`"
        )
    set_retry_seconds(config.storage.retry_seconds)
    answering = answering_of(
        Run(request.model) if run else None, config, request.overrides, request.world
    )
    with ExitStack() as over:
        if run:
            store = request.out
            if not store:
                store = join(request.model, _FOLDER)
            config.model.path = over.enter_context(folder_for_workers(config.cluster, store))
        dag, source = _planned(config, answering)
        if run:
            write = partial(write_checkpoint, request.model, config.model.path)
            step = with_whole_checkpoint(request.model, request.step, ["policy"], write)
            if request.out is None:  # the newest may be another one by now
                config.run.url = out = _default_out(request, step)
                check_unused(out, "--out")
        try:
            logged = one_pass(
                config, dag, source, step or 0, passing=[config.model.path] if run else ()
            )
        except Unreachable as error:
            kept = ""
            if run:
                kept = ", as are the weights of the run's checkpoint while it lasts"
            raise ConfigError(
                f"{error}; what an evaluation writes is below --out, here {out!r}{kept}"
            ) from error
    result = _eval_result(request, config, answering, step, logged)
    write_eval_result(out, result)
    return result, out


def _config(request: EvalRequest, out: str, run: bool) -> Config:
    """Return the configuration of the evaluation: that of a run, or the defaults, with the
    request's overrides.
    """
    for text in request.overrides:
        key, _, value = text.partition("=")
        if key in _ARGUMENTS:
            raise ConfigError(
                f"{text}: eval takes {value!r} as {_ARGUMENTS[key]}, and {key} from there"
            )
    settings = {**_settings(request.data, out), **({} if run else {"model.path": request.model})}
    overrides = [
        *(f"{key}={json.dumps(value)}" for key, value in settings.items()),
        *request.overrides,
    ]
    if run:
        return Run(request.model).config_with(overrides)
    return load_text("{}", "the defaults", overrides)


def _default_out(request: EvalRequest, step: int | None) -> str:
    """Return ``RUN/evaluations/test-step000010`` for a run, ``evaluations/MODEL-test`` for a
    model.
    """
    data = PurePosixPath(request.data).stem
    if step is not None:
        return join(request.model, _FOLDER, f"{data}-step{step:06d}")
    name = (
        PurePosixPath(request.model).name
        if is_remote(request.model)
        else Path(request.model).resolve().name
    )
    return join(_FOLDER, f"{name}-{data}")


def _settings(data: str, out: str) -> Mapping[str, object]:
    """Return overrides for keys of a run's configuration that an evaluation must not take over."""
    return {
        "run.url": out,
        "data.url": data,
        "data.sources": {},
        "data.prepare": None,
        "data.prepare_options": {},
        "cluster.placement": {},
        "cluster.elastic": False,
        "cluster.max_workers": None,
        "cluster.replacement_timeout": None,
        "rollout.expected_length_column": None,
        "rollout.prompt_placement": None,
        "validation.url": None,
        "validation.test_url": None,
        "validation.k": [],
    }


def _planned(config: Config, answering: Answering) -> tuple[DAG, Source]:
    """Return the DAG and its dataset. DataError or PlanError for unusable data, source or
    columns.
    """
    source = Source.of(config.data)
    schema = open_source(source).schema
    columns = source_schema(schema, source)
    dag = evaluation_dag(config, answering, columns)
    compile_chains(
        dag,
        [str(worker) for worker in range(config.cluster.workers)],
        columns,
        config.cluster.placement,
    )
    return dag, source


def _eval_result(
    request: EvalRequest,
    config: Config,
    answering: Answering,
    step: int | None,
    logged: Mapping[str, float | None],
) -> EvalResult:
    metrics = {name: value for name, value in logged.items() if value is not None}
    validation = config.validation
    sampling = validation_sampling(config.rollout, config.validation)
    return EvalResult(
        model=redacted(request.model),
        step=step,
        data=redacted(request.data),
        reward=answering.rewarded_by,
        prompts=_prompts(step_folder(config.run.url, TABLE, step or 0)),
        samples=round(metrics["episodes" if answering.episodes else "samples"]),
        n=validation.n,
        k=validation.k,
        temperature=sampling.temperature,
        top_p=validation.top_p,
        max_tokens=config.rollout.max_response_length,
        seed=config.run.seed,
        failures=round(metrics["episodes/failed" if answering.episodes else "reward/failures"]),
        turns=metrics.get("episodes/turns"),
        dropped_prompts=round(metrics["data/dropped_prompts"]),
        truncated=metrics.get("response/truncated", 0.0),
        metrics={name: value for name, value in metrics.items() if "@" in name},
    )


def _prompts(url: str) -> dict[str | None, int]:
    """Return the number of prompts from each source."""
    table = open_table(url).to_table([GROUP_ID, SOURCE]).group_by([GROUP_ID, SOURCE]).aggregate([])
    counts = table.group_by(SOURCE).aggregate([([], "count_all")]).sort_by(SOURCE)
    return dict(zip(counts[SOURCE].to_pylist(), counts["count_all"].to_pylist(), strict=True))
