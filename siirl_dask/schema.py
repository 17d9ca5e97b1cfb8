"""The columns of the data plane: Arrow types with variable-length lists and no padding.

A row is a prompt, later a sample of one. ``row_id`` and ``group_id`` come from the prompt's
position in the step's global batch and never from a rank, so they are the same on any number of
workers. Types are declared and never
inferred: an empty partition is normal, and Arrow would call its columns ``null``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import pyarrow as pa

Schema: TypeAlias = pa.Schema
DataType: TypeAlias = pa.DataType
_INDEX = re.compile(r"__(null_dask_index|index_level_\d+)__")

ROW_ID = "row_id"
"""int64. Position in the step's global batch: prompt position, after the rollout ``position * n
+ sample``."""
GROUP_ID = "group_id"
"""int64. Position of the prompt in the step's global batch; the samples of one prompt share it."""
TOKENS = "tokens"
"""int64. Cost of the row for balancing: its tokens, prompt and response. Before there is a
response, the expected cost of sampling one.
"""
PROMPT_NUMBER = "prompt_number"
"""int64. Number of the prompt in the order in which the run draws prompts, over all steps and
epochs."""
DATA_PART = "data_part"
"""int32. Index of the prompt's part in the dataset, in the order of the table's parts."""
DATA_ROW = "data_row"
"""int64. Row of the prompt in that part."""
SAMPLE_NUMBER = "sample_number"
"""int32. Number of the sample among those of its prompt, from 0."""
SAMPLING_SEED = "sampling_seed"
"""int64. Seed that the response was sampled with: with it, the prompt and the weights the engine
samples it again."""
PROMPT = "prompt"
"""The prompt as the dataset has it: a string, or a list of ``{role, content}`` messages."""
ENDS_WITH_ANSWER = (
    "its last message is the assistant's, and a prompt ends where the assistant is to answer: data "
    "import --column prompt=messages[:-1] --column answer=messages[-1].content takes the answer "
    "out of the messages, and data.continue_answers=true lets the model go on with what the "
    "message begins"
)
"""Error of a prompt of messages whose last is the answer, with what to do."""
ANSWER = "answer"
"""The answer as the dataset has it, which a reward compares with the response; any type."""
IMAGES = "images"
"""list<struct<bytes: binary, path: string>>. Images of the prompt, in the order of their
placeholders: each has its bytes, or the URL of its file.
"""
OBSERVED_IMAGES = "observed_images"
"""list<struct<start: int32, bytes: binary>>. Images that an environment has shown, in the order of
their placeholders: each begins at token ``start`` of the row, prompt and response.
"""
SOURCE_NAME = "source_name"
"""string. Name in ``data.sources`` of the dataset that the prompt is from."""
PROMPT_IDS = "prompt_ids"
"""list<int32>. Token ids of the prompt; an image is as many of its placeholder as the model sees
tokens of it."""
RESPONSE_IDS = "response_ids"
"""list<int32>. Sampled token ids, with the end token if there is one."""
PROMPT_TEXT = "prompt_text"
"""string. The prompt as the model saw it."""
RESPONSE = "response"
"""string. The decoded response, without the tokens that end it; other special tokens stay, since
tags such as ``<think>`` are special tokens of some models."""
PLAIN_RESPONSE = "plain_response"
"""string. The response without any special token, where that is another text than ``response``;
else null."""
ROLLOUT_LOGPROBS = "rollout_logprobs"
"""list<float>. Log-probability of each sampled token under the distribution it was drawn from
(after the temperature).
"""
ROUTED_EXPERTS = "routed_experts"
"""list<uint8>. Experts that the engine chose for each token of prompt and response but the last,
which it never saw: token after token, of each layer that has experts, as many as a token goes to
there.
"""
FINISH_REASON = "finish_reason"
"""string. ``stop`` (the model ended it) or ``length`` (the limit did). Of an episode also ``turns``
(it had as many as it may), ``environment`` (the environment ended it) or ``failed`` (a call of the
environment did; its reward is null).
"""
WEIGHTS_VERSION = "weights_version"
"""int64. Version of the weights that sampled this row: the steps that trained them; of several,
the oldest."""
TOKEN_VERSIONS = "token_versions"
"""list<int64>. Version of the weights that sampled each response token, for a row generated over
several steps."""
WORKER = "worker"
"""string. Name of the worker that sampled this row."""
REWARD = "reward"
"""float. Reward of the row; null if its function failed and that was allowed."""
OLD_LOGPROBS = "old_logprobs"
"""list<float>. Log-probability of each response token under the policy before this step's
update."""
ENTROPIES = "entropies"
"""list<float>. Entropy, in nats, of the policy before this step's update at each response token."""
COLLISION_PROBS = "collision_probs"
"""list<float>. Collision probability (the sum of squared probabilities) of that policy at each
response token."""
REFERENCE_LOGPROBS = "reference_logprobs"
"""list<float>. Log-probability of each response token under the reference policy."""
REWARD_PARTS = "reward_parts"
"""map<string, float>. All numbers that the reward function returned, by name; empty if it
returned one number."""
GREEDY = "greedy"
"""bool. True for the most likely response to a prompt, which serves as a baseline for its
samples."""
GREEDY_REWARD = "greedy_reward"
"""float. Reward of the most likely response to the row's prompt."""
RESPONSE_MASK = "response_mask"
"""list<bool>. True for a response token that the policy wrote and learns from; without the
column all are."""
EPISODE_ID = "episode_id"
"""int64. ``prompt position * n + sample``: the rows of one episode share it. Without the column
each row is one."""
SEGMENT = "segment"
"""int32. Number of the row among those of its episode and agent: a history that is rewritten
begins a new one."""
AGENT = "agent"
"""string. The agent that wrote the row, where there are several."""
TURNS = "turns"
"""list<struct<start: int32, stop: int32, reward: float, state: int64>>. The policy's turns: their
spans in ``response_ids``, their rewards, and a hash of the state that each was taken in, 0 for
none.
"""
TOKEN_TURNS = "token_turns"
"""list<int32>. Number, in its row, of the turn that each response token belongs to; -1 for
tokens of none."""
EMBEDDING = "embedding"
"""list<float>. Embedding of the row's text, of a model that encodes texts."""
POLICY_CHANGE = "policy_change"
"""float. Sum of the log-ratios, new policy to old, of what agents that were updated earlier in
the step wrote."""
KL_PENALTY = "kl_penalty"
"""list<float>. Reward of each response token for its divergence from the reference; at most 0 on
average."""
VALUES = "values"
"""list<float>. Critic's estimate, before each response token, of the reward to come."""
ADVANTAGE = "advantage"
"""float. Advantage of the row, the same for each of its tokens; null without a reward."""
ADVANTAGES = "advantages"
"""list<float>. Advantage of each response token; null without a reward."""
RETURNS = "returns"
"""list<float>. Target of the critic's value before each response token; null without a reward."""
COVARIANT = "covariant"
"""list<bool>. True for a response token whose log-probability covaries most with its advantage."""
HIGH_ENTROPY = "high_entropy"
"""list<bool>. True for a response token among those of highest entropy in its mini-batch."""
MINIBATCH = "minibatch"
"""int32. Index of the row's mini-batch in the step."""
PARAMETER = "parameter"
"""string. Name of a model parameter, in a table of weights."""
PARAMETER_DTYPE = "dtype"
"""string. Torch dtype of the parameter, such as ``float32``."""
PARAMETER_SHAPE = "shape"
"""list<int64>. Shape of the parameter."""
PARAMETER_DATA = "data"
"""large_binary. Values of the parameter, row-major, little-endian."""

