"""Reward functions, and the scorer that calls one for each row.

A reward function has the signature of ``RewardFn``; a config names it as ``module:function``, a
recipe takes the function itself. ``build_scorer`` is the ``build`` of a role that scores.
"""

from siirl_dask.rewards.code_execution.cases import code_execution
from siirl_dask.rewards.math_answers import dapo_math, gsm8k, math_answer
from siirl_dask.rewards.reasoning_answers import reasoning_gym
from siirl_dask.rewards.scorer import RewardFn, Score, Scorer, Scoring, build_scorer, score_of
from siirl_dask.rewards.several_rewards import by_source, weighted_sum
from siirl_dask.rewards.signatures import PASSED_IF_NAMED
from siirl_dask.rewards.text_answers import (
    brevity,
    exact_match,
    matches_format,
    multiple_choice,
)
from siirl_dask.rewards.trl_functions import from_trl
from siirl_dask.rewards.verl_functions import from_verl

__all__ = [
    "PASSED_IF_NAMED",
    "RewardFn",
    "Score",
    "Scorer",
    "Scoring",
    "brevity",
    "build_scorer",
    "by_source",
    "child_process",
    "code_execution",
    "dapo_math",
    "exact_match",
    "from_trl",
    "from_verl",
    "gsm8k",
    "matches_format",
    "math_answer",
    "multiple_choice",
    "reasoning_answers",
    "reasoning_gym",
    "score_of",
    "weighted_sum",
]
