"""Reward functions. Any function of this shape is one: name it in the config as ``module:function``, or pass it."""

from siirl_dask.rewards.exact import RewardFn, exact_match

__all__ = ["RewardFn", "exact_match"]
