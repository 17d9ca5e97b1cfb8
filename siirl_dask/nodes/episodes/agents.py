"""Several agents in one DAG: an agent's turn is stored while the next agent acts, and becomes a row for learning.

    prompts_a -> rollout_a -> hand_over -> prompts_b -> rollout_b -> reward -> turns -> turn_a -> ... -> update_a
                                                                                   \\-> turn_b -> ... -> update_b

``hand_over`` writes the next agent's prompt, and stores the turn in columns named ``AGENT_ROUND_COLUMN``. ``bring_out``
makes rows of all turns: each agent's row has the columns that every rollout has, so that the nodes which learn from it
need not know of agents. ``take_agents`` chooses the rows of the agents that one policy learns from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.context import Context
from siirl_dask.errors import PlanError
from siirl_dask.planner import ContractChanges, columns
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
)
from siirl_dask.tables import rows_where

MESSAGE = "message"
"""Column with the next agent's prompt: a text, or messages of a chat (``hand_over``)."""
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
    """Return the agent's prompt followed by its response: the next agent reads all that this one
    has read.
    """
    return f"{prompt_text}{response}\n"


def _hand_over_changes(
    *,
    agent: str,
    round: int,
    chat: bool,
    columns: Sequence[str],
    also: Sequence[str],
    **others: object,
) -> ContractChanges:
    _check_columns(also)
    writes = {MESSAGE: _CHAT if chat else pa.string()}
    for name in (*_IDS, *TURN, *also):
        writes[_stored_name(agent, round, name)] = TYPES[name]
    return ContractChanges(reads=(*columns, *also), writes=writes)


@columns(reads=[PROMPT, *TURN], depends_on_options=_hand_over_changes)
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
    """Store the turn of ``agent``, and write the next agent's prompt: the column ``message``.

    ``message(prompt=, prompt_text=, response=, **columns)`` returns a text, or with ``chat``
    messages; a text is then a message of the user. ``prompt`` is the dataset's, ``prompt_text`` the
    one that the agent has read. ``encode_prompts`` reads the result with ``column: message``.
    ``round`` counts the agent's turns, from 1. ``also`` are columns that its turn has in addition
    to those of ``generate``, such as ``response_mask`` of a turn with an environment. ValueError
    for another kind of message.
    """
    arguments = table.select([PROMPT, PROMPT_TEXT, RESPONSE, *columns]).to_pylist()
    messages = [_checked_message(message(**row), chat, message) for row in arguments]
    for name in (*_IDS, *TURN, *also):
        table = table.append_column(_stored_name(agent, round, name), table[name])
    if MESSAGE in table.column_names:
        table = table.drop_columns([MESSAGE])
    return table.append_column(MESSAGE, pa.array(messages, _CHAT if chat else pa.string()))


def _checked_message(text: object, chat: bool, message: Callable[..., Any]) -> object:
    """Return what ``message`` has returned as a value of the column. ValueError for what is no
    message.
    """
    if isinstance(text, str) and text:
        return [{"role": "user", "content": text}] if chat else text
    if chat and isinstance(text, list) and text and all(_is_chat_message(part) for part in text):
        return text
    wanted = "a text, or a list of {role, content}," if chat else "a text"
    raise ValueError(
        f"{getattr(message, '__name__', message)} returned {text!r:.200}: expected {wanted} that "
        "is not empty"
    )


def _is_chat_message(part: object) -> bool:
    if not isinstance(part, Mapping) or set(part) != {"role", "content"}:
        return False
    return all(isinstance(value, str) for value in part.values())


def _stored_name(agent: str, round: int, column: str) -> str:
    """Return the name of the column that stores a column of an agent's turn."""
    return f"{agent}_{round}_{column}"


def _check_columns(also: Sequence[str]) -> None:
    """Raise PlanError for an element of the option ``also`` that is no column of a turn."""
    for name in also:
        if name not in TYPES:
            raise PlanError(
                f"also={list(also)}: {name!r} is no column of a turn (there are: {sorted(TYPES)})"
            )


