"""Checks a dataset's rows before a run starts: finds nulls, and renders the first prompt as the
model sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from siirl_storage import FooterCache, StorageError

from siirl_dask.config import Config
from siirl_dask.coordinator import Dataset, Source, open_source, source_schema, unread_files
from siirl_dask.datasets import is_prompt
from siirl_dask.datasets.partitions import chat_as_text
from siirl_dask.errors import ConfigError, DataError, ImageError, counted
from siirl_dask.images import images_of, load_processor, normalised
from siirl_dask.images.prompts import marked, placeholder_tokens
from siirl_dask.models.architecture import read_config
from siirl_dask.models.cache import folder_here
from siirl_dask.models.shapes import weight_shapes
from siirl_dask.nodes import encode_prompts, sample_until_mixed
from siirl_dask.planner import DAG, Plan, bare
from siirl_dask.schema import ENDS_WITH_ANSWER, PROMPT, path_steps
from siirl_dask.tables import values_at

if TYPE_CHECKING:
    from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer

_GROUPS = 16  # row groups that are looked into
_ROWS = 2**14  # the first of each
_BYTES = 2**26  # of rows, once decoded
_PART_AS_TEXT = r'^\s*\[\s*\{\s*"type"\s*:\s*"(text|image|image_url)"'
_SHOWN = 2000  # characters of a prompt that are shown
Encode = Callable[[Any], Sequence[int]]
"""Returns the token ids of a prompt; where prompts have images, of the prompt and the value of
their column."""


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """A dataset's first prompt, as the model sees it."""

    text: str
    """Its tokens as text, special tokens as well."""
    tokens: int
    remark: str = ""
    """A sentence on what the user may have meant otherwise."""


def may_be_answered(dag: DAG) -> bool:
    """Return whether a prompt may end with the assistant's message: no node encodes it, or one
    lets the model go on.
    """
    encoders = [node for node in dag.nodes if bare(node.fn) in (encode_prompts, sample_until_mixed)]
    if not encoders:
        return True
    return any(node.options.get("continue_answers") for node in encoders)


def encodes_dataset(dag: DAG) -> bool:
    """Return whether a node encodes the dataset's prompts, which have to be texts or chats then."""
    return any(
        bare(node.fn) in (encode_prompts, sample_until_mixed)
        and node.options.get("column", PROMPT) == PROMPT
        for node in dag.nodes
    )


def check_rows(dataset: Dataset, *, answered: bool = True, encoded: bool = True) -> list[str]:
    """Return a sentence for each source some of whose answers are null, or in whose folder files
    are not read.

    DataError for chat messages or their parts that became texts, where prompts are ``encoded`` for
    others than texts and chats, and, with the row, for a null prompt, and unless prompts may be
    ``answered`` for one whose last message is the assistant's. The first 16,384 rows of up to 16
    row groups are looked at, 64 MiB in all; a step names others that it draws.
    """
    notes = []
    for source in dataset.sources:
        kind = source_schema(open_source(source).schema, source).field(PROMPT).type
        if encoded and not is_prompt(kind):
            raise DataError(
                f"dataset {source.url!r}: its prompts (data.prompt={source.prompt}) are {kind}: "
                "expected texts, or lists of chat messages (role, content)"
            )
        unread = unread_files(source)
        if unread:
            notes.append(
                f"dataset {source.url!r}: {counted(len(unread), 'file')} there, such as "
                f"{unread[0]!r}, {'is' if len(unread) == 1 else 'are'} not read: a run reads "
                "Parquet and Arrow files; siirl-dask data import makes a table of others"
            )
        nulls = 0
        looked = 0
        first: str | None = None
        for place, prompts, answers in _rows(source):
            if prompts.null_count:
                row = pc.index(pc.is_null(prompts), True).as_py()
                raise DataError(
                    f"dataset {source.url!r}: the prompt of row {row} of {place} is null "
                    f"(data.prompt={source.prompt}): remove such rows, or name another column"
                )
            row = None
            if not answered:
                row = _first_answered(prompts)
            if row is not None:
                raise DataError(
                    f"dataset {source.url!r}: the prompt of row {row} of {place}: "
                    f"{ENDS_WITH_ANSWER}"
                )
            text = chat_as_text(prompts)
            if text is not None:
                raise DataError(
                    f"dataset {source.url!r}: the prompts of {place} are texts such as "
                    f"{text!r:.60}: lists of chat messages were made text when they were written, "
                    'as Dask does with objects. Set dask.config.set({"dataframe.convert-string": '
                    "False}) before the dataframe is made, and write them again as lists"
                )
            part = _part_as_text(prompts)
            if part is not None:
                raise DataError(
                    f"dataset {source.url!r}: the content of a message in {place} is the text "
                    f"{part!r:.60}, a list of parts that became JSON: write all contents as lists, or "
                    "as texts; of JSON lines data import makes lists of both"
                )
            looked += len(answers)
            nulls += answers.null_count
            if first is None and answers.null_count:
                first = f"row {pc.index(pc.is_null(answers), True).as_py()} of {place}"
        if first is not None:
            notes.append(
                f"dataset {source.url!r}: {nulls:,} of {looked:,} answers that were looked at are "
                f"null (data.answer={source.answer}), such as that of {first}: a reward that needs "
                "an answer fails for them"
            )
    return notes


