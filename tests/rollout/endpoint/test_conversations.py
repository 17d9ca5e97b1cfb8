"""Requests become rows of exact tokens: nothing sampled is rendered again, nothing trains twice,
no draw is shared.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.config import EndpointConfig
from siirl_dask.rollout import FinishReason, Generation
from siirl_dask.rollout.endpoint.conversations import history_of
from siirl_dask.rollout.endpoint.messages import read_messages
from siirl_dask.rollout.endpoint.refusals import Refusal
from siirl_dask.rollout.endpoint.requests import Asked, read_request
from tests.rollout.endpoint.conftest import conversation

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def chat(*messages, tools=(), **more):
    return Asked(chat=True, messages=read_messages([*messages], 99), tools=list(tools), **more)


def answer(talk, tokenizer, asked, ids, *, message=None, version=5):
    """Serve a request with these ids; return the turn and what the client hears."""
    turn = talk.begin(asked)
    text = tokenizer.decode(ids, skip_special=True)
    message = message or assistant(text)
    talk.finish(
        turn,
        Generation(ids, [-1.0] * len(ids), FinishReason.STOP),
        version,
        history_of(asked, message, text),
    )
    return turn, message


BYTES = st.lists(st.integers(0, 257), min_size=1, max_size=6)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<|"), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(WORDS, BYTES), min_size=1, max_size=5))
def test_what_was_sampled_stays_as_it_is_whatever_its_text_becomes(tokenizer, turns):
    """Ids that are no text, that other ids would stand for, or that end a turn: the next request
    has them all.
    """
    talk, messages, before = conversation(tokenizer, segments=1), [], []
    for words, ids in turns:
        messages.append(user(words))
        turn, message = answer(talk, tokenizer, chat(*messages), ids)
        messages.append(message)
        assert turn.request.prompt[: len(before)] == before
        assert words in tokenizer.decode(turn.request.prompt[len(before) :], skip_special=False)
        assert turn.request.begun == len(turn.request.prompt) - len(turn.segment.prompt)
        before = [*turn.request.prompt, *ids]
    (row,) = talk.close()
    assert row.ids == before
    sampled = [token for _, ids in turns for token in ids]
    assert [token for token, own in zip(row.response, row.mask, strict=True) if own] == sampled
    assert [row.response[start:stop] for start, stop in row.turns] == [ids for _, ids in turns]
    assert row.logprobs == [-1.0 if own else 0.0 for own in row.mask]
    assert row.versions == [5 if own else -1 for own in row.mask]


def test_an_end_of_turn_that_was_sampled_is_not_repeated(tokenizer):
    (end,) = tokenizer.encode("<|im_end|>")
    talk = conversation(tokenizer)
    asked = chat(user("a"))
    _, said = answer(talk, tokenizer, asked, [*tokenizer.encode("b"), end])
    turn, _ = answer(talk, tokenizer, chat(user("a"), said, user("c")), [7])
    text = tokenizer.decode(turn.request.prompt, skip_special=False)
    assert (
        text
        == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_thoughts_that_a_template_takes_out_of_earlier_turns_stay(tokenizer):
    ids = tokenizer.encode("<think>deep</think>4")
    talk = conversation(tokenizer)
    _, said = answer(talk, tokenizer, chat(user("2+2")), ids)
    assert "deep" not in tokenizer.decode(
        tokenizer.encode([user("2+2"), said, user("why")]), skip_special=True
    )
    turn, _ = answer(talk, tokenizer, chat(user("2+2"), said, user("why")), [7])
    assert "deep" in tokenizer.decode(turn.request.prompt, skip_special=True)
    # as a tokenizer with a template of responses would split it
    heard = assistant("4", reasoning_content="deep")
    _, said = answer(talk, tokenizer, chat(user("3+1")), ids, message=heard)
    turn, _ = answer(talk, tokenizer, chat(user("3+1"), assistant("4"), user("why")), [7])
    assert turn.request.prompt[-1] != ids[-1]
    assert "deep" in tokenizer.decode(turn.request.prompt, skip_special=True)
    assert len(talk.close()) == 2


@pytest.mark.parametrize(
    "rewritten",
    [
        [user("a"), assistant("other"), user("c")],
        [user("A"), assistant("b"), user("c")],
        [user("summary of it all")],
        [user("a"), assistant("b"), assistant("words of the agent's"), user("c")],
    ],
)
def test_a_rewritten_history_begins_another_row_with_draws_of_its_own(tokenizer, rewritten):
    talk = conversation(tokenizer)
    first, said = answer(talk, tokenizer, chat(user("a")), tokenizer.encode("b"))
    assert said["content"] == "b"
    turn, _ = answer(talk, tokenizer, chat(*rewritten), [7, 8])
    assert turn.request.begun == 0
    assert turn.request.prompt == tokenizer.encode(read_messages(rewritten, 9))
    assert turn.request.seed != first.request.seed
    rows = talk.close()
    assert [row.response for row in rows] == [tokenizer.encode("b"), [7, 8]]


def test_other_tools_begin_another_row(tokenizer):
    talk = conversation(tokenizer)
    _, said = answer(talk, tokenizer, chat(user("a")), [65])
    answer(talk, tokenizer, chat(user("a"), said, user("c"), tools=[WEATHER]), [66])
    assert len(talk.close()) == 2


def test_a_tool_call_with_other_white_space_in_its_arguments_is_the_same(tokenizer):
    def called(arguments):
        return {
            "id": "call_0",
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }

    talk = conversation(tokenizer)
    said = assistant("", tool_calls=[called({"x": 1, "y": 2})])
    ids = [*tokenizer.encode("<tool_call>"), 9]
    first, _ = answer(talk, tokenizer, chat(user("a"), tools=[WEATHER]), ids, message=said)
    sent = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [called('{"y":2,  "x":1}')],
    }
    result = {"role": "tool", "tool_call_id": "call_0", "content": "rain"}
    turn, _ = answer(talk, tokenizer, chat(user("a"), sent, result, tools=[WEATHER]), [8])
    assert turn.request.prompt[: len(first.request.prompt) + len(ids)] == [
        *first.request.prompt,
        *ids,
    ]
    assert "rain" in tokenizer.decode(turn.request.prompt, skip_special=True)
    assert len(talk.close()) == 1


def test_branches_begin_with_the_same_ids_and_train_each_token_once(tokenizer):
    """Two ways to go on from one answer, and a third from the middle of the first way."""
    talk = conversation(tokenizer)
    root, said = answer(talk, tokenizer, chat(user("a")), [200, 201])
    left, heard = answer(talk, tokenizer, chat(user("a"), said, user("left")), [202])
    answer(talk, tokenizer, chat(user("a"), said, user("left"), heard, user("on")), [203])
    right, _ = answer(talk, tokenizer, chat(user("a"), said, user("right")), [204])
    again, _ = answer(
        talk, tokenizer, chat(user("a"), said, user("left"), heard, user("off")), [205]
    )
    trunk = [*root.request.prompt, 200, 201]
    assert right.request.prompt[: len(trunk)] == trunk
    assert again.request.prompt[: len(left.request.prompt) + 1] == [*left.request.prompt, 202]
    rows = talk.close()
    sampled = [
        token for row in rows for token, own in zip(row.response, row.mask, strict=True) if own
    ]
    assert sorted(sampled) == [200, 201, 202, 203, 204, 205]
    assert len({row.seed for row in rows}) == len(rows) == 3


def test_a_request_beside_the_one_that_continues_a_conversation_begins_another_row(tokenizer):
    talk = conversation(tokenizer)
    _, said = answer(talk, tokenizer, chat(user("a")), [200])
    goes_on = talk.begin(chat(user("a"), said, user("b")))
    beside = talk.begin(chat(user("a"), said, user("b")))
    assert goes_on.request.prompt == beside.request.prompt
    assert (goes_on.request.begun, beside.request.begun) == (
        len(goes_on.request.prompt) - len(goes_on.segment.prompt),
        0,
    )
    assert goes_on.request.seed != beside.request.seed


def test_the_rows_own_prompt_is_sampled_with_the_rows_seed_and_each_repetition_with_another(
    tokenizer,
):
    asked = chat(user("a"))
    talk = conversation(tokenizer, own_prompt=tokenizer.encode(asked.messages), seed=77)
    seeds = [answer(talk, tokenizer, asked, [7])[0].request.seed for _ in range(3)]
    assert seeds[0] == 77
    assert len({*seeds}) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_requests_that_run_together_give_the_same_rows_in_any_order(tokenizer, order):
    def rows(order):
        talk = conversation(tokenizer)
        questions = [chat(user(text)) for text in "xyz"]
        turns = {number: talk.begin(questions[number]) for number in order}
        for number in reversed(order):
            made = Generation([65 + number], [-1.0], FinishReason.STOP)
            talk.finish(turns[number], made, 1, history_of(questions[number], assistant("")))
        return [(row.prompt, row.response, row.seed) for row in talk.close()]

    assert rows(order) == rows([0, 1, 2])


def test_an_answer_that_nobody_has_read_leaves_nothing(tokenizer):
    talk = conversation(tokenizer, own_prompt=tokenizer.encode([user("a")]))
    first = talk.begin(chat(user("a")))
    talk.abandon(first)
    again, said = answer(talk, tokenizer, chat(user("a")), [7])
    assert again.request.seed == first.request.seed
    talk.abandon(talk.begin(chat(user("a"), said, user("b"))))
    turn, _ = answer(talk, tokenizer, chat(user("a"), said, user("b")), [8])
    assert turn.segment is again.segment
    (row,) = talk.close()
    assert [row.response[start:stop] for start, stop in row.turns] == [[7], [8]]


def test_texts_continue_as_texts(tokenizer):
    talk = conversation(tokenizer)
    first = Asked(chat=False, prompt="Q: 1\nA:")
    ids = [*tokenizer.encode(" 2"), 257]  # an end token, which the text does not show
    turn = talk.begin(first)
    talk.finish(
        turn, Generation(ids, [-1.0] * 3, FinishReason.STOP), 1, history_of(first, text=" 2")
    )
    second = talk.begin(Asked(chat=False, prompt="Q: 1\nA: 2\nQ: 3\nA:"))
    assert second.request.prompt == [*turn.request.prompt, *ids, *tokenizer.encode("\nQ: 3\nA:")]


def refused(talk, asked, status, words):
    with pytest.raises(Refusal, match=words) as caught:
        talk.begin(asked)
    assert caught.value.status == status


def test_an_episode_has_its_bounds(tokenizer):
    talk = conversation(tokenizer, prompt=60, response=60, requests=3, segments=2)
    refused(
        talk,
        chat(user("x" * 60)),
        400,
        r"tokens before its first new answer, more than 60 \(data.max_prompt",
    )
    _, said = answer(talk, tokenizer, chat(user("a")), [65] * 30)
    refused(
        talk,
        chat(user("a"), said, user("b" * 20)),
        400,
        r"no room for another answer \(rollout.max_response",
    )
    assert talk.begin(chat(user("b"), max_tokens=5)).request.sampling.max_tokens == 5
    refused(talk, chat(user("c")), 403, r"has 2 rows, as many as it may \(endpoint.max_segments\)")
    short = talk.begin(Asked(chat=True, messages=read_messages([user("a"), said, user("")], 9)))
    assert short.request.sampling.max_tokens == 60 - short.request.begun < 60
    refused(
        talk, chat(user("d")), 403, r"had 3 requests, as many as it may \(endpoint.max_requests\)"
    )
    talk.close()
    refused(talk, chat(user("e")), 401, "under way")


def test_the_models_length_bounds_an_answer(tokenizer):
    talk = conversation(tokenizer, context=50)
    turn = talk.begin(chat(user("a")))
    assert len(turn.request.prompt) + turn.request.sampling.max_tokens == 50


def test_a_template_that_refuses_messages_is_the_clients_mistake(tokenizer, monkeypatch):
    def raises(*given):
        raise ValueError("roles must alternate")

    monkeypatch.setattr(type(tokenizer), "encode", raises)
    refused(
        conversation(tokenizer),
        chat(user("a")),
        400,
        "chat template refuses the messages: ValueError: roles must",
    )


def test_a_request_reads_its_fields():
    body = (
        b'{"model": "m", "prompt": ["p"], "max_tokens": 5, "stop": "x", "temperature": 0, "user": '
        b'"u", "logprobs": 0}'
    )
    asked = read_request(body, chat=False, config=EndpointConfig(model="m"))
    assert (asked.prompt, asked.max_tokens, asked.stop, asked.overridden, asked.logprobs) == (
        "p",
        5,
        ("x",),
        True,
        True,
    )


def test_a_request_that_ends_with_an_answer_is_refused(tokenizer):
    talk = conversation(tokenizer)
    with pytest.raises(
        Refusal,
        match="the last message is the assistant's: expected one that the assistant is to answer",
    ):
        talk.begin(chat(user("2+2"), assistant("The sum")))
