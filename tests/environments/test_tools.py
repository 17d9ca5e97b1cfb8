"""Tools: their schemas, the calls that a model writes, what they give back, and state per
episode.
"""

import json
from functools import partial

import pytest
from transformers import AutoTokenizer

from siirl_dask.config import EnvironmentsConfig, ModelConfig
from siirl_dask.context import Device, Rank
from siirl_dask.environments import Action, Failure, Step, build_environments
from siirl_dask.environments.builder import check_environments
from siirl_dask.environments.tools import Call, CallParser, Malformed, checked, schema_of
from siirl_dask.errors import ConfigError
from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_model
from tests.environments import worlds

CHAT = [{"role": "user", "content": "go"}]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def said(step):
    return [message["content"] for message in step.observation]


@pytest.fixture(params=[{}, {"processes": 1, "timeout": 30}], ids=["worker", "processes"])
def way(request):
    return request.param


def test_functions_are_tools_and_a_turn_without_a_call_ends_the_episode(play, way):
    player = play(tools=[worlds.add], **way)
    opening = player.reset(prompt=CHAT)
    assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
    answer = player.step(f"let me see {call('add', a=2, b=3)} and {call('add', a=-1, b=1.0)}")
    results = [{"role": "tool", "name": "add", "content": text} for text in ("5", "0")]
    assert answer == Step(observation=results)
    assert player.step("it is 5") == Step(done=True)


def test_in_a_prompt_that_is_a_text_results_are_a_text(play):
    player = play(tools=[worlds.add])
    player.reset(prompt="2 + 3 = ?")
    assert (
        player.step(call("add", a=2, b=3)).observation == "\n<tool_response>\n5\n</tool_response>\n"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>{'name'}</tool_call>", "error: the call is not JSON"),
        ("<tool_call>[1]</tool_call>", 'error: expected {"name": "...", "arguments": {...}}'),
        ('<tool_call>{"name": "add", "arguments": "1"}</tool_call>', 'error: expected {"name"'),
        (
            '<tool_call>{"name": "add", "arguments"',
            "error: the call is not closed: expected </tool_call>",
        ),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "error: the call is not JSON"),
        (call("ad", a=1), "error: there is no tool 'ad'; tools: add"),
        (call("add", a=1), "error: add needs b"),
        (call("add", a=1, b=2, c=3), "error: add takes no c; it takes a, b"),
        (call("add", a=1, b="2"), 'error: add: b is "2", expected integer'),
        (call("add", a=1, b=True), "error: add: b is true, expected integer"),
    ],
)
def test_a_malformed_call_is_a_text_for_the_model(play, text, reason):
    player = play(tools=[worlds.add])
    player.reset(prompt=CHAT)
    (result,) = said(player.step(text))
    assert result.startswith(reason)
    assert said(player.step(call("add", a=1, b=1))) == ["2"]


def test_what_a_tool_raises_is_a_text_or_a_failure_without_addresses(play, way):
    player = play(tools=[worlds.act], **way)
    player.reset(prompt=CHAT)
    assert said(player.step(call("act", what="raise"))) == ["error: act raised ValueError: no None"]
    assert said(player.step(call("act", what="x"))) == ["did x"]
    player = play(tools=[worlds.act], on_tool_error="failure", **way)
    player.reset(prompt=CHAT)
    assert player.step(call("act", what="raise")) == Failure(
        "its tool act raised ValueError: no None"
    )


def test_a_tool_that_hangs_or_kills_its_process_is_a_text_and_the_episode_goes_on(play):
    player = play(tools=[worlds.act], processes=1, timeout=1)
    player.reset(prompt=CHAT)
    turn = call("act", what="hang") + call("act", what="killed") + call("act", what="x")
    hung, killed, fine = said(player.step(turn))
    assert hung == "error: act took more than 1 s"
    assert killed == "error: act the process died (exit code -9)"
    assert fine == "did x"


def test_a_tool_that_takes_the_state_with_its_process_fails_the_episode(play):
    player = play(worlds.Safe, processes=1, timeout=1)
    player.reset(prompt=CHAT)
    assert said(player.step(call("touch", what="raise"))) == [
        "error: touch raised ValueError: no None"
    ]
    turn = call("touch", what="hang") + call("touch", what="x")
    assert player.step(turn) == Failure("its tool touch took more than 1 s")


def test_an_async_tool_has_a_limit_of_time_in_the_worker(play):
    player = play(tools=[worlds.slow], timeout=1)
    player.reset(prompt=CHAT)
    assert said(player.step(call("slow", seconds=0) + call("slow", seconds=60))) == [
        "done",
        "error: slow took more than 1 s",
    ]


def test_results_of_one_turn_have_one_bound(play, way):
    player = play(tools=[worlds.act], max_observation="1KiB", **way)
    player.reset(prompt=CHAT)
    first, second = said(player.step(call("act", what="10 MB") * 2))
    assert first.endswith("[cut: 10000000 bytes]")
    assert len(first) == 1024
    assert len(second) <= 64


