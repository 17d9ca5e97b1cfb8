"""Tests of pass@k, best@k and maj@k against every choice of k samples, and of the node on uneven
workers.
"""

import re
from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import combinations
from statistics import fmean

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.config import RolloutConfig, ValidationConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.errors import ConfigError, DataError, PlanError
from siirl_dask.nodes import ColumnPath, generate, generate_answers, measure_answers
from siirl_dask.nodes.advantages.estimators import (
    best_at_k,
    majority_at_k,
    mean,
    pass_at_k_estimate,
)
from siirl_dask.observe import values
from siirl_dask.planner import (
    DAG,
    Node,
    Role,
    Rows,
    columns,
    compile_chains,
    dag_from_spec,
    dag_to_spec,
)
from siirl_dask.rollout import FinishReason, Generation, Sampling
from siirl_dask.schema import TYPES, fields
from siirl_dask.testing.local_pool import LocalPool
from siirl_dask.testing.rows import build_nothing

float32s = st.floats(width=32, min_value=-1e6, max_value=1e6)


@st.composite
def samples(draw):
    """Draw answers, their rewards, and a k that is at most their number."""
    answers = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=7))
    rewards = draw(
        st.lists(
            st.one_of(st.sampled_from([0.0, 1.0]), float32s),
            min_size=len(answers),
            max_size=len(answers),
        )
    )
    return answers, rewards, draw(st.integers(1, len(answers)))


def over_all_choices(n, k, value):
    """Return the exact mean of ``value`` over every choice of k of n places, rounded once."""
    choices = list(combinations(range(n), k))
    return float(sum(Fraction(value(places)) for places in choices) / len(choices))


@given(samples())
def test_pass_and_best_at_k_are_means_over_all_choices_of_k_samples(drawn):
    _, rewards, k = drawn
    right = [float(reward >= 1) for reward in rewards]
    expected = over_all_choices(len(right), k, lambda places: max(right[at] for at in places))
    assert pass_at_k_estimate(len(right), int(sum(right)), k) == expected
    expected = over_all_choices(len(rewards), k, lambda places: max(rewards[at] for at in places))
    assert best_at_k(rewards, k) == expected


@given(samples())
def test_majority_at_k_is_a_mean_and_the_first_answer_wins_a_tie(drawn):
    answers, rewards, k = drawn

    def winner(places):
        votes = Counter(answers[at] for at in places)
        most = max(votes.values())
        won = min((answer for answer in votes if votes[answer] == most), key=answers.index)
        of_answer = [Fraction(rewards[at]) for at in places if answers[at] == won]
        return sum(of_answer) / len(of_answer)

    assert majority_at_k(answers, rewards, k) == over_all_choices(len(answers), k, winner)


@given(samples())
def test_estimates_begin_at_the_mean_and_grow_with_k(drawn):
    answers, rewards, k = drawn
    assert best_at_k(rewards, 1) == majority_at_k(answers, rewards, 1) == mean(rewards)
    assert mean(rewards) == pytest.approx(fmean(rewards), rel=1e-12, abs=1e-12)
    assert best_at_k(rewards, k) >= mean(rewards)


def test_many_samples_lose_no_digits_and_take_no_time():
    assert pass_at_k_estimate(10_000, 1, 100) == pytest.approx(0.01, rel=1e-15)
    assert pass_at_k_estimate(2000, 1000, 1000) == 1.0
    answers = [str(at % 7) if at % 2 else f"once {at}" for at in range(128)]
    assert 0 < majority_at_k(answers, [float(answer == "1") for answer in answers], 64) < 1


@pytest.mark.parametrize("k", [0, 4])
def test_a_k_above_the_number_of_samples_is_refused(k):
    for estimate in (lambda: pass_at_k_estimate(3, 1, k), lambda: best_at_k([0.0] * 3, k)):
        with pytest.raises(ValueError, match=f"k={k} of 3 samples: expected 1 to 3"):
            estimate()


N = 4
SOURCES = ["gsm8k", "math", None]


@columns(reads=["prompt"], writes=fields("response", "reward"), expand="n")
def answer(ctx, table, *, n):
    """Give answers, some of them equal, and rewards that are no binary fractions, some missing;
    by prompt alone.
    """
    rows = table.take(np.repeat(np.arange(table.num_rows), n))
    ids = (table["row_id"].to_numpy()[:, None] * n + np.arange(n)).flatten()
    rng = [np.random.default_rng(row_id) for row_id in ids.tolist()]
    rewards = [
        None if at % 5 == 3 else r.choice([0, 0.1, 1])
        for at, r in zip(ids.tolist(), rng, strict=True)
    ]
    said = [f" {r.integers(3)}\n" for r in rng]
    rows = rows.set_column(rows.column_names.index("row_id"), "row_id", pa.array(ids))
    rows = rows.append_column("response", pa.array(said))
    return rows.append_column("reward", pa.array(rewards, TYPES["reward"]))


