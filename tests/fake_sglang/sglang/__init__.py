"""Stands in for SGLang 0.5.23: the parts of its Engine that siirl_dask calls, with its names of
arguments and its rules, over a model of transformers on a CPU. What each part does was read in the
source of the wheel.
"""
