"""Rules for the reward function: whose it is, which options and columns it gets, and the penalty of
long responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from siirl_dask.commands.migrate.draft import Draft
from siirl_dask.commands.migrate.training_files import files_of, open_here, training_files
from siirl_dask.commands.migrate.trl.script_names import function_in

_SOURCES = {
    "gsm8k": "gsm8k",
    "dapo": "dapo_math",
    "aime": "dapo_math",
    "mmlu": "multiple_choice",
    **dict.fromkeys(("geo3k", "geometry3k"), "geo3k"),
    **dict.fromkeys(("math", "numina", "deepscaler"), "math_answer"),
}
"""Part of a dataset's name, and the reward that verl and siiRL have for it."""
_VERL_SOURCES = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math_answer",
    "DigitalLearningGmbH/MATH-lighteval": "math_answer",
    "HuggingFaceH4/MATH-500": "math_answer",
    "math_dapo": "dapo_math",
    "math_dapo_reasoning": "dapo_math",
    "math": "dapo_math",
    "hiyouga/geometry3k": "geo3k",
}
"""Values of ``data_source`` in the datasets that verl prepares, and the reward of each."""
_OURS = "siirl_dask.rewards"
_BY_SOURCE = f"{_OURS}:by_source"
_BOXED_THOUGHT = r"<think>.*</think>.*\\boxed\{.*\}.*"
_GEO3K = {
    "rewards": {
        "right": f"{_OURS}:math_answer",
        "format": {"run": f"{_OURS}:matches_format", "with": {"pattern": _BOXED_THOUGHT}},
    },
    "weights": {"right": 0.9, "format": 0.1},
}
"""verl's reward of Geometry3k: mostly the boxed answer, and a tenth for the format."""
_CUSTOM = ("custom_reward_function", "reward.custom_reward_function")
_LONGEST = ("reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len")
_OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
    "custom_reward_function.overlong_buffer",
)


def set_reward(draft: Draft) -> None:
    """Set the reward function by the name of the dataset, where the other systems choose by each
    row's source.
    """
    functions = _functions_of(training_files(draft))
    manager = draft.first(
        ("reward.reward_manager.name", "reward_model.reward_manager"), "reward_model.reward_manager"
    )
    if draft.text(manager, "naive") not in ("naive", "dapo", "parallel", "batch"):
        draft.lose(
            manager,
            "there is no such reward: docs/rewards.md has those that there are, and how to write "
            "one",
        )
    custom = draft.first([f"{one}.path" for one in _CUSTOM], "")
    if custom:
        _set_custom_reward(draft, custom.removesuffix(".path"), manager)
        return
    note = "by the dataset's name; check it"
    tested = _functions_of(files_of(draft, "data.val_files"))
    if len(functions) > 1:
        needed = {*functions, *tested}
        sources = {one: _reward_of(own) for one, own in _VERL_SOURCES.items() if own in needed}
        draft.set("rewards.function", _BY_SOURCE, manager, note="by each row's data_source")
        draft.set("rewards.options", {"rewards": sources}, note="sources as in verl's own datasets")
        return
    function = functions[0] if functions else ""
    if function and {*tested} - {function}:
        draft.ask(
            f"rewards.function: {function} scores validations too, whose files have "
            f"{' and '.join(tested)} by their names: {_BY_SOURCE} scores each by its data_source"
        )
    if function == "geo3k":
        draft.set("rewards.options", _GEO3K, note="nine tenths for the answer, one for the format")
    named = "weighted_sum" if function == "geo3k" else function
    draft.set("rewards.function", f"{_OURS}:{named}", manager, note=note)
    if not function:
        draft.leave_open(
            "rewards.function",
            "it was chosen by each row's data_source, of which the dataset's name says nothing: name "
            "one of docs/rewards.md, or one of your own",
        )


def _reward_of(function: str) -> Any:
    """Return a reward by its name, with its options where it has some, for options of another."""
    if function == "geo3k":
        return {"run": f"{_OURS}:weighted_sum", "with": _GEO3K}
    return f"{_OURS}:{function}"