def _turns(agents: Sequence[str], rounds: int) -> list[tuple[str, int]]:
    """Return agent and round of each turn of an episode, in the order in which they act."""
    return [(agent, round) for round in range(1, rounds + 1) for agent in agents]


def _bring_out_changes(
    *,
    agents: Sequence[str],
    rounds: int = 1,
    groups: Mapping[str, str] | None = None,
    rewards: Mapping[str, str] | None = None,
    also: Sequence[str] = (),
) -> ContractChanges:
    _check_columns(also)
    for agent, compared in (groups or {}).items():
        _check_agent("groups", agent, agents)
        _check_agent("groups", compared, agents)
    for agent in rewards or {}:
        _check_agent("rewards", agent, agents)
    stored: list[str] = []
    for agent, round in _turns(agents, rounds)[:-1]:
        stored += [_stored_name(agent, round, name) for name in (*_IDS, *TURN, *also)]
    reads = [*stored, *also]
    if rewards:
        reads += [REWARD, REWARD_PARTS]
    writes = {name: TYPES[name] for name in also}
    return ContractChanges(reads=reads, writes=writes, drops=(*stored, MESSAGE))


def _check_agent(option: str, name: str, agents: Sequence[str]) -> None:
    if name not in agents:
        raise PlanError(f"{option} names {name!r}, which is none of the agents {list(agents)}")


