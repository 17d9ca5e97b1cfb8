"""Compares what a step moves for prompts with images and several samples of each, here and as
verl's DataProto.

    python benchmarks/images_bytes.py [--verl-prompts 4] [--out docs/benchmarks/images_bytes.md]

Here: a run of five workers, one more than loads, whose DAG has the shape of a recipe's: prompts
with a JPEG each, samples of them, and three nodes of other workers that read the images of their
rows, two of them in another layout. No model runs: it is the movement that is measured. Every
reader compares the bytes of each image with its digest.

There: rows with ``multi_modal_inputs`` as verl's agent loop makes them, through DataProto's own
serialisation, once to the driver and once from it. Few prompts, since pixels are large, and scaled
to as many: bytes are proportional to rows.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import pickle
import platform
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from siirl_dask.config.file import load, shipped
from siirl_dask.context import Context, Reduce
from siirl_dask.driver.run import run
from siirl_dask.observe import read_metrics, read_summary
from siirl_dask.planner import DAG, Node, Role, Rows, columns
from siirl_dask.schema import MINIBATCH, TYPES, fields
from siirl_dask.tables import rows_at
from siirl_dask.testing.rows import build_nothing

PROMPTS, SAMPLES, STEPS = 128, 8, 4
WIDTH, HEIGHT, QUALITY = 1024, 768, 92
# of such a picture for Qwen2.5-VL: 999 tokens of 2x2 patches, 3 x 2 x 14 x 14 floats each
PATCHES, PATCH = (3996, 1176)


@columns(reads=["image", "digest"], new_rows=True, groups="kept")
def encode(ctx: Context, table: pa.Table) -> pa.Table:
    """Stand for ``encode_prompts``: its table has the images."""
    return table


@columns(reads=["image"], expand="n", groups="kept")
def sample(ctx: Context, table: pa.Table, *, n: int) -> pa.Table:
    rows = rows_at(table, np.repeat(np.arange(table.num_rows), n))
    ids = table["row_id"].to_numpy().repeat(n) * n + np.tile(np.arange(n), table.num_rows)
    for name, values in {"row_id": ids, "tokens": ids * 7919 % 700 + 1000}.items():
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(values, pa.int64()))
    return rows


@columns(reads=["image", "digest"])
def look(ctx: Context, table: pa.Table) -> pa.Table:
    _check(ctx, table)
    return table


@columns(reads=["group_id"], writes=fields(MINIBATCH))
def draw(ctx: Context, table: pa.Table) -> pa.Table:
    drawn = pa.array(table["group_id"].to_numpy() % 4, TYPES[MINIBATCH])
    return table.append_column(MINIBATCH, drawn)


@columns(reads=["image", "digest", MINIBATCH])
def learn(ctx: Context, table: pa.Table) -> pa.Table:
    _check(ctx, table)
    return table


def _check(ctx: Context, table: pa.Table) -> None:
    groups = table["group_id"].to_numpy()
    _, first = np.unique(groups, return_index=True)
    for place in first.tolist():
        found = hashlib.sha256(table["image"][place].as_buffer()).hexdigest()
        assert found == table["digest"][place].as_py(), "another prompt's image"
    ctx.log("rows_read", table.num_rows, Reduce.SUM)


def dag() -> DAG:
    roles = [Role(name, build_nothing) for name in ("rollout", "policy", "reference")]
    balanced: dict[str, Any] = {"rows": Rows.BALANCED}
    nodes = (
        Node("prompts", encode, role="rollout"),
        Node("rollout", sample, role="rollout", after="prompts", options={"n": SAMPLES}),
        Node("old_logprobs", look, role="policy", after="rollout", **balanced),
        Node("reference", look, role="reference", after="rollout", **balanced),
        Node(
            "minibatches",
            draw,
            role="policy",
            after=("old_logprobs", "reference"),
            rows=Rows.GROUPED,
        ),
        Node("update", learn, role="policy", after="minibatches", **balanced),
    )
    return DAG(roles, nodes)


def photo(seed: int) -> bytes:
    """A JPEG with about the bytes of a photograph of that size: a smooth picture, and some
    noise.
    """
    numbers = np.random.default_rng(seed)
    small = Image.fromarray(numbers.integers(0, 256, (HEIGHT // 64, WIDTH // 64, 3), np.uint8))
    smooth = np.asarray(small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
    noisy = np.clip(smooth + numbers.normal(0, 5, smooth.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


@dataclass(frozen=True)
class Ours:
    image_bytes: int
    """Bytes of the images of a step."""
    peers: float
    by_group: float
    control: float | None
    seconds: float
    """Seconds of the step's pulls by group, of the worker that took longest, added up."""
    memory: float


