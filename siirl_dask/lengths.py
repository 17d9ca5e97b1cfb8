"""The column of expected lengths (``rollout.expected_length``): DataError for one that cannot be used, before anything
starts.
"""

from __future__ import annotations

from siirl_storage import StorageError

from siirl_dask.config import Config
from siirl_dask.coordinator.dataloader import Source, open_source
from siirl_dask.errors import ConfigError, DataError, did_you_mean
from siirl_dask.nodes.lengths import check_expected
from siirl_dask.phases import Phases, exists


def refuse_wrong_lengths(config: Config, phases: Phases) -> None:
    """ConfigError where no node of the training asks for the column. DataError where its dataset has none, or where any
    dataset that is there has one that holds anything but whole numbers of at least 1.
    """
    column = config.rollout.expected_length
    if column is None:
        return
    nodes = phases["train"][0].dag.nodes
    if not any(column in (*node.contract.reads, *node.contract.optional) for node in nodes):
        raise ConfigError(
            f"rollout.expected_length={column!r} and no node reads that column: give the node that runs "
            "siirl_dask.nodes:encode_prompts the rollout as well, as in with: {rollout: ${rollout}, ...}"
        )
    for phase, (_, source) in phases.items():
        if exists(source.url):
            _check(source, column, required=phase == "train")


def _check(source: Source, column: str, *, required: bool) -> None:
    snapshot, what = open_source(source), f"rollout.expected_length={column!r}: that column of dataset {source.url!r}"
    if column not in snapshot.schema.names:
        if required:
            known = snapshot.schema.names
            raise DataError(f"{what} is not there (there is: {known}){did_you_mean(column, known)}")
        return
    first = 0
    for group in snapshot.row_groups():
        try:
            lengths = snapshot.read_row_group(group, [column])[column]
        except StorageError as error:
            raise DataError(f"dataset {source.url!r}: {error}") from error
        check_expected(lengths, what, first)
        first += group.rows