@columns(
    reads=TURN,
    optional=[REWARD],
    writes={name: TYPES[name] for name in (*TURN, EPISODE_ID, AGENT, SEGMENT)},
    new_rows=True,
    depends_on_options=_bring_out_changes,
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
    """Make a row of each turn: the stored ones, and the last agent's.

    ``agents`` act in this order, ``rounds`` times over. Turn k of an episode, from 0, is row
    ``episode_id * turns + k``, where ``episode_id`` is the row id of the last turn. The second turn
    of an agent is its segment 1, and the reward falls on its last one: others have 0.

    Where an agent answered a turn several times (``rollout.n`` above 1), that turn is one row, with
    the mean of the rewards of the rows that continue it, and the id of the first; the node then
    needs complete groups (rows=GROUPED). ``groups={"b": "a"}`` compares turns of b that answer the
    same turn of a; otherwise the turns that answer the same prompt are compared. ``rewards={"a":
    "split"}`` gives a the part ``split`` of the reward (``reward_parts``) in place of the whole.
    """
    groups = {} if groups is None else groups
    rewards = {} if rewards is None else rewards
    turns = _turns(agents, rounds)
    table = table.sort_by(ROW_ID)
    tables: list[pa.Table] = []
    for index, (agent, round) in enumerate(turns):
        is_last = index == len(turns) - 1
        rows = table if is_last else _stored_turns(table, agent, round, also)
        if agent in rewards:
            rows = _set(rows, REWARD, _reward_part(rows, rewards[agent], agent))
        if REWARD in rows.column_names:
            if round < rounds:  # the reward is that of the agent's last turn
                zeros = pc.if_else(pc.is_valid(rows[REWARD]), pa.scalar(0.0, TYPES[REWARD]), None)
                rows = _set(rows, REWARD, zeros)
            else:
                ctx.log(f"{agent}/reward/mean", pc.drop_null(rows[REWARD]).to_pylist())
        if agent in groups:
            rows = _set(rows, GROUP_ID, rows[_answered_turn(groups, agent, turns[:index])])
        tables.append(_with_episodes(rows, agent, segment=round - 1, turn=index, turns=len(turns)))
    dropped = {MESSAGE}
    for agent, round in turns:
        dropped |= {_stored_name(agent, round, name) for name in (*_IDS, *TURN, *also)}
    names = [name for name in tables[-1].column_names if name not in dropped]
    return pa.concat_tables([rows.select(names) for rows in tables]).sort_by(ROW_ID)


def _answered_turn(
    groups: Mapping[str, str], agent: str, earlier: Sequence[tuple[str, int]]
) -> str:
    """Return the column with the ids of the turns that those of ``agent`` answer, among ``earlier``
    turns.

    ValueError where the agent that ``groups`` names for it has none.
    """
    compared = groups[agent]
    rounds = [round for other, round in earlier if other == compared]
    if not rounds:
        raise ValueError(f"groups={groups}: no turn of {compared!r} comes before one of {agent!r}")
    return _stored_name(compared, rounds[-1], ROW_ID)


def _with_episodes(rows: pa.Table, agent: str, *, segment: int, turn: int, turns: int) -> pa.Table:
    """Return the rows of turn ``turn`` of ``turns`` with their ids and with the columns of
    episodes.
    """
    count = rows.num_rows
    episode_ids = rows[ROW_ID].to_numpy()
    row_ids = episode_ids * turns + turn
    rows = _set(rows, ROW_ID, pa.array(row_ids, TYPES[ROW_ID]))
    rows = _set(rows, EPISODE_ID, pa.array(episode_ids, TYPES[EPISODE_ID]))
    rows = _set(rows, AGENT, pa.array([agent] * count, TYPES[AGENT]))
    return _set(rows, SEGMENT, pa.array([segment] * count, TYPES[SEGMENT]))


def _stored_turns(table: pa.Table, agent: str, round: int, also: Sequence[str]) -> pa.Table:
    """Return a row of each stored turn, with the mean reward of the table's rows that continue
    it.
    """
    turn_ids = table[_stored_name(agent, round, ROW_ID)].to_numpy()
    _, first_rows, turn_of_row = np.unique(turn_ids, return_index=True, return_inverse=True)
    rows = table
    if len(first_rows) < table.num_rows:
        rows = table.take(pa.array(first_rows))
        if REWARD in table.column_names:
            rows = _set(rows, REWARD, _mean_rewards(table[REWARD], turn_of_row, len(first_rows)))
    for name in (GROUP_ID, *TURN, *also):
        rows = _set(rows, name, rows[_stored_name(agent, round, name)])
    prompt_lengths = pc.list_value_length(rows[PROMPT_IDS])
    response_lengths = pc.list_value_length(rows[RESPONSE_IDS])
    return _set(rows, TOKENS, pc.add(prompt_lengths, response_lengths).cast(TYPES[TOKENS]))


def _mean_rewards(rewards: pa.ChunkedArray, turn_of_row: Any, turns: int) -> pa.Array:
    """Return the mean of the rewards of each turn; null where all are. [R], [R] -> [turns]."""
    valid = pc.is_valid(rewards).to_numpy().astype(bool)
    values = pc.fill_null(rewards, 0.0).to_numpy().astype(np.float64)
    counts = np.bincount(turn_of_row, weights=valid, minlength=turns)
    sums = np.bincount(turn_of_row, weights=values, minlength=turns)
    return pa.array(sums / np.maximum(counts, 1), TYPES[REWARD], mask=counts == 0)


def _reward_part(rows: pa.Table, part: str, agent: str) -> pa.Array:
    """Return a part of each row's reward. ValueError where a row that has a reward has no such
    part.
    """
    parts_of_rows = [dict(parts or ()) for parts in rows[REWARD_PARTS].to_pylist()]
    row_ids = rows[ROW_ID].to_pylist()
    for row_id, parts, reward in zip(row_ids, parts_of_rows, rows[REWARD].to_pylist(), strict=True):
        if reward is not None and part not in parts:
            raise ValueError(
                f"rewards={{{agent!r}: {part!r}}}: row {row_id} has the parts {sorted(parts)}; "
                f"expected the reward function to return {part!r} as well"
            )
    return pa.array([parts.get(part) for parts in parts_of_rows], TYPES[REWARD])


def _set(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Add a column, or replace the one of that name at its place."""
    if name not in table.column_names:
        return table.append_column(name, values)
    return table.set_column(table.column_names.index(name), name, values)


@columns(reads=[AGENT], new_rows=True, groups="kept")
def take_agents(ctx: Context, table: pa.Table, *, agents: tuple[str, ...]) -> pa.Table:
    """Keep the rows that these agents wrote, for the policy that learns from them."""
    return rows_where(table, pc.is_in(table[AGENT], pa.array(agents, TYPES[AGENT])))
