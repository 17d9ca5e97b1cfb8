"""Several agents in one DAG: an agent's turn is put aside while the next one acts, and brought out for learning.

    prompts_a -> rollout_a -> hand_over -> prompts_b -> rollout_b -> reward -> turns -> turn_a -> ... -> update_a
                                                                                   \\-> turn_b -> ... -> update_b

``hand_over`` writes what the next agent is told, and puts the turn aside in columns named ``AGENT_ROUND_COLUMN``.
``bring_out`` makes rows of all turns: each agent's row has the columns that every rollout has, so that the nodes which
learn from it know nothing of agents. ``take_agents`` chooses the rows of those that one policy learns from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.context import Context
from siirl_dask.coordinator.blobs import rows_where
from siirl_dask.errors import PlanError
from siirl_dask.planner import Changes, columns
from siirl_dask.planner import columns as declares
from siirl_dask.schema import (
    AGENT,
    EPISODE_ID,
    FINISH_REASON,
    GROUP_ID,
    PROMPT,
    PROMPT_IDS,
    PROMPT_TEXT,
    RESPONSE,
    RESPONSE_IDS,
    REWARD,
    REWARD_PARTS,
    ROLLOUT_LOGPROBS,
    ROW_ID,
    SAMPLE_NUMBER,
    SAMPLING_SEED,
    SEGMENT,
    TOKENS,
    TYPES,
    WEIGHTS_VERSION,
    WORKER,
    fields,
)

MESSAGE = "message"
"""Column with what the next agent is told: a text, or messages of a chat (``hand_over``)."""
TURN = (
    PROMPT_IDS,
    PROMPT_TEXT,
    RESPONSE_IDS,
    RESPONSE,
    ROLLOUT_LOGPROBS,
    FINISH_REASON,
    WEIGHTS_VERSION,
    SAMPLE_NUMBER,
    SAMPLING_SEED,
    WORKER,
)
"""Columns of a turn, as ``generate`` makes them."""
_IDS = (ROW_ID, GROUP_ID)
_CHAT = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


def append_response(prompt_text: str, response: str, **others: object) -> str:
    """Return the agent's prompt with its response below it: the next agent sees all that this one did."""
    return f"{prompt_text}{response}\n"


def _of_hand_over(
    *, agent: str, round: int, chat: bool, columns: Sequence[str], also: Sequence[str], **others: object
) -> Changes:
    kept = {_aside(agent, round, name): TYPES[name] for name in (*_IDS, *TURN, *_known(also))}
    return Changes(reads=(*columns, *also), writes={MESSAGE: _CHAT if chat else pa.string()} | kept)


@declares(reads=[PROMPT, *TURN], depends_on_options=_of_hand_over)
def hand_over(
    ctx: Context,
    table: pa.Table,
    *,
    agent: str,
    message: Callable[..., Any] = append_response,
    round: int = 1,
    chat: bool = False,
    columns: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
) -> pa.Table:
    """Put the turn of ``agent`` aside, and write what the next agent is told: the column ``message``.

    ``message(prompt=, prompt_text=, response=, **columns)`` returns a text, or messages with ``chat``, where a text is
    the user's. ``prompt`` is the dataset's, ``prompt_text`` what the agent saw. ``encode_prompts`` reads the result
    with ``column: message``. ``round`` counts the agent's turns, from 1. ``also`` are columns that its turn has beside
    those of ``generate``, such as ``response_mask`` of a turn with an environment. ValueError for another kind of
    message.
    """
    given = [PROMPT, PROMPT_TEXT, RESPONSE, *columns]
    messages = [_told(message(**row), chat, message) for row in table.select(given).to_pylist()]
    for name in (*_IDS, *TURN, *also):
        table = table.append_column(_aside(agent, round, name), table[name])
    if MESSAGE in table.column_names:
        table = table.drop_columns([MESSAGE])
    return table.append_column(MESSAGE, pa.array(messages, _CHAT if chat else pa.string()))