TYPES: Mapping[str, pa.DataType] = {
    ROW_ID: pa.int64(),
    GROUP_ID: pa.int64(),
    TOKENS: pa.int64(),
    PROMPT_NUMBER: pa.int64(),
    DATA_PART: pa.int32(),
    DATA_ROW: pa.int64(),
    SAMPLE_NUMBER: pa.int32(),
    SAMPLING_SEED: pa.int64(),
    IMAGES: pa.large_list(pa.struct({"bytes": pa.large_binary(), "path": pa.large_string()})),
    OBSERVED_IMAGES: pa.large_list(pa.struct({"start": pa.int32(), "bytes": pa.large_binary()})),
    SOURCE_NAME: pa.large_string(),
    PROMPT_IDS: pa.large_list(pa.int32()),
    RESPONSE_IDS: pa.large_list(pa.int32()),
    PROMPT_TEXT: pa.large_string(),
    RESPONSE: pa.large_string(),
    PLAIN_RESPONSE: pa.large_string(),
    ROLLOUT_LOGPROBS: pa.large_list(pa.float32()),
    ROUTED_EXPERTS: pa.large_list(pa.uint8()),
    FINISH_REASON: pa.large_string(),
    WEIGHTS_VERSION: pa.int64(),
    TOKEN_VERSIONS: pa.large_list(pa.int64()),
    WORKER: pa.large_string(),
    REWARD: pa.float32(),
    REWARD_PARTS: pa.map_(pa.string(), pa.float32()),
    OLD_LOGPROBS: pa.large_list(pa.float32()),
    ENTROPIES: pa.large_list(pa.float32()),
    COLLISION_PROBS: pa.large_list(pa.float32()),
    REFERENCE_LOGPROBS: pa.large_list(pa.float32()),
    GREEDY: pa.bool_(),
    GREEDY_REWARD: pa.float32(),
    RESPONSE_MASK: pa.large_list(pa.bool_()),
    EPISODE_ID: pa.int64(),
    SEGMENT: pa.int32(),
    AGENT: pa.large_string(),
    TURNS: pa.large_list(
        pa.struct(
            {"start": pa.int32(), "stop": pa.int32(), "reward": pa.float32(), "state": pa.int64()}
        )
    ),
    TOKEN_TURNS: pa.large_list(pa.int32()),
    EMBEDDING: pa.large_list(pa.float32()),
    POLICY_CHANGE: pa.float32(),
    KL_PENALTY: pa.large_list(pa.float32()),
    VALUES: pa.large_list(pa.float32()),
    ADVANTAGE: pa.float32(),
    ADVANTAGES: pa.large_list(pa.float32()),
    RETURNS: pa.large_list(pa.float32()),
    COVARIANT: pa.large_list(pa.bool_()),
    HIGH_ENTROPY: pa.large_list(pa.bool_()),
    MINIBATCH: pa.int32(),
    PARAMETER: pa.large_string(),
    PARAMETER_DTYPE: pa.large_string(),
    PARAMETER_SHAPE: pa.large_list(pa.int64()),
    PARAMETER_DATA: pa.large_binary(),
}
"""Type of each built-in column; ``PROMPT`` and ``ANSWER`` have the dataset's types."""

