"""A run says of its prompts before it starts: nulls by their rows, and the first one as the
model sees it.
"""

from __future__ import annotations

import json
import re
from contextlib import nullcontext

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.cli import main
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.coordinator.source import Source
from siirl_dask.driver.checks.prompt_lengths import notes_on_long_prompts
from siirl_dask.driver.checks.prompt_rows import check_rows, first_prompt, shortened
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.errors import ConfigError, DataError
from siirl_dask.planner import Phase
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from tests.rollout.test_tokenizer import BEGUN, THINKING, USER, with_bos

TEXTS = ["a", "b", None, "d", None]


def written(folder, prompts, answers, groups=2, name="data.parquet"):
    pq.write_table(
        pa.table({"prompt": prompts, "answer": answers}), folder / name, row_group_size=groups
    )
    return Source(url=str(folder / name), prompt="prompt", answer="answer")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "model", chat_template=THINKING)


def settings(model, url):
    none = [f"{key}=null" for key in ("validation.url", "validation.test_url", "data.prepare")]
    return [f"model.path={model}", f"data.url={url}", "data.max_prompt_length=99", *none]


def planned(model, url, *overrides):
    file = load_config_file(shipped("quickstart"), [*settings(model, url), *overrides])
    return file.config, *plan_phases(file.config, *dags(file), worker_names(file.config))[
        Phase.TRAIN
    ]


@pytest.mark.parametrize(
    "prompts",
    [pa.array(TEXTS), pa.array([None if text is None else [USER] for text in TEXTS])],
    ids=["texts", "messages"],
)
def test_a_null_prompt_is_refused_by_its_row_of_its_part(tmp_path, prompts):
    source = written(tmp_path, prompts, ["y"] * 5)
    said = "the prompt of row 0 of row group 1 of data.parquet is null (data.prompt=prompt)"
    with pytest.raises(DataError, match=re.escape(said)):
        check_rows(source)


def test_a_null_field_of_a_struct_is_a_null_prompt(tmp_path):
    questions = pa.array([{"text": "a"}, {"text": None}, None], pa.struct({"text": pa.string()}))
    pq.write_table(pa.table({"q": questions, "answer": ["1"] * 3}), tmp_path / "q.parquet")
    with pytest.raises(DataError, match=r"row 1 of q\.parquet is null"):
        check_rows(Source(url=str(tmp_path / "q.parquet"), prompt="q.text", answer="answer"))


CHATS = pa.array(
    [
        [USER],
        [],
        [USER, {"role": "assistant", "content": "2"}, USER],
        [USER, {"role": "assistant", "content": "<think>"}],
    ]
)


def test_a_prompt_in_a_large_list_that_ends_with_its_answer_is_refused_by_its_row(tmp_path):
    chats = CHATS.cast(pa.large_list(CHATS.type.value_type))
    with pytest.raises(
        DataError, match=r"row 3 of data.parquet: its last message is the assistant's"
    ):
        check_rows(written(tmp_path, chats, ["y"] * 4, groups=9), answered=False)


def answered_row(tmp_path, first):
    """Return the chats from ``first`` on, and what is said of the one that has its answer."""
    source = written(tmp_path, CHATS.slice(first), ["y"] * (4 - first), groups=9)
    return source, f"the prompt of row {3 - first} of data.parquet: its last message is the assist"


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_a_prompt_that_ends_with_its_answer_is_refused_by_its_row(tmp_path, first):
    source, said = answered_row(tmp_path, first)
    with pytest.raises(DataError, match=said):
        check_rows(source, answered=False)
    assert check_rows(source) == []


@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_prompt_that_ends_with_its_answer_is_refused_by_its_row_before_anything_starts(
    tmp_path, model, capsys, first
):
    source, said = answered_row(tmp_path, first)
    for overrides, fits in ([], False), (["data.continue_answers=true"], True):
        with nullcontext() if fits else pytest.raises(SystemExit):
            main(["plan", str(shipped("quickstart")), *settings(model, source.url), *overrides])
        assert (said in capsys.readouterr().err) is not fits


