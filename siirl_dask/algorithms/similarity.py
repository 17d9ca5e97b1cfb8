"""Rewards of failures by their likeness to successes of the same task (SRPO, arXiv:2511.15605,
as siiRL has it).
"""

from __future__ import annotations

import torch
from torch import Tensor

# what the failure nearest to a success may get: as siiRL, so that no failure passes for a success
_BEST = 0.6
_STEEPNESS = 10.0
_MIDDLE = 0.5
_ALIKE = 1e-6  # a spread of distances below this is none


def nearest_distances(embeddings: Tensor, centres: Tensor) -> Tensor:
    """Return the Euclidean distance of each embedding to the nearest centre. [N, D], [C, D] with C
    >= 1 -> [N] float64.

    Differences are taken, in float64, and not products of matrices: the result of a row does not
    depend on others.
    """
    apart = embeddings.double()[:, None] - centres.double()[None]
    return apart.square().sum(-1).min(1).values.sqrt()


def srpo_rewards(distances: Tensor) -> Tensor:
    """Return the rewards of a task's failures from their distances to its successes
    (Self-Referential Policy Optimization, arXiv:2511.15605). [F] -> [F] float32.

    ``0.6 sigmoid(10 (0.5 - d'))``, ``d' = (d - min d) / (max d - min d)`` over the task's failures,
    and 0.5 where they are all alike, which gives 0.3. The nearest failure gets 0.596, the farthest
    0.004. The paper standardises distances instead; these are the numbers of siiRL's code.
    """
    if not len(distances):
        return distances.float()
    low = distances.min()
    high = distances.max()
    scaled = (
        (distances - low) / (high - low)
        if high - low >= _ALIKE
        else torch.full_like(distances, 0.5)
    )
    return (_BEST * torch.sigmoid(_STEEPNESS * (_MIDDLE - scaled))).float()
