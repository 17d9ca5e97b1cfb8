"""Questions that are asked of most runs, each a function of the open samples that returns a table.

with open_rollouts("runs/mine", steps=range(10, 21)) as rollouts:
    print(worst(rollouts, 3), by(rollouts, "source"))

Each reads the columns that it needs and no others: token ids and log-probs are most of a run's bytes.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.errors import DataError
from siirl_dask.runs.rollouts import ATTEMPT, Rollouts, quoted
from siirl_dask.schema import (
    ANSWER,
    DATA_PART,
    DATA_ROW,
    FINISH_REASON,
    GROUP_ID,
    PROMPT,
    PROMPT_IDS,
    PROMPT_NUMBER,
    PROMPT_TEXT,
    RESPONSE,
    RESPONSE_IDS,
    REWARD,
    REWARD_PARTS,
    ROW_ID,
    SAMPLE_NUMBER,
    SAMPLING_SEED,
    TOKENS,
    WEIGHTS_VERSION,
    WORKER,
)

STEP = "step"
RESPONSE_TOKENS = "response_tokens"
_BINS = 10
_SHOWN = (
    *(REWARD, REWARD_PARTS, FINISH_REASON, PROMPT_NUMBER, SAMPLE_NUMBER, DATA_PART, DATA_ROW),
    *(WORKER, WEIGHTS_VERSION, SAMPLING_SEED, ATTEMPT),
)


def overview(rollouts: Rollouts) -> pa.Table:
    """Return ``step``, ``samples``, mean ``reward`` and mean ``response_tokens`` of each step."""
    return rollouts.table(overview_sql(rollouts))


def overview_sql(rollouts: Rollouts) -> str:
    """Return the SQL of ``overview``."""
    return (
        f"SELECT step, count(*) AS samples, round(avg(reward), 4) AS reward, "
        f"round(avg({_length(rollouts)}), 1) AS {RESPONSE_TOKENS} FROM {rollouts.view} GROUP BY step ORDER BY step"
    )


def worst(rollouts: Rollouts, count: int = 5) -> pa.Table:
    """Return the ``count`` samples with the lowest rewards, later steps first among equals; see ``best``."""
    return _extreme(rollouts, count, "ASC")


def best(rollouts: Rollouts, count: int = 5) -> pa.Table:
    """Return the ``count`` samples with the highest rewards, later steps first among equals.

    The columns are those that people read: step and row id, prompt, response and answer as text, reward and its parts,
    ``response_tokens``, and the row's lineage, as far as the run has them. Rows without a reward do not count.
    """
    return _extreme(rollouts, count, "DESC")


def _extreme(rollouts: Rollouts, count: int, order: str) -> pa.Table:
    if count < 1:
        raise DataError(f"{count} samples: expected at least 1")
    _check(rollouts, REWARD, ROW_ID)
    rows = rollouts.table(  # first the rewards of all rows, then the texts of a few: these are in few files
        f"SELECT step, row_id FROM {rollouts.view} WHERE reward IS NOT NULL "
        f"ORDER BY reward {order}, step DESC, row_id LIMIT {int(count)}"
    )
    if not rows.num_rows:
        raise DataError(f"no sample of the table {rollouts.name!r} has a reward")
    places = list(zip(*rows.to_pydict().values(), strict=True))
    chosen = ", ".join(f"({number}, {step}, {row})" for number, (step, row) in enumerate(places))
    columns = ", ".join([*texts(rollouts), f"{_length(rollouts)} AS {RESPONSE_TOKENS}", *_there(rollouts, _SHOWN)])
    return rollouts.table(
        f"SELECT step, row_id, {columns} FROM {rollouts.of_steps(sorted({step for step, _ in places}))} "
        f"JOIN (VALUES {chosen}) AS chosen(number, step, row_id) USING (step, row_id) ORDER BY chosen.number"
    )


def by(rollouts: Rollouts, column: str) -> pa.Table:
    """Return ``samples``, mean ``reward`` and mean ``response_tokens`` for each value of a column, most samples first.

    A dot goes into a struct. DataError for a column that there is not, or one of lists.
    """
    name = rollouts.column(column)
    _check(rollouts, REWARD)
    return rollouts.table(
        f"SELECT {name} AS {quoted(column)}, count(*) AS samples, avg(reward) AS reward, "
        f"avg({_length(rollouts)}) AS {RESPONSE_TOKENS} FROM {rollouts.view} GROUP BY 1 ORDER BY 2 DESC, 1"
    )


def zero_variance(rollouts: Rollouts) -> pa.Table:
    """Return for each step the ``groups``, those whose rewards are all ``equal``, their ``share`` and mean ``reward``.

    Such a group has no advantage, and teaches nothing. Groups with fewer than two rewards do not count.
    """
    _check(rollouts, REWARD, GROUP_ID)
    return rollouts.table(
        "SELECT step, count(*) AS groups, count(*) FILTER (low = high) AS equal, "
        "count(*) FILTER (low = high) / count(*) AS share, avg(high) FILTER (low = high) AS reward "
        "FROM (SELECT step, min(reward) AS low, max(reward) AS high "
        f"FROM {rollouts.view} GROUP BY step, group_id HAVING count(reward) > 1) GROUP BY step ORDER BY step"
    )


def lengths(rollouts: Rollouts) -> pa.Table:
    """Return a histogram of the responses' lengths in tokens: ``from``, ``to``, ``samples``, ``truncated``, ``reward``.

    ``truncated`` is the share of the bin's responses that the limit ended.
    """
    _check(rollouts, REWARD, FINISH_REASON)
    counts = rollouts.table(
        f"SELECT {_length(rollouts)} AS length, count(*) AS samples, sum(reward) AS total, count(reward) AS rewards, "
        f"count(*) FILTER (finish_reason = 'length') AS cut FROM {rollouts.view} GROUP BY 1 HAVING length IS NOT NULL"
    )
    if not counts.num_rows:
        raise DataError(f"the table {rollouts.name!r} has no responses")
    length = counts["length"].cast(pa.int64())
    least, most = pc.min_max(length).as_py().values()
    width = (most - least) // _BINS + 1
    counts = counts.append_column("bin", pc.divide(pc.subtract(length, least), width))
    sums = counts.group_by("bin").aggregate([(name, "sum") for name in ("samples", "total", "rewards", "cut")])
    found = {row["bin"]: row for row in sums.to_pylist()}
    rows = []
    for number in range(max(found) + 1):
        row = found.get(number, {"samples_sum": 0, "cut_sum": 0, "total_sum": 0, "rewards_sum": 0})
        samples, rewards = int(row["samples_sum"]), int(row["rewards_sum"])
        truncated = int(row["cut_sum"]) / samples if samples else None
        reward = float(row["total_sum"]) / rewards if rewards else None
        first = least + number * width
        rows.append((first, first + width - 1, samples, truncated, reward))
    kinds = (pa.int64(), pa.int64(), pa.int64(), pa.float64(), pa.float64())
    columns = [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
    return pa.table(columns, names=["from", "to", "samples", "truncated", "reward"])


def diff(rollouts: Rollouts, then: int, now: int) -> pa.Table:
    """Return the prompts that both steps have, with what came of each: the largest change of reward first.

    The columns are ``prompt``, ``answer``, the mean rewards ``then`` and ``now``, their ``change``, and of each step
    the prompt's first response. Prompts are the same if they come from the same row of the dataset, or, in a run that
    has no such columns, if their texts are equal. DataError if the steps share no prompt.
    """
    if absent := [step for step in (then, now) if step not in rollouts.files]:
        there = f"{min(rollouts.files)} to {max(rollouts.files)}"
        raise DataError(f"the table {rollouts.name!r} has no step {absent[0]}: it has {len(rollouts.files)}, {there}")
    _check(rollouts, REWARD, ROW_ID, RESPONSE)
    keys = _there(rollouts, (DATA_PART, DATA_ROW)) or [f"{_text(rollouts, _prompt(rollouts))} AS key"]
    names = ", ".join(key.rpartition(" AS ")[2] for key in keys)
    prompt, answer = (
        _text(rollouts, name) if name else "NULL::VARCHAR" for name in (_prompt(rollouts), _one(rollouts, ANSWER))
    )

    def of(step: int) -> str:
        return (
            f"(SELECT {', '.join(keys)}, any_value({prompt}) AS prompt, any_value({answer}) AS answer, "
            f"avg(reward) AS reward, arg_min(response, row_id) AS response FROM {rollouts.of_steps([step])} "
            f"WHERE reward IS NOT NULL GROUP BY {', '.join(map(str, range(1, len(keys) + 1)))})"
        )

    changes = rollouts.table(
        'SELECT a.prompt, a.answer, a.reward AS "then", b.reward AS now, b.reward - a.reward AS change, '
        f"a.response AS then_response, b.response AS now_response FROM {of(then)} AS a JOIN {of(now)} AS b "
        f"USING ({names}) ORDER BY abs(change) DESC, change, {names}"
    )
    if not changes.num_rows:
        raise DataError(
            f"steps {then} and {now} of the table {rollouts.name!r} have no prompt in common; a validation has the "
            "same prompts each time (--table validation)"
        )
    return changes


def _length(rollouts: Rollouts) -> str:
    """Return SQL for a response's tokens. All tokens less the prompt's cost a tenth of counting the response's ids."""
    there = rollouts.schema.names
    if TOKENS in there and PROMPT_IDS in there:
        return "(tokens - len(prompt_ids))"
    _check(rollouts, RESPONSE_IDS)
    return "len(response_ids)"


