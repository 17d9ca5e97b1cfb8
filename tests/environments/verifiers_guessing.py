"""An environment as packages for verifiers have it: a number is guessed, and each guess is told
whether it is too low or too high. The policy's guess is made of its words' bytes, so that a model
without training plays.
"""

import verifiers as vf
from datasets import Dataset

NUMBERS = 16


def guess_in(text):
    return sum(text.encode()) % NUMBERS


class Guessing(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        guess = guess_in(messages[-1].content)
        secret = int(state["answer"])
        if guess == secret:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return []
        return [{"role": "user", "content": "higher" if secret > guess else "lower"}]


async def nearness(completion, answer, **kwargs):
    said = [message.content for message in completion if message.role == "assistant"]
    return 1 - abs(guess_in(said[-1]) - int(answer)) / NUMBERS


async def turns(state):
    return float(len(state["trajectory"]))


def load_environment(turns_allowed=3, tools=False):
    rows = [
        {"question": f"Game {number}: guess.", "answer": str(number % NUMBERS)}
        for number in range(24)
    ]
    rubric = vf.Rubric(funcs=[nearness, turns], weights=[1.0, 0.1])
    given = {"dataset": Dataset.from_list(rows), "system_prompt": "Be brief.", "rubric": rubric}
    if tools:
        return vf.ToolEnv(tools=[guess_in_text], **given)
    if turns_allowed == 1:
        return vf.SingleTurnEnv(**given)
    return Guessing(max_turns=turns_allowed, **given)


def guess_in_text(text: str) -> int:
    """Return the guess in a text.

    Args:
        text: The text.
    """
    return guess_in(text)
