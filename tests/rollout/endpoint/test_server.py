"""The endpoint as clients see it: OpenAI's answers, a clear refusal of all else, and nothing
left when it closes.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx2
import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError

from siirl_dask.config import EndpointConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.rollout import Sampling
from siirl_dask.rollout.endpoint import AgentQueue, Endpoint
from tests.clusters import lasting_port
from tests.rollout.endpoint.conftest import conversation
from tests.rollout.endpoint.test_conversations import WEATHER, user

CALL = (
    '<think>rain?</think>Let me see.<tool_call>{"name": "weather", "arguments": {"day": '
    '"today"}}</tool_call>'
)
FORECAST = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"day": {"type": "string"}}},
    },
}


def test_a_chat_with_the_openai_client_is_one_row(serve):
    served = serve()
    messages = [user("a")]
    for words in ("b", "c"):
        done = served.client.chat.completions.create(model="policy", messages=messages)
        assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("hello", "stop")
        assert done.usage.total_tokens == len(served.engine.asked[-1].prompt) + 6
        messages += [done.choices[0].message, user(words)]
    (row,) = served.conversation.close()
    assert len(row.turns) == 2
    assert served.engine.tokenizer.decode(row.ids, skip_special=False).endswith(
        "assistant\nhello<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>"
    )
    assert set(row.versions) == {3, -1}


def test_tool_calls_are_found_and_their_results_go_on_with_the_conversation(serve):
    served = serve(lambda request: CALL if request.begun == 0 else "It rains.")
    ask = served.client.chat.completions.create
    first = ask(model="policy", messages=[user("weather?")], tools=[FORECAST]).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "Let me see."
    assert first.message.reasoning_content == "rain?"
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"day": "today"},
    )
    # thoughts are not sent
    sent = {"role": "assistant", "content": "Let me see.", "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    last = ask(model="policy", messages=[user("weather?"), sent, result], tools=[FORECAST]).choices[
        0
    ]
    assert last.message.content == "It rains."
    (row,) = served.conversation.close()
    said = served.engine.tokenizer.decode(row.ids, skip_special=False)
    assert said.startswith("<|im_start|>tools\n")
    assert CALL in said
    assert "<|im_start|>tool\nrain<|im_end|>" in said


@pytest.mark.parametrize(
    "text", ["<tool_call>{broken</tool_call>", "<tool_call>[1]</tool_call>", " plain \n"]
)
def test_what_is_no_tool_call_is_text(serve, text):
    served = serve(text)
    (choice,) = served.ask([user("a")], tools=[WEATHER])["choices"]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == "stop"
    served = serve(CALL)
    assert (
        served.ask([user("a")], tools=[FORECAST], tool_choice="none")["choices"][0]["message"][
            "content"
        ]
        == CALL
    )


@pytest.mark.parametrize("depth", [65, 500, 900, 1000, 1500])
def test_an_answer_of_brackets_alone_is_text_and_the_conversation_goes_on(serve, depth):
    nested = "[" * depth + "]" * depth
    says = '<tool_call>{"name": "weather", "arguments": ' + nested + "}</tool_call>"
    served = serve(says, within={"response": 20000, "prompt": 20000})
    served.conversation._sampling = Sampling(max_tokens=20000)
    (choice,) = served.ask([user("a")], tools=[WEATHER])["choices"]
    assert nested in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


def test_a_stream_says_the_same(serve):
    served = serve(lambda request: CALL)
    ask, how = served.client.chat.completions, {"model": "policy", "tools": [FORECAST]}
    whole = ask.create(messages=[user("a")], **how).choices[0]
    with ask.stream(messages=[user("b")], stream_options={"include_usage": True}, **how) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.content == whole.message.content
    assert streamed.choices[0].message.tool_calls[0].function.name == "weather"
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert streamed.usage.completion_tokens > 0
    texts = served.client.completions.create(model="policy", prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in texts) == CALL


def test_a_stop_string_cuts_the_tokens_where_it_is_complete(serve):
    served = serve("thought\nObservation: made up")
    done = served.ask([user("a")], stop=["Observation:", "never"], logprobs=True)["choices"][0]
    assert (done["message"]["content"], done["finish_reason"]) == ("thought\n", "stop")
    assert (
        "".join(token["token"] for token in done["logprobs"]["content"]) == "thought\nObservation:"
    )
    (row,) = served.conversation.close()
    assert (
        served.engine.tokenizer.decode(row.response, skip_special=False) == "thought\nObservation:"
    )
    assert [token["logprob"] for token in done["logprobs"]["content"]] == row.logprobs


def test_a_completion_has_its_text_and_log_probs(serve):
    served = serve("yes")
    done = served.client.completions.create(
        model="policy", prompt="a?", max_tokens=2, logprobs=0
    ).choices[0]
    assert (done.text, done.finish_reason) == ("ye", "length")
    assert (done.logprobs.tokens, done.logprobs.token_logprobs) == (["y", "e"], [-0.5, -0.51])


def test_there_is_one_model(serve):
    served = serve(model="mine")
    assert [model.id for model in served.client.models.list()] == ["mine"]
    assert served.client.models.retrieve("mine").id == "mine"
    with pytest.raises(NotFoundError, match="'yours' does not exist: this endpoint serves 'mine'"):
        served.client.models.retrieve("yours")


def body(**changes):
    given = {"model": "policy", "messages": [user("a")], **changes}
    return json.dumps({name: value for name, value in given.items() if value is not ...}).encode()


BAD = {
    "no JSON": (b"{", 400, "not JSON"),
    "not UTF-8": (b'{"model": "\xff"}', 400, "not UTF-8"),
    "half a character": (
        b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
        400,
        "UTF-8",
    ),
    "deep": (b"[" * 3000, 400, "not JSON"),
    "deep in a tool": (
        body(tools=[{**WEATHER, "x": json.loads("[" * 99 + "]" * 99)}]),
        400,
        "nested too deep",
    ),
    "another kind of role": (
        body(messages=[{"role": {}, "content": "a"}]),
        400,
        r"messages\[0\].*a role, one of",
    ),
    "a list": (b"[]", 400, "expected an object"),
    "too large": (body(messages=[user("x" * 5000)]), 413, r"more than 4KiB \(endpoint.max_body\)"),
    "another model": (
        body(model="gpt-5"),
        404,
        "'gpt-5' does not exist: this endpoint serves 'policy'",
    ),
    "no model": (body(model=...), 404, "does not exist"),
    "no messages": (body(messages=...), 400, "expected a list of at least one message"),
    "empty": (body(messages=[]), 400, "at least one message"),
    "too many": (
        body(messages=[user("a")] * 9),
        403,
        r"messages: 9, more than 8 \(endpoint.max_messages\)",
    ),
    "no role": (body(messages=[{"content": "a"}]), 400, r"messages\[0\].*a role, one of"),
    "a picture": (
        body(messages=[user([{"type": "image_url", "image_url": {}}])]),
        400,
        "parts of type text",
    ),
    "a number": (body(messages=[user(7)]), 400, r"messages\[0\].content=7"),
    "calls": (
        body(messages=[{"role": "assistant", "tool_calls": [{}]}]),
        400,
        "a function's name and arguments",
    ),
    "several": (body(n=2), 400, "n=2: the endpoint answers as with 1"),
    "true for one": (body(n=True), 400, "n=True"),
    "JSON alone": (
        body(response_format={"type": "json_object"}),
        400,
        r"endpoint.ignore=\[response_format\]",
    ),
    "forced": (body(tools=[WEATHER], tool_choice="required"), 400, 'tool_choice.*as with "auto"'),
    "penalty": (body(frequency_penalty=0.5), 400, "frequency_penalty=0.5"),
    "alternatives": (body(logprobs=True, top_logprobs=5), 400, "top_logprobs=5"),
    "unknown field": (body(beam_width=4), 400, "does not know this field"),
    "length": (body(max_tokens=0), 400, "max_tokens=0: expected a whole number of at least 1"),
    "stop": (body(stop=["", 1]), 400, "a text or up to 16"),
    "flag": (body(stream="yes"), 400, "stream='yes': expected true or false"),
    "tools": (body(tools=[{"name": "f"}]), 400, r"tools\[0\]"),
}


def test_bad_requests_get_a_clear_refusal_and_break_nothing(serve):
    served = serve(max_body="4KiB", max_messages=8)
    for name, (content, status, words) in BAD.items():
        answer = served.post(content=content)
        assert answer.status_code == status, (name, answer.text)
        message = answer.json()["error"]["message"]
        assert re.search(words, message), (name, message)
    for path, status in (("/embeddings", 404), ("/models", 405), ("/completions/x", 404)):
        assert served.post(path, json={}).status_code == status
    assert served.endpoint.serving.refused == len(BAD) + 3
    assert served.ask([user("a")])["choices"][0]["message"]["content"] == "hello"
    assert len(served.engine.asked) == 1


@pytest.mark.parametrize("key", ["wrong", "", "episode-key2", "\u043a"])
def test_another_token_is_refused(serve, key):
    served = serve()
    for path in ("/chat/completions", "/completions"):
        answer = served.post(
            path, key=key, json={"model": "policy", "messages": [user("a")], "prompt": "a"}
        )
        assert answer.status_code == 401
        assert "pass on the api_key" in answer.json()["error"]["message"]
    assert not served.engine.asked


def test_an_episode_that_has_ended_is_refused(serve):
    served = serve()
    served.ask([user("a")])
    served.endpoint.close(served.key)
    with pytest.raises(AuthenticationError):
        served.client.chat.completions.create(model="policy", messages=[user("a")])


def test_episodes_do_not_share_anything(serve, tokenizer):
    served = serve(lambda request: str(request.seed))
    other = conversation(tokenizer, seed=99)
    served.endpoint.open("other", other)
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(served.post, "/completions", key=key, json={"model": "policy", "prompt": "p"})
                 for key in ("episode-key", "other") * 4]  # fmt: skip
        assert {answer.result().status_code for answer in asked} == {200}
    seeds = [{row.seed for row in talk.close()} for talk in (served.conversation, other)]
    assert [*map(len, seeds)] == [4, 4]
    assert not seeds[0] & seeds[1]


def test_what_cannot_be_done_may_be_left_unread(serve):
    served = serve(ignore=["response_format", "tool_choice", "beam_width"])
    served.ask(
        [user("a")], response_format={"type": "json_object"}, tool_choice="required", beam_width=4
    )
    with pytest.raises(ConfigError, match="'messages' cannot be left unread"):
        EndpointConfig(ignore=["messages"])


def test_sampling_parameters_are_the_runs(serve):
    served = serve()
    served.ask([user("a")], temperature=0.1, top_p=0.5, seed=4)
    assert served.engine.asked[0].sampling.temperature == 1.0
    assert served.endpoint.serving.overridden == 1


def test_a_body_in_pieces_is_bounded_too(serve):
    served = serve(max_body="4KiB")
    answer = served.post(content=(b"x" * 1000 for _ in range(50)))
    assert answer.status_code == 413
    address = served.endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((address[0], int(address[1])), 10) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 400 " in raw.recv(1000)
    with socket.create_connection((address[0], int(address[1])), 10) as raw:
        raw.sendall(b"\0\xff nonsense\r\n\r\n")
        assert b" 400 " in raw.recv(1000)
    served.ask([user("a")])


def test_a_client_that_leaves_takes_its_answer_with_it(serve):
    hold = threading.Event()
    served = serve(hold=hold)
    host, port = urlsplit(served.endpoint.base_url).netloc.split(":")
    leaves = HTTPConnection(host, int(port))
    body = json.dumps({"model": "policy", "prompt": "p"})
    leaves.request("POST", "/v1/completions", body, {"Authorization": "Bearer episode-key"})
    assert served.engine.taken.wait(60)
    leaves.close()
    hold.set()
    served.post("/completions", json={"model": "policy", "prompt": "q"})
    (row,) = served.conversation.close()
    assert served.engine.tokenizer.decode(row.prompt, skip_special=True) == "q"


def test_closing_ends_requests_that_are_open_and_the_listener(tokenizer):
    queue = AgentQueue(Device("w"), lambda: None)
    threads = {*threading.enumerate()}
    with ThreadPoolExecutor(4) as pool:
        with Endpoint(_Silent(tokenizer), queue, EndpointConfig(), Rank()) as endpoint:
            endpoint.open("key", conversation(tokenizer))
            how = {
                "headers": {"Authorization": "Bearer key"},
                "json": {"model": "policy", "prompt": "p"},
            }
            url = endpoint.base_url
            open_ = [
                pool.submit(httpx2.post, url + "/completions", timeout=30, **how) for _ in range(4)
            ]
            taken = [request for _ in range(4) for request in queue.next(1, wait=True)]
            assert len(taken) == 4
        outcomes = [request.exception() or request.result() for request in open_]
    assert all(
        isinstance(one, httpx2.TransportError) or one.status_code == 503 for one in outcomes
    ), outcomes
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)
    assert not {*threading.enumerate()} - threads


class _Silent:
    version = 0
    context_length = None

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer


def test_ports_are_the_configured_ones_and_those_after_them(tokenizer):
    queue = AgentQueue(Device("w"), lambda: None)
    port = lasting_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(
            ConfigError, match=rf"endpoint.port={port - 1}: cannot listen on port {port}"
        ),
        Endpoint(_Silent(tokenizer), queue, EndpointConfig(port=port - 1), Rank(1, 2)),
    ):
        pass
    with Endpoint(_Silent(tokenizer), queue, EndpointConfig(port=port - 1), Rank(1, 2)) as endpoint:
        assert endpoint.base_url == f"http://127.0.0.1:{port}/v1"
    with pytest.raises(ConfigError, match="expected an address of this machine"):
        Endpoint(_Silent(tokenizer), queue, EndpointConfig(host="203.0.113.7"), Rank()).__enter__()


def test_the_client_says_what_was_refused(serve):
    served = serve(within={"prompt": 30})
    with pytest.raises(BadRequestError, match="more than 30") as caught:
        served.client.chat.completions.create(model="policy", messages=[user("x" * 40)])
    assert caught.value.code == "context_length_exceeded"
