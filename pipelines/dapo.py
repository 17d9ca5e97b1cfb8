"""DAPO (arXiv:2503.14476) with half its penalty, and a query of its metrics. The DAG is in
siirl_dask/recipes/dapo.py.

python pipelines/dapo.py configs/quickstart_dapo.yaml algorithm.loss_options.clip_high=0.3
"""

from siirl_dask import DAG, Config, dapo, main


def training(config: Config) -> DAG:
    return dapo(config).replace("reward", options={"factor": 0.5})


if __name__ == "__main__":
    run = main(training)
    print(run.metrics.select(["step", "data/drawn_prompts", "data/generation_rounds"]).to_pylist())
