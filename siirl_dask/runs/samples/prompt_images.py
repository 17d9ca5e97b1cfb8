"""Finds the images of samples' prompts in the dataset: a run stores where a prompt is from, and not
its images.

Rows that are shown are few, and no others' images are kept. Whatever is missing or damaged is told
in words, since the dataset may have been moved, changed or deleted since the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from time import monotonic
from typing import Any

import pyarrow as pa
from siirl_storage import FooterCache, Snapshot, StorageError

from siirl_dask.config import Config, parse_bytes
from siirl_dask.coordinator import Source, open_source
from siirl_dask.errors import DataError, ImageError, SiirlError
from siirl_dask.images import Image, images_of, normalised
from siirl_dask.images.reading import check_bytes, fetch, format_of, located, size_of
from siirl_dask.images.thumbnail import thumbnail
from siirl_dask.runs.reader import Run, is_run
from siirl_dask.runs.samples.rollouts import TABLE
from siirl_dask.schema import DATA_PART, DATA_ROW, SOURCE_NAME, path_steps, type_at
from siirl_dask.tables import values_at

PICTURES = "pictures"
"""Column of a table of samples: the images of each prompt, a list; empty where it has none."""
_SHOWN = 100  # images of one page: about three megabytes
_TOLD = 40  # images of which a terminal is told
ORIGIN = (SOURCE_NAME, DATA_PART, DATA_ROW)
"""Columns that tell where a sample's prompt is from, as far as a run stores them."""
_PICTURE = pa.struct({"kind": pa.string(), "url": pa.string(), "problem": pa.string()})
Picture = Mapping[str, str | None]
"""An image as it is shown: ``kind`` such as ``640x480 JPEG``, and ``url``, a thumbnail's data URL.
Of one that cannot be read only ``problem`` is there, a sentence."""


class StoredPromptImages:
    """Tells the images of a run's samples, those of ``table``.

    Args:
        url: The run. Where it has no configuration that can be read, or no images, samples have
            none.
        table: ``rollouts``, ``validation`` or ``test``.
        thumbnails: Whether to make pictures; else headers alone are read.
        most: Images that are shown of all samples together; a hundred by default, or forty in
            words.
    """

    def __init__(
        self,
        url: str,
        table: str = TABLE,
        *,
        thumbnails: bool,
        most: int | None = None,
    ) -> None:
        self._url = url
        self._table = table
        self._thumbnails = thumbnails
        self._datasets: dict[str, _Dataset | str] = {}
        self._rows: dict[tuple[str, int, int], list[Picture]] = {}
        if not most:
            most = _TOLD
            if thumbnails:
                most = _SHOWN
        self._most = most
        self._room = most
        self._seconds: float | None = None  # left for all fetches together

    @cached_property
    def _config(self) -> Config | None:
        return _config_of(self._url)

    def added_to(self, samples: pa.Table) -> pa.Table:
        """Return the samples with the column ``pictures``, a list of each one's."""
        if not {DATA_PART, DATA_ROW} <= {*samples.column_names} or self._config is None:
            return samples
        names = [name for name in ORIGIN if name in samples.column_names]
        pictures = [self._of(self._config, row) for row in samples.select(names).to_pylist()]
        return samples.append_column(PICTURES, pa.array(pictures, pa.list_(_PICTURE)))

    def of(self, sample: Mapping[str, Any]) -> Sequence[Picture]:
        """Return the images of a sample's prompt, by what it has of the columns ``ORIGIN``."""
        if self._config is None:
            return []
        return self._of(self._config, sample)

    def _of(self, config: Config, sample: Mapping[str, Any]) -> list[Picture]:
        url = _dataset_url(config, self._table, sample.get(SOURCE_NAME))
        part = sample.get(DATA_PART)
        row = sample.get(DATA_ROW)
        if url is None or part is None or row is None:
            return []
        if self._room <= 0:
            return [_problem(f"its images are left out: {self._most} are shown")]
        if (url, part, row) not in self._rows:
            self._rows[url, part, row] = self._read(config, url, part, row)
        found = self._rows[url, part, row]
        self._room -= len(found)
        return found

    def _read(self, config: Config, url: str, part: int, row: int) -> list[Picture]:
        try:
            images = self._dataset(config, url).images(part, row)
        except SiirlError as error:
            return [_problem(f"its images cannot be shown: {error}")]
        most = min(config.images.most, self._most)
        shown = [
            self._picture(config, number, image) for number, image in enumerate(images[:most], 1)
        ]
        bound = "images.most"
        if most != config.images.most:
            bound = f"{most} are shown"
        return shown + [_problem(f"{len(images) - most} more images are left out ({bound})")] * (
            len(images) > most
        )

    def _dataset(self, config: Config, url: str) -> _Dataset:
        """Return the dataset, opened once. DataError, the same each time, if that fails."""
        if url not in self._datasets:
            try:
                self._datasets[url] = _Dataset(
                    Source.of(config.data, url=url), config.images.column or ""
                )
            except SiirlError as error:
                self._datasets[url] = str(error)
        found = self._datasets[url]
        if isinstance(found, str):
            raise DataError(found)
        return found

    def _picture(self, config: Config, number: int, image: Image) -> Picture:
        most = config.images.max_source_pixels
        try:
            data = self._content(config, image)
            width, height = size_of(data, most)
            kind = f"{width}x{height} {format_of(data, most)}"
            return {
                "kind": kind,
                "url": thumbnail(data, most) if self._thumbnails else None,
                "problem": None,
            }
        except ImageError as error:
            return _problem(f"image {number} cannot be shown: {error}")

    def _content(self, config: Config, image: Image) -> bytes:
        settings = config.images
        most = parse_bytes("images.max_bytes", config.images.max_bytes)
        if image.data is not None:
            check_bytes(image.data, most, "it")
            return image.data
        left = settings.timeout if self._seconds is None else self._seconds
        if left <= 0:
            raise ImageError(
                f"it was not fetched: others took images.timeout={settings.timeout:g} seconds"
            )
        began = monotonic()
        try:
            url = located(image.path or "", settings.folder)
            return fetch(url, max_bytes=most, timeout=left)
        finally:
            self._seconds = left - (monotonic() - began)


