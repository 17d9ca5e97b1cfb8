"""``siirl-dask unpack``: writes a model with packed (quantized) weights as one that a run
trains.
"""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import open_fs

from siirl_dask.errors import ConfigError
from siirl_dask.models.cache import folder_here
from siirl_dask.models.packed_weights import UNPACKED, packing_of
from siirl_dask.runs.export import check_unused, put_folder, room_for


def unpack(model: str, to: str) -> str:
    """Write the model at ``model``, a folder or a URL, to ``to`` with unpacked weights. Return how
    they were packed.

    ConfigError when there is no model, when its weights are not packed, or not in a way that is
    known, and when something is at ``to``.
    """
    check_unused(to, "DEST")
    described = Path(folder_here(model, weights=False))
    if not (described / "config.json").is_file():
        raise ConfigError(
            f"no model is at {model!r}: expected a Hugging Face folder, which has a config.json"
        )
    method = packing_of(str(described))
    if method is None:
        raise ConfigError(f"the weights of {model!r} are not packed: a run trains them as they are")
    if method not in UNPACKED:
        raise ConfigError(
            f"the weights of {model!r} are packed by {method!r}, which is not known here: expected "
            f"one of {', '.join(UNPACKED)}"
        )
    base = folder_here(model, weights=True)
    fs, path = open_fs(to)
    if not isinstance(fs, LocalFileSystem):
        with TemporaryDirectory() as folder:
            _write(base, Path(folder), method)
            put_folder(Path(folder), to)
        return method
    there = Path(path).is_dir()
    Path(path).mkdir(parents=True, exist_ok=True)
    try:
        _write(base, Path(path), method)
    except BaseException:
        for file in Path(path).iterdir():
            file.unlink()
        if not there:
            rmtree(path)
        raise
    return method


def _write(base: str, folder: Path, method: str) -> None:
    """Write the unpacked model. ConfigError, with what is missing, for a full disk."""
    from siirl_dask.training.files.unpack import unpacked_weights, write_unpacked

    weights = unpacked_weights(base, method)
    with room_for(folder, sum(weight.nbytes for weight in weights.values())):
        write_unpacked(weights, base, folder)
