"""Two agents that learn from one reward, and a query of who said what. The DAG is in
siirl_dask/recipes/agents.py.

    python pipelines/agents.py configs/quickstart_agents.yaml agents.b.trainer.lr=5e-5

What an agent is told is a function of what the one before it wrote: here the second agent sees that
line and nothing else. ``agents.b.share=a`` gives both one model, ``rounds=2`` lets each of them act
twice.
"""

from siirl_dask import DAG, Config, agents, main
from siirl_dask.recipes.agents import validation


def ask_to_sort(response: str, **columns: object) -> str:
    return f"Sort:{response} ="


def training(config: Config) -> DAG:
    return agents(config, message=ask_to_sort)


def testing(config: Config) -> DAG:
    return validation(config, message=ask_to_sort)


if __name__ == "__main__":
    run = main(training, testing)
    turns = (
        "SELECT agent, response, reward FROM rollouts WHERE step = (SELECT max(step) FROM rollouts)"
    )
    for row in run.rollouts(f"{turns} ORDER BY episode_id, agent LIMIT 4").to_pylist():
        print(row)
