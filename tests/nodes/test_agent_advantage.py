"""Advantages of several agents as nodes, on one worker and on several; what an update changed
for the next one's.
"""

from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pytest
import torch

from siirl_dask.algorithms import RoleBaselines, build_role_baselines, dr_mas, hierarchical_grpo
from siirl_dask.errors import PeerError, PlanError
from siirl_dask.nodes import (
    estimate_agent_advantages,
    estimate_role_advantages,
    measure_policy_change,
)
from siirl_dask.nodes.advantages.agent_advantage import _read_parts
from siirl_dask.planner import DAG, Node, Role, compile_chains
from siirl_dask.schema import TYPES
from siirl_dask.testing.rows import build_nothing
from siirl_dask.training import TokenScores
from tests.nodes.test_learning_nodes import context, on_workers, rows

CENTRED = {"divide_by_std": False}


def two_agents(**others):
    """Two groups of two episodes; b's part of the first one is cut in two segments."""
    given = {
        "group_id": [0, 0, 0, 0, 0, 1, 1, 1, 1],
        "episode_id": [0, 0, 0, 1, 1, 2, 2, 3, 3],
        "segment": [0, 0, 1, 0, 0, 0, 0, 0, 0],
        "agent": ["a", "b", "b", "a", "b", "a", "b", "a", "b"],
        "reward": [1.0, 6.0, 4.0, 0.0, 30.0, 2.0, 2.0, 4.0, 8.0],
    }
    return rows(**given | others)


def test_dr_mas_compares_each_agents_whole_parts():
    table = estimate_agent_advantages(context(), two_agents(), advantage=partial(dr_mas, **CENTRED))
    assert table["advantage"].to_pylist() == [0.5, -10, -10, -0.5, 10, -1, -3, 1, 3]


def test_an_episode_one_of_whose_rows_failed_is_left_out_whole():
    reward = [1.0, None, 4.0, 0.0, 30.0, 2.0, 2.0, 4.0, 8.0]
    table = estimate_agent_advantages(
        context(), two_agents(reward=reward), advantage=partial(dr_mas, **CENTRED)
    )
    assert table["advantage"].to_pylist() == [None, None, None, 0, 30, -1, -3, 1, 3]


def test_a_hierarchy_takes_its_proposals_from_a_column():
    table = rows(
        group_id=[0] * 6,
        agent=["p", "s", "s", "p", "s", "s"],
        reward=[0.0, 1.0, 0.0, 4.0, 5.0, 7.0],
    ).append_column("proposal", pa.array([3, 3, 3, 4, 4, 4]))
    advantage = partial(hierarchical_grpo, proposer="p", **CENTRED)
    given = estimate_agent_advantages(context(), table, advantage=advantage, proposal="proposal")
    assert given["advantage"].to_pylist() == [-2, 0.5, -0.5, 2, -1, 1]


def test_a_proposal_that_no_node_wrote_is_refused_before_a_run():
    source = pa.schema({name: TYPES[name] for name in ("reward", "group_id", "agent")})
    options = {"advantage": partial(hierarchical_grpo, proposer="p"), "proposal": "parent"}
    node = Node("mine", estimate_agent_advantages, role="policy", options=options)
    with pytest.raises(PlanError, match="parent"):
        compile_chains(DAG((Role("policy", build_nothing),), (node,)), ["w"], source)


@pytest.mark.parametrize("advantage", [dr_mas, partial(hierarchical_grpo, proposer="a")])
def test_groups_on_other_workers_change_no_bit(advantage):
    node = partial(estimate_agent_advantages, advantage=advantage, proposal="episode_id")
    whole = node(context(), two_agents())
    table = two_agents().take([4, 2, 0, 1, 3, 8, 6, 7, 5])
    split, _ = on_workers(node, [table.slice(0, 5), table.slice(5), table.slice(0, 0)])
    assert split.sort_by("row_id").equals(whole)


def test_roles_are_compared_with_their_past_and_then_add_to_it():
    held = RoleBaselines(decay=0.5)
    held.load_state({"baselines": {"a": 1.0}})
    given = estimate_role_advantages(ctx := context(held), two_agents())["advantage"].to_pylist()
    assert given == [0, 10, 10, -1, 30, 1, 2, 3, 8]
    # a: 1, 0, 2, 4 after 1; b: 10, 30, 2, 8 after 0
    assert held.baselines == {"a": 2.625, "b": 8.875}
    assert ctx.metrics["baseline/a"].value == 2.625


