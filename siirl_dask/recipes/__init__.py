"""Recipes: functions from a configuration to the DAG of one algorithm.

Pass your own reward, advantage or loss as an argument; change the rest with ``DAG.add``,
``replace`` and ``without``. ``from siirl_dask import grpo, ppo, dapo, agents`` imports the
functions.
"""

from siirl_dask.recipes.validation import measure_options, scored_as_training, validation_dag

__all__ = [
    "agents",
    "common",
    "dapo",
    "grpo",
    "measure_options",
    "ppo",
    "scored_as_training",
    "turns",
    "validation_dag",
]
