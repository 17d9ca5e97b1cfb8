"""Rules of the engine, of validations and of profiles."""

from __future__ import annotations

from siirl_dask.commands.migrate.draft import Draft
from siirl_dask.config import Engine
from siirl_dask.errors import counted

_R = "actor_rollout_ref.rollout"
_ENGINES = {"hf": "transformers"}
_ROLES = {
    "generate": "rollout",
    "compute_reward": "reward",
    "compute_old_log_prob": "policy",
    "compute_ref_log_prob": "reference",
    "compute_ref_log_porb": "reference",
    "compute_value": "critic",
    "compute_advantage": "policy",
    "train_actor": "policy",
    "train_critic": "critic",
}
"""siiRL's nodes that are profiled, and the roles here that run them."""


def set_rollout(draft: Draft, workers: int) -> None:
    """Set the engine and its sampling."""
    name = draft.text(f"{_R}.name", "vllm")
    engine = _ENGINES.get(name, name)
    if engine == Engine.sglang:
        draft.lose(
            f"{_R}.name", "rollout.engine=sglang has no rollout.sampler=exact: choose both by hand"
        )
        draft.open_questions.append(
            "rollout.engine: sglang draws tokens with a sampler of its own; auto stands in"
        )
    elif engine in [*Engine]:
        draft.set("rollout.engine", engine, f"{_R}.name")
    else:
        draft.lose(f"{_R}.name", f"there is no engine {name!r}: {', '.join(Engine)}")
        draft.open_questions.append(f"rollout.engine: {name} has no counterpart; auto stands in")
    draft.set("rollout.n", int(draft.number(f"{_R}.n", 1)), f"{_R}.n")
    draft.set("rollout.temperature", draft.number(f"{_R}.temperature", 1.0), f"{_R}.temperature")
    draft.set("rollout.top_p", draft.number(f"{_R}.top_p", 1.0), f"{_R}.top_p")
    draft.set("rollout.top_k", max(0, int(draft.number(f"{_R}.top_k", -1))), f"{_R}.top_k")
    draft.copy({f"{_R}.min_p": "rollout.min_p"})
    length = draft.first(
        ("data.max_response_length", f"{_R}.response_length"), "data.max_response_length"
    )
    draft.set("rollout.max_response_length", int(draft.number(length, 512)), length)
    draft.hold(f"{_R}.response_length", "it follows data.max_response_length")
    size = max(
        1,
        int(
            draft.number(
                f"{_R}.tensor_model_parallel_size", 2 if draft.given.system == "verl" else 1
            )
        ),
    )
    if engine == "transformers" or workers % size:
        draft.lose(
            f"{_R}.tensor_model_parallel_size",
            f"engine {engine} on {counted(workers, 'worker')} takes no {size} for each",
        )
        size = 1
    draft.set("rollout.tensor_parallel_size", size, f"{_R}.tensor_model_parallel_size")
    _set_replay(draft, size)
    _set_loop(draft)
    if draft.has(f"{_R}.max_num_seqs"):
        rows = -(-int(draft.number(f"{_R}.max_num_seqs", 256)) // size)
        draft.set(
            "rollout.max_rows", rows, f"{_R}.max_num_seqs", note="for each worker of an engine"
        )
    bucket = (
        f"{_R}.checkpoint_engine.update_weights_bucket_megabytes",
        f"{_R}.update_weights_bucket_megabytes",
    )
    if any(draft.has(name) for name in bucket):
        megabytes = int(draft.number(draft.first(bucket, ""), 256))
        draft.set_from("rollout.weight_bucket", f"{megabytes}MiB", bucket)
    _set_vllm(draft)


def _set_loop(draft: Draft) -> None:
    """Ask where responses are made by a loop of turns."""
    name = f"{_R}.agent.default_agent_loop"
    if draft.text(name, "single_turn_agent") == "single_turn_agent":
        draft.hold(name, "a response is one turn")
    else:
        reason = "turns are an environment: dags/turns.yaml and environments.*, see docs/turns.md"
        draft.leave_out(name, reason, ["rollout.engine"])


def _set_replay(draft: Draft, size: int) -> None:
    name = f"{_R}.enable_rollout_routing_replay"
    if not draft.has(name):
        return
    replay = draft.flag(name, default=False)
    if replay and (size > 1 or not draft.flag(f"{_R}.enforce_eager", default=True)):
        draft.lose(name, "routes are recorded in engines of one worker, with enforce_eager")
    else:
        draft.set("rollout.router_replay", replay, name)


def _set_vllm(draft: Draft) -> None:
    draft.copy({
        f"{_R}.{name}": f"rollout.vllm.{name}"
        for name in ("gpu_memory_utilization", "enforce_eager", "enable_prefix_caching", "max_num_batched_tokens")
    })  # fmt: skip
    if draft.has(f"{_R}.free_cache_engine"):
        level = 0
        if draft.flag(f"{_R}.free_cache_engine", default=True):
            level = 2
        draft.set("rollout.vllm.sleep_level", level, f"{_R}.free_cache_engine")
    prefix = f"{_R}.engine_kwargs.vllm."
    names = {
        name: name.removeprefix(prefix) for name in draft.given.values if name.startswith(prefix)
    }
    names |= {f"{_R}.{name}": name for name in ("max_model_len", "enable_chunked_prefill")}
    if arguments := {own: draft.value(name) for name, own in names.items() if draft.has(name)}:
        draft.set_from("rollout.vllm.engine_kwargs", arguments, [*names])


def set_validation(draft: Draft) -> None:
    """Set the validation's dataset and sampling."""
    files = [str(file) for file in draft.items("data.val_files")]
    frequency = draft.first(("trainer.test_freq", "rollout.test_freq"), "trainer.test_freq")
    every = int(draft.number(frequency, -1))
    if files:
        draft.set("validation.url", files[0].replace("~", "${oc.env:HOME}", 1), "data.val_files")
        note = ""
        if every <= 0:
            every = max(1, int(draft.entries["run.steps"].value))
            note = "before the first step and after the last alone"
        draft.set("validation.every", every, frequency, note=note)
        draft.set(
            "validation.source_column", "data_source", note="a metric for each source, as there"
        )
    if len(files) > 1:
        draft.open_questions.append(
            f"validation.url: one dataset; {', '.join(files[1:])} must be put with the first"
        )
    for name in ("trainer.test_freq", "rollout.test_freq"):
        draft.hold(name, "there is no validation without data.val_files, or the other one is given")
    prefix = f"{_R}.val_kwargs"
    samples = int(draft.number(f"{prefix}.n", 1))
    drawn = draft.flag(f"{prefix}.do_sample", default=False)
    if draft.has(f"{prefix}.n"):
        draft.set("validation.n", samples, f"{prefix}.n")
    temperature: float = 0
    if drawn:
        temperature = draft.number(f"{prefix}.temperature", 0)
    if samples > 1 and not temperature:
        draft.open_questions.append(
            f"validation.temperature: {samples} samples of temperature 0 are all the same; 1 "
            "stands in"
        )
        temperature = 1.0
    draft.set("validation.temperature", temperature, f"{prefix}.temperature", f"{prefix}.do_sample")
    draft.copy({f"{prefix}.top_p": "validation.top_p"})


def set_profile(draft: Draft) -> None:
    """Set which steps, ranks and roles are profiled."""
    steps = "profiler.profile_steps"
    own = draft.flag("profiler.enable", default=False)
    first = 1  # siiRL counts its steps from 0
    if not own and draft.has("global_profiler.steps") and draft.text("global_profiler.tool"):
        steps = "global_profiler.steps"
        own = True
        first = 0
    if not own:
        unread = (
            "profiler.profile_steps",
            "profiler.roles",
            *(f"profiler.{one}" for one in _DETAILS),
        )
        for name in (*_WHEN, *unread, *_RANKS, *_EVERYONE):
            draft.hold(name, "no steps are profiled")
        return
    chosen = [max(1, step + first) for step in _numbers(draft, steps)]
    draft.set_from("profile.steps", chosen, [steps, *_WHEN])
    everyone = [name for name in _EVERYONE if draft.flag(name, default=False)]
    ranks = _numbers(draft, draft.first(_RANKS, _RANKS[0]))
    if everyone:
        ranks = []
    draft.set_from("profile.ranks", ranks, [*everyone, *_RANKS])
    if draft.has("profiler.roles"):
        roles = [_ROLES.get(str(one), str(one)) for one in draft.items("profiler.roles")]
        draft.set("profile.roles", [*dict.fromkeys(roles)], "profiler.roles")
    stacks = draft.flag("profiler.with_stack", draft.flag("profiler.with_module", default=False))
    memory = draft.flag("profiler.with_memory", draft.flag("profiler.record_shapes", default=False))
    level = "time"
    if stacks:
        level = "stacks"
    elif memory:
        level = "memory"
    draft.set("profile.level", level, *(f"profiler.{one}" for one in _DETAILS))
    for name in _EVERYONE:
        draft.hold(name, "the default here")


def _numbers(draft: Draft, name: str) -> list[int]:
    """Return the whole numbers of a list: steps or ranks; the first of either where there are
    none.
    """
    found = [
        one for one in draft.items(name, [0]) if isinstance(one, int) and not isinstance(one, bool)
    ]
    numbers = [one for one in found if one >= 0]
    if not numbers:
        return [0]
    return numbers


_WHEN = ("profiler.enable", "global_profiler.tool", "actor_rollout_ref.actor.profiler.enable")
_RANKS = ("profiler.ranks", "actor_rollout_ref.actor.profiler.ranks")
_EVERYONE = ("profiler.all_ranks", "actor_rollout_ref.actor.profiler.all_ranks")
_DETAILS = ("level", "with_memory", "record_shapes", "with_stack", "with_module")
