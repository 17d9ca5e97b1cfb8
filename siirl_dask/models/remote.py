"""Models at URLs: which files a model has there, as they are at one moment. cache.py brings them to
a host.

``hf://org/name[@revision][/folder]`` is a repository of the Hugging Face hub, at the commit that
its revision has now; any other URL that fsspec opens is a folder of files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import StorageError, open_fs

from siirl_dask.errors import ConfigError, UserError, did_you_mean

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

HUB = "hf://"
_NAME = re.compile(
    r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<folder>[^?#]*))?", re.ASCII
)
_OTHER_KINDS = ("datasets/", "spaces/", "buckets/", "kernels/")
_TAGS = (
    "sha256",
    "ETag",
    "etag",
    "md5Hash",
    "md5",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)
"""Names that stores have for a file's digest, or for the time of its last change; the best come
first."""
_WEIGHTS = (".safetensors",)
_OTHER_WEIGHTS = (
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
    ".tflite",
    ".ot",
)
_OF_ANOTHER_LIBRARY = "consolidated"
"""How files begin that hold Mistral's weights once more, under names of its own library."""
_INDEX = ".safetensors.index.json"
_OFFLINE = (
    "HF_HUB_OFFLINE is set or the hub does not answer, and its cache on this machine has not all "
    "of it"
)
_DESCRIBES = re.compile(
    r"(?:generation_)?config\.json|chat_template\.json|.*\.(?:model|tiktoken|jinja)"
    r"|(?!.*\.py$).*(?:token|tekken|vocab|merges|processor).*"
)
"""Names of the files that say how weights are used: config, tokenizer, processors, templates."""
_NEEDED = "config.json"
TEMPLATES = "additional_chat_templates"
"""The one folder in a model's folder that is read: transformers takes its tokenizer's further chat
templates from there, such as that for prompts with tools."""
_TEMPLATE = ".jinja"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a model."""

    name: str
    """Its path in the model's folder."""
    nbytes: int
    tag: str
    """Text that changes with the content: a digest, or the time of the last change."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model at a URL, with the files that it had there when somebody looked."""

    url: str
    """The URL as the configuration names it."""
    files: tuple[RemoteFile, ...]
    commit: str = ""
    """Commit of a repository of the hub."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def key(self) -> str:
        """Text of 16 letters, another one for other files."""
        described = [[file.name, file.nbytes, file.tag] for file in self.files]
        return sha256(json.dumps([self.url, self.commit, described]).encode()).hexdigest()[:16]

    @property
    def has_weights(self) -> bool:
        """Whether a file has weights, of any format."""
        return any(file.name.endswith((*_WEIGHTS, *_OTHER_WEIGHTS)) for file in self.files)

    def without_weights(self) -> RemoteModel:
        """Return the model with its config and tokenizer alone."""
        ends = (*_WEIGHTS, *_OTHER_WEIGHTS)
        return replace(
            self, files=tuple(file for file in self.files if not file.name.endswith(ends))
        )


_NOT_REACHED = "the hub cannot be reached"


class UnreachableModelError(ConfigError):
    """The hub does not answer, so that nobody knows whether the model is there."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A folder of a repository of the hub."""

    repo: str
    revision: str | None
    folder: str


def is_remote(path: str) -> bool:
    """Return whether a model's path is a URL that is not of a local file. ConfigError for one
    that nothing opens.
    """
    if "://" not in path and "::" not in path:
        return False
    try:
        return not isinstance(open_fs(path)[0], LocalFileSystem)
    except StorageError as error:
        raise ConfigError(f"model {path!r}: {error}") from error


def hub_name(url: str) -> HubName:
    """Return what a URL ``hf://...`` names. ConfigError unless it is a model's repository."""
    match = _NAME.fullmatch(url)
    if match is None or url.removeprefix(HUB).startswith(_OTHER_KINDS):
        raise ConfigError(
            f"model {url!r}: expected hf://org/name, hf://org/name@revision or a folder in it"
        )
    revision = match["revision"]
    return HubName(
        match["repo"], revision and unquote(revision), (match["folder"] or "").strip("/")
    )