class _Dataset:
    """Rows of one dataset by their places. DataError where it is not there, or has no such
    column.
    """

    def __init__(self, source: Source, column: str) -> None:
        self._source = source
        self._column = column
        self._snapshot: Snapshot = open_source(source)
        if type_at(self._snapshot.schema, column) is None:
            raise DataError(f"dataset {source.url!r} has no column {column!r} (images.column)")
        self._footers = FooterCache()

    def images(self, part: int, row: int) -> tuple[Image, ...]:
        """Return the images of row ``row`` of part ``part``. DataError where there is none, or
        it cannot be read.
        """
        url = self._source.url
        parts = self._snapshot.parts
        path = None
        if 0 <= part < len(parts):
            path = parts[part].path
        name = path_steps(self._column, self._snapshot.schema.names)[0]
        first = 0
        for group in self._snapshot.row_groups():
            if group.part != path:
                continue
            if first <= row < first + group.rows:
                read = partial(self._snapshot.read_row_group, group, [name], rows=[row - first])
                try:
                    table = read(max_bytes=self._source.read_limit, footers=self._footers)
                except StorageError as error:
                    raise DataError(f"dataset {url!r}: {error}") from error
                except Exception as error:  # drivers of remote storage raise what they like
                    raise DataError(
                        f"dataset {url!r} cannot be read: {type(error).__name__}: {error}"
                    ) from error
                return images_of(
                    normalised(values_at(table, self._column), self._column)[0].as_py()
                )
            first += group.rows
        raise DataError(
            f"dataset {url!r} has no row {row} in part {part}: it has changed since the run"
        )


def _config_of(url: str) -> Config | None:
    """Return the configuration of a run with images; None of others, and where there is none
    that can be read.
    """
    try:
        config = None
        if is_run(url):
            config = Run(url).config
    except SiirlError:
        return None
    if config is not None and config.images.column is not None:
        return config
    return None


def _dataset_url(config: Config, table: str, source_name: object) -> str | None:
    """Return the dataset of a sample; None where the configuration names none."""
    if table != TABLE:
        return {"validation": config.validation.url, "test": config.validation.test_url}.get(table)
    if not config.data.sources:
        return config.data.url
    given = config.data.sources.get(str(source_name))
    if given:
        return given.url
    return None


def _problem(words: str) -> Picture:
    return {"kind": None, "url": None, "problem": words}
