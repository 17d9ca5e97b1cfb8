"""The nodes that come with the package: functions ``(Context, pa.Table) -> pa.Table``. Any such function is a node."""

from siirl_dask.nodes.advantage import (
    draw_minibatches,
    estimate_advantage,
    estimate_token_advantages,
    take_greedy_baselines,
)
from siirl_dask.nodes.covariance import choose_covariant
from siirl_dask.nodes.dynamic_sampling import sample_until_mixed
from siirl_dask.nodes.evaluate import ColumnPath, eval_table, measure_answers
from siirl_dask.nodes.generate import generate, generate_answers, generate_with_greedy
from siirl_dask.nodes.logprobs import base_logprobs, estimate_values, policy_logprobs, reference_logprobs
from siirl_dask.nodes.prompts import encode_prompts
from siirl_dask.nodes.reward import score, score_with_model
from siirl_dask.nodes.shaping import penalise_kl, penalise_overlong
from siirl_dask.nodes.update import update_critic, update_policy
from siirl_dask.nodes.weights import load_weights, publish_weights

__all__ = [
    "ColumnPath",
    "base_logprobs",
    "choose_covariant",
    "draw_minibatches",
    "encode_prompts",
    "estimate_advantage",
    "estimate_token_advantages",
    "estimate_values",
    "eval_table",
    "generate",
    "generate_answers",
    "generate_with_greedy",
    "load_weights",
    "measure_answers",
    "penalise_kl",
    "penalise_overlong",
    "policy_logprobs",
    "publish_weights",
    "reference_logprobs",
    "sample_until_mixed",
    "score",
    "score_with_model",
    "take_greedy_baselines",
    "update_critic",
    "update_policy",
]
