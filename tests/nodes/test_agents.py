"""Turns of several agents: what one hands over, the rows that are made of all, and whose they
are.
"""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import PlanError
from siirl_dask.nodes import append_response, bring_out, hand_over, take_agents
from siirl_dask.nodes.episodes.agents import MESSAGE, TURN
from siirl_dask.planner import Node
from siirl_dask.schema import TYPES
from siirl_dask.worker.node_output import checked


def context():
    return Context(step=1, run_seed=0, rank=Rank(), device=Device("w"), resource=None)


def turn(agent, row_ids, groups, **others):
    """Rows as ``generate`` leaves them: row r of agent a said ``a r``, in as many tokens as r,
    on a prompt of two.
    """
    texts = [f"{agent}{row}" for row in row_ids]
    made = {
        "row_id": row_ids,
        "group_id": groups,
        "tokens": [2 + row for row in row_ids],
        "prompt": [f"p{group}" for group in groups],
        "prompt_ids": [[1, 2] for _ in row_ids],
        "prompt_text": [f"seen by {text}." for text in texts],
        "response_ids": [[7] * row for row in row_ids],
        "response": texts,
        "rollout_logprobs": [[-0.5] * row for row in row_ids],
        "finish_reason": ["stop" for _ in row_ids],
        "weights_version": [3 for _ in row_ids],
        "sample_number": [row % 2 for row in row_ids],
        "sampling_seed": [100 + row for row in row_ids],
        "worker": ["w" for _ in row_ids],
        **others,
    }
    return pa.table(
        {name: pa.array(values, TYPES.get(name, pa.string())) for name, values in made.items()}
    )


def ask(prompt, response, **others):
    return f"{prompt} {response}?"


def answered(table, agent, n=1):
    """The rows of the next agent, n of each: as encode_prompts and generate with rollout.n make
    them.
    """
    index = [row for row in range(table.num_rows) for _ in range(n)]
    ids = [
        table["row_id"][row].as_py() * n + sample
        for row in range(table.num_rows)
        for sample in range(n)
    ]
    kept = table.take(index).drop_columns(TURN)
    own = turn(agent, ids, kept["group_id"].to_pylist()).drop_columns(["prompt"])
    for name in own.column_names:
        if name in kept.column_names:
            kept = kept.drop_columns([name])
        kept = kept.append_column(name, own[name])
    return kept


def call(node, table, **options):
    """Call it as a worker does, which holds its table to the contract."""
    made = node(context(), table, **options)
    planned = Node("node", node, role="r", after="before", options=options)
    dropped = planned.contract.drops
    return checked(
        planned, [name for name in made.column_names if name not in dropped], table, made
    )


def test_the_next_agent_is_told_what_the_function_makes_of_a_turn_and_the_turn_is_put_aside():
    table = turn("a", [4, 5], [2, 2])
    told = call(hand_over, table, agent="a", message=ask)
    assert told[MESSAGE].to_pylist() == ["p2 a4?", "p2 a5?"]
    assert told["prompt"].to_pylist() == ["p2", "p2"]
    for name in ("row_id", "group_id", *TURN):
        assert told[f"a_1_{name}"].to_pylist() == table[name].to_pylist(), name


def test_an_agent_is_told_all_that_the_one_before_saw_and_said_if_nothing_else_is_asked_for():
    assert (
        append_response(prompt="x", prompt_text="Sort: 2 1 =", response=" 1 2")
        == "Sort: 2 1 = 1 2\n"
    )


def test_a_message_of_a_chat_is_the_users_unless_it_says_otherwise():
    table = turn("a", [4], [2])
    told = call(hand_over, table, agent="a", message=ask, chat=True)
    assert told[MESSAGE].to_pylist() == [[{"role": "user", "content": "p2 a4?"}]]
    messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "a4"}]
    told = call(hand_over, table, agent="a", message=lambda **row: messages, chat=True)
    assert told[MESSAGE].to_pylist() == [messages]


@pytest.mark.parametrize(
    ("made", "chat"),
    [("", False), (None, False), ([], True), ([{"role": "user"}], True), (3, True)],
)
def test_a_message_that_is_none_is_refused_with_the_functions_name(made, chat):
    def ask_badly(**row):
        return made

    with pytest.raises(ValueError, match=r"ask_badly returned .*: expected a text"):
        hand_over(context(), turn("a", [4], [2]), agent="a", message=ask_badly, chat=chat)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True), st.randoms())
