"""Recipes: functions from a configuration to the DAG of one algorithm.

Pass your own reward, advantage or loss as an argument; change the rest with ``DAG.add``,
``replace`` and ``without``. ``from siirl_dask import grpo, ppo, dapo, agents`` imports the
functions.
"""

__all__ = ["agents", "common", "dapo", "grpo", "ppo", "turns", "validation"]
