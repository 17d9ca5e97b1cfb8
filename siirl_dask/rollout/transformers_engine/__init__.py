"""Samples with a model of transformers: a decoding loop of our own, its caches, graphs and drafts."""

from siirl_dask.rollout.transformers_engine.spec import SPEC

__all__ = ["SPEC", "engine"]