def find_model(url: str) -> RemoteModel:
    """Look at the files of the model at ``url``; read none. ConfigError, by name, where there is
    none, or where its store cannot be reached.
    """
    with reached(url):
        model = _on_hub(url) if url.startswith(HUB) else RemoteModel(url, _chosen(_listed(url)))
    names = [file.name for file in model.files]
    if _NEEDED not in names:
        there = "nothing"
        if names:
            there = ", ".join(names[:8])
        raise ConfigError(
            f"model {url!r}: there is no {_NEEDED} (there is: {there}); expected a folder that "
            f"transformers loads{_nearest(url) if not names else ''}"
        )
    return model


@contextmanager
def reached(url: str, file: str = "") -> Iterator[None]:
    """Turn any error over the model at ``url``, or a file of it, or its store into a ConfigError
    that names it.
    """
    subject = f"model {url!r}" + (f": its file {file}" if file else "")
    try:
        yield
    except UserError:
        raise
    except StorageError as error:
        raise ConfigError(f"{subject}: {error}") from error
    except Exception as error:  # drivers of remote storage raise what they like
        if url.startswith(HUB):
            reason = _why_not_from_hub(error)
            if reason == _OFFLINE or reason.startswith(_NOT_REACHED):
                raise UnreachableModelError(f"{subject}: {reason}") from error
            raise ConfigError(f"{subject}: {reason}") from error
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise ConfigError(
                f"{subject} is not there: {error}{'' if file else _nearest(url)}"
            ) from error
        raise ConfigError(
            f"{subject}: its store cannot be reached: {type(error).__name__}: {error}"
        ) from error


def _why_not_from_hub(error: Exception) -> str:
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return "the hub wants an account that was let in: HF_TOKEN names one"
        case errors.RepositoryNotFoundError():
            return "the hub has no such repository, or it is private: HF_TOKEN names an account"
        case errors.RevisionNotFoundError():
            return "its repository has no such revision"
        case errors.OfflineModeIsEnabled() | errors.LocalEntryNotFoundError():
            return _OFFLINE
        case errors.EntryNotFoundError():
            return "its repository has no such folder"
        case errors.HFValidationError():
            return str(error)
    return f"{_NOT_REACHED}: {type(error).__name__}: {error}"


def _listed(url: str) -> list[RemoteFile]:
    """Return the files of a folder, and the chat templates in it."""
    fs, path = open_fs(url)
    entries = fs.ls(path, detail=True)
    found = [(_base(_path(info)), info) for info in entries if info["type"] == "file"]
    for folder in entries:
        if folder["type"] == "directory" and _base(_path(folder)) == TEMPLATES:
            found += [
                (f"{TEMPLATES}/{_base(_path(info))}", info)
                for info in fs.ls(_path(folder), detail=True)
                if info["type"] == "file" and _path(info).endswith(_TEMPLATE)
            ]
    unknown = [_path(info) for _, info in found if info["size"] is None]
    if unknown:
        raise ConfigError(f"model {url!r}: its store does not tell how large {unknown[0]} is")
    return [RemoteFile(name, int(info["size"]), tag_of(info)) for name, info in found]


def _path(info: Mapping[str, object]) -> str:
    """Return where a store's entry is, without the slash that some stores end folders with."""
    return str(info["name"]).rstrip("/")


def tag_of(info: Mapping[str, object]) -> str:
    """Return what a store says of a file that changes with its content."""
    return next((str(info[name]) for name in _TAGS if info.get(name)), "")


def is_of_weights(name: str) -> bool:
    """Return whether a model's file of that name holds weights, or is an index of such files."""
    return name.endswith((*_WEIGHTS, *_OTHER_WEIGHTS, ".index.json"))


