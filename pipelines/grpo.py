"""GRPO (arXiv:2402.03300), and a query of its rollouts. The DAG is in siirl_dask/recipes/grpo.py.

python pipelines/grpo.py configs/quickstart.yaml trainer.lr=5e-5
"""

from siirl_dask import grpo, main

if __name__ == "__main__":
    run = main(grpo)
    for row in run.rollouts(
        "SELECT step, avg(reward) AS reward FROM rollouts GROUP BY step ORDER BY step"
    ).to_pylist():
        print(row)
