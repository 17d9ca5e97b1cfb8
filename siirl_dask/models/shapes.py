"""Reads a model's size from its folder: parameters from the headers of its weight files, or where
it has none from its config; widths from its config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from glob import has_magic
from hashlib import sha256
from io import SEEK_END
from itertools import chain
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import open_fs

from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import (
    completed,
    read_config,
    shapes_by_config,
    understood,
)
from siirl_dask.models.cache import folder_if_here, open_model
from siirl_dask.models.remote import (
    TEMPLATES,
    describes_model,
    find_model,
    is_of_weights,
    is_remote,
    reached,
    tag_of,
)

INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_ENDING = ".safetensors"
_FLOATING = ("F32", "BF16", "F16", "F64")
"""Types of weights, as safetensors names them: numbers that need no scales."""
_NAMED = 4  # files or parameters in a message
_LAYER = re.compile(r"^.*\blayers\.\d+\.")
_OF_EXPERTS = ".experts."
_STREAMS = 8  # headers read at once
_FIRST = 2**20  # bytes of each file, of which its header is a part
_SAMPLES = 64  # places of each file
_SAMPLE = 4096  # bytes
_LENGTH = 8  # bytes before the header, with its length
_LARGEST_HEADER = 10**8  # bytes, a limit of the safetensors specification
_WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
# as Qwen, Mixtral and DeepSeek name them
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Counts of a model's parameters."""

    total: int
    """Elements of all tensors."""
    tensors: int
    """Number of tensors."""
    largest: int
    """Elements of the largest tensor."""
    layer: int = 0
    """Elements of the largest layer; 0 where names do not tell layers apart."""
    experts: int = 0
    """Elements of the experts of mixtures, without their routers."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    shape: tuple[int, ...]
    dtype: str
    """Type of its numbers, as safetensors names it: ``BF16``."""
    url: str
    """Its file."""
    begin: int
    """Place of its first byte in the file."""
    nbytes: int

    @property
    def type_fault(self) -> str:
        """A clause on numbers that want scales, or are no weights; empty for others."""
        if self.dtype in _FLOATING:
            return ""
        return f"is {self.dtype} where one of {', '.join(_FLOATING)} was expected"


@dataclass(frozen=True, slots=True)
class Widths:
    """Widths of a model's layers, which workers that split them must divide; None where its
    config does not say.
    """

    heads: int | None
    """Attention heads."""
    kv_heads: int | None
    """Heads of keys and values."""
    intermediate: int | None
    """Width of each layer's MLP."""
    vocabulary: int | None
    """Tokens of the vocabulary."""
    experts: int | None = None
    """Experts of each layer of a mixture."""


