"""The nodes that come with the package: functions ``(Context, pa.Table) -> pa.Table``. Any such
function is a node.
"""

from siirl_dask.nodes.advantages.advantage import draw_minibatches, estimate_advantage
from siirl_dask.nodes.advantages.agent_advantage import (
    estimate_agent_advantages,
    estimate_role_advantages,
)
from siirl_dask.nodes.advantages.greedy_baselines import (
    generate_with_greedy,
    take_greedy_baselines,
)
from siirl_dask.nodes.advantages.shaping import penalise_kl, penalise_overlong
from siirl_dask.nodes.advantages.similarity import embed_texts, score_by_similarity
from siirl_dask.nodes.advantages.token_advantage import estimate_token_advantages
from siirl_dask.nodes.advantages.turn_advantage import estimate_turn_advantages
from siirl_dask.nodes.dynamic_sampling import sample_until_mixed
from siirl_dask.nodes.episodes.agents import append_response, bring_out, hand_over, take_agents
from siirl_dask.nodes.episodes.play import play, play_answers
from siirl_dask.nodes.episodes.run_agents import run_agents, run_agents_to_validate
from siirl_dask.nodes.episodes.turn_scores import score_turns
from siirl_dask.nodes.evaluate import (
    ColumnPath,
    eval_table,
    generate_answers,
    measure_answers,
    validation_sampling,
)
from siirl_dask.nodes.generate import generate
from siirl_dask.nodes.logprobs import (
    average_logprobs,
    base_logprobs,
    estimate_values,
    policy_logprobs,
    reference_logprobs,
    rollout_logprobs,
)
from siirl_dask.nodes.policy_change import measure_policy_change
from siirl_dask.nodes.prompts import check_expected_lengths, encode_prompts
from siirl_dask.nodes.reward import score
from siirl_dask.nodes.reward_model import score_with_model
from siirl_dask.nodes.token_masks.covariance import choose_covariant
from siirl_dask.nodes.token_masks.entropy import choose_high_entropy
from siirl_dask.nodes.token_masks.second_moment import mask_second_moment
from siirl_dask.nodes.token_masks.truncated import mask_truncated
from siirl_dask.nodes.update import update_policy
from siirl_dask.nodes.update_critic import update_critic
from siirl_dask.nodes.weights import load_weights, publish_weights

__all__ = [
    "ColumnPath",
    "append_response",
    "average_logprobs",
    "base_logprobs",
    "bring_out",
    "check_expected_lengths",
    "choose_covariant",
    "choose_high_entropy",
    "draw_minibatches",
    "embed_texts",
    "encode_prompts",
    "episodes",
    "estimate_advantage",
    "estimate_agent_advantages",
    "estimate_role_advantages",
    "estimate_token_advantages",
    "estimate_turn_advantages",
    "estimate_values",
    "eval_table",
    "evaluate",
    "generate",
    "generate_answers",
    "generate_with_greedy",
    "hand_over",
    "load_weights",
    "mask_second_moment",
    "mask_truncated",
    "measure_answers",
    "measure_policy_change",
    "penalise_kl",
    "penalise_overlong",
    "play",
    "play_answers",
    "policy_logprobs",
    "publish_weights",
    "reference_logprobs",
    "rollout_logprobs",
    "run_agents",
    "run_agents_to_validate",
    "sample_until_mixed",
    "score",
    "score_by_similarity",
    "score_turns",
    "score_with_model",
    "take_agents",
    "take_greedy_baselines",
    "update_critic",
    "update_policy",
    "validation_sampling",
]
