"""Rewards failures by their similarity to successes of the same task: SRPO (arXiv:2511.15605),
as siiRL has it.
"""

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
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS
from siirl_dask.nodes.episodes.turn_table import episode_rows, scored_episodes
from siirl_dask.nodes.packed_table import packed, ragged, scatter_valid, values
from siirl_dask.planner import columns, reads_option
from siirl_dask.schema import EMBEDDING, GROUP_ID, REWARD, TYPES, fields
from siirl_dask.training import TextEncoder


def _check_options(*, success: float = 1.0, eps: float = 0.5, min_samples: int = 2) -> None:
    if find_spec("sklearn") is None:
        raise ConfigError("score_by_similarity needs scikit-learn: pip install 'siirl_dask[srpo]'")
    if not eps > 0 or min_samples < 1:
        raise ValueError(
            f"eps={eps}, min_samples={min_samples}: expected more than 0, and at least 1"
        )


def _learns_alone(*, success: float = 1.0, eps: float = 0.5, min_samples: int = 2) -> bool:
    """Return False: without other samples of its prompt a failure has no success to be compared
    with.
    """
    return False


@columns(depends_on_options=reads_option("columns"), writes=fields(EMBEDDING))
def embed_texts(
    ctx: Context, table: pa.Table, *, columns: tuple[str, ...] = ("response",)
) -> pa.Table:
    """Add the encoder's embedding of each row's text: of its ``columns`` one after the other, with
    a line break between.

    The node needs a role built by ``build_encoder``. DataError for an embedding that is not finite.
    """
    encoder: TextEncoder = ctx.resource
    texts = []
    for row in table.select(list(columns)).to_pylist():
        parts = ["" if part is None else str(part) for part in row.values()]
        texts.append("\n".join(parts))
    embeddings = encoder.embeddings(texts)
    finite = embeddings.isfinite().all(1)
    if not finite.all():
        bad = int((~finite).nonzero()[0])
        raise DataError(
            f"the embedding of {texts[bad]!r:.200} is not finite; with model.dtype=bfloat16, try "
            "float32"
        )
    offsets = torch.arange(len(texts) + 1) * embeddings.shape[1]
    return table.append_column(EMBEDDING, ragged(embeddings.flatten(), offsets, TYPES[EMBEDDING]))


@columns(
    reads=[REWARD, GROUP_ID, EMBEDDING],
    optional=EPISODE_COLUMNS,
    writes=fields(REWARD),
    trial=_check_options,
    learns_alone=_learns_alone,
)
def score_by_similarity(
    ctx: Context,
    table: pa.Table,
    *,
    success: float = 1.0,
    eps: float = 0.5,
    min_samples: int = 2,
) -> pa.Table:
    """Set the reward of a success to 1 and that of a failure to its likeness to the group's
    successes (SRPO, arXiv:2511.15605); see ``srpo_rewards``.

    The node needs complete groups, rows=GROUPED: siiRL compares with what is on the same worker, so
    that its rewards depend on the number of workers. An episode is a success where its reward,
    summed over its rows, is at least ``success``. Its embedding is the mean of its rows'. The
    successes' embeddings, standardised, are clustered by DBSCAN (``eps``, ``min_samples``); a
    failure's distance is that to the nearest cluster's mean, or to the mean of all where there is
    no cluster. A group without successes, or without failures, keeps 0 and 1. The row that ends an
    episode has its reward, others 0. DataError for embeddings of different widths.
    """
    comparable = scored_episodes(table)
    scored = table.filter(comparable)
    rows = episode_rows(scored)
    rewards = values(scored[REWARD]).double()
    embeddings = _embedding_matrix(scored)
    parts = list(rows.members().values())
    succeeded = [sum(rewards[part].tolist()) >= success for part in parts]
    parts_of_group: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        group = int(rows.group_ids[part[0]])
        parts_of_group.setdefault(group, []).append(index)
    row_rewards = torch.zeros(scored.num_rows)
    for indices in parts_of_group.values():
        means = torch.stack([embeddings[parts[index]].double().mean(0) for index in indices])
        group_succeeded = torch.tensor([succeeded[index] for index in indices])
        group_rewards = _group_rewards(means, group_succeeded, eps, min_samples).tolist()
        for index, reward in zip(indices, group_rewards, strict=True):
            row_rewards[parts[index][-1]] = reward
    ctx.log("reward/successes", [float(flag) for flag in succeeded])
    totals = [float(row_rewards[part[-1]]) for part in parts]
    ctx.log("reward/mean", totals)
    ctx.log("reward/std", totals, Reduce.STD)
    column = scatter_valid(comparable, pa.array(row_rewards.numpy(), TYPES[REWARD]))
    return table.set_column(table.column_names.index(REWARD), REWARD, column)


def _group_rewards(embeddings: Tensor, succeeded: Tensor, eps: float, min_samples: int) -> Tensor:
    """Return the rewards of one group's episodes. [N, D], [N] bool -> [N] float32."""
    rewards = succeeded.float()
    if succeeded.any() and not succeeded.all():
        centres = torch.from_numpy(_cluster_means(embeddings[succeeded].numpy(), eps, min_samples))
        distances = nearest_distances(embeddings[~succeeded], centres)
        rewards[~succeeded] = srpo_rewards(distances)
    return rewards


def _cluster_means(
    embeddings: NDArray[np.float64], eps: float, min_samples: int
) -> NDArray[np.float64]:
    """Return the mean of each cluster of embeddings; without clusters the mean of all. [N, D] ->
    [C, D].
    """
    from sklearn.cluster import DBSCAN  # takes seconds to import, and only this node needs it
    from sklearn.preprocessing import StandardScaler

    standardised = StandardScaler().fit_transform(embeddings)
    labels = DBSCAN(eps=eps, min_samples=min_samples).fit(standardised).labels_
    clusters = int(labels.max(initial=-1)) + 1  # the label -1 is noise
    if not clusters:
        return np.stack([embeddings.mean(0)])
    return np.stack([embeddings[labels == label].mean(0) for label in range(clusters)])


def _embedding_matrix(table: pa.Table) -> Tensor:
    """Return the embeddings. [R, D]. DataError where they differ in width."""
    flat, offsets = packed(table[EMBEDDING])
    widths = offsets.diff().unique().tolist()
    if len(widths) > 1:
        raise DataError(f"{EMBEDDING!r} has widths {widths[:5]}: expected the same in every row")
    width = widths[0] if widths else 0
    return flat.reshape(table.num_rows, width)
