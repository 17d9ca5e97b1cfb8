"""The Data Coordinator: the Dataloader reads prompts, the Databuffer moves rows between workers."""

from siirl_dask.coordinator.source import (
    Dataset,
    Mixture,
    Source,
    data_files,
    dataset_schema,
    exists,
    is_vacant,
    open_source,
    opened,
    source_schema,
    splits_of,
    training_dataset,
    unread_files,
)

__all__ = [
    "Dataset",
    "Mixture",
    "Source",
    "data_files",
    "databuffer",
    "dataloader",
    "dataset_schema",
    "exists",
    "is_vacant",
    "layout",
    "open_source",
    "opened",
    "source_schema",
    "splits_of",
    "training_dataset",
    "transport",
    "unread_files",
]