def test_null_answers_are_counted_and_the_first_is_named(tmp_path):
    (note,) = check_rows(written(tmp_path, ["a"] * 5, TEXTS))
    assert "2 of 5 answers" in note
    assert "row 0 of row group 1 of data.parquet" in note
    assert check_rows(written(tmp_path, ["a"] * 5, ["y"] * 5)) == []


def test_plan_refuses_a_null_prompt_and_tells_of_null_answers(tmp_path, model, capsys):
    main(
        [
            "plan",
            str(shipped("quickstart")),
            *settings(model, written(tmp_path, ["a"] * 5, TEXTS).url),
        ]
    )
    assert "2 of 5 answers that were looked at are null" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(
            [
                "plan",
                str(shipped("quickstart")),
                *settings(model, written(tmp_path, TEXTS, ["y"] * 5).url),
            ]
        )
    assert "row 0 of row group 1 of data.parquet is null" in capsys.readouterr().err


def test_a_place_for_an_image_or_a_video_that_nobody_reads_is_refused_and_not_read_as_text(
    tmp_path,
):
    text = {"type": "text", "text": "2+2?"}
    model = tiny_vlm(tmp_path / "model")
    url = written(tmp_path, [[{"role": "user", "content": [text]}]] * 2, ["4"] * 2).url
    notes_on_long_prompts(*planned(model, url))
    places = {
        "image": {"type": "image", "text": None},
        "video": {"type": "text", "text": "<|video_pad|>"},
    }
    for kind, place in places.items():
        prompts = [[{"role": "user", "content": [place, text]}]] * 2
        url = written(tmp_path, prompts, ["4"] * 2, name=f"{kind}.parquet").url
        said = rf"prompts?: it has a place of kind '{kind}' \(<\|{kind}_pad\|>, token \d+\), and"
        for check in (notes_on_long_prompts, first_prompt):
            with pytest.raises(DataError, match=said):
                check(*planned(model, url))


def test_the_first_prompt_is_what_the_template_makes_of_it_with_its_arguments(
    tmp_path, model, capsys
):
    url = written(tmp_path, [[USER]] * 2, ["4"] * 2).url
    arguments = [*settings(model, url), "model.template={enable_thinking: false}"]
    main(["plan", str(shipped("quickstart")), *arguments])
    text = "off:<|user|>2+2?<|stop|><|assistant|><think></think>"
    assert (
        f"== first prompt ==\n\n{len(text)} tokens, as the model sees them\n{text}"
        in capsys.readouterr().out
    )
    main(["plan", str(shipped("quickstart")), "--format", "json", *arguments])
    assert json.loads(capsys.readouterr().out)["first_prompt"] == {
        "text": text,
        "tokens": len(text),
        "remark": "",
    }


def test_a_plan_says_one_of_what_there_is_one_of(tmp_path, model, capsys):
    url = written(tmp_path, ["a"] * 2, ["4"] * 2).url
    one = [
        "cluster.workers=1",
        "cluster.placement={}",
        "data.batch_size=1",
        "algorithm.minibatches=1",
    ]
    main(["plan", str(shipped("quickstart")), *settings(model, url), *one])
    said = capsys.readouterr().out
    assert "1 token, as the model sees it\na" in said
    assert "on 1 worker, 1 prompt a step" in said


def test_a_prompt_that_ends_with_an_answer_is_refused_at_the_start_or_continued(tmp_path, model):
    url = written(tmp_path, [[USER, BEGUN]], ["4"]).url
    given = planned(model, url)
    for look in (first_prompt, notes_on_long_prompts):
        with pytest.raises(DataError, match=r"prompts?: its last message is the assistant's"):
            look(*given)
    continued = planned(model, url, "data.continue_answers=true")
    assert first_prompt(*continued).text.endswith("<|assistant|>The sum")
    assert notes_on_long_prompts(*continued) == [
        "0 of 1 prompts are longer than data.max_prompt_length=99"
    ]


