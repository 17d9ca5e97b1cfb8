"""Recipes: one algorithm's whole DAG a page, made from a configuration.

A reward, an advantage or a loss of one's own is passed as an argument; ``DAG.add``, ``replace`` and ``without`` change
the rest. ``from siirl_dask import grpo, ppo, dapo`` gives the functions.
"""