def _functions_of(files: Sequence[str]) -> list[str]:
    """Return the rewards of files, each once: by their rows' sources where these are known, else
    by the names of the file and its folder. A file that tells nothing adds none.
    """
    found: list[str] = []
    for file in files:
        sources = _sources_in(file)
        by_rows = [_VERL_SOURCES.get(one, _function_by_name(one)) for one in sources]
        named = [_function_by_name("/".join(Path(file).parts[-2:]))]
        found += by_rows if any(by_rows) else named
    return [one for one in dict.fromkeys(found) if one]


def _function_by_name(name: str) -> str:
    return next((own for part, own in _SOURCES.items() if part in name.lower()), "")


def _sources_in(file: str) -> list[str]:
    """Return what the first rows of a Parquet file that is here have as ``data_source``."""
    table = open_here(file)
    if table is None or table.num_row_groups == 0:
        return []
    rows = table.read_row_group(0, columns=["data_source"])
    if "data_source" not in rows.column_names:
        return []
    return [str(one) for one in rows["data_source"].unique().to_pylist()]


def _set_custom_reward(draft: Draft, group: str, manager: str) -> None:
    """Set the reward function of the user's own, which ``from_verl`` calls as verl does."""
    path = draft.text(f"{group}.path").removeprefix("file://")
    place = path.removeprefix("pkg://")
    function = f"{place}:{draft.text(f'{group}.name', 'compute_score')}"
    names = [f"{group}.path", f"{group}.name"]
    options: dict[str, Any] = {"function": function}
    prefix = f"{group}.reward_kwargs."
    given = [name for name in draft.given.values if name.startswith(prefix) and draft.has(name)]
    if given:
        options["arguments"] = {name.removeprefix(prefix): draft.value(name) for name in given}
    draft.set_from("rewards.function", "siirl_dask.rewards:from_verl", names)
    draft.set_from("rewards.options", options, [*names, *given])
    draft.hold(manager, "the function is the user's own")
    if draft.text(manager) == "batch":
        draft.leave_open(
            "rewards.function",
            f"{function} takes the rows of a batch, and a reward takes one: write it as "
            "reward(prompt, response, answer, **columns)",
        )


def columns_of_reward(draft: Draft) -> list[str]:
    """Return the columns that the reward function gets: for one of the user's own, of those that
    verl gives it, the ones that it takes and that training files which are here have.
    """
    custom = draft.first([f"{one}.path" for one in _CUSTOM], "")
    if not custom:
        by_source = draft.entries["rewards.function"].value == _BY_SOURCE
        return ["data_source"] if by_source else []
    columns = ["data_source", "extra_info"]
    name = draft.text(custom.replace(".path", ".name"), "compute_score")
    function = function_in(Path(draft.text(custom).removeprefix("file://")), name)
    if function is not None and function.args.kwarg is None:
        arguments = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
        columns = [one for one in columns if one in arguments]
    for table in map(open_here, training_files(draft)):
        if table is not None:
            columns = [one for one in columns if one in table.schema_arrow.names]
    return columns


def set_overlong(draft: Draft) -> None:
    """Add DAPO's penalty of long responses as a node."""
    prefix = next(
        (one for one in _OVERLONG if draft.has(f"{one}.enable", f"{one}.len")), _OVERLONG[0]
    )
    is_siirl = draft.given.system == "siiRL"
    enabled = draft.has(f"{prefix}.len") if is_siirl else False
    if not draft.flag(f"{prefix}.enable", enabled):
        return
    names = [f"{prefix}.{name}" for name in ("enable", "len", "penalty_factor")]
    options: dict[str, Any] = {
        "buffer": int(draft.number(names[1], 512)),
        "factor": draft.number(names[2], 1.0 if is_siirl else 0.0),
    }
    longest = draft.first(_LONGEST, "")
    limit = int(draft.number(longest, 0))
    if longest and limit != draft.entries["rollout.max_response_length"].value:
        options["max_length"] = limit
        draft.became(longest, "nodes.overlong")
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