def _rows(source: Source) -> Iterator[tuple[str, pa.ChunkedArray, pa.ChunkedArray]]:
    """Yield a row group's name, prompts and answers; a worker will report those that cannot be
    read.
    """
    snapshot = open_source(source)
    footers = FooterCache()
    left = _BYTES
    known = snapshot.schema.names
    paths = [path_steps(source.prompt, known), path_steps(source.answer, known)]
    names = list(dict.fromkeys(path[0] for path in paths))
    for group in snapshot.row_groups()[:_GROUPS]:
        if left <= 0:
            return
        rows = range(min(group.rows, _ROWS))
        try:
            table = snapshot.read_row_group(
                group,
                names,
                rows=rows,
                max_bytes=source.read_limit,
                footers=footers,
            )
        except StorageError:
            continue
        left -= table.nbytes
        place = f"{group.part}" if group.index == 0 else f"row group {group.index} of {group.part}"
        yield place, values_at(table, source.prompt), values_at(table, source.answer)


def _first_answered(prompts: pa.ChunkedArray) -> int | None:
    """Return the row of the first prompt whose last message is the assistant's."""
    kind = prompts.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(
        kind.value_type
    ):
        return None
    if kind.value_type.get_field_index("role") < 0:
        return None
    chats = prompts.combine_chunks()
    rows = pc.indices_nonzero(pc.greater(pc.fill_null(pc.list_value_length(chats), 0), 0))
    last = pc.subtract(chats.offsets.slice(1).take(rows), 1)
    found = pc.index(pc.struct_field(chats.values, "role").take(last), "assistant").as_py()
    return None if found < 0 else rows[found].as_py()


def _part_as_text(prompts: pa.ChunkedArray) -> str | None:
    """Return the first content of a message that is a text and begins as a list of parts in JSON;
    None where there is none.
    """
    kind = prompts.type
    if not is_prompt(kind) or not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    contents = pc.struct_field(pc.list_flatten(prompts.combine_chunks()), "content")
    if not (pa.types.is_string(contents.type) or pa.types.is_large_string(contents.type)):
        return None
    found = pc.index(pc.match_substring_regex(contents, _PART_AS_TEXT), True).as_py()
    if found < 0:
        return None
    return str(contents[found])