def describes_model(name: str) -> bool:
    """Return whether a model's file of that name says how its weights are used."""
    if is_of_weights(name):
        return False
    return _DESCRIBES.fullmatch(name) is not None


def is_of_mistral(name: str) -> bool:
    """Return whether a file of that name is of Mistral's own library, beside the model's."""
    return name.startswith(_OF_ANOTHER_LIBRARY)


def _base(path: str) -> str:
    return PurePosixPath(path).name


def _chosen(files: Sequence[RemoteFile]) -> tuple[RemoteFile, ...]:
    """Return the files that trainers and engines read, by name: where there are safetensors, no
    weights but these.
    """
    seen = sorted(
        (file for file in files if file.name and not file.name.startswith(".")),
        key=lambda file: file.name,
    )
    own = [file for file in seen if not is_of_mistral(file.name)]
    if any(file.name.endswith(_WEIGHTS) for file in own):
        seen = [file for file in own if not file.name.endswith(_OTHER_WEIGHTS)]
    return tuple(seen)


def _on_hub(url: str) -> RemoteModel:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFile, RepoFolder

    name = hub_name(url)
    if constants.HF_HUB_OFFLINE:
        return _in_hub_cache(url, name)
    api = HfApi()
    commit = api.repo_info(name.repo, revision=name.revision).sha
    entries = list(api.list_repo_tree(name.repo, name.folder or None, revision=commit))
    files = [_of_hub(entry, "") for entry in entries if isinstance(entry, RepoFile)]
    for folder in entries:
        if isinstance(folder, RepoFolder) and _base(folder.path) == TEMPLATES:
            templates = api.list_repo_tree(name.repo, folder.path, revision=commit)
            files += [
                _of_hub(entry, f"{TEMPLATES}/")
                for entry in templates
                if isinstance(entry, RepoFile) and entry.path.endswith(_TEMPLATE)
            ]
    return RemoteModel(url, _chosen(files), str(commit))


def _of_hub(entry: RepoFile, folder: str) -> RemoteFile:
    """Return a file of a repository, which is in ``folder`` of the model's."""
    digest = entry.blob_id
    if entry.lfs:
        digest = entry.lfs.sha256
    return RemoteFile(folder + _base(entry.path), entry.size, digest)


def _in_hub_cache(url: str, name: HubName) -> RemoteModel:
    """Return the model as the hub's own cache on this machine has it."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(
        name.repo, str(PurePosixPath(name.folder, _NEEDED)), revision=name.revision
    )
    if not isinstance(config, str):
        raise ConfigError(f"model {url!r}: {_OFFLINE}")
    root = Path(config).parent
    templates = root.glob(f"{TEMPLATES}/*{_TEMPLATE}")
    there = [file for file in (*root.iterdir(), *templates) if file.is_file()]
    shards = {shard for file in there if file.name.endswith(_INDEX) for shard in _shards(file)}
    lacking = sorted(shards - {file.name for file in there})
    if lacking:
        raise ConfigError(f"model {url!r}: {_OFFLINE}: {', '.join(lacking[:5])}")
    listed = []
    for file in there:
        path = file.relative_to(root).as_posix()
        listed.append(RemoteFile(path, file.stat().st_size, file.resolve().name))
    commit = Path(config).parents[len(PurePosixPath(name.folder).parts)].name
    return RemoteModel(url, _chosen(listed), commit)


def _shards(index: Path) -> set[str]:
    """Return the files that hold a model's weights, as their index says."""
    return set(json.loads(index.read_bytes())["weight_map"].values())


def _nearest(url: str) -> str:
    """Return a hint at the nearest name beside ``url``."""
    try:
        fs, path = open_fs(url)
        folder, _, name = path.rstrip("/").rpartition("/")
        return did_you_mean(
            name, [_base(str(found).rstrip("/")) for found in fs.ls(folder, detail=False)]
        )
    except Exception:
        # the folder or bucket is not there either; the error that led here is the one to tell
        return ""
