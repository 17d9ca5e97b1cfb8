"""Runs SGLang as a rollout engine beside a worker's process. Nothing here imports SGLang before
an engine is built.
"""

from siirl_dask.rollout.sglang_engine.spec import SPEC

__all__ = ["SPEC"]
