"""Tables of episodes made by hand: the same episode as one row, or cut into segments that go on
where it was cut.
"""

import pyarrow as pa

from siirl_dask.schema import TYPES

N = 4  # samples of a prompt in these tables


def episode(number, turns, *, reward=0.0, group=None, agent=None, failed=False, seed=0):
    """Describe an episode of ``turns`` = (the policy's tokens, the environment's tokens after
    them).
    """
    return {
        "episode_id": number,
        "group_id": number // N if group is None else group,
        "turns": turns,
        "reward": None if failed else reward,
        "agent": agent,
        "seed": seed,
    }


def cut_rows(one, cuts=()):
    """Return the rows of an episode that begins another before each turn of ``cuts``; the last
    has the reward.
    """
    token = iter(range(10**6))
    prompt = [(one["episode_id"] * 7 + one["seed"]) % 40 + 1, 2, 3]
    rows, ids, mask = [], [], []
    for turn, (said, answered) in enumerate(one["turns"]):
        if turn in cuts and ids:
            rows.append((prompt, ids, mask))
            prompt, ids, mask = [*prompt, *ids], [], []
        ids = ids + [
            (one["episode_id"] * 31 + next(token) * 5 + one["seed"]) % 50 + 1
            for _ in range(said + answered)
        ]
        mask = mask + [True] * said + [False] * answered
    rows.append((prompt, ids, mask))
    last = len(rows) - 1
    return [
        {
            "episode_id": one["episode_id"],
            "group_id": one["group_id"],
            "segment": at,
            "agent": one["agent"],
            "prompt_ids": prompt,
            "response_ids": ids,
            "response_mask": mask,
            "reward": None if one["reward"] is None else one["reward"] * (at == last),
        }
        for at, (prompt, ids, mask) in enumerate(rows)
    ]


def table_of(episodes, cuts=None, **per_token):
    """Return the table of the episodes; ``cuts`` are the turns before which each is cut, None gives
    no such columns.

    ``per_token`` are functions (row's number among those of all episodes, token's place in its
    episode) -> number.
    """
    rows = []
    for at, one in enumerate(episodes):
        place = 0
        for row in cut_rows(one, () if cuts is None else cuts[at]):
            row["row_id"] = (
                len(rows) if cuts is None else one["episode_id"] * 100 + 50 * (one["agent"] == "b")
            )
            row["row_id"] += 0 if cuts is None else row["segment"]
            count = len(row["response_ids"])
            row |= {
                name: [of(at, place + k) for k in range(count)] for name, of in per_token.items()
            }
            row["tokens"] = len(row["prompt_ids"]) + count
            place += count
            rows.append(row)
    absent = {name for name in ("episode_id", "segment") if cuts is None}
    absent |= {"agent"} if all(one["agent"] is None for one in episodes) else set()
    names = [name for name in rows[0] if name not in absent]
    return pa.table({name: pa.array([row[name] for row in rows], TYPES[name]) for name in names})


def joined(table, name):
    """Return a column of numbers per token as one list per episode, whatever its rows."""
    found = {}
    for row in sorted(table.to_pylist(), key=lambda row: row["row_id"]):
        found.setdefault((row.get("episode_id", row["row_id"]), row.get("agent")), []).extend(
            row[name]
        )
    return list(found.values())
