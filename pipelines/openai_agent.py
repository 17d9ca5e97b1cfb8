"""GRPO of an agent that is written with the openai client: it may try twice, and a second try is worth half.

    python pipelines/openai_agent.py configs/quickstart.yaml run.name=openai_agent rollout.max_response_length=64

``run_agents`` runs the agent for each row. Its requests go to the engine of its worker, and the tokens of one episode
become one row, on which the trainer learns from those that the model wrote.
"""

import openai

from siirl_dask import DAG, Config, grpo, main
from siirl_dask.nodes import run_agents
from siirl_dask.rollout.endpoint import Client


async def agent(client: Client, row: dict[str, str]) -> dict[str, float]:
    # the endpoint is on this machine: no certificates to be read
    plain = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(
        base_url=client.base_url, api_key=client.api_key, http_client=plain
    ) as ai:
        text, worth = row["prompt"], 1.0
        while worth >= 0.5:
            done = await ai.completions.create(model=client.model, prompt=text, max_tokens=12)
            answer = done.choices[0].text
            if answer.strip() == row["answer"].strip():
                return {"reward": worth, "first_try": float(worth == 1.0)}
            text, worth = f"{text}{answer}\nNo. {row['prompt']}", worth / 2
    return {"reward": 0.0, "first_try": 0.0}


def training(config: Config) -> DAG:
    asks = {
        "agent": agent,
        "endpoint": config.endpoint,
        "max_prompt_length": config.data.max_prompt_length,
    }
    dag = grpo(config).replace("rollout", fn=run_agents, options=asks)
    return dag.replace("advantage", after=("rollout", "old_logprobs")).without("reward")


if __name__ == "__main__":
    run = main(training)
    print(
        run.metrics.select(
            ["step", "reward/mean", "reward/first_try", "episodes/turns"]
        ).to_pylist()[-1]
    )
