"""The Data Coordinator: the Dataloader reads prompts, the Databuffer moves rows between workers."""

from siirl_dask.coordinator.source import (
    Dataset,
    Mixture,
    Source,
    dataset_schema,
    exists,
    open_source,
    opened,
    source_schema,
    training_dataset,
)

__all__ = [
    "Dataset",
    "Mixture",
    "Source",
    "databuffer",
    "dataloader",
    "dataset_schema",
    "exists",
    "layout",
    "open_source",
    "opened",
    "source_schema",
    "training_dataset",
    "transport",
]