def test_each_turn_of_a_chain_is_a_row_whose_id_tells_its_episode_and_its_place(row_ids, random):
    groups = [row // 4 for row in row_ids]
    table = answered(hand_over(context(), turn("a", row_ids, groups), agent="a", message=ask), "b")
    table = table.append_column(
        "reward", pa.array([float(row) for row in row_ids], TYPES["reward"])
    )
    order = random.sample(range(len(row_ids)), len(row_ids))
    made = call(bring_out, table.take(order), agents=("a", "b"))
    assert made["row_id"].to_pylist() == sorted(
        2 * row + place for row in row_ids for place in (0, 1)
    )
    for row in made.to_pylist():
        episode, place = divmod(row["row_id"], 2)
        assert (row["episode_id"], row["agent"], row["segment"]) == (episode, "ab"[place], 0)
        assert (row["response"], row["reward"], row["group_id"]) == (
            f"{'ab'[place]}{episode}",
            episode,
            episode // 4,
        )
        assert row["tokens"] == len(row["prompt_ids"]) + len(row["response_ids"])
    assert not [name for name in made.column_names if name.startswith("a_1_") or name == MESSAGE]
    mine = call(take_agents, made, agents=("b",))
    assert mine["response"].to_pylist() == [f"b{row}" for row in sorted(row_ids)]


@given(
    st.lists(
        st.lists(st.none() | st.floats(0, 1, width=32), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    )
)
def test_a_proposal_has_one_row_and_the_mean_reward_of_those_that_came_of_it(rewards):
    proposals = turn("a", [*range(len(rewards))], [row // 2 for row in range(len(rewards))])
    table = answered(hand_over(context(), proposals, agent="a", message=ask), "b", n=3)
    flat = [reward for own in rewards for reward in own]
    table = table.append_column("reward", pa.array(flat, TYPES["reward"]))
    made = call(bring_out, table, agents=("a", "b"), groups={"b": "a"})
    proposed, solved = (take_agents(context(), made, agents=(agent,)).to_pylist() for agent in "ab")
    assert [row["response"] for row in proposed] == proposals["response"].to_pylist()
    assert [row["group_id"] for row in proposed] == proposals["group_id"].to_pylist()
    assert [row["group_id"] for row in solved] == [
        row for row in range(len(rewards)) for _ in range(3)
    ]
    assert [row["reward"] for row in solved] == flat
    for row, own in zip(proposed, rewards, strict=True):
        there = [reward for reward in own if reward is not None]
        assert row["reward"] == (
            pytest.approx(sum(there) / len(there), abs=1e-6) if there else None
        )
    assert len({row["row_id"] for row in proposed + solved}) == 4 * len(rewards)


def test_the_turns_of_an_agent_in_later_rounds_are_segments_and_the_reward_falls_on_the_last():
    table = turn("a", [4, 5], [2, 2])
    for name, number in (("a", 1), ("b", 1), ("a", 2)):
        table = hand_over(context(), table, agent=name, round=number, message=ask)
        table = answered(table, f"{'b' if name == 'a' else 'a'}{number}")
    table = table.append_column("reward", pa.array([1.0, None], TYPES["reward"]))
    made = call(bring_out, table, agents=("a", "b"), rounds=2)
    told = [(row["agent"], row["segment"], row["reward"]) for row in made.to_pylist()]
    assert told[:4] == [("a", 0, 0.0), ("b", 0, 0.0), ("a", 1, 1.0), ("b", 1, 1.0)]
    assert [reward for _, _, reward in told[4:]] == [None] * 4
    assert made["row_id"].to_pylist() == [*range(16, 24)]


def test_an_agent_may_get_a_part_of_the_reward_in_place_of_the_whole():
    table = answered(hand_over(context(), turn("a", [4, 5], [2, 2]), agent="a", message=ask), "b")
    table = table.append_column("reward", pa.array([1.0, None], TYPES["reward"]))
    parts = pa.array([[("split", 0.25)], []], TYPES["reward_parts"])
    table = table.append_column("reward_parts", parts)
    made = call(bring_out, table, agents=("a", "b"), rewards={"a": "split"})
    assert made["reward"].to_pylist() == [0.25, 1.0, None, None]
    with pytest.raises(
        ValueError, match=r"rewards=\{'a': 'spilt'\}: row 4 has the parts \['split'\]"
    ):
        bring_out(context(), table, agents=("a", "b"), rewards={"a": "spilt"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"groups": {"c": "a"}}, r"groups names 'c', which is none of the agents \['a', 'b'\]"),
        ({"rewards": {"c": "part"}}, r"rewards names 'c', which is none"),
        ({"also": ("response_mask", "mask")}, r"also=.*'mask' is no column of a turn"),
    ],
)
def test_options_that_name_nothing_are_refused_when_the_node_is_made(options, said):
    with pytest.raises(PlanError, match=said):
        Node(  # noqa: B018
            "turns", bring_out, role="r", after="reward", options={"agents": ("a", "b"), **options}
        ).contract


def test_the_turns_of_one_episode_share_a_row_id_and_not_their_luck():
    one, other, alone = context(), context(), context()
    one.agent, one.node = "a", "rollout_a"
    other.agent, other.node = "b", "rollout_b"
    assert len({ctx.seed(5) for ctx in (one, other, alone)}) == 3


def test_metrics_of_an_agents_node_have_its_name_and_what_counts_for_the_run_counts_there_too():
    ctx = context()
    ctx.agent = "a"
    ctx.log("samples", 3)
    ctx.log("policy/loss", 0.5)
    assert {name: metric.total for name, metric in ctx.metrics.items()} == {
        "a/samples": 3.0,
        "samples": 3.0,
        "a/policy/loss": 0.5,
    }
