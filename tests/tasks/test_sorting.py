import pyarrow.parquet as pq
import pytest

from siirl_dask.config import Config, DataConfig, Engine, ModelConfig, RolloutConfig, RunConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import RunError
from siirl_dask.rollout import Sampling, build_engine
from siirl_dask.tasks import sorting
from siirl_dask.tasks.sorting import (
    digit_fraction,
    marked_digits,
    sorted_digits,
    write_digits_task,
    write_sorting_task,
)


@pytest.fixture(scope="module")
def seen():
    return []


@pytest.fixture(scope="module")
def task(tmp_path_factory, seen):
    """A task whose model was stopped early: it takes a second or two to be right once in 50."""
    folder = tmp_path_factory.mktemp("sorting")
    return write_sorting_task(
        folder, seed=0, digits=4, accuracy=0.02, progress=lambda *given: seen.append(given)
    )


def rows(path):
    return pq.read_table(path).to_pylist()


def test_the_answers_are_the_sorted_digits(task):
    for row in rows(task.train)[:50]:
        digits = row["prompt"].removeprefix("Sort: ").removesuffix(" =").split()
        assert row["answer"] == " " + " ".join(sorted(digits))


def test_no_prompt_is_in_two_of_the_tables(task):
    tables = [
        {row["prompt"] for row in rows(path)} for path in (task.train, task.validation, task.test)
    ]
    assert len(set.union(*tables)) == sum(len(table) for table in tables)


def test_no_table_has_prompts_of_the_warm_start(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "siirl_dask.tasks.warm_start.warm_start", lambda folder, *given, **_: shown.extend(given)
    )
    task = write_sorting_task(tmp_path)
    demonstrations, held_out = ({prompt for prompt, _ in given} for given in shown)
    assert len(demonstrations) > 90_000
    assert not demonstrations & held_out
    for path in (task.train, task.validation, task.test):
        assert not (demonstrations | held_out) & {row["prompt"] for row in rows(path)}


def test_a_third_of_marked_demonstrations_bear_the_mark(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "siirl_dask.tasks.warm_start.warm_start", lambda folder, *given, **_: shown.extend(given)
    )
    task = write_sorting_task(tmp_path, marked=True)
    marked = [answer.startswith(" #### ") for _, answer in shown[0]]
    assert sum(marked) / len(marked) == pytest.approx(0.35, abs=0.01)
    assert "#" not in str(rows(task.train))


def test_every_file_has_several_row_groups(task):
    assert all(
        pq.ParquetFile(path).num_row_groups >= 8
        for path in (task.train, task.validation, task.test)
    )


def test_the_seed_decides_the_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr("siirl_dask.tasks.warm_start.warm_start", lambda *given, **_: None)
    first, same, other = (
        rows(write_sorting_task(tmp_path / name, seed=seed).train)
        for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    )
    assert first == same != other


def test_the_warm_start_reaches_its_accuracy_and_reports_progress(task, seen):
    steps, most, accuracies = zip(*seen, strict=True)
    assert list(steps) == sorted(set(steps))
    assert set(most) == {400}
    assert accuracies[-1] >= 0.02 > max(accuracies[:-1])


def test_its_accuracy_is_that_of_greedy_decoding(task, seen):
    engine = build_engine(
        Device("w0"),
        Rank(),
        model=ModelConfig(path=str(task.model)),
        rollout=RolloutConfig(engine=Engine.transformers),
    )
    examples = rows(task.train)[:512]
    prompts = [engine.tokenizer.encode(row["prompt"]) for row in examples]
    samples = engine.generate(prompts, [0] * len(prompts), Sampling(max_tokens=12, temperature=0.0))
    texts = [engine.tokenizer.decode(sample.token_ids, skip_special=True) for sample in samples]
    right = [
        sorted_digits(row["prompt"], text, row["answer"])
        for row, text in zip(examples, texts, strict=True)
    ]
    assert sum(right) / len(right) == pytest.approx(seen[-1][2], abs=0.03)


def test_a_warm_start_that_misses_its_accuracy_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("siirl_dask.tasks.warm_start._MAX_STEPS", 2)
    with pytest.raises(RunError, match="after 2 steps"):
        write_sorting_task(tmp_path)
    assert not sorting.task_in(tmp_path).train.exists()
    assert not sorting.task_in(tmp_path).model.exists()


def test_prepare_writes_the_task_where_the_config_looks_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr("siirl_dask.tasks.warm_start.warm_start", lambda *given, **_: None)
    sorting.prepare(
        Config(run=RunConfig(seed=3), data=DataConfig(url=str(tmp_path / "task" / "train.parquet")))
    )
    task = sorting.task_in(tmp_path / "task")
    assert all(
        path.exists()
        for path in (task.train, task.validation, task.test, task.model / "config.json")
    )


def test_the_digits_task_needs_no_warm_start(tmp_path):
    task = write_digits_task(tmp_path)
    assert len(rows(task.train)) > 1000
    assert (task.model / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("reward", "response", "expected"),
    [
        (sorted_digits, " 1 2 9", 1.0),
        (sorted_digits, " #### 1 2 9", 0.0),
        (sorted_digits, " 1 2 8", 0.0),
        (marked_digits, " #### 1 2 9", 1.0),
        (marked_digits, " 1 2 9", 0.0),
        (marked_digits, " #### 1 2 8", 0.0),
        (digit_fraction, "1234abcd", 0.5),
        (digit_fraction, "12345678", 1.0),
        (digit_fraction, "", 0.0),
        (digit_fraction, "²³", 0.0),
    ],
)
def test_rewards(reward, response, expected):
    assert reward("Sort: 9 1 2 =", response, " 1 2 9", data_source="sorting") == expected