def weights_digest(path: str) -> str:
    """Return a digest of the weights of the model at ``path``, a folder or a URL; "" where none
    are, or where a URL's store cannot be reached.

    That of a folder is of each file's name and size, its first bytes, which name the tensors, and
    samples of the rest: a model of other weights has another one, unless no sample differs. That
    of a URL is of each file's name and size, and of what its store says of the content or of the
    last change; nothing is read.
    """
    if is_remote(path):
        return _digest_at(path)
    files = [file for file in sorted(Path(path).glob("*")) if is_of_weights(file.name)]
    digest = sha256()
    for file in files:
        nbytes = file.stat().st_size
        digest.update(f"{file.name} {nbytes}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_FIRST))
            for place in range(_SAMPLES):
                stream.seek(nbytes * place // _SAMPLES)
                digest.update(stream.read(_SAMPLE))
    if not files:
        return ""
    return digest.hexdigest()


def description_digests(path: str) -> dict[str, str]:
    """Return a digest of each file of the model at ``path``, a folder or a URL, that says how its
    weights are used, by its name: ``config.json``, tokenizer, processors, chat templates. Empty
    where none are, or where a URL's store cannot be reached.

    Those of a URL are of each file's size, and of what its store says of the content or of the last
    change; nothing is read.
    """
    described: dict[str, bytes] = {}
    if is_remote(path):
        with suppress(ConfigError):
            for one in find_model(path).files:
                if describes_model(one.name):
                    described[one.name] = json.dumps([one.nbytes, one.tag]).encode()
    else:
        folder = Path(path)
        for file in (*folder.glob("*"), *folder.glob(f"{TEMPLATES}/*")):
            if describes_model(file.name) and file.is_file():
                described[file.relative_to(folder).as_posix()] = file.read_bytes()
    return {name: sha256(described[name]).hexdigest() for name in sorted(described)}


def _digest_at(url: str) -> str:
    try:
        model = find_model(url)
    except ConfigError:
        return ""
    files = [[one.name, one.nbytes, one.tag] for one in model.files if is_of_weights(one.name)]
    if not files:
        return ""
    return sha256(json.dumps(files).encode()).hexdigest()


def count_parameters(path: str) -> ModelSize | None:
    """Count the parameters of the model in a folder, on any fsspec URL: in its ``*.safetensors``,
    or where it has none, as its ``config.json`` says. None without either. ConfigError for damaged
    ones.
    """
    sizes = {name: prod(shape) for name, shape in parameter_shapes(path).items()}
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        match = _LAYER.search(name)
        if match:
            layers[match[0]] = layers.get(match[0], 0) + size
    layer = max(layers.values(), default=0)
    experts = sum(size for name, size in sizes.items() if _OF_EXPERTS in name)
    if sizes:
        return ModelSize(sum(sizes.values()), len(sizes), max(sizes.values()), layer, experts)
    return None


def parameter_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a folder's model by name, from its weights or else
    from its config.
    """
    shapes = weight_shapes(path)
    if shapes:
        return shapes
    return shapes_by_config(path)


def weight_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a folder's ``*.safetensors``, by name; empty without
    such files.
    """
    return {name: tensor.shape for name, tensor in stored_tensors(path).items()}


def stored_tensors(path: str) -> dict[str, StoredTensor]:
    """Return each tensor in a folder's ``*.safetensors``, on any fsspec URL, by name; empty
    without such files. ConfigError for damaged ones.
    """
    with reached(path):
        fs, folder = open_model(path)
        there = listed_files(fs, folder)

        def index() -> bytes:
            text: bytes = fs.cat_file(str(there[INDEX]["name"]))
            return text

        found = [there[name] for name in files_with_weights(path, there, index)]
        if isinstance(fs, LocalFileSystem):
            return dict(each for info in found for each in _tensors_in(fs, str(info["name"])))
        with ThreadPoolExecutor(_STREAMS) as pool:
            names = [fs.unstrip_protocol(str(info["name"])) for info in found]
            return dict(chain.from_iterable(pool.map(_tensors_at, names, map(tag_of, found))))


def sampled_bytes(tensor: StoredTensor) -> list[bytes]:
    """Read samples of a tensor's numbers, at even distances, from its file on any fsspec URL. Those
    of two tensors that a run has trained apart differ.
    """
    fs, path = open_fs(tensor.url)
    starts = [tensor.begin + tensor.nbytes * place // _SAMPLES for place in range(_SAMPLES)]
    end = tensor.begin + tensor.nbytes

    def read(start: int) -> bytes:
        data: bytes = fs.cat_file(path, start=start, end=min(start + _SAMPLE, end))
        return data

    with ThreadPoolExecutor(_STREAMS) as pool:
        return list(pool.map(read, starts))


def listed_files(fs: Any, folder: str) -> dict[str, dict[str, Any]]:
    """Return what a store says of each entry of a folder by its name; empty without a folder."""
    try:
        found = fs.ls(folder, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {PurePosixPath(str(info["name"])).name: info for info in found}


def files_with_weights(path: str, there: Iterable[str], index: Callable[[], bytes]) -> list[str]:
    """Return the names of the ``*.safetensors`` that hold the weights of the model at ``path``,
    as transformers chooses them among the files that are ``there``; none where there are none.

    ``index`` reads ``model.safetensors.index.json``. Files that it does not name are of an earlier
    model, or of another library.

    Raises:
        ConfigError: it names files that are not there, or others than ``model.safetensors`` where
            that is there as well, which libraries choose differently; or files have other names.
    """
    there = set(there)
    found = {name for name in there if name.endswith(_ENDING)}
    if not found and INDEX not in there:
        return []
    named: set[str] | None = None
    if INDEX in there:
        named = _named_in(path, index())
    subject = f"model.path={path!r}"
    shards = {name for name in found if _SHARD.fullmatch(name)}
    if named is None and _WHOLE in found and shards:
        raise ConfigError(
            f"{subject}: it has {_WHOLE}, and parts of a model ({_some(shards)}) without {INDEX}: "
            "libraries would load different weights; delete those that are not the model's"
        )
    if _WHOLE in found and named in (None, {_WHOLE}):
        return [_WHOLE]
    if named is None:
        raise ConfigError(
            f"{subject}: nothing says which of its *.safetensors hold the weights: expected "
            f"{_WHOLE}, or {INDEX}, which names them (there is: {_some(found)})"
        )
    if _WHOLE in found:
        raise ConfigError(
            f"{subject}: it has {_WHOLE}, and {INDEX} names others ({_some(named)}): libraries "
            "would load different weights; delete those that are not the model's"
        )
    if named - found:
        raise ConfigError(
            f"{subject}: {INDEX} names files that are not there: {_some(named - found)}; copy or "
            "download them again"
        )
    return sorted(named)


def _named_in(path: str, index: bytes) -> set[str]:
    """Return the files that an index names."""
    try:
        content = json.loads(index)
        content["metadata"]  # transformers reads it
        named = set(content["weight_map"].values())
        if not named or any(PurePosixPath(name).name != name for name in named):
            raise ValueError(f"weight_map has {_some(named)} where names of files were expected")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path={path!r}: {INDEX} cannot be read: {error!r}") from error
    return named


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names))[:_NAMED])


def check_no_pattern(path: str, engine: str) -> None:
    """Raise ConfigError for a model's folder in whose path ``engine`` reads a pattern: it globs for
    the files of weights, finds none in ``exp[1]``, and takes those of ``exp1`` if they are there.
    """
    if has_magic(path) and not is_remote(path):
        raise ConfigError(
            f"model.path={path!r}: {engine} reads '*', '?' and '[' in the path of a model as a "
            "pattern, and would look for its weights elsewhere: rename the folder, or take "
            "rollout.engine=transformers"
        )


def check_no_other_weights(path: str, engine: str) -> None:
    """Raise ConfigError for a model with ``*.safetensors`` beside those that hold its weights, as of
    another precision (``variant``) or of Mistral's own library (``consolidated``), where no index
    names these: ``engine`` would load all of them.
    """
    with reached(path):
        folder = folder_if_here(path)
        if folder is None:
            there = {file.name for file in find_model(path).files}
        else:
            there = set(listed_files(*open_fs(folder)))
    if INDEX in there:
        return
    found = {name for name in there if name.endswith(_ENDING)}
    others = found - {_WHOLE}
    if _WHOLE in found and others:
        raise ConfigError(
            f"model.path={path!r}: {engine} would load {_some(others)} as well as {_WHOLE}, in any "
            f"order, where {INDEX} names none of them: move those files away, or take "
            "rollout.engine=transformers"
        )


def check_has_safetensors(path: str, backend: str) -> None:
    """Raise ConfigError for a model at ``path`` whose weights are in files of other formats alone,
    of which ``backend`` reads none.
    """
    if weight_shapes(path):
        return
    with reached(path):
        fs, folder = open_model(path)
        if not fs.exists(folder):
            return
        others = [name for name in fs.ls(folder, detail=False) if str(name).endswith(".bin")]
    if others:
        raise ConfigError(
            f"model.path={path!r}: its weights are in {_some(PurePosixPath(name).name for name in others)}, "
            f"and trainer.backend={backend} reads *.safetensors alone: save the model with "
            "transformers once more, or take trainer.backend=torch"
        )


def tensors_in_file(url: str, subject: str) -> dict[str, StoredTensor]:
    """Return each tensor in one ``.safetensors`` file, on any fsspec URL, by name. ConfigError,
    beginning with ``subject``, for one that cannot be read.
    """
    try:
        return dict(_tensors_in(*open_fs(url)))
    except Exception as error:  # drivers of remote storage raise what they like
        raise ConfigError(f"{subject}: {url} cannot be read: {error}") from error


@lru_cache(maxsize=4096)  # a run asks for each role, and again for each worker's memory
def _tensors_at(url: str, tag: str) -> tuple[tuple[str, StoredTensor], ...]:
    """Read the header of a file at a URL, whose ``tag`` would be another one if it had changed."""
    return tuple(_tensors_in(*open_fs(url)))


def _tensors_in(fs: Any, name: str) -> Iterator[tuple[str, StoredTensor]]:
    """Read one file's header: its length in 8 bytes little-endian, then JSON."""
    try:
        with fs.open(name, "rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            if length > _LARGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            end = file.seek(0, SEEK_END)
        header.pop("__metadata__", None)
        first = _LENGTH + length
        url = fs.unstrip_protocol(name)
        found = []
        for key, tensor in header.items():
            begin, behind = tensor["data_offsets"]
            shape = tuple(map(int, tensor["shape"]))
            stored = StoredTensor(shape, str(tensor["dtype"]), url, first + begin, behind - begin)
            found.append((key, stored))
        if end != max((each.begin + each.nbytes for _, each in found), default=first):
            raise ValueError(f"it has {end} bytes, which are not all of its tensors or too many")
        yield from found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: {name} is no whole safetensors file: {error}") from error


def read_widths(path: str) -> Widths | None:
    """Read widths from a folder's ``config.json``, on any fsspec URL; None without one.
    ConfigError if damaged.
    """
    config = read_config(path)
    if config is None:
        return None
    return understood(path, config, _widths)


def _widths(config: Mapping[str, Any]) -> Widths:
    text = config.get("text_config", config)
    found = text if all(map(text.get, _WIDTHS)) else completed(config) or config
    return Widths(
        heads=_whole(found.get("num_attention_heads")),
        kv_heads=_whole(found.get("num_key_value_heads")),
        intermediate=_whole(found.get("intermediate_size")),
        vocabulary=_whole(found.get("vocab_size")),
        experts=next((text[name] for name in _EXPERTS if isinstance(text.get(name), int)), None),
    )


def _whole(value: object) -> int | None:
    if isinstance(value, int):
        return value
    return None
