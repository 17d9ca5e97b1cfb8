"""The bytes that a plan says cross the links are those that a step moves."""

from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.estimates.links import links_of, total_of
from siirl_dask.planner import DAG, Node, Role, Rows, TableSizes, compile_chains
from siirl_dask.testing.local_pool import LocalPool
from siirl_dask.testing.rows import build_nothing, fill, take

TOKENS, PROMPTS = 500, 64
TWO, THREE = "aabb", "aabc"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    url = tmp_path_factory.mktemp("data") / "data.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * PROMPTS, "answer": ["b"] * PROMPTS}), url)
    return Source(url=str(url), prompt="prompt", answer="answer", batch_size=PROMPTS, seed=0)


def plan_of(source, hosts, placement, rows):
    roles = (Role("sampler", build_nothing), Role("learner", build_nothing))
    there = Node("there", partial(fill, tokens=TOKENS), role="sampler")
    back = Node("back", take, role="learner", after="there", rows=rows[0])
    nodes = (there, back, Node("again", take, role="sampler", after="back", rows=rows[1]))
    workers = {f"w{number}": host for number, host in enumerate(hosts)}
    schema = source_schema(open_source(source).schema, source)
    return compile_chains(DAG(roles, nodes), list(workers), schema, placement, workers)


@pytest.mark.parametrize(
    ("hosts", "sampler", "learner"),
    [
        (TWO, [0, 1], [2, 3]),
        (TWO, [0, 2], [1, 3]),
        (TWO, [0, 1, 2], [3, 1]),
        (TWO, [0, 1, 2, 3], [0, 3]),
        (THREE, [0, 1], [2, 3]),
        (THREE, [0, 1, 2, 3], [0, 1, 2, 3]),
        ("abababab", [0, 1, 2, 3, 4, 5], [6, 7]),
    ],
)
@pytest.mark.parametrize(
    "rows",
    [
        (Rows.BALANCED, Rows.REPLICATED),
        (Rows.GROUPED, Rows.ANYWHERE),
        (Rows.REPLICATED, Rows.BALANCED),
    ],
    ids=lambda rows: "-".join(rows),
)
def test_what_crosses_the_links_is_what_the_plan_says(source, hosts, sampler, learner, rows):
    plan = plan_of(source, hosts, {"sampler": sampler, "learner": learner}, rows)
    sizes = TableSizes(prompts=PROMPTS, prompt_tokens=1, response_tokens=TOKENS)
    planned = total_of(links_of(plan, sizes))
    with LocalPool(plan, source, url="") as pool:
        moved = pool.run()["bytes/hosts"].value
        by_link = {}
        for worker, databuffer in pool.databuffers.items():
            for giver, nbytes in databuffer.traffic.by_worker.items():
                link = plan.hosts[giver], plan.hosts[worker]
                by_link[link] = by_link.get(link, 0) + nbytes
    assert moved == pytest.approx(sum(planned.values()), rel=0.01)
    crossed = {link: nbytes for link, nbytes in by_link.items() if link[0] != link[1]}
    assert {link: nbytes for link, nbytes in planned.items() if nbytes} == pytest.approx(
        crossed, rel=0.01
    )


def test_between_roles_that_share_hosts_no_row_crosses(source):
    plan = plan_of(
        source, "aabb", {"sampler": [0, 2], "learner": [1, 3]}, (Rows.BALANCED, Rows.GROUPED)
    )
    sizes = TableSizes(prompts=PROMPTS, prompt_tokens=1, response_tokens=TOKENS)
    assert sum(total_of(links_of(plan, sizes)).values()) == 0


def test_replicated_rows_are_taken_from_the_replica_on_ones_own_host(source):
    everywhere = {"sampler": [0, 1, 2, 3], "learner": [0, 2]}
    plan = plan_of(source, "aabb", everywhere, (Rows.REPLICATED, Rows.BALANCED))
    sizes = TableSizes(prompts=PROMPTS, prompt_tokens=1, response_tokens=TOKENS)
    first, second = links_of(plan, sizes)
    assert sum(first.bytes.values()) > 0
    assert not second.bytes
    with LocalPool(plan, source, url="") as pool:
        metrics = pool.run()
        assert metrics["bytes/hosts"].value == pytest.approx(sum(first.bytes.values()), rel=0.01)
        assert metrics["samples"].value == 3 * PROMPTS, "two replicas, and each row once"