IDENTITY = (ROW_ID, GROUP_ID, TOKENS)
"""Columns that every table has and every edge carries: the id of a row, its group, its cost."""
ORIGIN = (PROMPT_NUMBER, DATA_PART, DATA_ROW)
"""Columns that tell where a prompt comes from; they travel to the nodes whose tables are saved."""


def is_blob(kind: DataType) -> bool:
    """Tell whether values of this type are binary, or lists or structs that contain binary
    values.
    """
    parts = [kind.field(index).type for index in range(kind.num_fields)]
    if parts:
        return any(map(is_blob, parts))
    return "binary" in str(kind)


def is_index_column(name: str) -> bool:
    """Return whether a column is the row index of a dataframe without a name of its own, which
    pandas and Dask write into Parquet files: it is no column of the data.
    """
    return _INDEX.fullmatch(name) is not None


def decoded(kind: DataType, leaf: Callable[[DataType], DataType] = lambda kind: kind) -> DataType:
    """Return the type of the same values one by one: no dictionary, runs, views or extension, in
    what it nests as well.

    ``leaf`` gives the type for one that nests nothing.
    """
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return decoded(kind.storage_type, leaf)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return decoded(kind.value_type, leaf)
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_struct(kind):
        return pa.struct([_decoded(field, leaf) for field in kind])
    if types.is_list(kind) or types.is_list_view(kind):
        return pa.list_(_decoded(kind.value_field, leaf))
    if types.is_large_list(kind) or types.is_large_list_view(kind):
        return pa.large_list(_decoded(kind.value_field, leaf))
    if types.is_fixed_size_list(kind):
        return pa.list_(_decoded(kind.value_field, leaf), kind.list_size)
    if types.is_map(kind):
        return pa.map_(
            decoded(kind.key_type, leaf), _decoded(kind.item_field, leaf), kind.keys_sorted
        )
    return leaf(kind)


