"""GRPO with your own node, reward, advantage and loss: functions, and edits of the recipe's DAG.

    python pipelines/custom.py configs/quickstart.yaml run.name=custom

The node measures how short a response is, the advantage favours responses that are both right and
short, and the loss is a plain policy gradient over the tokens with high entropy.
"""

from functools import partial

import pyarrow as pa
from torch import Tensor

from siirl_dask import DAG, Config, Context, Node, algorithms, columns, grpo, main
from siirl_dask.algorithms import LossInputs, Outcomes, TokenLoss


def near_enough(prompt: str, response: str, answer: str, **extra: object) -> dict[str, float]:
    words, wanted = response.split(), answer.split()
    right = sum(a == b for a, b in zip(words, wanted, strict=False)) / max(1, len(wanted))
    # other keys than "reward" become metrics
    return {"reward": right, "exact": float(words == wanted)}


@columns(reads=["response_ids"], writes={"brevity": pa.float32()})
def measure_brevity(ctx: Context, table: pa.Table) -> pa.Table:
    lengths = [len(tokens) for tokens in table["response_ids"].to_pylist()]
    ctx.log("brevity/length", lengths)
    return table.append_column(
        "brevity", pa.array([1 / max(1, length) for length in lengths], pa.float32())
    )


def short_and_right(outcomes: Outcomes) -> Tensor:
    return algorithms.grpo(outcomes) / outcomes.lengths.clamp(min=1).sqrt()  # [rows]


def unsure_tokens(inputs: LossInputs, *, least_entropy: float) -> TokenLoss:
    unsure = (inputs.entropy.detach() >= least_entropy).float()
    loss = -inputs.logprobs * inputs.advantages * unsure  # [tokens]
    return TokenLoss(loss=loss, metrics={"unsure": unsure, "brevity": inputs.columns["brevity"]})


def training(config: Config) -> DAG:
    loss = partial(unsure_tokens, least_entropy=0.01)
    dag = grpo(
        config, reward=near_enough, advantage=short_and_right, loss=loss, columns=["brevity"]
    )
    dag = dag.add(Node("brevity", measure_brevity, role="rollout", after="rollout"))
    return dag.replace("advantage", after=("brevity", "reward", "old_logprobs"))


if __name__ == "__main__":
    main(training)