def _told(made: object, chat: bool, message: Callable[..., Any]) -> object:
    if isinstance(made, str) and made:
        return [{"role": "user", "content": made}] if chat else made
    if chat and isinstance(made, list) and made and all(_is_message(one) for one in made):
        return made
    wanted = "a text, or a list of {role, content}," if chat else "a text"
    raise ValueError(
        f"{getattr(message, '__name__', message)} returned {made!r:.200}: expected {wanted} that is not empty"
    )


def _is_message(one: object) -> bool:
    return (
        isinstance(one, Mapping) and set(one) == {"role", "content"} and all(isinstance(v, str) for v in one.values())
    )


def _aside(agent: str, round: int, column: str) -> str:
    """Return the name under which a column of an agent's turn is put aside."""
    return f"{agent}_{round}_{column}"


def _known(names: Sequence[str]) -> Sequence[str]:
    if unknown := [name for name in names if name not in TYPES]:
        raise PlanError(f"also={list(names)}: {unknown[0]!r} is no column of a turn (there are: {sorted(TYPES)})")
    return names


def _turns(agents: Sequence[str], rounds: int) -> list[tuple[str, int]]:
    """Return agent and round of each turn of an episode, in the order in which they act."""
    return [(agent, number) for number in range(1, rounds + 1) for agent in agents]


def _of_bring_out(
    *,
    agents: Sequence[str],
    rounds: int = 1,
    groups: Mapping[str, str] | None = None,
    rewards: Mapping[str, str] | None = None,
    also: Sequence[str] = (),
) -> Changes:
    *earlier, _ = _turns(agents, rounds) or [("", 0)]
    aside = [_aside(*turn, name) for turn in earlier for name in (*_IDS, *TURN, *_known(also))]
    for option, named in {"groups": [*(groups or {}), *(groups or {}).values()], "rewards": [*(rewards or {})]}.items():
        if unknown := [name for name in named if name not in agents]:
            raise PlanError(f"{option} names {unknown[0]!r}, which is none of the agents {list(agents)}")
    parts = (REWARD, REWARD_PARTS) if rewards else ()
    return Changes(reads=(*aside, *also, *parts), writes=fields(*also), drops=(*aside, MESSAGE))


@columns(
    reads=TURN,
    optional=[REWARD],
    writes=fields(*TURN, EPISODE_ID, AGENT, SEGMENT),
    new_rows=True,
    depends_on_options=_of_bring_out,
)
def bring_out(
    ctx: Context,
    table: pa.Table,
    *,
    agents: tuple[str, ...],
    rounds: int = 1,
    groups: Mapping[str, str] | None = None,
    rewards: Mapping[str, str] | None = None,
    also: tuple[str, ...] = (),
) -> pa.Table:
    """Make a row of each turn: those that were put aside, and the last agent's.

    ``agents`` act in this order, ``rounds`` times over. Turn k of an episode, from 0, is row
    ``episode_id * turns + k``, where ``episode_id`` is the row id of the last turn. The second turn of an agent is its
    segment 1, and the reward falls on its last one: others have 0.

    Where an agent answered a turn several times (``rollout.n`` above 1), that turn is one row, with the mean of the
    rewards of what came of it, and the id of the first; the node then asks for rows=GROUPED. ``groups={"b": "a"}``
    compares turns of b that answer the same turn of a; otherwise the turns that answer the same prompt are compared.
    ``rewards={"a": "split"}`` gives a the part ``split`` of the reward (``reward_parts``) in place of the whole.
    """
    turns = _turns(agents, rounds)
    table = table.sort_by(ROW_ID)
    made = []
    for place, (agent, number) in enumerate(turns):
        rows = table if place == len(turns) - 1 else _of_earlier(table, agent, number, also)
        if agent in (rewards or {}):
            rows = _set(rows, REWARD, _part(rows, (rewards or {})[agent], agent))
        if REWARD in rows.column_names and number < rounds:
            rows = _set(rows, REWARD, pc.if_else(pc.is_valid(rows[REWARD]), pa.scalar(0.0, TYPES[REWARD]), None))
        elif REWARD in rows.column_names:
            ctx.log(f"{agent}/reward/mean", pc.drop_null(rows[REWARD]).to_pylist())
        if compared := (groups or {}).get(agent):
            before = [turn for turn in turns[:place] if turn[0] == compared]
            if not before:
                raise ValueError(f"groups={groups}: no turn of {compared!r} comes before one of {agent!r}")
            rows = _set(rows, GROUP_ID, rows[_aside(*before[-1], ROW_ID)])
        ids = rows[ROW_ID].to_numpy()
        made.append(_named(rows, ids, ids * len(turns) + place, agent, number - 1))
    dropped = {_aside(*turn, name) for turn in turns for name in (*_IDS, *TURN, *also)} | {MESSAGE}
    kept = [name for name in made[-1].column_names if name not in dropped]
    return pa.concat_tables([rows.select(kept) for rows in made]).sort_by(ROW_ID)


