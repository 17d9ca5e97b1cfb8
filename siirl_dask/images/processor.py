"""The one processor of images: engines, policies, critics and references build it from the same
folder and settings, so that they see the same pixels and count the same tokens.

A picture is resized here, once, to a size that the model's own processor leaves alone: its two
backends resize differently, and an engine may take one where transformers takes the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from math import prod
from typing import Any

import torch
from PIL import Image as pil
from torch import Tensor
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from siirl_dask.config import ImagesConfig, parse_bytes
from siirl_dask.errors import ConfigError, ImageError
from siirl_dask.images.cache import BoundedCache
from siirl_dask.images.families import ImageFamily, family_of
from siirl_dask.images.image import Image
from siirl_dask.images.reading import check_bytes, decode, fetch, located, size_of
from siirl_dask.models.architecture import read_config
from siirl_dask.models.loading import refused_by_name

# after which a size is what the resize leaves alone, but for sizes at the edge of what it takes
_RESIZES = 4
_STREAMS = 16  # files that are fetched at once


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image as the visual tower takes it."""

    values: Tensor
    """float32 [patches, 3 * temporal patch * patch * patch]."""
    grid: tuple[int, int, int]
    """Patches in time, height and width."""

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return int(self.values.nbytes)


class ImageProcessor:
    """Makes pixels and placeholders of images. ImageError for a file that cannot be used, which
    says why.

    Any thread may use it. What it has made last is kept, by content and settings, up to
    ``images.cache`` bytes.
    """

    def __init__(
        self,
        processor: Any,
        settings: ImagesConfig,
        family: ImageFamily,
        image_token: int,
    ) -> None:
        """Use ``load``, which checks the folder. ``processor`` is the model's own, of
        transformers.
        """
        self.family = family
        self.image_token = image_token
        """Id of the placeholder."""
        self.settings = settings
        """The column, limits and cache of the images."""
        self._max_bytes = parse_bytes("images.max_bytes", settings.max_bytes)
        self._processor = processor
        self.pixel_limits = _limits(self._processor.size, settings)
        """Fewest and most pixels of an image as the model sees it: an engine's own processor
        must get the same ones."""
        self._patch = int(self._processor.patch_size)
        self._merge = int(self._processor.merge_size)
        described = json.dumps(
            [self._processor.to_dict(), self.pixel_limits], sort_keys=True, default=str
        )
        self._digest = sha256(described.encode()).hexdigest()
        cache = parse_bytes("images.cache", settings.cache)
        # apart: pixels, of many times their bytes, would have them fetched again
        self._files = BoundedCache(cache // 2)
        self._cache = BoundedCache(cache, beside=self._files)

    @classmethod
    def load(cls, folder: str, settings: ImagesConfig) -> ImageProcessor:
        """Load the processor of the model in ``folder``.

        Raises:
            ConfigError: the model sees no images, is of a family that is not known, or its folder
                says nothing of how images are processed, or something else than its config.json.
        """
        config = read_config(folder)
        subject = f"model.path={folder!r}"
        if config is None:
            raise ConfigError(
                f"{subject}: expected a folder with a config.json, and images.column is set"
            )
        family = family_of(config, folder)
        with refused_by_name(folder, f"{subject}: its image processor"):
            own = AutoImageProcessor.from_pretrained(
                folder,
                backend="pil",
                local_files_only=True,
                trust_remote_code=False,
            )
        _check_patches(own, config["vision_config"], subject)
        return cls(own, settings, family, int(config["image_token_id"]))

    def bring(self, images: Iterable[Image]) -> None:
        """Fetch the files of images that are not here, several at once. One that fails says so
        when it is used.
        """
        missing = {image.path: image for image in images if image.data is None}
        if len(missing) > 1:
            with ThreadPoolExecutor(min(_STREAMS, len(missing)), "siirl-images") as pool:
                [*pool.map(self._try_to_read, missing.values())]

    def identity(self, image: Image) -> str:
        """Return a digest of the image's content and of all settings: equal only where pixels
        are.
        """
        return sha256(f"{self._content(image)} {self._digest}".encode()).hexdigest()

    def grid(self, image: Image) -> tuple[int, int, int]:
        """Return the patches in time, height and width, from the image's header alone."""
        width, height = self._stable(*size_of(self._read(image), self.settings.max_source_pixels))
        return 1, height // self._patch, width // self._patch

    def tokens(self, image: Image) -> int:
        """Return the number of tokens that the model sees, from the image's header alone."""
        return prod(self.grid(image)) // self._merge**2

    def expand(self, ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """Return a prompt's ids with as many placeholders for each image as it has tokens, instead
        of one.

        Raises:
            ImageError: the prompt has more or fewer placeholders than images, or two side by side.
        """
        wanted = sum(token == self.image_token for token in ids)
        if wanted != len(images):
            raise ImageError(
                f"the prompt has {_counted(wanted, 'place')} for images and "
                f"{_counted(len(images), 'image')}: expected as many"
            )
        if len(images) > self.settings.most:
            raise ImageError(
                f"{len(images)} images: expected at most {self.settings.most} (images.most)"
            )
        if any(pair == (self.image_token, self.image_token) for pair in pairwise(ids)):
            raise ImageError(
                "two images of the prompt have nothing between them: expected a token, such as the "
                "model's"
            )
        left = enumerate(images, 1)
        expanded: list[int] = []
        for token in ids:
            times = 1
            if token == self.image_token:
                number, image = next(left)
                with numbered(number, len(images)):
                    times = self.tokens(image)
            expanded += [token] * times
        return expanded

    def shortened(self, ids: Sequence[int]) -> list[int]:
        """Return ids with one placeholder for each image, to be read by people."""
        before = [None, *ids]
        return [
            token
            for token, last in zip(ids, before, strict=False)
            if token != self.image_token or token != last
        ]

    def picture(self, image: Image) -> pil.Image:
        """Return the picture in RGB, in the size that the model sees."""

        def make() -> pil.Image:
            picture = decode(self._read(image), self.settings.max_source_pixels)
            size = self._stable(*picture.size)
            if picture.size == size:
                return picture
            return picture.resize(size, self._processor.resample)

        return self._cache.get(
            ("picture", self._content(image)), make, lambda made: 3 * made.width * made.height
        )

    def check(self, images: Sequence[Image]) -> None:
        """Decode a prompt's images; the pictures stay in the cache for whoever needs them next, as
        far as it goes.

        ImageError, with the image's number, for one that is damaged.
        """
        for number, image in enumerate(images, 1):
            with numbered(number, len(images)):
                self.picture(image)

    def pixels(self, image: Image) -> Pixels:
        """Return the picture as the visual tower takes it."""

        def make() -> Pixels:
            made = self._processor(
                images=[self.picture(image)],
                do_resize=False,
                return_tensors="pt",
            )
            time, height, width = made["image_grid_thw"][0].tolist()
            return Pixels(made["pixel_values"].to(torch.float32), (time, height, width))

        return self._cache.get(("pixels", self._content(image)), make, lambda made: made.nbytes)

    def _stable(self, width: int, height: int) -> tuple[int, int]:
        """Return the size that an image of ``width`` x ``height`` gets, which the resize then
        leaves alone.
        """
        least, most = self.pixel_limits
        size = (height, width)
        for _ in range(_RESIZES):
            try:
                new = smart_resize(size[0], size[1], self._patch * self._merge, least, most)
            except ValueError as error:  # of sides whose ratio is above 200
                raise ImageError(
                    f"it is {width} x {height} pixels, which the model cannot take: {error}"
                ) from None
            if new == size:
                return new[1], new[0]
            size = new
        raise ImageError(
            f"it is {width} x {height} pixels, which fit no grid of {self._patch * self._merge} "
            f"pixels with {least:,} "
            f"to {most:,} in all: set images.max_pixels higher, or leave the image out"
        )

    def _content(self, image: Image) -> str:
        """Return the digest of an image's bytes, which are fetched for it where they are at a
        URL.
        """
        if image.data is not None:
            return image.key
        return sha256(self._read(image)).hexdigest()

    def _read(self, image: Image) -> bytes:
        if image.data is not None:
            check_bytes(image.data, self._max_bytes, "it")
            return image.data
        url = located(image.path or "", self.settings.folder)
        return self._files.get(url, lambda: self._fetch(url), len)

    def _fetch(self, url: str) -> bytes:
        return fetch(url, max_bytes=self._max_bytes, timeout=self.settings.timeout)

    def _try_to_read(self, image: Image) -> None:
        with suppress(ImageError):  # whoever uses the image tells, and knows its row
            self._read(image)


@contextmanager
def numbered(number: int, count: int) -> Iterator[None]:
    """Begin an ImageError raised inside with the image's number among those of its prompt."""
    try:
        yield
    except ImageError as error:
        raise ImageError(f"image {number} of {count}: {error}") from error.__cause__


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _limits(size: Any, settings: ImagesConfig) -> tuple[int, int]:
    """Return fewest and most pixels: those of the settings, or of the model's own processor."""
    least = int(settings.min_pixels or size["shortest_edge"])
    most = int(settings.max_pixels or size["longest_edge"])
    if least > most:
        raise ConfigError(
            f"images.min_pixels={settings.min_pixels} and images.max_pixels={settings.max_pixels} "
            f"give {least} to {most} pixels with what the model's folder says: expected a range"
        )
    return least, most


def _check_patches(processor: Any, vision: Mapping[str, Any], subject: str) -> None:
    """Raise ConfigError where preprocessor_config.json and config.json describe different
    patches.
    """
    names = {
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "spatial_merge_size": "merge_size",
    }
    for name, own in names.items():
        there = vision.get(name)
        here = getattr(processor, own, None)
        if isinstance(there, int) and there != here:
            raise ConfigError(
                f"{subject}: its config.json has {name}={there}, and its preprocessor_config.json "
                f"{own}={here}: the folder holds files of two models"
            )