def first_prompt(config: Config, plan: Plan, dataset: Dataset) -> FirstPrompt | None:
    """Return the first prompt of an open dataset as the model sees it.

    None where no node runs ``encode_prompts``, where the model's tokenizer is not on this machine,
    and where its images are at a URL. DataError for a prompt that the model cannot be shown;
    ConfigError for options that do not fit the tokenizer.
    """
    if not any(bare(node.fn) is encode_prompts for node in plan.dag.nodes):
        return None
    tokenizer = tokenizer_here(config)
    if tokenizer is None:
        return None
    source = dataset.sources[0]
    snapshot = open_source(source)
    images = config.images.column
    paths = [source.prompt] if images is None else [source.prompt, images]
    known = snapshot.schema.names
    names = list(dict.fromkeys(path_steps(path, known)[0] for path in paths))
    group = next(group for group in snapshot.row_groups() if group.rows)
    try:
        table = snapshot.read_row_group(group, names, rows=[0], max_bytes=source.read_limit)
    except StorageError:
        return None
    prompt = values_at(table, source.prompt)[0].as_py()
    if prompt is None:
        raise DataError(
            f"dataset {source.url!r}: its first prompt is null (data.prompt={source.prompt})"
        )
    if images is not None:
        shown = images_of(normalised(values_at(table, images), images)[0].as_py())
        if any(image.data is None for image in shown):
            return None
        processor = load_processor(folder_here(config.model.path, weights=False), config.images)
        assert processor is not None
        prompt = marked(prompt, processor.family.placeholder)
    name = f"dataset {source.url!r}: its first prompt"
    return rendered(tokenizer, prompt, name, encoder_of(config, tokenizer))


def encoder_of(config: Config, tokenizer: HuggingFaceTokenizer) -> Encode:
    """Return the function that encodes the run's prompts. It raises DataError for one with places
    for images, videos or sound where none are read: the model would read their tokens as those of a
    text.
    """
    described = read_config(config.model.path)
    unread = {} if described is None else placeholder_tokens(described)
    if config.images.used:
        unread = {token: kind for token, kind in unread.items() if kind != "image"}

    def encode(prompt: Any) -> Sequence[int]:
        ids = tokenizer.encode(prompt, continue_answer=config.data.continue_answers)
        for token in unread.keys() & {*ids}:
            place = tokenizer.decode([token], skip_special=False)
            raise DataError(
                f"it has a place of kind {unread[token]!r} ({place}, token {token}), and nothing "
                "of that kind is read: name the column of images (images.column), or take such "
                "parts out of the messages"
            )
        return ids

    return encode


def rendered(
    tokenizer: HuggingFaceTokenizer, prompt: Any, name: str, encode: Encode | None = None
) -> FirstPrompt:
    """Return a prompt as the model sees it, images as one placeholder each. DataError, with
    ``name``, if it cannot. ``encode`` takes the place of the tokenizer's own.
    """
    if encode is None:
        encode = tokenizer.encode
    with named(name):
        ids = encode(prompt)
    text = shortened(tokenizer.decode(ids, skip_special=False))
    remark = tokenizer.untemplated_note if isinstance(prompt, str) else tokenizer.unbegun_note
    return FirstPrompt(text, len(ids), remark)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Raise a DataError that begins with ``name`` in place of a DataError or an exception of a
    chat template.
    """
    try:
        yield
    except (ConfigError, ImageError):
        raise
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    except Exception as error:  # a chat template may raise anything
        raise DataError(
            f"{name}: the chat template fails on it: {type(error).__name__}: {error}"
        ) from error


def tokenizer_here(config: Config) -> HuggingFaceTokenizer | None:
    """Return the tokenizer of ``model.path``; None where it cannot be reached from here, and for a
    model without weights, of which a plan may know the config alone.

    ConfigError for one that cannot be loaded, and for options of ``model`` that do not fit it.
    """
    # transformers: seconds that others need not wait for
    from siirl_dask.rollout.tokenizer import load_tokenizer

    path = config.model.path
    try:
        folder = folder_here(path, weights=False)
        has_weights = bool(weight_shapes(path))
    except ConfigError:
        return None
    try:
        tokenizer = load_tokenizer(folder, f"model.path={path!r}")
    except ConfigError:
        if has_weights:
            raise
        return None
    return tokenizer.with_options(config.model)


def shortened(text: str) -> str:
    """Return the beginning and the end of a long text, without control characters of terminals."""
    if len(text) > _SHOWN:
        half = _SHOWN // 2
        left_out = len(text) - _SHOWN
        text = f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for sign in text
    )