def test_roles_may_be_games_and_agents():
    held = RoleBaselines(decay=0.5)
    table = rows(group_id=[0, 0], agent=["a", "a"], reward=[1.0, 3.0], source_name=["go", "chess"])
    estimate_role_advantages(context(held), table, by=("source_name", "agent"))
    assert held.baselines == {"go a": 0.5, "chess a": 1.5}


def test_baselines_are_the_same_on_any_number_of_workers():
    alone = RoleBaselines()
    whole = [estimate_role_advantages(context(alone), two_agents()) for _ in range(2)][-1]
    held = [RoleBaselines() for _ in range(3)]
    for _ in range(2):
        parts = [two_agents().slice(5), two_agents().slice(0, 0), two_agents().slice(0, 5)]
        split, _ = on_workers(estimate_role_advantages, parts, held)
    assert split.sort_by("row_id").equals(whole)
    assert all(one.state() == alone.state() for one in held)


def test_a_resumed_run_goes_on_with_the_baselines():
    first, second = RoleBaselines(), RoleBaselines()
    estimate_role_advantages(context(first), two_agents())
    second.load_state(first.state())
    given = [estimate_role_advantages(context(held), two_agents()) for held in (first, second)]
    assert given[0].equals(given[1])
    assert first.state() == second.state()


@pytest.mark.parametrize(
    "message", [b"\xff", b"{}", b"[[1]]", b'[["1", "a", 0.5]]', b'[[1, "a", NaN]]']
)
def test_rewards_from_a_peer_are_checked(message):
    with pytest.raises(PeerError, match="rewards of roles"):
        _read_parts(message)


def test_the_role_is_stateful_and_its_decay_is_checked_before_a_run():
    assert estimate_role_advantages.__contract__.stateful
    with pytest.raises(Exception, match="expected 0 to below 1"):
        build_role_baselines.__builds__.preflight({"decay": 2.0}, ["w"], None)


@dataclass
class Moved:
    """A policy whose log-probs are all -0.5."""

    seen: list

    def logprobs(self, rows):
        self.seen.append(rows.tokens.tolist())
        count = int(rows.offsets[-1] - rows.prompt_lengths.sum())
        return TokenScores(torch.full((count,), -0.5), torch.zeros(count), torch.ones(count))


def turns_of_two(**others):
    given = {
        "group_id": [0, 0, 0, 0],
        "episode_id": [0, 0, 1, 1],
        "agent": ["a", "b", "a", "b"],
        "prompt_ids": [[1]] * 4,
        "response_ids": [[2, 3], [4], [5], [6]],
        "old_logprobs": [[-1.0, -0.75], [-9.0], [-0.25], [-9.0]],
    }
    return rows(**given | others)


def test_what_an_update_changed_is_on_all_rows_of_the_episode():
    policy = Moved([])
    table = measure_policy_change(context(policy), turns_of_two(), agents=("a",))
    assert table["policy_change"].to_pylist() == [0.75, 0.75, -0.25, -0.25]
    assert policy.seen == [[1, 2, 3, 1, 5]]  # rows of the other agent were not scored


def test_changes_of_several_updates_add_up():
    policy = Moved([])
    table = measure_policy_change(
        context(policy), turns_of_two(policy_change=[1.0, 1.0, 2.0, 2.0]), agents=("a",)
    )
    assert table["policy_change"].to_pylist() == [1.75, 1.75, 1.75, 1.75]


def test_tokens_of_the_environment_are_no_change():
    mask = [[True, False], [True], [True], [True]]
    table = measure_policy_change(
        context(Moved([])), turns_of_two(response_mask=mask), agents=("a",)
    )
    assert table["policy_change"].to_pylist() == [0.5, 0.5, -0.25, -0.25]


def test_a_row_may_be_an_episode():
    table = turns_of_two().drop_columns(["episode_id", "agent", "old_logprobs"])
    old = pa.array([[-1.0, -0.75], [-1.0], [-0.25], [-0.5]], TYPES["old_logprobs"])
    given = measure_policy_change(
        context(Moved([])), table.append_column("rollout_logprobs", old), old="rollout_logprobs"
    )
    assert given["policy_change"].to_pylist() == [0.75, 0.5, -0.25, 0]