def test_a_class_of_trl_s_shape_is_tools_with_state_per_episode(play, way):
    player = play(worlds.Shop, columns=["prompt", "answer", "stock"], **way)
    opening = player.reset(0, prompt=CHAT, stock=5)
    player.reset(1, prompt=CHAT, stock=1)
    assert opening.prompt == [{"role": "user", "content": "go There are 5."}]
    assert sorted(tool["function"]["name"] for tool in opening.tools) == ["sell", "stock"]
    first = player.step(call("sell", count=2) + call("sell") + call("stock"), 0)
    assert said(first) == ["3 left", "2 left", '{"left": 2, "sold": 3}']
    assert said(player.step(call("sell", count=2), 1)) == [
        "error: sell raised ValueError: only 1 are left in <tests.environments.worlds.Shop object "
        "at 0x...>"
    ]
    assert first.reward == pytest.approx(0.3), "a turn's reward is what get_reward has risen by"
    last = player.step("done", 0)
    assert (last.reward, last.done) == (0.0, True)


def test_tools_that_a_class_names_leave_its_step_the_turns_without_a_call(play, way):
    player = play(worlds.Marked, tools=[worlds.add], **way)
    opening = player.reset(prompt=CHAT, answer="7")
    assert [tool["function"]["name"] for tool in opening.tools] == ["look", "add"]
    assert said(player.step(call("look") + call("add", a=3, b=4))) == ["7", "7"]
    assert player.step("7") == Step(reward=1.0, done=True)


def options(**given):
    return {"environments": EnvironmentsConfig(**given.pop("config", {})), **given}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (options(), "environments.environment, .* are empty"),
        (options(tools=[worlds.untyped]), "tool 'untyped' has no schema: .*expected types"),
        (options(tools=[worlds.add, worlds.add]), "two tools have the same name"),
        (options(tools=[worlds.add], config={"timeout": 3}), "tool 'add' is not async"),
        (
            options(environment=worlds.Guess, config={"timeout": 3}),
            r"Guess.reset is not async: environments.timeout",
        ),
        (
            options(environment=worlds.NoWorld),
            r"NoWorld.reset takes \(prompt, answer\): expected reset\(row, seed\)",
        ),
        (options(environment=dict), "dict has no reset"),
        (options(by_name={"a": worlds.Guess, "b": dict}), "dict has no reset"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(given, message):
    with pytest.raises(ConfigError, match=message):
        check_environments(given, ["w"], None)


def test_what_can_work_is_not_refused():
    for given in (
        options(environment=worlds.Shop),
        options(environment=worlds.Cart),
        options(environment=worlds.Chat),
        options(environment=worlds.AsyncGuess, config={"timeout": 3}),
        options(environment=worlds.made_by_a_function),
        options(
            environment=partial(worlds.made_by_a_function, 3), config={"timeout": 3, "processes": 1}
        ),
    ):
        assert check_environments(given, ["w"], None).memory == 0


def test_options_that_are_bound_are_not_the_model_s():
    schema = schema_of(partial(worlds.add, b=2))["function"]["parameters"]
    assert [*schema["properties"]] == schema["required"] == ["a"]


TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
"""A response template, as transformers describes how a model writes its messages."""


def test_calls_are_read_by_the_tokenizer_where_it_knows_their_form(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(
        tiny_model(tmp_path / "model", seed=0, chat_template=CHAT_TEMPLATE)
    )
    tools = {"add": schema_of(worlds.add)}

    def calls(text):
        return CallParser(tokenizer).calls(Action(text, tokenizer(text)["input_ids"]), tools)

    assert calls(call("add", a=1, b=2)) == [Call("add", {"a": 1, "b": 2})]
    tokenizer.response_template = TEMPLATE
    body = json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}})
    assert calls(f"so <call>{body}</call>") == [Call("add", {"a": 1, "b": 2})]
    assert calls("nothing") == []
    assert isinstance(calls("<call>{</call>")[0], Malformed)


def test_the_tokenizer_of_a_role_s_model_is_loaded(tmp_path):
    folder = tiny_model(tmp_path / "model", seed=0, chat_template=CHAT_TEMPLATE)
    built = build_environments(
        Device("w"),
        Rank(),
        environments=EnvironmentsConfig(),
        tools=[worlds.add],
        model=ModelConfig(path=str(folder)),
    )
    built.close()


def test_values_of_other_types_than_the_schema_s_are_refused_and_whole_floats_are_integers():
    tools = {"add": schema_of(worlds.add)}
    assert checked(Call("add", {"a": 1.0, "b": 2}), tools).arguments == {"a": 1, "b": 2}
    assert isinstance(checked(Call("add", {"a": 1.5, "b": 2}), tools), Malformed)
