"""Reads and writes a run's folder: config, DAG, checkpoints, tables of rows. Needs neither torch
nor Dask.
"""

__all__ = [
    "attempt",
    "check",
    "checkpoint_model",
    "checkpoint_state",
    "checkpoints",
    "export",
    "folder",
    "identity_file",
    "owner",
    "past_weights",
    "preview",
    "reader",
    "replays",
    "retention",
    "samples",
    "stages",
    "tables",
    "trace",
    "whole_checkpoint",
]
