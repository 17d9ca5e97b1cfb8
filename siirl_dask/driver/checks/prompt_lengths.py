"""Estimates, before a run starts, how many prompts of its dataset are too long to be trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from siirl_storage import FooterCache, StorageError

from siirl_dask.config import Config
from siirl_dask.coordinator import Dataset, Mixture, Source, open_source, source_schema
from siirl_dask.datasets import longer_than, token_lengths_of
from siirl_dask.driver.checks.prompt_rows import Encode, encoder_of, named, tokenizer_here
from siirl_dask.errors import ConfigError, ImageError
from siirl_dask.images import images_of, load_processor, normalised
from siirl_dask.images.prompts import marked
from siirl_dask.models.cache import folder_here
from siirl_dask.nodes import encode_prompts
from siirl_dask.planner import Plan, bare
from siirl_dask.schema import PROMPT, path_steps
from siirl_dask.tables import values_at

if TYPE_CHECKING:
    from siirl_dask.images.processor import ImageProcessor

_GROUPS = 16  # row groups that are sampled
_ROWS = 32  # prompts of each
_HEAD = (
    2**14
    # rows of a row group among which they are chosen: a later row costs the decoding of those
    # before it
)
_TEXT = 2**21  # characters that are encoded at most: one to two seconds
_GROUPS_OF_IMAGES = 4  # row groups that are sampled where prompts have images: each is megabytes


@dataclass(frozen=True, slots=True)
class TooLong:
    """A count of prompts that are too long, in a sample of row groups."""

    rows: int
    """Rows of the table."""
    counts: tuple[tuple[int, int], ...]
    """Number of prompts that were looked at, and of those that are too long, of each row group."""

    @property
    def looked_at(self) -> int:
        """Prompts that were looked at."""
        return sum(looked for looked, _ in self.counts)

    @property
    def found(self) -> int:
        """Prompts that are too long."""
        return sum(found for _, found in self.counts)

    def text(self, limit: int) -> str:
        """Return the estimate as a sentence, without its end; two standard errors after +-."""
        longer = f"longer than data.max_prompt_length={limit}"
        if self.looked_at >= self.rows:
            return f"{self.found:,} of {self.rows:,} prompts are {longer}"
        judged = f"judged by {self.looked_at:,} of them"
        if not self.found:
            return (
                f"fewer than {min(1.0, 3 / self.looked_at):.1%} of {self.rows:,} prompts are "
                f"{longer}, {judged}"
            )
        share = self.found / self.looked_at
        return (
            f"about {share:.1%} (+- {2 * self._error(share):.1%}) of {self.rows:,} prompts are "
            f"{longer}, {judged}"
        )

    def _error(self, share: float) -> float:
        """Return the standard error: prompts of one row group may be alike, so it is not below
        that of the groups.
        """
        independent = sqrt(share * (1 - share) / self.looked_at)
        deviation = 0.0
        for looked, found in self.counts:
            difference = found / looked - share
            deviation += looked**2 * difference**2
        groups = len(self.counts)
        between = sqrt(deviation * groups / max(1, groups - 1)) / self.looked_at
        return max(independent, between)


def notes_on_long_prompts(config: Config, plan: Plan, dataset: Dataset) -> list[str]:
    """Return a sentence for each source of an open dataset, none where its prompts cannot be
    measured here.

    That is where no node runs ``encode_prompts``, and where the model's tokenizer is not on this
    machine. Further sentences name the special tokens that texts get, and the chat template that
    they do not go through, or that does not begin the assistant's turn. DataError for a prompt that
    cannot be encoded, and for one with places for images where none are read.
    """
    if not any(bare(node.fn) is encode_prompts for node in plan.dag.nodes):
        return []
    tokenizer = tokenizer_here(config)
    if tokenizer is None:
        return []
    processor = None
    if config.images.column is not None:
        try:
            processor = load_processor(folder_here(config.model.path, weights=False), config.images)
        except ConfigError:
            # the engine, on the workers' machines, raises the error where they cannot load it
            # either
            return []
    names = [""]
    if isinstance(dataset, Mixture):
        names = [f"source {share.name!r}: " for share in dataset.shares]
    notes = []
    if any(_holds_texts(source) for source in dataset.sources):
        on_texts = (tokenizer.special_tokens_note, tokenizer.untemplated_note)
        notes += [note for note in on_texts if note]
    if tokenizer.unbegun_note and not all(_holds_texts(source) for source in dataset.sources):
        notes.append(tokenizer.unbegun_note)

    encode = encoder_of(config, tokenizer)
    for name, source in zip(names, dataset.sources, strict=True):
        limit = config.data.max_prompt_length
        if processor is None:
            sample = counted_lengths(source, tokenizer.identity, limit)
            if sample is None:
                sample = sample_lengths(source, encode, limit, _TEXT // len(names))
        else:
            with_images = partial(_encode_with_images, encode, processor)
            sample = sample_lengths(
                source, with_images, limit, _TEXT // len(names), images=config.images.column
            )
        if sample.looked_at:
            dropped = ""
            if sample.found:
                dropped = "; they are dropped from their steps"
            notes.append(f"{name}{sample.text(limit)}{dropped}")
    return notes


def counted_lengths(source: Source, tokenizer: str | None, limit: int) -> TooLong | None:
    """Count by the lengths that ``data import`` wrote into the table; None where it has none by
    this tokenizer.
    """
    table = open_source(source)
    known = token_lengths_of(table)
    if known is None or (known.prompt, known.tokenizer) != (source.prompt, tokenizer):
        return None
    try:
        return TooLong(table.num_rows, tuple(longer_than(table, known.column, limit)))
    except StorageError:
        return None  # a worker reports a part that cannot be read


def _holds_texts(source: Source) -> bool:
    kind = source_schema(open_source(source).schema, source).field(PROMPT).type
    return bool(pa.types.is_large_string(kind))


def _encode_with_images(
    encode: Encode, processor: ImageProcessor, row: tuple[Any, Any]
) -> Sequence[int]:
    """Return the ids of a prompt with its images, from their headers. ImageError also for one
    that is at a URL.
    """
    prompt, value = row
    images = images_of(value)
    if any(image.data is None for image in images):
        raise ImageError("it is not fetched to be counted")
    return processor.expand(encode(marked(prompt, processor.family.placeholder)), images)


def sample_lengths(
    source: Source,
    encode: Encode,
    limit: int,
    characters: int = _TEXT,
    *,
    images: str | None = None,
) -> TooLong:
    """Count long prompts of up to 16 row groups, the same ones each time, until ``characters`` have
    been encoded.

    With ``images``, the column of the prompts' images, ``encode`` gets both. A prompt whose images
    cannot be used is left out: the step that it is in reports it.
    """
    counts = []
    for rows in _samples(source, images):
        if characters <= 0:
            break
        found = 0
        looked = 0
        for row in rows:
            prompt = row if images is None else row[0]
            if isinstance(prompt, str):
                characters -= len(prompt)
            else:
                characters -= sum(len(str(turn)) for turn in prompt)
            with suppress(ImageError), named(f"dataset {source.url!r}: one of its prompts"):
                length = len(encode(row))
                looked += 1
                if length > limit:
                    found += 1
            if characters <= 0:
                break
        if looked:
            counts.append((looked, found))
    return TooLong(open_source(source).num_rows, tuple(counts))


def _samples(source: Source, images: str | None) -> Iterator[list[Any]]:
    """Yield prompts, and their images, of one row group after the other.

    Row groups that cannot be read are left out: a worker will report them.
    """
    snapshot = open_source(source)
    random = np.random.default_rng(0)
    footers = FooterCache()
    groups = snapshot.row_groups()
    numbers = random.permutation(len(groups))[: _GROUPS if images is None else _GROUPS_OF_IMAGES]
    rows_of_group = max(_ROWS, ceil(_GROUPS * _ROWS / len(numbers)))
    paths = [source.prompt] if images is None else [source.prompt, images]
    known = snapshot.schema.names
    names = list(dict.fromkeys(path_steps(path, known)[0] for path in paths))
    for number in numbers:
        group = groups[number]
        rows = np.sort(random.permutation(min(group.rows, _HEAD))[:rows_of_group]).tolist()
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
        prompts = values_at(table, source.prompt).to_pylist()
        if images is None:
            yield [prompt for prompt in prompts if prompt is not None]
            continue
        shown = normalised(values_at(table, images), images).to_pylist()
        yield [
            (prompt, value)
            for prompt, value in zip(prompts, shown, strict=True)
            if prompt is not None
        ]
