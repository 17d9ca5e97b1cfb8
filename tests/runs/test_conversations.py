"""Conversations are shown as such: who said what, in which turn, to which reward, and nothing of
it is markup.
"""

import html
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.cli import main
from siirl_dask.runs.preview import preview_samples
from siirl_dask.runs.reader import decoder_of_run
from siirl_dask.runs.samples import questions
from siirl_dask.runs.samples.mismatch import mismatch
from siirl_dask.runs.samples.rollouts import open_rollouts
from siirl_dask.runs.samples.sample_rows import Choice, newest_samples
from siirl_dask.runs.samples.token_texts import tokenizer_file
from siirl_dask.runs.samples.utterances import UtteranceKind, answered, said, spans_of
from siirl_dask.views.dashboard.page import _read_whole
from siirl_dask.views.dashboard.samples_panel import _detail
from siirl_dask.views.report.gather import gather
from siirl_dask.views.watch.screen import _outcome
from tests.runs.episodes import CALL, NASTY, conversations
from tests.runs.test_questions import TAGS, Tags


@pytest.fixture
def run(tmp_path):
    return conversations(tmp_path / "run")


def told(sample):
    return [
        (one["who"], one["kind"], one["text"], one["turn"], one["reward"])
        for one in sample["conversation"]
    ]


def test_a_conversation_tells_who_said_what(run):
    with open_rollouts(run) as rollouts:
        best, second = questions.best(rollouts, 2, decoder_of_run(run)).to_pylist()
    assert told(best) == [
        ("policy", "said", "Let me look.", 1, None),
        ("policy", "call", 'search(query="Bergen", k=3)', 1, 0.0),
        ("tool", "result", "rain", None, None),
        ("policy", "said", f"Bergen {NASTY}", 2, 1.0),
    ]
    assert (best["turns"], best["segments"], best["reward"], best["row_id"]) == (2, 1, 1.0, 0)
    assert told(second) == [
        ("policy", "said", "one", 1, 0.25),
        ("environment", "answer", ">", None, None),
        ("policy", "said", "two", 2, 0.25),
        ("segment 2, a new history", "segment", "Summary: one, two", None, None),
        ("policy", "said", "three", 3, 0.5),
    ]
    assert (second["turns"], second["segments"], second["reward"], second["row_id"]) == (
        3,
        2,
        1.0,
        2,
    )
    assert second["response_tokens"] == len("one > two") + len("three")
    assert second["prompt"] == "Where?"


def test_questions_count_episodes(run):
    with open_rollouts(run) as rollouts:
        assert questions.overview(rollouts).to_pylist()[0]["samples"] == 4
        assert questions.overview(rollouts).to_pylist()[0]["reward"] == pytest.approx(
            2 / 3, abs=1e-4
        )
        by_turns = questions.by_turns(rollouts).to_pylist()
        assert [
            (one["turns"], one["samples"], one["reward"], one["failed"]) for one in by_turns
        ] == [
            (1, 2, 0.0, 1),
            (2, 1, 1.0, 0),
            (3, 1, 1.0, 0),
        ]
        assert questions.zero_variance(rollouts).to_pylist() == [
            {"step": 1, "groups": 1, "equal": 1, "share": 1.0, "reward": 1.0}
        ]
        assert sum(questions.lengths(rollouts)["samples"].to_pylist()) == 4
        assert questions.by(rollouts, "finish_reason").num_rows == 4
        (failed,) = questions.failed(rollouts, 5, decoder_of_run(run)).to_pylist()
        assert told(failed)[-1][1] == "failure"
        assert failed["reward"] is None
        assert questions.longest(rollouts, 1, None).to_pylist()[0]["row_id"] == 0


def test_tokens_that_nobody_sampled_do_not_count_in_the_mismatch(run):
    with open_rollouts(run) as rollouts:
        (found,) = mismatch(rollouts).to_pylist()
    assert (found["mean"], found["largest"]) == (0.25, 0.25)


def test_without_the_models_tokenizer_the_response_is_told_as_a_whole(run):
    with open_rollouts(run) as rollouts:
        _, second = questions.best(rollouts, 2).to_pylist()
    assert [one[2] for one in told(second)] == ["one > two", "", "three"]


