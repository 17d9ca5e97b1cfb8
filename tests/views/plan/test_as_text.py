"""The text of ``siirl-dask plan``."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import pytest

from siirl_dask.planner import DAG, Node, Role, Rows, TableSizes, columns, compile_chains, estimate
from siirl_dask.schema import fields
from siirl_dask.views.plan import describe

SIZES = TableSizes(prompts=32, prompt_tokens=100, response_tokens=50, totals={"weights": 1_600_001})
SPLIT = {"rollout": [0, 1], "policy": [2, 3], "reference": [2, 3]}
IDS = 24  # bytes of row_id, group_id and tokens


@dataclass
class Sampling:
    n: int


def build(device, rank): ...


@columns(expand="sampling.n", writes=fields("prompt_ids"))
def generate(ctx, table, *, sampling: object = None): ...


def plain(ctx, table): ...


def test_bytes_are_counted_from_types_lengths_and_given_widths(grpo, source):
    plan = compile_chains(grpo, ["w0", "w1", "w2", "w3"], source, SPLIT)
    found = estimate(plan, SIZES)
    rows = 32 * 8
    assert found["prompts", "rollout"].rows == 32
    assert found["rollout", "old"].rows == rows
    assert found["rollout", "old"].bytes == rows * (IDS + (8 + 4 * 100) + (8 + 4 * 50))
    assert found["ref", "advantage"].bytes == rows * (IDS + 8 + 4 * 50)
    assert found["reward", "advantage"].unknown == ("prompt", "answer", "response")
    assert found["rollout", "reward"].bytes == 0
    assert found["weights", "load"].bytes == 2 * 1_600_001
    known = replace(SIZES, token_bytes=8, widths={"prompt": 300, "answer": 20})
    bounded = estimate(plan, known)["reward", "advantage"]
    assert bounded.unknown == ()
    # prompt answer level logprobs response reward
    per_row = IDS + 300 + 20 + 4 + (8 + 50 * 4) + (8 + 50 * 8) + 4
    assert bounded.bytes == rows * per_row


@pytest.mark.parametrize(
    ("fn", "rows"),
    [
        (partial(generate, sampling=Sampling(n=4)), 128),
        (partial(generate, sampling={"n": 3}), 96),
        (generate, None),
        (plain, 32),
    ],
)
def test_expansion_is_found_in_options(fn, rows):
    dag = DAG(
        [Role("a", build), Role("b", build)],
        [Node("g", fn, role="a"), Node("x", plain, role="b", after="g")],
    )
    plan = compile_chains(dag, ["w0", "w1"], pa.schema({}), {"a": [0], "b": [1]})
    found = estimate(plan, SIZES)["g", "x"]
    assert found.rows == rows
    assert found.bytes == (None if rows is None else rows * IDS)
    assert (f"{rows} anywhere" if rows else "? anywhere") in describe(plan, SIZES)


def test_text_in_full():
    roles = [Role("gen", build), Role("learn", build)]
    nodes = [
        Node("make", partial(generate, sampling=Sampling(n=2)), role="gen"),
        Node("near", plain, role="gen", after="make"),
        Node(
            "far",
            plain,
            role="learn",
            after="make",
            rows=Rows.GROUPED,
            reads=("prompt_ids", "prompt"),
        ),
        Node(
            "join",
            plain,
            role="gen",
            after=("near", "far"),
            save_as="rollouts",
            reads=("prompt_ids",),
        ),
    ]
    plan = compile_chains(
        DAG(roles, nodes), ["w0", "w1", "w2"], pa.schema({"prompt": pa.string()}), {"gen": [0, 1]}
    )
    here = __name__
    text = describe(plan, SIZES)
    assert text.splitlines()[0] == "2 roles on 3 workers, 32 prompts a step"
    flat = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        f"gen {here}:build w0, w1",
        f"learn {here}:build w0..w2 (3)",
        f"make {here}:generate gen - - -> prompt_ids",
        f"far {here}:plain learn make prompt_ids, prompt -> -",
        f"join {here}:plain gen near, far prompt_ids -> -, saved as 'rollouts'",
        "w0, w1 make (from data; to far) > near (statistics to join) > far (from make; to join) > "
        "join (from far; saves rollouts)",
        "w2 far (from make; to join)",
        "make -> near 64 anywhere local - -",
        "make -> far 64 grouped w0, w1 -> w0..w2 (3) <= 27.7 kB prompt?, prompt_ids",
        "near -> join 64 anywhere local, guide - -",
        "far -> join 64 anywhere w0..w2 (3) -> w0, w1 <= 27.7 kB prompt?, prompt_ids",
        "Between workers: at most 55.3 kB a step, and columns marked '?', whose size is not known.",
    ):
        assert line in " ".join(flat), f"{line}\n\n{text}"


@pytest.mark.alone
@pytest.mark.parametrize("workers", [2, 4, 1024])
def test_it_is_narrow_and_quick_at_any_size(grpo, source, workers):
    names = [f"tcp-worker-{i}" for i in range(workers)]
    half = workers // 2
    placement = {
        "rollout": range(half),
        "policy": range(half, workers),
        "reference": range(half, workers, 2),
    }
    start = time.perf_counter()
    text = describe(compile_chains(grpo, names, source, placement), SIZES)
    assert time.perf_counter() - start < 2
    assert max(map(len, text.splitlines())) <= 120
    assert len(text.splitlines()) < 70
    for edge in ("prompts -> rollout", "rollout -> reward", "old -> advantage", "weights -> load"):
        assert edge in text
    if workers == 1024:
        assert "tcp-worker-0..tcp-worker-511 (512)" in text


def test_bytes_are_rounded_up(grpo, source):
    for total, text in (
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1001, "1.1 kB"),
        (1_600_001, "1.7 MB"),
        (12 * 10**12, "12.0 TB"),
    ):
        plan = compile_chains(grpo, ["w0", "w1"], source, {"rollout": [0], "policy": [1]})
        sizes = replace(SIZES, totals={"weights": total})
        assert f"<= {text} " in describe(plan, sizes)
