"""Questions that are asked of most runs, each a function of the open samples that returns a table.

with open_rollouts("runs/mine", steps=range(10, 21)) as rollouts:
    print(worst(rollouts, 3), by(rollouts, "source"))

Each reads the columns that it needs and no others: token ids and log-probs are most of a run's
bytes. A sample is a row; of an episode of several rows it is all of them, of each agent by itself
(``per_sample.py``).
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.errors import DataError
from siirl_dask.runs.samples.last_message import with_last_messages
from siirl_dask.runs.samples.per_sample import RESPONSE_TOKENS, check, length, per_sample
from siirl_dask.runs.samples.rollouts import Rollouts, quoted
from siirl_dask.runs.samples.selection import (
    asked,
    best,
    failed,
    longest,
    one_of,
    prompt,
    text,
    there,
    worst,
)
from siirl_dask.runs.samples.utterances import FAILED
from siirl_dask.schema import (
    AGENT,
    ANSWER,
    DATA_PART,
    DATA_ROW,
    EPISODE_ID,
    FINISH_REASON,
    GROUP_ID,
    PROMPT,
    RESPONSE,
    REWARD,
    ROW_ID,
    TURNS,
)

__all__ = [
    "best",
    "by",
    "by_turns",
    "diff",
    "failed",
    "lengths",
    "longest",
    "overview",
    "overview_sql",
    "worst",
    "zero_variance",
]
_LENGTHS = pa.schema(
    {
        "from": pa.int64(),
        "to": pa.int64(),
        "samples": pa.int64(),
        "truncated": pa.float64(),
        "reward": pa.float64(),
    }
)
_BINS = 10


def overview(rollouts: Rollouts) -> pa.Table:
    """Return ``step``, ``samples``, mean ``reward`` and mean ``response_tokens`` of each step."""
    return rollouts.table(overview_sql(rollouts))


def overview_sql(rollouts: Rollouts) -> str:
    """Return the SQL of ``overview``."""
    return (
        f"SELECT step, count(*) AS samples, round(avg(reward), 4) AS reward, "
        f"round(avg({RESPONSE_TOKENS}), 1) AS {RESPONSE_TOKENS} "
        f"FROM {per_sample(rollouts, reward=REWARD, response_tokens=length(rollouts))} GROUP BY "
        "step ORDER BY step"
    )


def by_turns(rollouts: Rollouts) -> pa.Table:
    """Return ``samples``, mean ``reward``, mean ``response_tokens`` and the ``failed`` for each
    number of ``turns``.
    """
    check(rollouts, TURNS, REWARD, FINISH_REASON)
    counted = per_sample(
        rollouts,
        turns="len(turns)",
        reward=REWARD,
        response_tokens=length(rollouts),
        finish_reason=FINISH_REASON,
    )
    return rollouts.table(
        "SELECT turns::BIGINT AS turns, count(*) AS samples, avg(reward) AS reward, "
        f"avg({RESPONSE_TOKENS}) AS {RESPONSE_TOKENS}, count(*) FILTER (finish_reason = "
        f"'{FAILED}') AS failed FROM {counted} GROUP BY 1 ORDER BY 1"
    )


def by(rollouts: Rollouts, column: str) -> pa.Table:
    """Return ``samples``, mean ``reward`` and mean ``response_tokens`` for each value of a column,
    most samples first.

    Of an episode the value is its last row's. A dot goes into a struct. DataError for a column that
    there is not, or one of lists.
    """
    name = rollouts.column(column)
    check(rollouts, REWARD)
    counted = per_sample(rollouts, value=name, reward=REWARD, response_tokens=length(rollouts))
    return rollouts.table(
        f"SELECT value AS {quoted(column)}, count(*) AS samples, avg(reward) AS reward, "
        f"avg({RESPONSE_TOKENS}) AS {RESPONSE_TOKENS} FROM {counted} GROUP BY 1 ORDER BY 2 DESC, 1"
    )


def zero_variance(rollouts: Rollouts) -> pa.Table:
    """Return for each step the ``groups``, those whose rewards are all ``equal``, their ``share``
    and mean ``reward``.

    Such a group has no advantage, and teaches nothing. Groups with fewer than two rewards do not
    count.
    """
    check(rollouts, REWARD, GROUP_ID)
    agent = {}
    if {EPISODE_ID, AGENT} <= {*rollouts.schema.names}:
        agent = {AGENT: AGENT}
    group = ", ".join([GROUP_ID, *agent])
    return rollouts.table(
        "SELECT step, count(*) AS groups, count(*) FILTER (low = high) AS equal, "
        "count(*) FILTER (low = high) / count(*) AS share, avg(high) FILTER (low = high) AS reward "
        "FROM (SELECT step, min(reward) AS low, max(reward) AS high "
        f"FROM {per_sample(rollouts, reward=REWARD, group_id=GROUP_ID, **agent)} "
        f"GROUP BY step, {group} HAVING count(reward) > 1) GROUP BY step ORDER BY step"
    )


def lengths(rollouts: Rollouts) -> pa.Table:
    """Return a histogram of the responses' lengths in tokens: ``from``, ``to``, ``samples``,
    ``truncated``, ``reward``.

    ``truncated`` is the share of the bin's responses that the limit ended.
    """
    check(rollouts, REWARD, FINISH_REASON)
    counted = per_sample(
        rollouts,
        response_tokens=length(rollouts),
        reward=REWARD,
        finish_reason=FINISH_REASON,
    )
    counts = rollouts.table(
        f"SELECT {RESPONSE_TOKENS} AS length, count(*) AS samples, sum(reward) AS total, "
        "count(reward) AS rewards, count(*) FILTER (finish_reason = 'length') AS cut FROM "
        f"{counted} GROUP BY 1 HAVING length IS NOT NULL"
    )
    if not counts.num_rows:
        raise DataError(f"the table {rollouts.name!r} has no responses")
    tokens = counts["length"].cast(pa.int64())
    least, most = pc.min_max(tokens).as_py().values()
    width = (most - least) // _BINS + 1
    counts = counts.append_column("bin", pc.divide(pc.subtract(tokens, least), width))
    sums = counts.group_by("bin").aggregate(
        [(name, "sum") for name in ("samples", "total", "rewards", "cut")]
    )
    found = {row["bin"]: row for row in sums.to_pylist()}
    rows = []
    for number in range(max(found) + 1):
        row = found.get(number, {"samples_sum": 0, "cut_sum": 0, "total_sum": 0, "rewards_sum": 0})
        samples = int(row["samples_sum"])
        rewards = int(row["rewards_sum"])
        truncated = None
        if samples:
            truncated = int(row["cut_sum"]) / samples
        reward = None
        if rewards:
            reward = float(row["total_sum"]) / rewards
        first = least + number * width
        rows.append(
            {
                "from": first,
                "to": first + width - 1,
                "samples": samples,
                "truncated": truncated,
                "reward": reward,
            }
        )
    return pa.Table.from_pylist(rows, schema=_LENGTHS)


def diff(rollouts: Rollouts, then: int, now: int, *, full: bool = False) -> pa.Table:
    """Return the prompts that both steps have, with what came of each: the largest change of reward
    first.

    The columns are ``prompt``, ``answer``, the mean rewards ``then`` and ``now``, their ``change``,
    of each step the prompt's first response, and ``data_part`` and ``data_row`` where the run has
    them. Prompts are the same if they come from the same row of the dataset, or, in a run that has
    no such columns, if their texts are equal. A prompt is the last message of its user, or with
    ``full`` all that the model saw. DataError if the steps share no prompt.
    """
    absent = [step for step in (then, now) if step not in rollouts.files]
    if absent:
        steps = rollouts.files
        has = f"it has {len(steps)}, {min(steps)} to {max(steps)}"
        raise DataError(f"the table {rollouts.name!r} has no step {absent[0]}: {has}")
    check(rollouts, REWARD, ROW_ID, RESPONSE)
    keys = {name: name for name in there(rollouts, (DATA_PART, DATA_ROW))}
    origin = "".join(f", {name}" for name in keys)
    if not keys:
        keys = {"key": text(rollouts, prompt(rollouts))}
    question = prompt(rollouts) if full else asked(rollouts)
    columns = {
        name: text(rollouts, column) if column else "NULL::VARCHAR"
        for name, column in {PROMPT: question, ANSWER: one_of(rollouts, ANSWER)}.items()
    }
    names = ", ".join(keys)

    def of(step: int) -> str:
        samples = per_sample(
            rollouts,
            rollouts.of_steps([step]),
            **keys,
            **columns,
            reward=REWARD,
            response=RESPONSE,
            row_id=ROW_ID,
        )
        return (
            f"(SELECT {names}, any_value(prompt) AS prompt, any_value(answer) AS answer, "
            f"avg(reward) AS reward, arg_min(response, row_id) AS response FROM {samples} WHERE "
            f"reward IS NOT NULL GROUP BY {names})"
        )

    changes = rollouts.table(
        'SELECT a.prompt, a.answer, a.reward AS "then", b.reward AS now, b.reward - a.reward AS '
        "change, "
        f"a.response AS then_response, b.response AS now_response{origin} FROM {of(then)} AS a "
        f"JOIN {of(now)} AS b "
        f"USING ({names}) ORDER BY abs(change) DESC, change, {names}"
    )
    if not changes.num_rows:
        raise DataError(
            f"steps {then} and {now} of the table {rollouts.name!r} have no prompt in common; a "
            "validation has the same prompts each time (--table validation)"
        )
    if full:
        return changes
    return with_last_messages(changes)
