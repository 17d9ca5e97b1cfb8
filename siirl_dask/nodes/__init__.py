"""Built-in node functions: ``(Context, pa.Table) -> pa.Table``. Any function of that shape is a node."""

from siirl_dask.nodes.advantage import draw_minibatches, estimate_advantage
from siirl_dask.nodes.logprobs import policy_logprobs, reference_logprobs
from siirl_dask.nodes.prompts import encode_prompts
from siirl_dask.nodes.reward import score
from siirl_dask.nodes.rollout import generate, generate_greedy
from siirl_dask.nodes.update import update_policy
from siirl_dask.nodes.weights import load_weights, publish_weights

__all__ = [
    "draw_minibatches",
    "encode_prompts",
    "estimate_advantage",
    "generate",
    "generate_greedy",
    "load_weights",
    "policy_logprobs",
    "publish_weights",
    "reference_logprobs",
    "score",
    "update_policy",
]
