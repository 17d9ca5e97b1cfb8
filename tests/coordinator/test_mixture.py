from collections import Counter
from fractions import Fraction

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from siirl_dask.config import DataConfig, DataSource
from siirl_dask.coordinator.dataloader import Dataloader
from siirl_dask.coordinator.source import dataset_schema, opened, training_dataset
from siirl_dask.errors import ConfigError, DataError

COLUMNS = ("row_id", "group_id", "tokens", "prompt", "answer", "source_name", "level")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    math = {
        "q": [f"m{i}" for i in range(60)],
        "a": [*map(str, range(60))],
        "level": [i % 5 for i in range(60)],
    }
    code = {
        "ask": [f"c{i}" for i in range(35)],
        "meta": [{"truth": str(i)} for i in range(35)],
        "odd": [1.5] * 35,
    }
    short = {
        "q": ["s0", "s1", "s2"],
        "a": ["0", "1", "2"],
        "odd": ["x", "y", "z"],
        "level": [9, 9, 9],
    }
    for name, rows in {"math": math, "code": code, "short": short}.items():
        pq.write_table(pa.table(rows), folder / f"{name}.parquet", row_group_size=8)
    return folder


def mixture(folder, seed=3, **weights):
    own = {"code": {"prompt": "ask", "answer": "meta.truth"}}
    weights = weights or {"math": 5, "code": 2, "short": 0.7}
    sources = {
        name: DataSource(url=str(folder / f"{name}.parquet"), weight=weight, **own.get(name, {}))
        for name, weight in weights.items()
    }
    return training_dataset(DataConfig(sources=sources, prompt="q", answer="a", batch_size=8), seed)


def everywhere(loaders, method, *arguments):
    count = len(loaders)
    parts = [
        getattr(loader, method)(*arguments, COLUMNS, index, count)
        for index, loader in enumerate(loaders)
    ]
    assert len({part.schema for part in parts}) == 1
    return pa.concat_tables(parts).sort_by("row_id")


def load(dataset, step, workers=1, position=None):
    loaders = [Dataloader(dataset, position) for _ in range(workers)]
    table = everywhere(loaders, "load", step)
    for loader in loaders:
        loader.close()
    return table


def test_rows_say_which_source_they_are_from_and_lack_what_it_lacks(folder):
    table = pa.concat_tables([load(mixture(folder), step) for step in range(20)])
    for row in table.to_pylist():
        assert row["prompt"] == row["source_name"][0] + row["answer"]
        assert (row["level"] is None) == (row["source_name"] == "code")
    assert "odd" not in dataset_schema(mixture(folder)).names  # a number in one, a text in another


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None
)
@given(step=st.integers(0, 60), workers=st.integers(2, 5))
def test_a_step_is_the_same_on_any_number_of_workers_and_wherever_a_run_resumes(
    folder, step, workers
):
    dataset = opened(mixture(folder))
    one = Dataloader(dataset)
    for before in range(max(0, step - 2), step):
        one.load(before, COLUMNS, 0, 1)
    assert load(dataset, step, workers).equals(everywhere([one], "load", step))
    one.close()


def test_proportions_are_exact_and_every_row_comes_once_an_epoch(folder):
    dataset = opened(mixture(folder))
    loader = Dataloader(dataset)
    rows = [row for step in range(154) for row in loader.load(step, COLUMNS, 0, 1).to_pylist()]
    loader.close()
    counts = Counter(row["source_name"] for row in rows)  # of 1,232 = 160 x 7.7
    assert counts == {"math": 800, "code": 320, "short": 112}
    for name, size in {"math": 60, "code": 35, "short": 3}.items():
        prompts = [row["prompt"] for row in rows if row["source_name"] == name]
        epochs = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        assert all(len({*epoch}) == len(epoch) for epoch in epochs)
        assert len(epochs) == 1 or epochs[0] != epochs[1]


def test_the_order_in_which_sources_are_written_changes_nothing(folder):
    one, other = mixture(folder, math=1, code=0.25), mixture(folder, code=0.25, math=1)
    assert one == other
    assert one.shares[0].weight == Fraction(1, 4)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_later_steps_follow_the_prompts_that_were_drawn_beyond_a_step(folder, workers):
    dataset = opened(mixture(folder))
    loaders = [Dataloader(dataset) for _ in range(workers)]
    taken = [everywhere(loaders, "load", 0), everywhere(loaders, "load", 1)]
    taken += [everywhere(loaders, "draw_prompts", 3), everywhere(loaders, "draw_prompts", 5)]
    assert [i for part in taken[2:] for i in part["row_id"].to_pylist()] == [*range(8, 16)]
    position = loaders[0].position
    taken.append(everywhere(loaders, "load", 2))
    again = load(dataset, 2, workers, position)
    for loader in loaders:
        loader.close()
    assert again.equals(taken[-1])
    drawn = [prompt for part in taken for prompt in part["prompt"].to_pylist()]
    assert drawn == [
        prompt for step in range(4) for prompt in load(dataset, step)["prompt"].to_pylist()
    ]


def test_prompts_or_answers_of_two_types_are_refused_by_source(folder, tmp_path):
    pq.write_table(pa.table({"q": ["x"], "a": [7]}), tmp_path / "numbers.parquet")
    sources = {
        "math": DataSource(url=f"{folder}/math.parquet"),
        "num": DataSource(url=f"{tmp_path}/numbers.parquet"),
    }
    dataset = training_dataset(DataConfig(sources=sources, prompt="q", answer="a"), 0)
    with pytest.raises(
        DataError, match=r"answer is large_string in 'math', int64 in 'num': expected one type"
    ):
        dataset_schema(dataset)


def test_a_column_with_the_name_of_the_sources_column_is_refused(tmp_path):
    pq.write_table(
        pa.table({"q": ["x"], "a": ["y"], "source_name": ["z"]}), tmp_path / "rows.parquet"
    )
    sources = {"x": DataSource(url=f"{tmp_path}/rows.parquet")}
    with pytest.raises(DataError, match=r"rows\.parquet' has a column 'source_name': rename it"):
        dataset_schema(training_dataset(DataConfig(sources=sources, prompt="q", answer="a"), 0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"url": "x", "sources": {"a": DataSource(url="y")}},
            r"both given: expected one of them; data\.url=null",
        ),
        (
            {"url": None},
            r"data\.url=None: expected the URL of a dataset, or several in data\.sources",
        ),
        (
            {"sources": {"a": DataSource(url="x", weight=0)}},
            r"data\.sources\.a\.weight=0: expected a number above 0",
        ),
        (
            {"sources": {"a": DataSource(url="x", weight=float("nan"))}},
            r"weight=nan: expected a number above 0",
        ),
        ({"sources": {"a": DataSource(url="")}}, r"data\.sources\.a\.url='': expected the URL"),
    ],
)
def test_wrong_sources_are_refused_by_key(values, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**values)
