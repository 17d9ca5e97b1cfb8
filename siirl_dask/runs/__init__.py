"""Reads and writes a run's folder: config, DAG, checkpoints, tables of rows. Needs neither torch
nor Dask.
"""