def measured(tmp_path, workers, placement=None, prompts=11, *, flat=False, **options):
    """Return what a validation of ``prompts`` prompts logs."""
    extra = [{"source": SOURCES[at % 3]} for at in range(prompts)]
    table = pa.table(
        {"prompt": [str(at) for at in range(prompts)], "answer": [""] * prompts, "extra": extra}
    )
    if flat:
        table = table.flatten()
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=2)
    source = Source(url=str(tmp_path / "data.parquet"), prompt="prompt", answer="answer")
    roles = (Role("a", build_nothing), Role("b", build_nothing))
    given = {"n": N, "k": (1, 2, 4), "source": ColumnPath("extra.source")} | options
    nodes = (
        Node("answer", partial(answer, n=given["n"]), role="a"),
        Node(
            "measure",
            partial(measure_answers, **given),
            role="b",
            after="answer",
            rows=Rows.GROUPED,
        ),
    )
    names = [f"w{at}" for at in range(workers)]
    schema = source_schema(open_source(source).schema, source)
    with LocalPool(
        compile_chains(DAG(roles, nodes), names, schema, placement), source, str(tmp_path)
    ) as pool:
        return {name: value for name, value in values(pool.run()).items() if "@" in name}


def test_uneven_workers_give_the_numbers_of_one_to_the_last_bit(tmp_path):
    one = measured(tmp_path, 1)
    kinds = ["mean@4", "pass@1", "pass@2", "pass@4", "best@2", "best@4", "maj@2", "maj@4"]
    assert set(one) == {f"{kind}{end}" for kind in kinds for end in ("", "/gsm8k", "/math")}
    assert 0 < one["pass@1/math"] < one["pass@2/math"] < 1
    for workers in (2, 3, 5):
        assert measured(tmp_path, workers) == one, workers
    assert measured(tmp_path, 3, {"a": [0, 1], "b": [1, 2]}) == one


def test_a_source_may_be_a_column_whose_name_has_a_dot(tmp_path):
    """As json_normalize of pandas names it."""
    assert measured(tmp_path, 1, flat=True) == measured(tmp_path, 1)


def test_prompts_count_alike_and_not_for_a_k_above_their_samples(tmp_path):
    """The expected numbers are computed here, from the rows that the node sees."""
    prompts = pa.table({"row_id": np.arange(11), "prompt": [str(at) for at in range(11)]})
    rows = answer(None, prompts, n=N)
    rewards = [
        list(filter(lambda r: r is not None, rows["reward"].to_pylist()[at : at + N]))
        for at in range(0, 44, N)
    ]
    whole = [given for given in rewards if len(given) == N]
    assert len(whole) < len(rewards)
    found = measured(tmp_path, 2)
    assert found["mean@4"] == pytest.approx(fmean(map(fmean, rewards)), abs=1e-12)
    assert found["best@4"] == pytest.approx(fmean(map(max, whole)), abs=1e-12)
    assert found["pass@4"] == pytest.approx(
        fmean(float(max(given) >= 1) for given in whole), abs=1e-12
    )


def table_of(responses, rewards, **more):
    ids = pa.array([0] * len(rewards), pa.int64())
    return pa.table(
        {"group_id": ids, "response": responses, "reward": pa.array(rewards, pa.float32()), **more}
    )


def logged(table, **options):
    ctx = Context(step=1, run_seed=0, rank=Rank(), device=Device("w"), resource=None)
    assert measure_answers(ctx, table, **options) is table
    return {name: metric.value for name, metric in ctx.metrics.items()}


def first_word(response):
    return next(iter(response.split()), None)


def test_votes_count_extracted_answers_or_stripped_responses():
    table = table_of(["7 so", "8", "7 as", ""], [1.0, 0.0, 1.0, 0.0])
    assert logged(table, n=4, k=(4,), extract=first_word)["maj@4"] == 1.0
    assert logged(table, n=4, k=(4,))["maj@4"] == 1.0  # all differ: the first wins
    assert logged(table.take([1, 0, 2, 3]), n=4, k=(4,))["maj@4"] == 0.0
    assert logged(table_of([" 8\n", "7", "8"], [0.0, 1.0, 0.0]), n=3, k=(3,))["maj@3"] == 0.0


def test_one_sample_without_a_source_logs_nothing():
    table = table_of(["x"], [1.0], source=["a"])
    assert logged(table, n=1, k=(1,)) == {}
    assert logged(table, n=1, k=(1,), alone=True) == {"mean@1": 1.0, "pass@1": 1.0}
    assert set(logged(table, n=1, k=(1,), source=ColumnPath("source"))) == {
        "mean@1",
        "pass@1",
        "mean@1/a",
        "pass@1/a",
    }


