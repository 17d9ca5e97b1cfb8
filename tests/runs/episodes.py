"""A run whose samples are conversations: tokens are bytes, as the tiny tokenizer has them."""

import pyarrow as pa
from siirl_storage import commit_parts, stage_part

from siirl_dask.schema import TYPES
from siirl_dask.tasks.tiny_model import tiny_tokenizer
from tests.written_runs import begin_run

NASTY = "\x1b[31m<script>alert(1)</script> & \x07</pre>"
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Bergen", "k": 3}}\n</tool_call>'
RESULT = (
    "\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
_TOKENIZER = tiny_tokenizer()


def encode(text):
    return _TOKENIZER(text)["input_ids"]


def episode_row(
    step, number, episode, said, *, segment=0, agent="", reward=0.0, end="turns", prompt="Where?"
):
    """Make a row of ``said``, texts with the reward of the policy's turn, or None where the
    environment speaks.
    """
    ids, mask, turns = [], [], []
    for text, turn_reward in said:
        own, begin = encode(text), len(ids)
        ids, mask = ids + own, mask + [turn_reward is not None] * len(own)
        if turn_reward is not None:
            turns.append({"start": begin, "stop": len(ids), "reward": turn_reward, "state": 0})
    prompt_ids = encode(prompt)
    return {
        "row_id": number,
        "group_id": episode // 2,
        "episode_id": episode,
        "segment": segment,
        "agent": agent or None,
        "tokens": len(prompt_ids) + len(ids),
        "prompt_ids": prompt_ids,
        "prompt_text": prompt,
        "answer": "Bergen",
        "response_ids": ids,
        "response": "".join(text for text, _ in said),
        "response_mask": mask,
        "turns": turns,
        "rollout_logprobs": [-1.0 if own else 0.0 for own in mask],
        "old_logprobs": [-1.25 if own else -7.0 for own in mask],
        "finish_reason": end,
        "reward": reward,
        "worker": "0",
    }


def conversations(url, *, agents=False):
    """Save one step: a tool call, a rewritten history, a failure, a short episode."""
    begin_run(url, f"model.path={url}/model")
    tiny_tokenizer().save_pretrained(f"{url}/model")
    first = [("Let me look. " + CALL, 0.0), (RESULT, None), ("Bergen " + NASTY, 1.0)]
    rows = [
        episode_row(1, 0, 0, first, reward=1.0, end="environment", agent="a" * agents),
        episode_row(1, 2, 1, [("one", 0.25), (" > ", None), ("two", 0.25)], reward=0.5, agent="a" * agents),
        episode_row(1, 3, 1, [("three", 0.5)], reward=0.5, segment=1, end="length", prompt="Summary: one, two",
                    agent="a" * agents),
        episode_row(1, 4, 2, [("four", 0.0)], reward=None, end="failed", agent="a" * agents),
        episode_row(1, 6, 3, [("five", 0.0)], end="turns", agent="a" * agents),
    ]  # fmt: skip
    rows[3]["turns"][0]["reward"] = None
    if not agents:
        rows = [{name: value for name, value in row.items() if name != "agent"} for row in rows]
    table = pa.table(
        {name: pa.array([row[name] for row in rows], TYPES.get(name)) for name in rows[0]}
    )
    folder = f"{url}/rollouts/step=000001"
    commit_parts(folder, 1, [stage_part(folder, 1, 0, table)])
    return str(url)
