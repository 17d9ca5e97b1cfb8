"""Loss inputs that several test files share, and every surrogate with the options it is tested
with.
"""

from functools import partial

import torch

from siirl_dask.algorithms import (
    LossInputs,
    cispo,
    clip_cov,
    cpgd,
    dppo,
    dro,
    gmpo,
    gspo,
    happo_clip,
    kl_cov,
    policy_gradient,
    ppo_clip,
    sapo,
    sequence_clip,
    turn_clip,
    vespo,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
SURROGATES = {
    "policy_gradient": policy_gradient,
    "ppo_clip": ppo_clip,
    "dual_clip": partial(ppo_clip, dual_clip=3.0),
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "cpgd": cpgd,
    "cpgd without drift": partial(cpgd, drift=0.0),
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "sapo": sapo,
    "dppo": dppo,
    "dppo by kl": partial(dppo, divergence="kl", low=0.05, high=0.05),
    "dro": partial(dro, beta=0.5),
    "vespo": vespo,
    "sequence_clip": sequence_clip,
    "turn_clip": turn_clip,
    "turn_clip by the mean": partial(turn_clip, mean=True),
    "happo_clip": happo_clip,
}


def inputs(logprobs, old, advantages, **others):
    """LossInputs of one row; the sampler is the old policy, no token is covariant, a row is one
    turn, and no agent was updated before, unless ``others`` say so."""
    defaults = {
        "logprobs": torch.as_tensor(logprobs),
        "old_logprobs": torch.as_tensor(old),
        "advantages": torch.as_tensor(advantages),
        "rollout_logprobs": torch.as_tensor(old),
        "entropy": torch.zeros(len(logprobs)),
        "offsets": torch.tensor([0, len(logprobs)]),
        "columns": {
            "covariant": torch.zeros(len(logprobs), dtype=torch.bool),
            "token_turns": torch.zeros(len(logprobs), dtype=torch.int32),
            "policy_change": torch.zeros(len(logprobs)),
        },
    }
    return LossInputs(**defaults | others)


EXAMPLE = inputs([-0.5, -1.5, -0.5, -1.0], [-1.0, -1.0, -1.0, -3.0], [1.0, 1.0, -1.0, -1.0])
TWO_ROWS = torch.tensor([0, 2, 4])
