"""Generates with servers of vLLM or SGLang that somebody else has started. Nothing here imports vLLM but
``extension`` and ``serve``, which run in a server.
"""

from siirl_dask.rollout.server_engine.spec import SPEC

__all__ = ["SPEC"]
