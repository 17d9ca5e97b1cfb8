"""Puts the model of a run's checkpoint where every worker of an evaluation can read it, for as
long as that takes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import absolute, join, open_fs, remove_tree

from siirl_dask.config import ClusterConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models.remote import HUB, is_remote
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoints import Checkpoint
from siirl_dask.runs.export import put_folder, write_folder
from siirl_dask.runs.reader import Run, is_run
from siirl_dask.runs.retention import MODEL, OWNER
from siirl_dask.wording import redacted

logger = logging.getLogger("siirl_dask.runs")
_LEASE = 30.0  # seconds without a sign of life, after which a clean-up may delete the model


@contextmanager
def folder_for_workers(cluster: ClusterConfig, store: str) -> Iterator[str]:
    """Yield a path or URL at which nothing is, and remove at the end what has come there.

    It is a temporary folder where the workers are processes of this machine, and one below
    ``store`` where they may be on others. That one has a sign of life beside it, by which
    ``siirl-dask clean`` sees that it is in use.
    """
    if not (cluster.exists or cluster.spec):
        with TemporaryDirectory() as folder:
            yield folder
        return
    url = join(absolute(store), f"{MODEL}{uuid4().hex[:16]}")  # workers may run in other folders
    fs, path = open_fs(url)
    with take(f"{url}{OWNER}", _LEASE, logger.info):
        try:
            yield path if isinstance(fs, LocalFileSystem) else url
        finally:
            try:
                remove_tree(fs, path)
            except Exception as error:
                # each store has errors of its own; what ended the evaluation is the one to tell
                text = redacted(
                    f"the model at {url} could not be removed: {type(error).__name__}: {error}"
                )
                logger.warning("%s", text)


def is_run_or_model(url: str, step: int | None) -> bool:
    """Return whether ``url`` names a run, and not a model.

    ConfigError where neither is there, or for a ``step`` of a model.
    """
    if not url.startswith(HUB) and is_run(url):
        return True
    if not is_remote(url) and not Path(url, "config.json").is_file():
        raise ConfigError(
            f"{url!r} is neither a run, with a config.yaml, nor a Hugging Face folder, "
            "with a config.json"
        )
    if step is not None:
        raise ConfigError(
            f"{url!r} is a Hugging Face folder, and has no step {step}: leave out --step"
        )
    return False


def write_checkpoint(run: str, to: str, found: Checkpoint) -> None:
    """Write the policy of the checkpoint ``found`` of ``run`` to ``to``, as ``siirl-dask
    export`` does.
    """
    fs, path = open_fs(to)
    if isinstance(fs, LocalFileSystem):  # nobody reads it yet, so it need not be whole at once
        Path(path).mkdir(parents=True, exist_ok=True)
        write_folder(Path(path), run, Run(run).config, found, role="policy")
        return
    with TemporaryDirectory() as folder:
        write_folder(Path(folder), run, Run(run).config, found, role="policy")
        put_folder(Path(folder), to)
