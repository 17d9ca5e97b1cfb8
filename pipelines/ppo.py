"""PPO with a critic (arXiv:1707.06347), and a query of its metrics. The DAG is in
siirl_dask/recipes/ppo.py.

python pipelines/ppo.py configs/quickstart_ppo.yaml critic.lr=1e-3
"""

from siirl_dask import main, ppo

if __name__ == "__main__":
    run = main(ppo)
    print(run.metrics.select(["step", "policy/loss", "critic/loss"]).to_pylist())
