"""Harnesses that others wrote train as they are: their episodes become rows of what was sampled."""

from __future__ import annotations

import asyncio

import pytest
from openai import AsyncOpenAI

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call>'


def sampled(row):
    return [token for token, own in zip(row.response, row.mask, strict=True) if own]


def test_smolagents_runs_and_each_step_is_a_row_since_it_rewrites_its_history(serve):
    smolagents = pytest.importorskip("smolagents")

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One number.
            b: The other.
        """
        return a + b

    answers = [CALL, FINAL]
    served = serve(lambda request: answers[len(served.engine.asked) - 1], ignore=["tool_choice"],
                   within={"prompt": 40_000}, max_body="4MiB")  # fmt: skip
    model = smolagents.OpenAIModel(
        model_id="policy", api_base=served.endpoint.base_url, api_key=served.key
    )
    agent = smolagents.ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
    assert agent.run("What is 2 + 3?") == "5"
    rows = served.conversation.close()
    encode = served.engine.tokenizer.encode
    assert [sampled(row) for row in rows] == [
        [*encode(text), *encode("<|im_end|>")] for text in answers
    ]
    assert "Observation:\n5" in served.engine.tokenizer.decode(rows[1].prompt, skip_special=True)


def test_openai_agents_runs_and_its_episode_is_one_row(serve):
    agents = pytest.importorskip("agents", exc_type=ImportError)
    if not hasattr(agents, "Runner"):
        pytest.skip("needs openai-agents: pip install openai-agents")

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    answers = [CALL, "It is 5."]
    served = serve(lambda request: answers[len(served.engine.asked) - 1], within={"prompt": 4000})

    async def run():
        agents.set_tracing_disabled(True)
        async with AsyncOpenAI(base_url=served.endpoint.base_url, api_key=served.key) as client:
            model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
            agent = agents.Agent(name="a", instructions="Use tools.", tools=[add], model=model)
            return (await agents.Runner.run(agent, "What is 2 + 3?")).final_output

    assert asyncio.run(run()) == "It is 5."
    (row,) = served.conversation.close()
    encode = served.engine.tokenizer.encode
    assert sampled(row) == [
        token for text in answers for token in [*encode(text), *encode("<|im_end|>")]
    ]
    assert len(row.turns) == 2
    assert "<|im_start|>tool\n5<|im_end|>" in served.engine.tokenizer.decode(
        row.response, skip_special=False
    )
