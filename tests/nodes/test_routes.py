"""The column of routes: what nodes that sample write of it, and what trainers read."""

from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pytest
import torch

from siirl_dask.config import EndpointConfig, EnvironmentsConfig, RolloutConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import ConfigError, DataError, PeerError
from siirl_dask.models.routing import Routing
from siirl_dask.nodes import (
    generate,
    generate_answers,
    generate_with_greedy,
    play,
    policy_logprobs,
    reference_logprobs,
    run_agents,
    sample_until_mixed,
    update_policy,
)
from siirl_dask.nodes.packed_table import pack_rows
from siirl_dask.nodes.routes import add_routes, packed_routes
from siirl_dask.planner.contract import contract_of
from siirl_dask.rollout import FinishReason, Generation
from siirl_dask.rollout.requests import Sampled, pack_sampled, read_sampled
from siirl_dask.schema import TYPES
from siirl_dask.training import TokenScores

ROUTING = Routing((0, 3), 5, 2)
ON = RolloutConfig(n=2, max_response_length=3, router_replay=True)


class Words:
    def decode(self, token_ids, *, skip_special):
        return " ".join(map(str, token_ids))

    def plain_text(self, token_ids):
        return None


@dataclass
class Router:
    """An engine whose routes count: token t of a row goes to the experts t, t + 1, t + 2 and t +
    3, modulo 5.
    """

    routing: Routing | None = ROUTING
    tokenizer: Words = field(default_factory=Words)
    version: int = 0

    def serve(self, queue):
        while taken := queue.next(9, wait=True):
            for ticket, asked in taken:
                tokens = [7] * (1 + asked.seed % 3)
                known = len(asked.prompt) + len(tokens) - 1
                routes = bytes(
                    (token + place) % 5 for token in range(known) for place in range(ROUTING.width)
                )
                queue.complete(
                    ticket, Generation(tokens, [-1.0] * len(tokens), FinishReason.STOP, routes)
                )


@dataclass
class Seen:
    """A trainer that keeps the rows it was given."""

    rows: object = None

    def logprobs(self, rows):
        self.rows = rows
        count = len(rows.tokens) - int(rows.prompt_lengths.sum())
        return TokenScores(torch.zeros(count), torch.zeros(count), torch.ones(count))


def context(resource):
    return Context(step=1, run_seed=0, rank=Rank(), device=Device("w"), resource=resource)


def prompts(*ids):
    identity = {
        name: pa.array(range(len(ids)), pa.int64()) for name in ("row_id", "group_id", "tokens")
    }
    return pa.table(identity | {"prompt_ids": pa.array([*ids], TYPES["prompt_ids"])})


def with_routes(rows, *routes):
    given = rows.drop_columns("routed_experts") if "routed_experts" in rows.column_names else rows
    return given.append_column("routed_experts", pa.array([*routes], TYPES["routed_experts"]))


def test_a_row_has_the_experts_of_each_token_but_its_last():
    for node, rows in ((generate, 4), (generate_with_greedy, 6)):
        table = node(context(Router()), prompts([1, 2, 3], [4]), rollout=ON)
        assert table.num_rows == rows
        assert table["routed_experts"].type == pa.large_list(pa.uint8())
        for prompt, response, routes in zip(
            *(table[name].to_pylist() for name in ("prompt_ids", "response_ids", "routed_experts")),
            strict=True,
        ):
            known = len(prompt) + len(response) - 1
            assert routes == [(token + place) % 5 for token in range(known) for place in range(4)]
    seen = Seen()
    policy_logprobs(context(seen), table)
    ends = seen.rows.offsets.tolist()
    assert seen.rows.routes.shape == (ends[-1], 4)
    assert seen.rows.routes[: ends[1] - 1].flatten().tolist() == table["routed_experts"][0].as_py()
    assert (seen.rows.routes == -1).all(dim=1).nonzero().flatten().tolist() == [
        end - 1 for end in ends[1:]
    ]
    reference_logprobs(context(seen), table)
    assert seen.rows.routes is None


def test_the_column_is_there_where_the_option_is_on():
    for node, options in (
        (generate, {}),
        (generate_with_greedy, {}),
        (
            sample_until_mixed,
            {"scorer": "reward", "columns": (), "max_prompt_length": 4, "batch_size": 1},
        ),
    ):
        for rollout in (ON, RolloutConfig()):
            contract = contract_of(partial(node, rollout=rollout, **options))
            assert ("routed_experts" in contract.writes.names) == rollout.router_replay
    assert "routed_experts" not in contract_of(partial(generate_answers, rollout=ON)).writes.names
    for node in (policy_logprobs, update_policy):
        assert "routed_experts" in contract_of(node).if_written
    assert "routed_experts" not in contract_of(reference_logprobs).if_written


def test_an_engine_that_records_no_routes_is_refused():
    with pytest.raises(
        ConfigError, match="the engine records no routes: give build_engine the same rollout"
    ):
        generate(context(Router(routing=None)), prompts([1]), rollout=ON)


@pytest.mark.parametrize("routes", [None, b"", b"\0" * 7, b"\0" * 9, b"\0" * 7 + b"\5"])
def test_routes_of_a_peer_that_do_not_fit_the_row_are_refused(routes):
    sampled = Sampled(Generation([7], [-1.0], FinishReason.STOP, routes), "w3")
    assert read_sampled(pack_sampled(sampled)) == sampled
    with pytest.raises(
        PeerError, match=r"worker 'w3' sent routes of .* 4 for each of 2 tokens, of 5 experts"
    ):
        add_routes(Router(), prompts([1, 2]), [sampled])
    with pytest.raises(PeerError, match="which is no sample"):
        read_sampled({**pack_sampled(sampled), "routes": [1, 2]})


def test_stored_routes_that_do_not_fit_the_rows_are_refused():
    table = generate(context(Router()), prompts([1, 2, 3], [4, 5]), rollout=ON)
    whole = table["routed_experts"].to_pylist()
    with pytest.raises(DataError, match="1 row has no routed_experts"):
        packed_routes(with_routes(table, *whole[:3], None))
    with pytest.raises(
        DataError,
        match=r"row 2 has \d+ routed_experts for the \d+ tokens before its last: expected 4",
    ):
        packed_routes(with_routes(table, *whole[:2], whole[2][:-1], whole[3]))
    assert packed_routes(table.slice(0, 0)) is None
    assert packed_routes(table.drop_columns("routed_experts")) is None
    part = packed_routes(table.slice(1, 2))
    assert part.shape == (len(pack_rows(table.slice(1, 2)).rows.tokens), 4)
    assert part[0].tolist() == [0, 1, 2, 3]


def test_episodes_have_no_routes():
    for node, options in (
        (play, {"environments": EnvironmentsConfig()}),
        (run_agents, {"command": ("agent",), "endpoint": EndpointConfig()}),
    ):
        with pytest.raises(ConfigError, match=r"rollout\.router_replay=true: .* leave it out"):
            node.__contract__.trial(rollout=ON, **options)