def texts(rollouts: Rollouts) -> list[str]:
    """Return SQL for the columns ``prompt``, ``response`` and ``answer``, as text, of those that there are."""
    named = {PROMPT: _prompt(rollouts), RESPONSE: _one(rollouts, RESPONSE), ANSWER: _one(rollouts, ANSWER)}
    return [f"{_text(rollouts, column)} AS {name}" for name, column in named.items() if column]


def _prompt(rollouts: Rollouts) -> str:
    """Return the column that has the prompt as the model saw it, or as the dataset does."""
    return _one(rollouts, PROMPT_TEXT) or _one(rollouts, PROMPT)


def _one(rollouts: Rollouts, name: str) -> str:
    return name if name in rollouts.schema.names else ""


def _text(rollouts: Rollouts, name: str) -> str:
    if not name:
        _check(rollouts, PROMPT_TEXT)
    return f"CAST({name} AS VARCHAR)"


def _there(rollouts: Rollouts, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in rollouts.schema.names]


def _check(rollouts: Rollouts, *names: str) -> None:
    """Raise DataError for a column that the saved table lacks."""
    if missing := [name for name in names if name not in rollouts.schema.names]:
        raise DataError(
            f"the table {rollouts.name!r} has no column {missing[0]!r}: no node of the run's DAG wrote it before the "
            f"table was saved (it has: {', '.join(rollouts.schema.names)})"
        )