def _named(rows: pa.Table, episodes: Any, row_ids: Any, agent: str, segment: int) -> pa.Table:
    count = rows.num_rows
    rows = _set(rows, ROW_ID, pa.array(row_ids, TYPES[ROW_ID]))
    rows = _set(rows, EPISODE_ID, pa.array(episodes, TYPES[EPISODE_ID]))
    rows = _set(rows, AGENT, pa.array([agent] * count, TYPES[AGENT]))
    return _set(rows, SEGMENT, pa.array([segment] * count, TYPES[SEGMENT]))


def _of_earlier(table: pa.Table, agent: str, number: int, also: Sequence[str]) -> pa.Table:
    """Return a row of each turn that was put aside, with the mean reward of the table's rows that came of it."""
    turn_ids = table[_aside(agent, number, ROW_ID)].to_numpy()
    _, first, turn_of = np.unique(turn_ids, return_index=True, return_inverse=True)
    rows = table.take(pa.array(first)) if len(first) < table.num_rows else table
    if len(first) < table.num_rows and REWARD in table.column_names:
        rows = _set(rows, REWARD, _means(table[REWARD], turn_of, len(first)))
    for name in (GROUP_ID, *TURN, *also):
        rows = _set(rows, name, rows[_aside(agent, number, name)])
    prompts, responses = (pc.list_value_length(rows[name]) for name in (PROMPT_IDS, RESPONSE_IDS))
    return _set(rows, TOKENS, pc.add(prompts, responses).cast(TYPES[TOKENS]))


def _means(rewards: pa.ChunkedArray, turn_of: Any, turns: int) -> pa.Array:
    """Return the mean of the rewards of each turn; null where all are."""
    there = pc.is_valid(rewards).to_numpy().astype(bool)
    values = pc.fill_null(rewards, 0.0).to_numpy().astype(np.float64)
    counts = np.bincount(turn_of, weights=there, minlength=turns)
    sums = np.bincount(turn_of, weights=values, minlength=turns)
    return pa.array(sums / np.maximum(counts, 1), TYPES[REWARD], mask=counts == 0)


def _part(rows: pa.Table, part: str, agent: str) -> pa.Array:
    """Return a part of each row's reward. ValueError where a row that has a reward has no such part."""
    told = [dict(parts or ()) for parts in rows[REWARD_PARTS].to_pylist()]
    for row, parts, whole in zip(rows[ROW_ID].to_pylist(), told, rows[REWARD].to_pylist(), strict=True):
        if whole is not None and part not in parts:
            raise ValueError(
                f"rewards={{{agent!r}: {part!r}}}: row {row} has the parts {sorted(parts)}; expected the reward "
                f"function to return {part!r} as well"
            )
    return pa.array([parts.get(part) for parts in told], TYPES[REWARD])


def _set(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    if name not in table.column_names:
        return table.append_column(name, values)
    return table.set_column(table.column_names.index(name), name, values)


@columns(reads=[AGENT], new_rows=True, groups="kept")
def take_agents(ctx: Context, table: pa.Table, *, agents: tuple[str, ...]) -> pa.Table:
    """Keep the rows that these agents wrote, for the policy that learns from them."""
    return rows_where(table, pc.is_in(table[AGENT], pa.array(agents, TYPES[AGENT])))
