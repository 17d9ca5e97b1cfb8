"""GRPO with your own node, reward, advantage and loss: functions, and edits of the recipe's DAG.

    python pipelines/custom.py configs/quickstart.yaml run.name=custom

The node measures how short a response is, the advantage favours right and short responses, and the
loss is a plain policy gradient over the tokens with high entropy.
"""

from functools import partial

import pyarrow as pa
from torch import Tensor

from siirl_dask import DAG, Config, Context, Node, algorithms, columns, grpo, main
from siirl_dask.algorithms import LossInputs, Outcomes, TokenLoss


def near_enough(prompt: str, response: str, answer: str, **extra: object) -> dict[str, float]:
    words, wanted = response.split(), answer.split()
    right = sum(a == b for a, b in zip(words, wanted, strict=False)) / max(1, len(wanted))
    return {"reward": right, "exact": float(words == wanted)}  # "exact" becomes a metric


@columns(reads=["response_ids"], writes={"brevity": pa.float32()})
def measure_brevity(ctx: Context, table: pa.Table) -> pa.Table:
    brevity = [1 / max(1, len(tokens)) for tokens in table["response_ids"].to_pylist()]
    ctx.log("brevity", brevity)
    return table.append_column("brevity", pa.array(brevity, pa.float32()))


def short_and_right(outcomes: Outcomes) -> Tensor:
    return algorithms.grpo(outcomes) / outcomes.lengths.clamp(min=1).sqrt()  # [rows]


def unsure_tokens(inputs: LossInputs, *, least_entropy: float) -> TokenLoss:
    unsure = (inputs.entropy.detach() >= least_entropy).float()
    loss = -inputs.logprobs * inputs.advantages * unsure  # [tokens]
    return TokenLoss(loss=loss, metrics={"unsure": unsure, "brevity": inputs.columns["brevity"]})


def training(config: Config) -> DAG:
    own = {"advantage": short_and_right, "loss": partial(unsure_tokens, least_entropy=0.01)}
    dag = grpo(config, reward=near_enough, **own, columns=["brevity"])
    dag = dag.add(Node("brevity", measure_brevity, role="rollout", after="rollout"))
    return dag.replace("advantage", after=("brevity", "reward", "old_logprobs"))


if __name__ == "__main__":
    main(training)
