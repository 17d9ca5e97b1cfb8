"""Reward functions. Any function of this shape is one: name it in the config as ``module:function``, or pass it.

``build_scorer`` is a role's ``build``: it calls the function for each row.
"""

from siirl_dask.rewards.arithmetic import gsm8k
from siirl_dask.rewards.choice import multiple_choice
from siirl_dask.rewards.competition import dapo_math
from siirl_dask.rewards.exact import exact_match
from siirl_dask.rewards.programs import code_execution
from siirl_dask.rewards.scorer import RewardFn, Score, Scorer, build_scorer
from siirl_dask.rewards.shaping import brevity, matches_format, weighted_sum
from siirl_dask.rewards.symbolic import math_answer

__all__ = [
    "RewardFn",
    "Score",
    "Scorer",
    "brevity",
    "build_scorer",
    "code_execution",
    "dapo_math",
    "exact_match",
    "gsm8k",
    "matches_format",
    "math_answer",
    "multiple_choice",
    "weighted_sum",
]