class Recorder:
    """An engine that records the sampling parameters of its requests."""

    version = 0

    @property
    def tokenizer(self):
        return self

    def decode(self, token_ids, *, skip_special):
        return ""

    def plain_text(self, token_ids):
        return None

    def serve(self, queue):
        while taken := queue.next(9, wait=True):
            for ticket, asked in taken:
                self.asked = asked.sampling
                queue.complete(ticket, Generation([asked.seed % 1000], [0.0], FinishReason.STOP))


def test_validation_has_its_own_settings_and_numbers_rows_alike():
    table = pa.table(
        {"row_id": [3, 5], "group_id": [3, 5], "tokens": [1, 1], "prompt_ids": [[1], [2]]}
    )
    rollout = RolloutConfig(n=2, temperature=0.3, top_k=5, max_response_length=7)
    ctx = Context(step=1, run_seed=0, rank=Rank(), device=Device("w"), resource=Recorder())
    drawn = generate_answers(
        ctx, table, rollout=rollout, validation=ValidationConfig(n=2, temperature=0.9, top_p=0.5)
    )
    assert ctx.resource.asked == Sampling(max_tokens=7, temperature=0.9, top_p=0.5)
    assert drawn.select(["row_id", "response_ids"]) == generate(ctx, table, rollout=rollout).select(
        ["row_id", "response_ids"]
    )
    greedy = generate_answers(ctx, table, rollout=rollout, validation=ValidationConfig())
    assert ctx.resource.asked == Sampling(max_tokens=7, temperature=0.0)
    assert greedy["row_id"].to_pylist() == [3, 5]


def test_a_column_that_cannot_be_a_source_is_refused_by_name():
    with pytest.raises(DataError, match=r"'a\\nb' \(where\) of prompt 0: expected text"):
        logged(table_of(["x"], [1.0], where=["a\nb"]), n=1, k=(1,), source=ColumnPath("where"))
    with pytest.raises(DataError, match=r"no 'where\.at' in column 'where' of type struct<on"):
        logged(
            table_of(["x"], [1.0], where=[{"on": 1}]), n=1, k=(1,), source=ColumnPath("where.at")
        )
    many = (
        table_of(["x"] * 300, [1.0] * 300, where=range(300))
        .drop("group_id")
        .append_column("group_id", [range(300)])
    )
    with pytest.raises(
        DataError, match=r"'where' has 300 values or more: expected at most 256 sources"
    ):
        logged(many, n=1, k=(1,), source=ColumnPath("where"))


def test_a_trial_refuses_a_large_k_and_the_contract_reads_the_source(tmp_path):
    node = Node("measure", partial(measure_answers, n=4, k=(1, 9)), role="reward")
    with pytest.raises(PlanError, match=r"k=\[1, 9\]: 9 of n=4 samples"):
        node.try_options()
    with pytest.raises(PlanError, match=r"reads \['extr\.source'\].*did you mean 'extra'"):
        measured(tmp_path, 1, source=ColumnPath("extr.source"))
    within = (
        r"reads \['extra\.sorce'\].*: no 'sorce' \(there is: \['source'\]\); did you mean 'source'"
    )
    with pytest.raises(PlanError, match=within):
        measured(tmp_path, 1, source=ColumnPath("extra.sorce"))


def test_yaml_and_python_spell_one_node():
    fn = partial(measure_answers, n=2, k=(1, 2), source=ColumnPath("x.y"), extract=first_word)
    dag = DAG((Role("a", build_nothing),), (Node("m", fn, role="a"),))
    spec = dag_to_spec(dag)
    assert spec["nodes"][0]["with"]["source"] == {"path": "x.y"}
    again = dag_from_spec(spec["roles"], spec["nodes"])
    assert again == dag
    assert again.nodes[0].contract.reads == ("group_id", "reward", "response", "x.y")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n": 4, "temperature": 0.0}, "validation.n=4 with validation.temperature=0"),
        (
            {"n": 4, "temperature": 1.0, "k": [1, 8]},
            "validation.k=[1, 8]: 8 of validation.n=4 samples",
        ),
        ({"n": 4, "temperature": 1.0, "k": [0]}, "validation.k=[0]: 0 of"),
        ({"temperature": -1.0}, "validation.temperature=-1.0: expected at least 0"),
        ({"top_p": 0.0}, "validation.top_p=0.0: expected more than 0"),
        ({"n": 0}, "validation.n=0: expected at least 1"),
    ],
)
def test_impossible_sampling_parameters_are_refused_by_name(given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        ValidationConfig(**given)


def test_k_defaults_to_one_and_all_samples():
    assert ValidationConfig().k == [1]
    assert ValidationConfig(n=8, temperature=0.5).k == [1, 8]