def loaded_type(kind: DataType) -> DataType:
    """Return the type in which workers hold a dataset's column: decoded, with offsets of 64 bits, and
    see ``inner_nulls_as_text``.
    """
    return with_large_offsets(inner_nulls_as_text(kind))


def inner_nulls_as_text(kind: DataType) -> DataType:
    """Return a type, decoded, with texts for what is null in every row within lists and structs,
    which may be anything: Arrow's cast fails for nulls in lists (pyarrow 26).
    """
    if pa.types.is_null(kind):
        return kind
    return decoded(kind, _text_for_null)


def _text_for_null(kind: DataType) -> DataType:
    return pa.string() if pa.types.is_null(kind) else kind


def _decoded(field: pa.Field, leaf: Callable[[DataType], DataType]) -> pa.Field:
    return field.with_type(decoded(field.type, leaf))


def with_large_offsets(kind: DataType) -> DataType:
    """Return the type with offsets of 64 bits, in what it nests as well: a column may then hold any
    number of elements.

    Maps stay as they are, since Arrow has none with such offsets.
    """
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.large_list(_with_large_offsets(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(_with_large_offsets(kind.value_field), kind.list_size)
    if types.is_struct(kind):
        return pa.struct([_with_large_offsets(field) for field in kind])
    if types.is_string(kind):
        return pa.large_string()
    if types.is_binary(kind):
        return pa.large_binary()
    return kind


def _with_large_offsets(field: pa.Field) -> pa.Field:
    return field.with_type(with_large_offsets(field.type))


def path_steps(path: str, columns: Collection[str]) -> list[str]:
    """Return the names that lead to the values at ``path`` in a table with these columns.

    A column of that name is the path's end, whatever dots its name has, as pandas' json_normalize
    and flattened datasets name theirs. Otherwise each dot leads into a struct.
    """
    if path in columns:
        return [path]
    return path.split(".")


def type_at(schema: Schema, path: str) -> DataType | None:
    """Return the type of the values at ``path`` (see ``path_steps``); None where there are none."""
    if missing_step(schema, path) is not None:
        return None
    kind: DataType = pa.struct(list(schema))
    for name in path_steps(path, schema.names):
        kind = kind.field(name).type
    return kind


def missing_step(schema: Schema, path: str) -> tuple[str, list[str]] | None:
    """Return the first name on the way to the values at ``path`` that is not there, and the names
    in its place; None where all are there.
    """
    kind = pa.struct(list(schema))
    for name in path_steps(path, schema.names):
        known = []
        if pa.types.is_struct(kind):
            known = [field.name for field in kind]
        if known.count(name) != 1:  # two columns of a name cannot be told apart
            return name, known
        kind = kind.field(name).type
    return None


def fields(*names: str) -> dict[str, pa.DataType]:
    """Return the types of built-in columns, for a node's ``writes``."""
    return {name: TYPES[name] for name in names}


def make_schema(types: Mapping[str, pa.DataType]) -> Schema:
    """Return the Arrow schema of columns and their types, with offsets of 64 bits."""
    return pa.schema(
        {name: with_large_offsets(pa.field(name, kind).type) for name, kind in types.items()}
    )
