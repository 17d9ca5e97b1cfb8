"""Numbers that are not finite are named by worker and row, the rows are put aside, and no rank
decides for itself.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.algorithms import grpo
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import Aborted, TrainingError
from siirl_dask.nodes import estimate_advantage
from siirl_dask.nodes.nonfinite import bad_rows, nonfinite_handler
from siirl_dask.testing.local_pool import ThreadPeers
from siirl_dask.training import NonFinite
from tests.nodes.test_learning_nodes import rows as table_of

NUMBERS = st.floats(width=32)


@settings(max_examples=40)
@given(
    st.lists(st.none() | NUMBERS, max_size=6),
    st.lists(st.none() | st.lists(NUMBERS, max_size=3), max_size=4),
)
def test_every_row_with_a_number_that_is_not_finite_is_found_and_no_other(numbers, lists):
    flat = pa.chunked_array([pa.array(numbers, pa.float32())])
    assert bad_rows(flat) == [
        at for at, one in enumerate(numbers) if one is not None and not math.isfinite(one)
    ]
    ragged = pa.chunked_array([pa.array(lists, pa.large_list(pa.float32()))])
    assert bad_rows(ragged) == [
        at for at, row in enumerate(lists) if row and not all(map(math.isfinite, row))
    ]
    assert bad_rows(ragged.slice(1)) == [at - 1 for at in bad_rows(ragged) if at]


def found(rows, *, in_a_row=1, may_skip=True):
    return NonFinite(
        minibatch=1, minibatches=2, loss=math.nan, norm=math.nan, in_a_row=in_a_row, may_skip=may_skip, rows=rows,
        micro_batches=[0, 2] if rows else [],
    )  # fmt: skip


def decisions(findings, *, skip):
    """Return what each rank raises, and the tables that were put aside, where rank r has found
    ``findings[r]``.
    """
    peers, aside = ThreadPeers(len(findings)), []

    def on_rank(rank):
        def dump_nonfinite(rows):
            aside.append((rank, rows))
            return "runs/x/nonfinite-update/step=000003"

        table = table_of(row_id=[10 * rank + row for row in range(8)], advantage=[1.0] * 8)
        context = Context(
            step=3,
            run_seed=0,
            rank=Rank(rank, len(findings)),
            device=Device(f"w{rank}"),
            resource=None,
        )
        context.peers, context.skip_nonfinite, context.dump_nonfinite = (
            peers.at(rank),
            skip,
            dump_nonfinite,
        )
        try:
            nonfinite_handler(context, [table.slice(0, 0), table])(findings[rank])
        except (TrainingError, Aborted) as error:
            return error
        return None

    with ThreadPoolExecutor(len(findings)) as threads:
        return list(threads.map(on_rank, range(len(findings)))), aside


def test_the_rank_that_found_the_rows_names_them_and_the_others_only_stop():
    (other, first), aside = decisions(
        [found({}), found({"advantages": [2], "loss": [2, 7]})], skip=False
    )
    assert type(other) is Aborted
    said = (
        "mini-batch 2 of 2: loss nan, gradient norm nan; no step was taken on it: advantages and "
        "loss not finite on worker 'w1' in rows 12, 17 of 8, micro-batches 1, 3; its rows are in "
        "runs/x/nonfinite-update/step=000003 (run.on_nan=stop; skip would leave this update out)"
    )
    assert str(first) == said
    saved = dict(aside)[1]
    assert saved["row_id"].to_pylist() == [12, 17, 10, 11, 13, 14, 15, 16]
    assert saved["nonfinite"].to_pylist()[:3] == [["advantages", "loss"], ["loss"], []]


def test_where_no_row_is_to_blame_every_rank_says_so():
    errors, _ = decisions([found({}), found({})], skip=False)
    assert [type(error) for error in errors] == [TrainingError, TrainingError]
    assert "each row's loss is finite, the gradient of all is not" in str(errors[0])


def test_a_step_is_left_out_by_all_ranks_or_by_none():
    assert decisions([found({}), found({"loss": [0]})], skip=True)[0] == [None, None]
    tired = [found(rows, in_a_row=11, may_skip=False) for rows in ({}, {"loss": [0]})]
    other, first = decisions(tired, skip=True)[0]
    assert type(other) is Aborted
    assert "the last 11 were so" in str(first)
    assert "trainer.max_skipped_steps" in str(first)


@pytest.mark.parametrize("skip", [False, True])
def test_an_advantage_that_is_not_finite_ends_the_run_or_goes_on_to_the_update(skip):
    table = table_of(
        group_id=[0, 0, 1, 1], reward=[1.0, math.nan, 1.0, 0.0], response_ids=[[1], [2], [3], [4]]
    )
    context = Context(
        step=3, run_seed=0, rank=Rank(), device=Device("w"), resource=None, skip_nonfinite=skip
    )
    if skip:
        estimate_advantage(context, table, advantage=grpo)
        assert context.metrics["nonfinite/advantage"].value == 2
    else:
        with pytest.raises(
            TrainingError, match="advantage not finite on worker 'w' in rows 0, 1 of 4"
        ):
            estimate_advantage(context, table, advantage=grpo)


def test_what_is_put_aside_is_bounded_in_rows_and_in_steps():
    aside, state = [], {}
    table = table_of(reward=[1.0] * 3000, group_id=[0] * 3000, response_ids=[[1]] * 3000)
    for step in range(20):
        context = Context(
            step=step, run_seed=0, rank=Rank(), device=Device("w"), resource=None, state=state
        )
        context.skip_nonfinite, context.dump_nonfinite = True, aside.append
        nonfinite_handler(context, [table])(found({"loss": [2999]}))
    assert [rows.num_rows for rows in aside] == [1000] * 16
    assert all(rows["row_id"][0].as_py() == 2999 for rows in aside)
