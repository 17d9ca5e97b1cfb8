"""How many prompts are too long is told before a run starts, from a sample of the dataset."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from siirl_storage import append, open_table

from siirl_dask.cli import main
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.coordinator.source import Source
from siirl_dask.datasets.importing import ImportRequest, PromptLengths, import_data
from siirl_dask.driver.checks.prompt_lengths import (
    TooLong,
    counted_lengths,
    notes_on_long_prompts,
    sample_lengths,
)
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.errors import ConfigError
from siirl_dask.planner import Phase
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer, load_tokenizer
from siirl_dask.tasks.tiny_model import tiny_tokenizer


def source(path):
    return Source(url=str(path), prompt="q", answer="a")


def write(path, lengths, group):
    pq.write_table(
        pa.table({"q": ["x" * n for n in lengths], "a": [""] * len(lengths)}),
        path,
        row_group_size=group,
    )
    return source(path)


def test_a_small_dataset_is_counted_whole(tmp_path):
    sample = sample_lengths(write(tmp_path / "q.parquet", [*range(1, 301)], 50), str.encode, 290)
    assert sample.text(290) == "10 of 300 prompts are longer than data.max_prompt_length=290"


@pytest.mark.parametrize("part", [0.05, 0.5, 0.98])
def test_an_estimate_is_within_its_error_also_where_long_prompts_lie_together(tmp_path, part):
    lengths = np.where(np.random.default_rng(1).random(40_000) < part, 9, 3)
    lengths[:20_000].sort()
    sample = sample_lengths(write(tmp_path / "q.parquet", lengths.tolist(), 400), str.encode, 8)
    assert sample.looked_at == 16 * 32
    found = sample.found / sample.looked_at
    assert abs(found - (lengths > 8).mean()) < 2 * sample._error(found) + 0.01


def test_the_error_is_that_of_row_groups_where_they_differ():
    assert TooLong(10**6, ((32, 32), (32, 0)) * 8)._error(0.5) > 5 * TooLong(
        10**6, ((32, 16), (32, 16)) * 8
    )._error(0.5)


def test_no_long_prompt_among_some_says_how_few_there_can_be(tmp_path):
    sample = sample_lengths(write(tmp_path / "q.parquet", [3] * 40_000, 400), str.encode, 8)
    assert sample.text(8).startswith("fewer than 0.6% of 40,000 prompts are longer than")


def test_long_texts_end_a_sample_early(tmp_path):
    sample = sample_lengths(
        write(tmp_path / "q.parquet", [1000] * 400, 20), str.encode, 8, characters=5000
    )
    assert (sample.looked_at, sample.found) == (5, 5)


@pytest.fixture
def imported(tmp_path):
    """Import rows of these lengths into a table, with the column that counts them by a tokenizer
    of one name.
    """

    def add(lengths, tokenizer="mine", to="table", **given):
        lines = "".join(f'{{"prompt": "{"x" * n}", "answer": ""}}\n' for n in lengths)
        (tmp_path / "rows.jsonl").write_text(lines)
        counts = PromptLengths(
            prompt="prompt",
            measure=lambda texts: list(map(len, texts)),
            column="n",
            tokenizer=tokenizer,
        )
        sources = [str(tmp_path / "rows.jsonl")]
        return import_data(
            ImportRequest(sources=sources, to=str(tmp_path / to), prompts=counts, **given)
        )

    return add


def counted(table, tokenizer="mine", prompt="prompt"):
    found = counted_lengths(Source(url=table.url, prompt=prompt, answer="answer"), tokenizer, 8)
    return None if found is None else (found.found, found.looked_at, found.rows)


def test_lengths_of_an_import_are_counted_if_they_are_of_all_prompts_by_the_same_tokenizer(
    imported,
):
    table = imported([3, 9, 12], row_group_bytes=16)
    assert len(table.row_groups()) > 1
    assert counted(table) == (2, 3, 3)
    assert counted(table, "another") is None
    assert counted(table, prompt="answer") is None
    assert counted(imported([10, 1], append=True)) == (3, 5, 5)
    append(table.url, [open_table(table.url).to_table()])
    assert counted(open_table(table.url)) is None, (
        "rows of others count as if this tokenizer had counted them"
    )
    assert counted(imported([10], append=True)) is None
    assert counted(imported([10], tokenizer=None, to="other")) is None


def test_one_column_does_not_get_the_lengths_of_two_tokenizers(imported):
    imported([3])
    with pytest.raises(ConfigError, match=r"--length-column n: .* give the same tokenizer"):
        imported([3], "another", append=True)


@pytest.mark.parametrize("record", ["", "[]", '{"column": "n"}', '{"column": 1}', "[" * 100_000])
def test_a_record_of_lengths_that_is_none_is_not_believed(imported, record):
    table = imported([3])
    append(
        table.url,
        [open_table(table.url).to_table().slice(0, 0)],
        properties={"token_lengths": record},
    )
    assert counted(open_table(table.url)) is None


def test_a_run_that_knows_the_lengths_encodes_no_prompt(tmp_path, monkeypatch):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{"x" * n}", "answer": "y"}}\n' for n in (9, 1, 12))
    )
    paths = [str(tmp_path / "rows.jsonl"), str(tmp_path / "table")]
    main(["data", "import", *paths, "--tokenizer", str(tmp_path / "model"), "--length-column", "n"])
    settings = [
        f"model.path={tmp_path}/model",
        f"data.url={tmp_path}/table",
        "data.max_prompt_length=8",
    ]
    settings += ["validation.url=null", "validation.test_url=null", "data.prepare=null"]
    file = load_config_file(shipped("quickstart"), settings)
    plan, dataset = plan_phases(file.config, *dags(file), worker_names(file.config))[Phase.TRAIN]
    monkeypatch.setattr(HuggingFaceTokenizer, "encode", None)  # a call of it fails
    told = (
        "2 of 3 prompts are longer than data.max_prompt_length=8; they are dropped from their steps"
    )
    assert notes_on_long_prompts(file.config, plan, dataset) == [told]


def test_a_tokenizer_is_another_one_with_another_template(tmp_path):
    first, second = tiny_tokenizer(), tiny_tokenizer()
    second.chat_template = "{{ messages }}"
    names = [HuggingFaceTokenizer(one, "").identity for one in (first, tiny_tokenizer(), second)]
    assert names[0] == names[1] != names[2]
    first.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), "it").identity == names[0]


def test_a_run_tells_of_the_prompts_of_each_source_that_are_too_long(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    for name, lengths in {"short": [1, 2], "long": [9, 1, 12]}.items():
        rows = {"prompt": ["x" * n for n in lengths], "answer": ["y"] * len(lengths)}
        pq.write_table(pa.table(rows), tmp_path / f"{name}.parquet")
    sources = [f"data.sources.{name}.url={tmp_path}/{name}.parquet" for name in ("short", "long")]
    settings = [
        f"model.path={tmp_path}/model",
        "data.max_prompt_length=8",
        "data.url=null",
        "validation.url=null",
    ]
    file = load_config_file(
        shipped("quickstart"), [*settings, *sources, "validation.test_url=null"]
    )
    plan, dataset = plan_phases(file.config, *dags(file), worker_names(file.config))[Phase.TRAIN]
    told = "prompts are longer than data.max_prompt_length=8"
    dropped = "; they are dropped from their steps"
    expected = [f"source 'long': 2 of 3 {told}{dropped}", f"source 'short': 0 of 2 {told}"]
    assert notes_on_long_prompts(file.config, plan, dataset) == expected
    file.config.model.path = "nowhere"
    assert notes_on_long_prompts(file.config, plan, dataset) == []