def test_a_template_that_fails_is_named_with_its_dataset(tmp_path):
    broken = tiny_model(tmp_path / "model", chat_template="{{ raise_exception('no system') }}")
    given = planned(broken, written(tmp_path, [[USER]], ["4"]).url)
    with pytest.raises(
        DataError, match=r"data\.parquet'.* the chat template fails on it: .*no system"
    ):
        first_prompt(*given)
    with pytest.raises(DataError, match=r"data\.parquet'.* the chat template fails on it"):
        notes_on_long_prompts(*given)


def test_special_tokens_around_texts_are_said_once_where_prompts_are_texts(tmp_path):
    folder = tmp_path / "model"
    tiny_model(folder)
    with_bos().save_pretrained(folder)
    texts = planned(folder, written(tmp_path, ["ab"], ["4"]).url)
    assert notes_on_long_prompts(*texts)[0].startswith(
        "model.add_special_tokens=auto: prompts that are texts get"
    )
    assert first_prompt(*texts).text == "<s>ab"
    chats = planned(folder, written(tmp_path, [[USER]], ["4"], name="chats.parquet").url)
    assert len(notes_on_long_prompts(*chats)) == 1


def test_texts_that_miss_the_models_chat_template_are_remarked_on_and_messages_are_not(
    tmp_path, model, capsys
):
    texts = written(tmp_path, ["2+2?"], ["4"]).url
    chats = written(tmp_path, [[USER]], ["4"], name="chats.parquet").url
    remark = "prompts are texts, and the model's chat template is for messages alone"
    assert any(remark in note for note in notes_on_long_prompts(*planned(model, texts)))
    assert not any(remark in note for note in notes_on_long_prompts(*planned(model, chats)))
    for url, remarks in ((texts, 1), (chats, 0)):
        main(["plan", str(shipped("quickstart")), *settings(model, url)])
        assert capsys.readouterr().out.count(f"note: {remark}") == remarks


def test_arguments_that_the_template_does_not_read_are_refused_by_plan(tmp_path, model):
    given = planned(
        model, written(tmp_path, [[USER]], ["4"]).url, "model.template={thinking: true}"
    )
    with pytest.raises(ConfigError, match=r"does not read .thinking."):
        first_prompt(*given)


def test_where_there_is_no_tokenizer_there_is_no_first_prompt(tmp_path):
    assert first_prompt(*planned(tmp_path / "nowhere", written(tmp_path, ["a"], ["4"]).url)) is None


def test_a_key_that_no_node_reads_is_refused(tmp_path, model):
    url = written(tmp_path, [[USER]], ["4"]).url
    dag = tmp_path / "own.yaml"
    dag.write_text(
        "base: siirl_dask:quickstart.yaml\nnodes:\n  prompts: {with: {continue_answers: null}}\n"
    )
    file = load_config_file(dag, [*settings(model, url), "data.continue_answers=true"])
    with pytest.raises(ConfigError, match=r"data\.continue_answers=true and no node reads it"):
        plan_phases(file.config, *dags(file), worker_names(file.config))


def test_data_show_prints_the_first_prompt_as_the_model_sees_it(tmp_path, model, capsys):
    main(["data", "show", written(tmp_path, [[USER]], ["4"]).url, "--model", str(model)])
    text = "off:<|user|>2+2?<|stop|><|assistant|>"
    assert (
        f"First prompt as the model sees it, {len(text)} tokens\n{text}" in capsys.readouterr().out
    )
    main(["data", "show", written(tmp_path, [[USER, BEGUN]], ["4"]).url, "--model", str(model)])
    assert (
        "First prompt: it is refused: its last message is the assistant's"
        in capsys.readouterr().out
    )


def test_a_long_prompt_shows_its_end_and_no_command_of_a_terminal():
    text = shortened("x" * 3000 + "\x1b[2Jend")
    assert text.endswith("\N{REPLACEMENT CHARACTER}[2Jend")
    assert "[... 1,007 characters ...]" in text
