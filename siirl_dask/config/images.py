"""Config group of images: the dataset's column, limits of what is read, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass, fields

from siirl_dask.config.checks import above, at_least, located, parse_bytes
from siirl_dask.errors import ConfigError

_MOST_PIXELS = 178_956_970  # of an image that Pillow opens at all


@dataclass(kw_only=True, slots=True)
class ImagesConfig:
    """``images``: the images of prompts."""

    column: str | None = None
    """Column of the dataset with each prompt's images; a dot leads into a struct. None: prompts are
    texts alone."""
    observations: bool = False
    """Whether environments show images: in how an episode begins, and in what they answer."""
    folder: str | None = None
    """Folder, or any fsspec URL, in which relative paths of the column begin. None: a relative
    path is an error."""
    min_pixels: int | None = None
    """Fewest pixels of an image as the model sees it; a smaller one is enlarged. None: as the
    model's folder says."""
    max_pixels: int | None = None
    """Most pixels of an image as the model sees it; a larger one is made smaller. None: as the
    model's folder says."""
    most: int = 8
    """Most images of one prompt; a prompt with more is an error."""
    max_bytes: str = "20MiB"
    """Largest file of one image; a larger one is an error."""
    max_source_pixels: int = 64_000_000
    """Most pixels of an image before it is resized, by its header; one with more is an error."""
    timeout: float = 60.0
    """Seconds within which the file at a URL must come."""
    cache: str = "256MiB"
    """Memory in which each role on a worker keeps fetched files and processed images, those that
    were used last."""

    @property
    def used(self) -> bool:
        """Whether a model is to see any."""
        if self.column is not None:
            return True
        return self.observations

    @property
    def source(self) -> str:
        """The option by which a model sees images, for errors."""
        if self.column is not None:
            return f"images.column={self.column!r}"
        return "images.observations=true"

    def __post_init__(self) -> None:
        if self.column is not None and not self.column.strip():
            raise ConfigError(
                f"images.column={self.column!r}: expected the name of a column, or null"
            )
        for one in () if self.used else fields(self):
            given = getattr(self, one.name)
            if given != one.default:
                raise ConfigError(
                    f"images.{one.name}={given!r} and images.column=null, so no images are read: "
                    f"name their column, or leave images.{one.name} out"
                )
        if self.folder:
            self.folder = located("images.folder", self.folder)
        at_least("images", 1, most=self.most, max_source_pixels=self.max_source_pixels)
        if self.max_source_pixels > _MOST_PIXELS:
            raise ConfigError(
                f"images.max_source_pixels={self.max_source_pixels}: expected at most "
                f"{_MOST_PIXELS}, of which Pillow opens images"
            )
        above("images", 0, timeout=self.timeout)
        for name, pixels in {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}.items():
            if pixels is not None:
                at_least("images", 1, **{name: pixels})
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"images.min_pixels={self.min_pixels} is above "
                f"images.max_pixels={self.max_pixels}: expected no more"
            )
        for name, text in {"max_bytes": self.max_bytes, "cache": self.cache}.items():
            at_least("images", 1, **{name: parse_bytes(f"images.{name}", text)})
