"""The task with a tool, for both sides: its settings, its tools, and a tokenizer that both read
calls with.
"""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from siirl_dask.tasks.calculator import Calculator, write_calculator_task
from siirl_dask.tasks.sorting import task_in

from .setting import Setting

CALL, SLOW_CALL, RARE = 0.02, 0.2, 20
"""Seconds of a slow tool's call, and of one in so many."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}</tool_call>' }}"
    "{% endfor %}{{ (eos_token if message['role'] == 'assistant' else '') + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""The tiny model's chats with two things more that TRL wants: calls are written, and an end
token after a turn."""

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>\s*", "content": "text"},
    },
}
"""How transformers, and so both sides, read a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnsSetting(Setting):
    """GRPO with a calculator. The numbers are those of configs/quickstart_tools.yaml but for the
    tokens of one turn, which TRL has no bound for.
    """

    steps: int = 20
    minibatches: int = 2
    lr: float = 3e-4
    max_response: int = 64
    """Most tokens of all turns together, the tool's words included."""
    turns: int = 2
    slow: bool = False
    """Whether the tool takes a while to answer."""


class SlowCalculator(Calculator):
    """A calculator that answers after a while, which depends on the numbers alone."""

    def add(self, first: int, second: int) -> str:
        """Add two numbers.

        Args:
            first: A number.
            second: Another one.
        """
        rare = random.Random(f"{first} {second}").randrange(RARE) == 0
        time.sleep(SLOW_CALL if rare else CALL)
        return super().add(first, second)


def write_task(folder: Path) -> None:
    """Write data and model, where they are not there yet, and give the tokenizer what both sides
    read.
    """
    from transformers import AutoTokenizer

    task = task_in(folder)
    if not task.train.exists():
        write_calculator_task(folder)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    tokenizer.save_pretrained(task.model)


def copy_task(source: Path, folder: Path) -> None:
    """Copy a task, so that its tokenizer stays as it is."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
