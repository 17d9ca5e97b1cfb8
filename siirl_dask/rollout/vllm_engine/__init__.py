"""Runs vLLM as a rollout engine inside a worker's process."""

from siirl_dask.rollout.vllm_engine.spec import SPEC

__all__ = ["SPEC"]
