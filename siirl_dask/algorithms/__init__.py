"""Advantages, losses and KL estimates: pure functions of tensors. Passing one is the extension point: no registry."""

from siirl_dask.algorithms.advantages import AdvantageFn, dr_grpo, grpo
from siirl_dask.algorithms.kl import k1, k2, k3
from siirl_dask.algorithms.losses import LossFn, LossInputs, TokenLoss, ppo_clip

__all__ = ["AdvantageFn", "LossFn", "LossInputs", "TokenLoss", "dr_grpo", "grpo", "k1", "k2", "k3", "ppo_clip"]
