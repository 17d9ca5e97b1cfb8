"""Tests of DAPO's dynamic sampling with a real dataloader, on one and several workers of one
process.
"""

from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.config import RewardsConfig, RolloutConfig
from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.errors import PlanError
from siirl_dask.nodes import encode_prompts, sample_until_mixed
from siirl_dask.planner import DAG, Node, Role, compile_chains
from siirl_dask.rewards import build_scorer
from siirl_dask.rollout import FinishReason, Generation
from siirl_dask.testing.local_pool import LocalPool

COLUMNS = [
    "row_id",
    "group_id",
    "prompt",
    "answer",
    "response",
    "reward",
    "prompt_number",
    "data_row",
    "sample_number",
]


class Digits:
    def encode(self, prompt):
        return [int(prompt)]

    def decode(self, token_ids, *, skip_special):
        return " ".join(map(str, token_ids))

    def plain_text(self, token_ids):
        return None


@dataclass
class Guesser:
    """Answers with the prompt's number and a bit that the seed decides."""

    tokenizer: Digits = field(default_factory=Digits)
    version: int = 0

    def serve(self, queue):
        while taken := queue.next(2, wait=True):
            for ticket, asked in taken:
                queue.complete(
                    ticket,
                    Generation([asked.prompt[0], asked.seed % 2], [0.0, 0.0], FinishReason.STOP),
                )


def build_guesser(device, rank):
    return Guesser()


def hard_and_easy(prompt, response, answer, **extra):
    """Every third prompt can be answered right or wrong; the others are always right or always
    wrong.
    """
    number, bit = map(int, response.split())
    return float(bit) if number % 3 == 0 else float(number % 3 == 1)


def never(prompt, response, answer, **extra):
    return 0.0


@pytest.fixture
def source(tmp_path):
    table = pa.table({"prompt": [str(i) for i in range(100)], "answer": list(range(100))})
    pq.write_table(table, tmp_path / "train.parquet", row_group_size=9)
    return Source(
        url=str(tmp_path / "train.parquet"), prompt="prompt", answer="answer", batch_size=8, seed=1
    )


async def hard_and_easy_async(prompt, response, answer):
    return hard_and_easy(prompt, response, answer)


def run(source, workers, tmp_path, *, steps=1, reward=hard_and_easy, overlap=True, **options):
    sample = partial(
        sample_until_mixed,
        rollout=RolloutConfig(n=6),
        **({"max_prompt_length": 4, "batch_size": 8} | options),
    )
    roles = (
        Role("rollout", build_guesser),
        Role("reward", partial(build_scorer, rewards=RewardsConfig(), reward=reward)),
    )
    dag = DAG(roles, (Node("rollout", sample, role="rollout", save_as="rollouts"),))
    names = [f"w{i}" for i in range(workers)]
    plan = compile_chains(
        dag, names, source_schema(open_source(source).schema, source), overlap=overlap
    )
    url = tmp_path / f"{workers}-{steps}-{overlap}"
    with LocalPool(plan, source, str(url)) as pool:
        metrics = [pool.run(step) for step in range(1, steps + 1)]
    tables = [
        pq.read_table(url / "rollouts" / f"step={step:06d}").sort_by("row_id")
        for step in range(1, steps + 1)
    ]
    return [table.select(COLUMNS) for table in tables], metrics


def test_a_step_is_filled_with_groups_that_have_a_spread(source, tmp_path):
    (table,), (metrics,) = run(source, 1, tmp_path)
    groups = table.group_by("group_id").aggregate(
        [("reward", "min"), ("reward", "max"), ("reward", "count")]
    )
    assert sorted(groups["group_id"].to_pylist()) == list(range(8))
    assert set(groups["reward_count"].to_pylist()) == {6}
    assert set(groups["reward_max"].to_pylist()) == {1.0}
    assert set(groups["reward_min"].to_pylist()) == {0.0}
    assert table["row_id"].to_pylist() == list(range(48))
    assert table["sample_number"].to_pylist() == [*range(6)] * 8
    assert table["prompt"].to_pylist() == [str(row) for row in table["data_row"].to_pylist()]
    assert metrics["data/generation_rounds"].value > 1


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_any_number_of_workers_keeps_the_same_groups_and_prompts(source, tmp_path, workers):
    alone, metrics = run(source, 1, tmp_path, steps=4)
    several, others = run(source, workers, tmp_path, steps=4)
    for step in range(4):
        assert several[step].equals(alone[step])
        assert others[step]["data/drawn_prompts"].value == metrics[step]["data/drawn_prompts"].value


def test_groups_are_the_same_where_responses_are_scored_while_others_are_sampled(source, tmp_path):
    expected, _ = run(source, 1, tmp_path)
    for overlap in (True, False):
        (got,), (metrics,) = run(source, 2, tmp_path, reward=hard_and_easy_async, overlap=overlap)
        assert got.equals(expected[0])
        assert ("rows/scored_early" in metrics) is overlap


def test_no_prompt_is_drawn_twice_in_an_epoch(source, tmp_path):
    tables, metrics = run(source, 2, tmp_path, steps=3)
    assert sum(step["data/drawn_prompts"].value for step in metrics) < 100
    prompts = [prompt for table in tables for prompt in table["prompt"].to_pylist()[::6]]
    assert len(set(prompts)) == len(prompts) == 24


def test_it_gives_up_after_its_rounds_when_no_group_has_a_spread(source, tmp_path):
    (table,), (metrics,) = run(source, 2, tmp_path, reward=never, rounds=3)
    assert table.num_rows == 0
    assert metrics["data/generation_rounds"].value == 3
    assert metrics["data/drawn_prompts"].value == 24


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_whose_prompts_are_all_too_long_ends_without_rows(source, tmp_path, workers):
    (table,), (metrics,) = run(source, workers, tmp_path, rounds=3, max_prompt_length=0)
    assert table.num_rows == 0
    assert (metrics["data/prompts"].value, metrics["data/dropped_prompts"].value) == (0, 24)


def test_a_second_reader_of_the_dataset_beside_it_is_refused(source):
    sample = partial(sample_until_mixed, rollout=RolloutConfig(), max_prompt_length=4, batch_size=8)
    nodes = (
        Node("rollout", sample, role="rollout"),
        Node("prompts", partial(encode_prompts, max_prompt_length=4), role="rollout"),
    )
    schema = pa.schema({"prompt": pa.string(), "answer": pa.int64()})
    with pytest.raises(
        PlanError, match=r"node 'rollout' draws more prompts.*\['rollout', 'prompts'\]"
    ):
        compile_chains(
            DAG((Role("rollout", build_guesser), Role("reward", build_guesser)), nodes),
            ["w"],
            schema,
        )


@pytest.mark.parametrize(
    ("scorer", "placement", "said"),
    [
        ("reward", {"rollout": [0, 1], "reward": [1]}, "worker 'w0' has it not"),
        ("rewards", {}, "did you mean 'reward'"),
    ],
)
def test_a_scorer_on_other_workers_than_the_samples_is_refused(scorer, placement, said):
    sample = partial(
        sample_until_mixed,
        rollout=RolloutConfig(),
        max_prompt_length=4,
        batch_size=8,
        scorer=scorer,
    )
    roles = (Role("rollout", build_guesser), Role("reward", build_guesser))
    schema = pa.schema({"prompt": pa.string(), "answer": pa.int64()})
    with pytest.raises(PlanError, match=f"node 'rollout' uses role '{scorer}'.*{said}"):
        compile_chains(
            DAG(roles, (Node("rollout", sample, role="rollout"),)), ["w0", "w1"], schema, placement
        )
