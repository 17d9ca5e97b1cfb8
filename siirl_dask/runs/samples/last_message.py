"""Finds in a prompt the last message of its user, without the template's text around it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pyarrow as pa

from siirl_dask.observe import chat_text
from siirl_dask.runs.samples.rollouts import Rollouts
from siirl_dask.schema import PROMPT

_USER = "user"
_LONGEST = 2**16  # characters of a prompt's end in which the message is looked for
_TEMPLATES = (
    # ChatML: Qwen, SmolLM and many others
    re.compile(r"<\|im_start\|>user\n?(.*?)(?:<\|im_end\|>|$)", re.DOTALL),
    # Llama 3
    re.compile(
        r"<\|start_header_id\|>user<\|end_header_id\|>\s*(.*?)(?:<\|eot_id\|>|$)", re.DOTALL
    ),
    # Gemma
    re.compile(r"<start_of_turn>user\n?(.*?)(?:<end_of_turn>|$)", re.DOTALL),
    # Phi, Zephyr, GLM
    re.compile(
        r"<\|user\|>\s*(.*?)(?:<\|(?:end|assistant|system|user|observation)\|>|</s>|$)", re.DOTALL
    ),
    # gpt-oss
    re.compile(r"<\|start\|>user<\|message\|>(.*?)(?:<\|end\|>|$)", re.DOTALL),
    # DeepSeek
    re.compile(r"<\uff5cUser\uff5c>(.*?)(?:<\uff5c|$)", re.DOTALL),
    # Mistral, Llama 2
    re.compile(r"\[INST\](?:\s*<<SYS>>.*?<</SYS>>)?\s*(.*?)\s*(?:\[/INST\]|$)", re.DOTALL),
)


def last_message(prompt: object) -> str:
    """Return what the user said last: of a list of messages, or of a text that a model's chat
    template has made; any other text as it is.
    """
    if prompt is None:
        return ""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        return _of_messages(prompt)
    text = str(prompt)
    end = text[-_LONGEST:]
    for template in _TEMPLATES:
        found = template.findall(end)
        if found:
            return str(found[-1]).strip()
    return text


def _of_messages(messages: Sequence[object]) -> str:
    said = [one for one in messages if isinstance(one, Mapping) and one.get("role") == _USER]
    if said:
        return str(said[-1].get("content"))
    return chat_text(messages)


def with_last_messages(samples: pa.Table) -> pa.Table:
    """Return the samples with the last message of the user in place of each prompt."""
    place = samples.schema.get_field_index(PROMPT)
    if place < 0:
        return samples
    asked = [last_message(prompt) for prompt in samples[PROMPT].to_pylist()]
    return samples.set_column(place, PROMPT, pa.array(asked, pa.string()))


def chat_column(rollouts: Rollouts) -> str:
    """Return SQL for the last message of the user, where the dataset's prompts are lists of
    messages; empty elsewhere.
    """
    if PROMPT not in rollouts.schema.names or not is_chat(rollouts.schema.field(PROMPT).type):
        return ""
    return f"list_filter({PROMPT}, lambda one: one.role = '{_USER}')[-1].content"


def is_chat(kind: pa.DataType) -> bool:
    """Return whether a column's type is a list of messages whose contents are texts."""
    if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
        return False
    message = kind.value_type
    if not pa.types.is_struct(message):
        return False
    fields = {field.name: field.type for field in message}
    if "role" not in fields or "content" not in fields:
        return False
    return fields["content"] in (pa.string(), pa.large_string())
