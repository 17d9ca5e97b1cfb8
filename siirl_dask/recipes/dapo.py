"""DAPO (arXiv:2503.14476): clip-higher, token-mean loss, overlong penalty, dynamic sampling, no KL.

    python -m siirl_dask.recipes.dapo configs/quickstart_dapo.yaml algorithm.loss_options.clip_high=0.3

The clip bounds and the aggregation are values of the configuration; the penalty and dynamic sampling are nodes of the
DAG. Dynamic sampling replaces a prompt whose samples all get the same reward, in further rounds of generation.
"""

from __future__ import annotations

from collections.abc import Sequence

from siirl_dask.config import Config
from siirl_dask.nodes import penalise_overlong, sample_until_mixed
from siirl_dask.planner import DAG, Rows
from siirl_dask.recipes.common import Function
from siirl_dask.recipes.grpo import grpo


def dapo(
    config: Config,
    *,
    reward: Function | None = None,
    advantage: Function | None = None,
    loss: Function | None = None,
    columns: Sequence[str] = (),
    rounds: int = 10,
) -> DAG:
    """Return the DAG of DAPO. ``rounds`` is the most rounds of generation in a step; other
    arguments as in ``grpo``.

    ``dapo(config).replace("reward", options={"buffer": 512, "factor": 0.5})`` changes the penalty.
    """
    sample = {
        "rollout": config.rollout,
        "max_prompt_length": config.data.max_prompt_length,
        "batch_size": config.data.batch_size,
        "rounds": rounds,
        "images": config.images,
        "continue_answers": config.data.continue_answers,
    }
    penalty = {"max_length": config.rollout.max_response_length}
    dag = grpo(config, reward=reward, advantage=advantage, loss=loss, columns=columns)
    # one node reads prompts, generates and scores, round after round: each worker draws its own
    # prompts
    dag = dag.replace(
        "rollout",
        fn=sample_until_mixed,
        after=(),
        rows=Rows.ANYWHERE,
        options=sample,
    )
    return dag.replace("reward", fn=penalise_overlong, options=penalty).without("prompts")


if __name__ == "__main__":
    from siirl_dask import main

    main(dapo)
