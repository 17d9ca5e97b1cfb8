r"""Recipes of datasets, for ``data.prepare``: each writes the tables that a configuration names,
where they are absent.

    data: {url: data/gsm8k/train, prepare: "siirl_dask.datasets:gsm8k"}
    validation: {url: data/gsm8k/test}

All tables have ``prompt``, chat messages; ``answer``, what the reward that goes with the dataset
compares; and ``data_source``. ``source`` is where a dataset is read from: its repository on a hub
(``HF_ENDPOINT`` names another hub or a mirror), or a folder or URL with the same files.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import pyarrow as pa
import pyarrow.compute as pc
from siirl_storage import join

from siirl_dask.config import Config
from siirl_dask.datasets.chat_messages import MESSAGES, as_messages
from siirl_dask.datasets.column_paths import extract
from siirl_dask.datasets.importing import ROW_GROUP_BYTES, ImportRequest, import_data
from siirl_dask.datasets.inputs import exists
from siirl_dask.errors import DataError

_GSM8K = 'Let\'s think step by step and output the final answer after "####".'
_BOXED = r"Let's think step by step and output the final answer within \boxed{}."
# as verl's preparation of Geometry3K asks
_THINK = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The "
    r"reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE "
    r"put in \boxed{}."
)
# a worker decodes a row group for some of its rows, and images are large
_IMAGE_GROUP_BYTES = 2**22
_Transform = Callable[[pa.Table], pa.Table]


def gsm8k(config: Config, *, source: str = "hf://datasets/openai/gsm8k") -> None:
    """Write GSM8K (arXiv:2110.14168): 7,473 problems to train on, and 1,319 to validate on.

    The answer is the number after ``####``, as ``siirl_dask.rewards:gsm8k`` compares it;
    ``solution`` is all of it.
    """
    _write(config.validation.url, join(source, "main/test-*.parquet"), _gsm8k)
    _write(config.data.url, join(source, "main/train-*.parquet"), _gsm8k)


def math(
    config: Config,
    *,
    source: str = "hf://datasets/agentica-org/DeepScaleR-Preview-Dataset",
    validation_source: str = "hf://datasets/HuggingFaceH4/MATH-500",
) -> None:
    """Write DeepScaleR's 40,000 problems of competitions to train on, and the 500 of MATH-500 to
    validate on.

    Answers are LaTeX, as ``siirl_dask.rewards:math_answer`` compares them.
    """
    _write(config.validation.url, join(validation_source, "test.jsonl"), _problems("math_500"))
    _write(config.data.url, join(source, "deepscaler.json"), _problems("deepscaler"))


def dapo_17k(
    config: Config, *, source: str = "hf://datasets/BytedTsinghua-SIA/DAPO-Math-17k"
) -> None:
    """Write DAPO-Math-17k (arXiv:2503.14476): 17,000 problems, each once, where the file repeats
    each 100 times.

    Answers are whole numbers, as ``siirl_dask.rewards:dapo_math`` compares them. There is nothing
    to validate on.
    """
    _write(config.data.url, join(source, "data/dapo-math-17k.parquet"), _first_of_each(_verl))


def geometry3k(config: Config, *, source: str = "hf://datasets/hiyouga/geometry3k") -> None:
    """Write Geometry3K (arXiv:2105.04165): 2,101 problems with images to train on, 300 to validate
    on, 601 to test on.

    ``images`` are the files' bytes; ``<image>`` in the prompt is where one belongs.
    """
    url = config.validation
    _write(url.test_url, join(source, "data/test-*.parquet"), _geometry3k, _IMAGE_GROUP_BYTES)
    _write(url.url, join(source, "data/validation-*.parquet"), _geometry3k, _IMAGE_GROUP_BYTES)
    _write(config.data.url, join(source, "data/train-*.parquet"), _geometry3k, _IMAGE_GROUP_BYTES)


def _write(
    url: str | None,
    source: str,
    transform: _Transform,
    row_group_bytes: int = ROW_GROUP_BYTES,
) -> None:
    """Write one table, unless there is something already or the configuration names none."""
    if url is not None and not exists(url):
        import_data(
            ImportRequest(
                sources=[source],
                to=url,
                transform=transform,
                row_group_bytes=row_group_bytes,
            )
        )


def _gsm8k(table: pa.Table) -> pa.Table:
    solutions = table["answer"].to_pylist()
    if unmarked := [solution for solution in solutions if "####" not in (solution or "")]:
        raise DataError(
            "GSM8K: expected a solution that ends with '#### ' and a number, not "
            f"{unmarked[0]!r:.200}"
        )
    answers = [solution.rpartition("####")[2].strip().replace(",", "") for solution in solutions]
    prompts = _instructed(table["question"], _GSM8K)
    columns = {
        "answer": pa.array(answers, pa.string()),
        "solution": table["answer"].cast(pa.string()),
    }
    return _named("gsm8k", prompts, columns)


def _problems(name: str) -> _Transform:
    def transform(table: pa.Table) -> pa.Table:
        columns = {column: table[column].cast(pa.string()) for column in ("answer", "solution")}
        return _named(name, _instructed(table["problem"], _BOXED), columns)

    return transform


def _verl(table: pa.Table) -> pa.Table:
    """Return rows of verl's layout, whose answer is within ``reward_model``."""
    prompts = pa.array(table["prompt"].to_pylist(), MESSAGES)
    answers = extract(table, "reward_model.ground_truth").cast(pa.string())
    return pa.table(
        {
            "prompt": prompts,
            "answer": answers,
            "data_source": table["data_source"].cast(pa.string()),
        }
    )


def _geometry3k(table: pa.Table) -> pa.Table:
    prompts = _instructed(table["problem"], _THINK)
    images = extract(table, "images.bytes").cast(pa.list_(pa.binary()))
    return _named(
        "geometry3k", prompts, {"answer": table["answer"].cast(pa.string()), "images": images}
    )


def _first_of_each(transform: _Transform) -> _Transform:
    """Return ``transform``, then only the rows whose prompt and answer no earlier row has."""
    seen: set[bytes] = set()

    def first(table: pa.Table) -> pa.Table:
        rows = transform(table)
        texts = (repr((row["prompt"], row["answer"])).encode() for row in rows.to_pylist())
        kept = []
        for digest in (blake2b(text, digest_size=16).digest() for text in texts):
            kept.append(digest not in seen)
            seen.add(digest)
        return rows.filter(pa.array(kept, pa.bool_()))

    return first


def _instructed(problems: pa.ChunkedArray, instruction: str) -> pa.Array:
    return as_messages(pc.binary_join_element_wise(problems.cast(pa.string()), instruction, " "))


def _named(name: str, prompts: pa.Array, columns: dict[str, pa.Array]) -> pa.Table:
    sources = pa.array([name] * len(prompts), pa.string())
    return pa.table({"prompt": prompts, **columns, "data_source": sources})
