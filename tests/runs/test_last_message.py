"""A prompt is shown by what its user said last, whatever template wrote it, and all of it on
request.
"""

import pyarrow as pa
import pytest

from siirl_dask.cli import main
from siirl_dask.runs.preview import preview_samples
from siirl_dask.runs.samples import questions
from siirl_dask.runs.samples.last_message import last_message
from siirl_dask.runs.samples.rollouts import open_rollouts
from siirl_dask.runs.samples.sample_rows import Choice, newest_samples, whole_sample
from tests.runs.test_questions import row, save

CHATML = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    "prompt",
    [
        CHATML.format("first") + "a<|im_end|>\n<|im_start|>user\nWhat is 2+3?<|im_end|>\n",
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2+3?<|eot_id|>",
        "<start_of_turn>user\nWhat is 2+3?<end_of_turn>\n<start_of_turn>model\n",
        "<|user|>\nWhat is 2+3?<|end|>\n<|assistant|>\n",
        "<|start|>user<|message|>What is 2+3?<|end|><|start|>assistant",
        "<\uff5cbegin\uff5c>be brief<\uff5cUser\uff5c>What is 2+3?<\uff5cAssistant\uff5c>",
        "<s>[INST] <<SYS>>\nbe brief\n<</SYS>>\n\nWhat is 2+3? [/INST]",
        "What is 2+3?",
        [{"role": "system", "content": "x"}, {"role": "user", "content": "What is 2+3?"}],
    ],
)
def test_the_last_message_of_the_user_is_found_in_the_templates_of_most_models(prompt):
    assert last_message(prompt) == "What is 2+3?"


def chats(tmp_path, **columns):
    """A run whose prompts differ in one line in the middle, and in what else ``columns`` say."""
    rows = [
        {**row(1, at, float(at), 3), "prompt_text": CHATML.format(f"ask {at}"), **columns}
        for at in range(4)
    ]
    return save(tmp_path / "run", {1: rows}, parts=1)


def test_every_view_shows_the_line_in_which_prompts_differ(tmp_path, capsys):
    url = chats(tmp_path)
    main(["rollouts", url, "--best", "2"])
    told = capsys.readouterr().out
    assert "ask 3" in told
    assert "im_start" not in told
    main(["rollouts", url, "--best", "2", "--full"])
    told = capsys.readouterr().out
    assert "<|im_start|>system" in told
    assert "left out" not in told
    assert {one.prompt for one in newest_samples(url, [1], Choice.NEWEST)} == {
        f"ask {at}" for at in range(4)
    }
    assert whole_sample(url, 1, 2).row.prompt == CHATML.format("ask 2")
    assert {one["prompt"] for one in preview_samples(url, 1, 4)} == {f"ask {at}" for at in range(4)}


def test_the_dataset_s_own_messages_are_taken_where_the_template_is_not_known(tmp_path):
    said = [{"role": "user", "content": "the question"}, {"role": "assistant", "content": "x"}]
    url = chats(tmp_path, prompt=said, prompt_text="@@ an unknown template @@")
    with open_rollouts(url) as rollouts:
        assert questions.best(rollouts, 1)["prompt"].to_pylist() == ["the question"]
        full = questions.best(rollouts, 1, full=True)
        assert full["prompt"].to_pylist() == ["@@ an unknown template @@"]
        assert pa.types.is_string(questions.worst(rollouts, 1).schema.field("prompt").type)
    assert newest_samples(url, [1], Choice.NEWEST)[0].prompt == "the question"
    assert preview_samples(url, 1, 1)[0]["prompt"] == "the question"


@pytest.mark.parametrize(
    "choose", [questions.best, questions.worst, questions.longest, questions.failed]
)
def test_each_choice_of_samples_gives_the_last_message_and_the_whole_prompt_on_request(
    tmp_path, choose
):
    with open_rollouts(chats(tmp_path, finish_reason="failed")) as rollouts:
        asked = {f"ask {at}" for at in range(4)}
        assert {*choose(rollouts)["prompt"].to_pylist()} == asked
        assert {*choose(rollouts, full=True)["prompt"].to_pylist()} == set(
            map(CHATML.format, asked)
        )