def ours(folder: Path) -> Ours:
    images = [photo(seed) for seed in range(PROMPTS)]
    digests = [hashlib.sha256(image).hexdigest() for image in images]
    rows = {"prompt": ["p"] * PROMPTS, "answer": [""] * PROMPTS, "image": images, "digest": digests}
    pq.write_table(pa.table(rows), folder / "data.parquet", row_group_size=32, compression="none")
    url = str(folder / "run")
    values = {
        "run.url": url,
        "run.steps": STEPS,
        "data.url": folder / "data.parquet",
        "data.prepare": "null",
        "data.batch_size": PROMPTS,
        "cluster.workers": 5,
        "cluster.placement": "{rollout: [0, 1], policy: [2, 3], reference: [4]}",
        "checkpoint.every": 0,
        "validation.url": "null",
        "validation.test_url": "null",
        "observe.progress": "false",
    }
    config = load(shipped("quickstart.yaml"), [f"{key}={value}" for key, value in values.items()])
    run(config, dag())
    records = [record["metrics"] for record in read_metrics(url)][1:]  # the first step warms up
    edges = [
        name for name in records[0] if name.startswith("seconds/") and name.endswith(" by group")
    ]

    def mean(name: str) -> float:
        return sum(record[name] or 0.0 for record in records) / len(records)

    assert mean("rows_read") == 3 * PROMPTS * SAMPLES
    return Ours(
        sum(map(len, images)),
        mean("bytes/peers"),
        mean("bytes/by_group"),
        read_summary(url).bytes_per_step.scheduler_and_client,
        sum(map(mean, edges)),
        mean("bytes/process"),
    )


@dataclass(frozen=True)
class Theirs:
    prompts: int
    nbytes: int
    """Bytes of one hop, where each sample was processed by itself."""
    shared: int
    """Bytes of one hop, where the samples of a prompt share one object: DataProto.repeat of
    processed prompts."""
    seconds: float
    """Seconds to serialise and read back, one hop."""
    memory: int


def theirs(prompts: int) -> Theirs:
    """Serialise one batch as DataProto does when it goes from process to process."""
    import torch
    from verl import DataProto

    def inputs(seed: int) -> dict[str, Any]:
        values = torch.rand(PATCHES, PATCH, generator=torch.Generator().manual_seed(seed))
        return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, 54, 74]])}

    def proto(objects: list[dict[str, Any]]) -> Any:
        column = np.empty(len(objects), object)
        column[:] = objects
        uids = torch.arange(len(objects))
        return DataProto.from_dict(
            tensors={"uid": uids}, non_tensors={"multi_modal_inputs": column}
        )

    once = [inputs(prompt) for prompt in range(prompts)]
    shared = len(pickle.dumps(proto([one for one in once for _ in range(SAMPLES)])))
    apart = proto(
        [
            {**one, "pixel_values": one["pixel_values"].clone()}
            for one in once
            for _ in range(SAMPLES)
        ]
    )
    began = time.perf_counter()
    sent = pickle.dumps(apart)
    received = pickle.loads(sent)
    seconds = time.perf_counter() - began
    assert len(received) == prompts * SAMPLES
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Theirs(prompts, len(sent), shared, seconds, peak * 1024)


def report(here: Ours, there: Theirs) -> str:
    scale = PROMPTS / there.prompts
    hop, shared = there.nbytes * scale, there.shared * scale

    def line(name: str, *cells: str) -> str:
        return f"| {name} | {' | '.join(cells)} |"

    lines = [
        "# Images: bytes of a step",
        "",
        f"`python benchmarks/images_bytes.py`, {platform.processor() or platform.machine()}. "
        f"{PROMPTS} prompts with a JPEG of {WIDTH}x{HEIGHT} each, together "
        f"{here.image_bytes / 1e6:.1f} MB, and {SAMPLES} samples of each. Three nodes on three "
        "other workers read the images: old log-probs and update on two, in two layouts, a "
        "reference on one.",
        "",
        "| a step | bytes | seconds | memory of a process |",
        "|---|---|---|---|",
        line(
            "here: images, by group, to all readers",
            f"{here.by_group / 1e6:.1f} MB",
            f"{here.seconds:.2f}",
            f"{here.memory / 1e9:.2f} GB",
        ),
        line("here: everything, worker to worker", f"{here.peers / 1e6:.1f} MB", "", ""),
        line("here: through scheduler and client", f"{(here.control or 0) / 1e3:.0f} kB", "", ""),
        line(
            "verl's DataProto: pixel values of each sample, to one reader, in and out of the "
            "driver",
            f"{2 * hop / 1e9:.1f} GB",
            f"{2 * there.seconds * scale:.1f}",
            f"{there.memory / 1e9:.2f} GB for {there.prompts} prompts",
        ),
        line(
            "the same where samples share the prompt's object", f"{2 * shared / 1e9:.1f} GB", "", ""
        ),
        "",
        "Here each of the three workers gets every image once, "
        f"{here.by_group / here.image_bytes:.2f} times the images: the update takes what the old "
        "log-probs have brought, though its rows lie otherwise.",
        "",
        f"DataProto was measured with {there.prompts} prompts, for want of memory: "
        f"{there.nbytes / 1e6:.1f} MB for {there.prompts * SAMPLES} rows in one hop, or "
        f"{there.shared / 1e6:.1f} MB where samples share the prompt's object, as they do after "
        f"`DataProto.repeat` and not after an agent loop. Times {scale:g} for {PROMPTS} prompts, "
        f"times two hops, for one reader: {2 * hop / here.by_group:,.0f} times the bytes of three "
        f"readers here, and {2 * shared / here.by_group:,.0f} times where samples share.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verl-prompts", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        here = ours(Path(folder))
    text = report(here, theirs(given.verl_prompts))
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