def test_a_terminal_and_a_page_show_turns_and_nothing_of_it_is_markup(run, tmp_path, capsys):
    main(["rollouts", run, "--best", "--failed", "--longest", "1", "--turns"])
    shown = capsys.readouterr().out
    assert not {c for c in shown if not c.isprintable()} - {"\n"}
    for words in (
        "policy calls a tool, turn 1, reward 0",
        'search(query="Bergen", k=3)',
        "2 segments",
        "failed",
    ):
        assert words in shown, words
    main(["rollouts", run, "--html", str(tmp_path / "page.html"), "--best", "--failed"])
    main(["rollouts", run, "--html", str(tmp_path / "all.html")])
    main(["report", run, "--output", str(tmp_path / "report.html")])
    for name in ("page", "all", "report"):
        parser = Tags()
        parser.feed((tmp_path / f"{name}.html").read_text())
        assert "script" not in parser.tags, name
        assert "<script>alert(1)</script>" in parser.text, name
        assert "policy calls a tool, turn 1, reward 0" in parser.text, name
        assert name == "report" or parser.tags <= {*TAGS.split()}


def test_the_dashboard_colours_only_what_the_policy_wrote(run):
    tokenizer = tokenizer_file(f"{run}/model")
    seen = _read_whole(run, 1, 0, tokenizer)
    shown = _detail(seen, "colour by ratio")
    assert "at most 0.25 nats apart" in shown, "the environment's tokens, of -7 nats, count"
    coloured = "".join(
        html.unescape(text)
        for text in re.findall(r'<span title="[^"]*" style="[^"]*">([^<]*)', shown)
    )
    assert coloured == f"Let me look. {CALL}Bergen {NASTY}"
    assert "<script" not in shown
    assert ">tool</span>" in shown
    assert "policy, turn 2, reward 1" in shown
    seen = _read_whole(run, 1, 3, tokenizer)
    assert "another segment" in _detail(seen, "plain")
    row = seen.sample.row
    assert (row.row_id, row.turns, row.reward) == (2, 3, 1.0)
    failed = _read_whole(run, 1, 4, tokenizer)
    assert failed.sample.row.finish_reason == "failed"
    assert "four" in _detail(replace(failed, pieces=()), "by log-prob")


def test_the_dashboards_table_has_an_episode_a_row(run):
    rows = newest_samples(run, [1], Choice.NEWEST)
    assert [(one.row_id, one.turns, one.reward) for one in rows] == [
        (0, 2, 1.0),
        (2, 3, 1.0),
        (4, 1, None),
        (6, 1, 0),
    ]
    assert [one.row_id for one in newest_samples(run, [1], Choice.EQUAL)] == [0, 2]
    assert [one.row_id for one in newest_samples(run, [1], Choice.WORST, 1)] == [6]


def test_agents_are_named_and_watch_tells_turns(tmp_path):
    run = conversations(tmp_path / "run", agents=True)
    with open_rollouts(run) as rollouts:
        (best,) = questions.best(rollouts, 1, decoder_of_run(run)).to_pylist()
        assert questions.by(rollouts, "agent").to_pylist()[0]["samples"] == 4
    assert {who for who, *_ in told(best)} == {"a", "tool"}
    assert newest_samples(run, [1], Choice.BEST)[0].agent == "a"
    outcomes = {_outcome(row) for row in preview_samples(run, 1, 5)}
    assert {"reward 1, 2 turns", "failed, 1 turn"} <= outcomes


def test_the_messages_of_a_chat_template_are_told_by_their_roles():
    chatml = "<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    llama = (
        "<|start_header_id|>ipython<|end_header_id|>\n\n42<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert [(one.who, one.kind, one.text) for one in answered(chatml)] == [
        ("environment", UtteranceKind.ANSWER, "higher")
    ]
    assert [(one.who, one.kind, one.text) for one in answered(llama)] == [
        ("tool", UtteranceKind.RESULT, "42")
    ]
    assert [(one.who, one.text) for one in answered("<\n")] == [("environment", "<")]


@pytest.mark.parametrize(
    "text", ["[1]", "{}", '{"name": 3, "arguments": [1]}', "[" * 10**5, "<function=f>"]
)
def test_a_call_that_is_none_is_shown_as_it_is(text):
    (one,) = said("policy", f"<tool_call>{text}</tool_call>", 1, None)
    assert (one.kind, one.text) == (UtteranceKind.CALL, text)


@given(
    tokens=st.integers(0, 20),
    turns=st.lists(st.tuples(st.integers(-2, 25), st.integers(-2, 25)), max_size=4),
    mask=st.none() | st.lists(st.booleans(), max_size=25),
)
def test_spans_cover_a_response_once_whatever_its_columns_say(tokens, turns, mask):
    given_turns = [{"start": start, "stop": stop, "reward": 0.0} for start, stop in turns]
    spans = spans_of(tokens, mask, given_turns)
    assert [at for span in spans for at in range(span.start, span.stop)] == list(range(tokens))


def test_a_report_of_a_run_with_turns_is_gathered(run):
    assert gather([run])[0].samples.best[0]["conversation"]
