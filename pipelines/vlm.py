"""GRPO on images, with a reward that looks at them: right answers count more where there is more to
count.

    python pipelines/vlm.py configs/quickstart_vlm.yaml run.name=vlm

A reward gets whatever columns its node names, so also the images of the row, as bytes of their
files.
"""

from io import BytesIO

from PIL import Image

from siirl_dask import DAG, Config, grpo, main


def by_size(
    prompt: object, response: str, answer: str, images: list[dict[str, bytes]], **extra: object
) -> float:
    """Return 0 for a wrong number, and for a right one from 0.5 to 1: the pictures have 4 to 16
    cells of 64 pixels.
    """
    width, height = Image.open(BytesIO(images[0]["bytes"])).size
    return (response.strip() == answer) * (0.5 + width * height / 2048)


def training(config: Config) -> DAG:
    """Return GRPO's DAG with that reward, which is given the images."""
    dag = grpo(config, reward=by_size)
    return dag.replace("reward", options={"columns": ("images",)})


if __name__ == "__main__":
    run = main(training)
    query = (
        "SELECT step, avg(reward) AS reward, avg(len(response_ids)) AS tokens FROM rollouts GROUP "
        "BY step ORDER BY step"
    )
    for row in run.rollouts(query).to_pylist():
        print(row)
