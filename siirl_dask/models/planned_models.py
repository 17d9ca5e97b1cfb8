"""For those who plan a run and build no model: whether a model's files are whole, and which
families are computed in a slower way than others.

Trainers and engines find the latter out by a trial when they build one, whatever its family. The
tables here are what the trials find of the families in ``tests/training/test_families.py``, which
holds them to it.
"""

from __future__ import annotations

from functools import lru_cache

from siirl_dask.config import ModelConfig
from siirl_dask.context import Device
from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import ModelUse, read_config
from siirl_dask.models.cache import local_model, open_model
from siirl_dask.models.remote import is_remote, reached, tag_of
from siirl_dask.models.shapes import listed_files

_CONFIG = "config.json"
_NOT_REPLACED = "its attention cannot be replaced"
PADDED = {
    "bloom": _NOT_REPLACED,
    "codegen": _NOT_REPLACED,
    "doge": "it makes masks of its own",
    "falcon": _NOT_REPLACED,
    "gpt_neo": _NOT_REPLACED,
    "gptj": _NOT_REPLACED,
    "llama4_text": "it attends in chunks",
    "modernbert-decoder": "it has local attention of its own",
    "mpt": _NOT_REPLACED,
    "xglm": _NOT_REPLACED,
}
"""Why rows are computed side by side with padding, and not packed, by ``model_type`` of
``config.json``."""
REFUSED = ("recurrent_gemma",)
"""``model_type`` of those whose log-probs no layout of rows gives."""
GENERATED = (
    "bloom", "codegen", "diffllama", "doge", "falcon", "gpt_neo", "gptj", "llama4_text", "minimax", "mpt", "nemotron",
    "stablelm", "xglm",
)  # fmt: skip
"""``model_type`` of those that the transformers engine samples with transformers' ``generate``,
not its own loop."""


def check_model(path: str, use: ModelUse = ModelUse.GENERATES) -> None:
    """Check the files of the model at ``path``, on any fsspec URL, as ``check_weights`` of
    weight_files.py does for a ``use``; once for files that stay as they are, whichever role asks.

    Does nothing where no ``config.json`` is. ConfigError for files that are not of the model.
    """
    with reached(path):
        fs, folder = open_model(path)
        there = listed_files(fs, folder)
    if _CONFIG not in there:
        return
    files = [(name, str(info["size"]), tag_of(info)) for name, info in there.items()]
    _check_files(path, use, tuple(sorted(files)))


def model_here(
    model: ModelConfig, device: Device, use: ModelUse = ModelUse.GENERATES
) -> ModelConfig:
    """Return ``model`` with its folder on this host as its path, as ``local_model`` does. Files that
    have come from a URL are checked: of these a plan reads headers and samples. ConfigError as of
    ``check_model``.
    """
    found = local_model(model, device)
    if is_remote(model.path):
        check_model(found.path, use)
    return found


@lru_cache(maxsize=64)  # roles of a run ask for the same model
def _check_files(path: str, use: ModelUse, files: tuple[tuple[str, str, str], ...]) -> None:
    """Check the files of a model, of which ``files`` has names, sizes and tags."""
    # torch and transformers, which take seconds
    from siirl_dask.models.weight_files import check_weights

    check_weights(path, use)


def why_padded(path: str) -> str | None:
    """Return why rows of the model in ``path`` are computed with padding, beginning with its
    family; None where they are packed, for a family that is not known, and without a
    ``config.json``. ConfigError if that is damaged.
    """
    kind = _kind_of_text(path)
    if kind not in PADDED:
        return None
    return f"{kind}: {PADDED[kind]}"


def check_has_layout(path: str) -> None:
    """Raise ConfigError for a family whose log-probs no layout of rows gives, as a trainer would
    find out when it builds the model in ``path``, and for a damaged ``config.json``.
    """
    kind = _kind_of_text(path)
    if kind in REFUSED:
        raise ConfigError(
            f"model.path={path!r}: trainers do not compute the log-probs of {kind} as transformers "
            "does, neither packed nor with padding; docs/models.md has the families that they do"
        )


def rows_note(path: str) -> str | None:
    """Return a sentence on how a trainer computes rows of the model in ``path``; None and
    ConfigError as of ``why_padded``.
    """
    why = why_padded(path)
    if why is None:
        return None
    return f"rows: with padding ({why}), which takes longer"


def loop_note(path: str) -> str | None:
    """Return a sentence on the loop with which the transformers engine samples from the model in
    ``path``; None for the engine's own, and as ``why_padded`` does. ConfigError as there.
    """
    kind = _kind_of_text(path)
    if kind not in GENERATED:
        return None
    return f"loop: transformers' generate ({kind}), which takes longer"


def _kind_of_text(path: str) -> str | None:
    """Return the ``model_type`` of a model, or of its text where it sees images as well."""
    config = read_config(path)
    if config is None:
        return None
    text = config.get("text_config")
    if isinstance(text, dict) and "model_type" in text:
        config = text
    kind: str | None = config.get("model_type")
    return kind
