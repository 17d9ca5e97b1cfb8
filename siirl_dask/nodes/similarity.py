"""Rewards failures by how much they look like successes of the same task: SRPO (arXiv:2511.15605), as siiRL has it."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from siirl_dask.algorithms import nearest_distances, srpo_rewards
from siirl_dask.context import Context, Reduce
from siirl_dask.errors import ConfigError, DataError
from siirl_dask.nodes.episodes import EPISODE_COLUMNS
from siirl_dask.nodes.packed_table import packed, ragged, scatter_valid, values
from siirl_dask.nodes.turn_table import episode_rows, scored_episodes
from siirl_dask.planner import columns, reads_option
from siirl_dask.schema import EMBEDDING, GROUP_ID, REWARD, TYPES, fields
from siirl_dask.training import TextEncoder


def _try(*, success: float = 1.0, eps: float = 0.5, min_samples: int = 2) -> None:
    if find_spec("sklearn") is None:
        raise ConfigError("score_by_similarity needs scikit-learn: pip install 'siirl_dask[srpo]'")
    if not eps > 0 or min_samples < 1:
        raise ValueError(f"eps={eps}, min_samples={min_samples}: expected more than 0, and at least 1")


def _learns_alone(*, success: float = 1.0, eps: float = 0.5, min_samples: int = 2) -> bool:
    """Return False: without another sample of its prompt no failure has a success to be compared with."""
    return False


@columns(depends_on_options=reads_option("columns"), writes=fields(EMBEDDING))
def embed_texts(ctx: Context, table: pa.Table, *, columns: tuple[str, ...] = ("response",)) -> pa.Table:
    """Add the encoder's embedding of each row's text: of its ``columns`` one after the other, with a line break
    between.

    The node asks for a role built by ``build_encoder``. DataError for an embedding that is not finite.
    """
    encoder: TextEncoder = ctx.resource
    texts = [
        "\n".join("" if part is None else str(part) for part in row.values())
        for row in table.select([*columns]).to_pylist()
    ]
    embeddings = encoder.embeddings(texts)
    if not embeddings.isfinite().all():
        bad = int((~embeddings.isfinite().all(1)).nonzero()[0])
        raise DataError(f"the embedding of {texts[bad]!r:.200} is not finite; with model.dtype=bfloat16, try float32")
    ends = torch.arange(len(texts) + 1) * embeddings.shape[1]
    return table.append_column(EMBEDDING, ragged(embeddings.flatten(), ends, TYPES[EMBEDDING]))


@columns(
    reads=[REWARD, GROUP_ID, EMBEDDING],
    optional=EPISODE_COLUMNS,
    writes=fields(REWARD),
    trial=_try,
    learns_alone=_learns_alone,
)
def score_by_similarity(
    ctx: Context, table: pa.Table, *, success: float = 1.0, eps: float = 0.5, min_samples: int = 2
) -> pa.Table:
    """Set the reward of a success to 1 and that of a failure to its likeness to the group's successes (SRPO,
    arXiv:2511.15605); see ``srpo_rewards``.

    The node asks for rows=GROUPED: siiRL compares with what is on the same worker, so its rewards depend on how many
    there are. An episode is a success where its reward, summed over its rows, is at least ``success``. Its embedding is
    the mean of its rows'. The successes' embeddings, standardised, are clustered by DBSCAN (``eps``, ``min_samples``);
    a failure's distance is that to the nearest cluster's mean, or to the mean of all where there is no cluster. A group
    without successes, or without failures, keeps 0 and 1. The row that ends an episode has its reward, others 0.
    DataError for embeddings of different widths.
    """
    comparable = scored_episodes(table)
    scored = table.filter(comparable)
    rows, rewards = episode_rows(scored), values(scored[REWARD]).double()
    embeddings = _matrix(scored)
    members = list(rows.members().values())
    succeeded = [sum(rewards[part].tolist()) >= success for part in members]
    groups: dict[int, list[int]] = {}
    for at, part in enumerate(members):
        groups.setdefault(int(rows.group_ids[part[0]]), []).append(at)
    given = torch.zeros(scored.num_rows)
    for group in groups.values():
        means = torch.stack([embeddings[members[at]].double().mean(0) for at in group])
        flags = torch.tensor([succeeded[at] for at in group])
        for at, reward in zip(group, _rewards(means, flags, eps, min_samples).tolist(), strict=True):
            given[members[at][-1]] = reward
    ctx.log("reward/successes", [float(flag) for flag in succeeded])
    totals = [float(given[part[-1]]) for part in members]
    ctx.log("reward/mean", totals)
    ctx.log("reward/std", totals, Reduce.STD)
    column = scatter_valid(comparable, pa.array(given.numpy(), TYPES[REWARD]))
    return table.set_column(table.column_names.index(REWARD), REWARD, column)


def _rewards(embeddings: Tensor, succeeded: Tensor, eps: float, min_samples: int) -> Tensor:
    """Return the rewards of one group's episodes. [N, D], [N] bool -> [N] float32."""
    rewards = succeeded.float()
    if succeeded.any() and not succeeded.all():
        centres = _centres(embeddings[succeeded].numpy(), eps, min_samples)
        rewards[~succeeded] = srpo_rewards(nearest_distances(embeddings[~succeeded], torch.from_numpy(centres)))
    return rewards


def _centres(embeddings: NDArray[np.float64], eps: float, min_samples: int) -> NDArray[np.float64]:
    """Return the mean of each cluster of embeddings; without clusters the mean of all. [N, D] -> [C, D]."""
    from sklearn.cluster import DBSCAN  # seconds to import, which only this node needs
    from sklearn.preprocessing import StandardScaler

    labels = DBSCAN(eps=eps, min_samples=min_samples).fit(StandardScaler().fit_transform(embeddings)).labels_
    found = [embeddings[labels == label].mean(0) for label in range(int(labels.max(initial=-1)) + 1)]
    return np.stack(found or [embeddings.mean(0)])


def _matrix(table: pa.Table) -> Tensor:
    """Return the embeddings. [R, D]. DataError where they differ in width."""
    flat, offsets = packed(table[EMBEDDING])
    widths = offsets.diff().unique().tolist()
    if len(widths) > 1:
        raise DataError(f"{EMBEDDING!r} has widths {widths[:5]}: expected the same in every row")
    return flat.reshape(table.num_rows, widths[0] if widths else 0)
