"""Groups of ranks lie on one host where they can, in an order that follows from the hosts alone."""

from __future__ import annotations

from functools import partial

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.config import Backend, FsdpConfig, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.planner import DAG, Node, Role, builds, columns, compile_chains
from siirl_dask.planner.hosts import arrange, by_host, groups_apart
from siirl_dask.planner.placement import host_notes
from siirl_dask.rollout import build_engine
from siirl_dask.training import build_trainer
from tests.planner.random_dags import QUICKLY

HOSTS = st.lists(st.integers(1, 12), min_size=1, max_size=6)
SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=3)
SOURCE = pa.schema({"prompt": pa.string()})


def spread(counts, mixed=False):
    """Return hosts with so many workers each; ``mixed``: workers of different hosts come in
    turn.
    """
    pairs = [(place, host) for host, count in enumerate(counts) for place in range(count)]
    ordered = sorted(pairs) if mixed else sorted(pairs, key=lambda pair: pair[::-1])
    return {f"w{number}": f"h{host}" for number, (_, host) in enumerate(ordered)}


@QUICKLY
@given(HOSTS, SIZES, st.booleans())
def test_no_group_is_on_two_hosts_where_all_could_be_on_one(counts, sizes, mixed):
    hosts = spread(counts, mixed)
    order = arrange(list(hosts), hosts, sizes)
    assert sorted(order) == sorted(hosts), "every worker has one place"
    if all(count % size == 0 for count in counts for size in sizes):
        assert not any(groups_apart(order, hosts, size) for size in sizes)


@QUICKLY
@given(HOSTS, st.integers(2, 8), st.booleans())
def test_as_many_groups_of_one_size_as_possible_are_on_one_host(counts, size, mixed):
    hosts = spread(counts, mixed)
    order = arrange(list(hosts), hosts, [size])
    groups = -(-len(hosts) // size)
    whole = sum(count // size for count in counts)
    rest = [count % size for count in counts if count % size]
    assert groups - len(groups_apart(order, hosts, size)) >= whole
    assert len(groups_apart(order, hosts, size)) <= -(-sum(rest) // size)


@QUICKLY
@given(HOSTS, SIZES)
def test_workers_of_a_host_keep_their_order_and_a_single_host_its_all(counts, sizes):
    hosts = spread(counts, mixed=True)
    order = arrange(list(hosts), hosts, sizes)
    for own in by_host(order, hosts).values():
        assert own == sorted(own, key=list(hosts).index)
    alone = list(spread([sum(counts)]))
    assert arrange(alone, dict.fromkeys(alone, "h"), sizes) == tuple(alone)
    assert arrange(alone, {}, sizes) == tuple(alone)


@columns(expand="n")
def grow(ctx, table, *, n: int = 1): ...


def plan(counts, *, tensor=1, shard=None, placement=None, mixed=False):
    hosts = spread(counts, mixed)
    model = ModelConfig(path="none")
    fsdp = {} if shard is None else {"backend": "fsdp", "fsdp": {"shard_size": shard or None}}
    rollout = RolloutConfig(engine="vllm", tensor_parallel_size=tensor)
    trainer = trainer_config(**fsdp)
    roles = (
        Role("rollout", partial(build_engine, model=model, rollout=rollout)),
        Role("policy", partial(build_trainer, model=model, trainer=trainer, rollout=rollout)),
    )
    nodes = (Node("grow", grow, role="rollout"), Node("learn", grow, role="policy", after="grow"))
    return compile_chains(DAG(roles, nodes), list(hosts), SOURCE, placement, hosts)


def trainer_config(backend="torch", fsdp=None):
    return TrainerConfig(backend=Backend(backend), fsdp=FsdpConfig(**(fsdp or {})))


def test_default_placement_puts_engines_and_shards_on_one_host_each():
    made = plan([3, 5, 4, 4], tensor=4, shard=4)
    for role in ("rollout", "policy"):
        assert len(groups_apart(made.placement[role], made.hosts, 4)) == 1, (
            "of 3 and 1 that are left"
        )
    (engines, shards) = host_notes(made)
    assert engines.startswith(
        "role 'rollout': 1 of its 4 groups of 4 ranks (rollout.tensor_parallel_size) are on"
    )
    assert "no order of its workers does better" in engines
    assert "role 'policy'" in shards
    assert not list(host_notes(plan([4, 8, 4], tensor=4, shard=2, mixed=True)))


def test_a_placement_that_the_user_wrote_is_kept_and_a_group_that_need_not_be_apart_is_named():
    chosen = [0, 2, 1, 3]
    made = plan([2, 2], tensor=2, placement={"rollout": chosen})
    assert made.placement["rollout"] == ("w0", "w2", "w1", "w3")
    (note,) = host_notes(made)
    assert note == (
        "role 'rollout': 2 of its 2 groups of 2 ranks (rollout.tensor_parallel_size) are on "
        "several hosts, the first with w0 on h0, w2 on h1; with its workers in another order in "
        "cluster.placement, none would be"
    )


def test_shards_over_all_hosts_are_named_with_the_size_that_fits_a_host():
    (note,) = host_notes(plan([4, 4], shard=0))
    assert note == (
        "role 'policy': its 8 ranks (trainer.fsdp.shard_size) are on 2 hosts; no order of its "
        "workers does better; trainer.fsdp.shard_size=4 would keep each group on one host"
    )
    assert not list(host_notes(plan([8], shard=0)))


def test_a_builder_of_a_users_own_says_which_ranks_belong_together():
    made = compile_chains(
        DAG((Role("mine", build_mine),), (Node("grow", grow, role="mine"),)),
        [f"w{i}" for i in range(6)],
        SOURCE,
        None,
        spread([3, 3], mixed=True),
    )
    assert not groups_apart(made.placement["mine"], made.hosts, 3)


@builds(
    preflight=lambda options, workers, config: None,
    groups=lambda options, workers: {"mine.size": 3},
)
def build_mine(device, rank): ...


@pytest.mark.parametrize("hosts", [None, {"w0": "a", "w1": "a"}])
def test_one_host_is_planned_as_no_host(hosts):
    roles, nodes = (Role("mine", build_mine),), (Node("grow", grow, role="mine"),)
    made = compile_chains(DAG(roles, nodes), ["w0", "w1"], SOURCE, None, hosts)
    assert made == compile_chains(DAG(roles, nodes), ["w0", "w1"], SOURCE)
