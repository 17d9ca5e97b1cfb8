"""Rows of another package's tasks and environments, for ``siirl-dask data import
reasoning_gym:chain_sum?size=1000``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pyarrow as pa

from siirl_dask.errors import DataError
from siirl_dask.planner.spec.ecosystems import EcosystemName, adapter_of

_BATCH = 256
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_OWN = ("size", "seed", "prompt", "chat")


class EcosystemRows:
    """The rows that a name stands for. ``size`` rows are made, the first of ``seed``; ``prompt``
    is a text before each one's own, and with ``chat=false`` prompts are texts and no messages.
    """

    def __init__(self, name: EcosystemName) -> None:
        """DataError for other values of these options, and where there are no rows; PlanError where
        the package has no such thing, or is not installed.
        """
        options = dict(name.options)
        size = options.pop("size", None)
        if size is not None:
            _whole(name, size, "size", least=1)
        self._seed = _whole(name, options.pop("seed", 0), "seed", least=0)
        self._before = str(options.pop("prompt", ""))
        self._is_chat = options.pop("chat", True)
        if not isinstance(self._is_chat, bool):
            raise DataError(f"{name.spelled!r}: chat={self._is_chat!r}: expected true or false")
        self._name = EcosystemName(name.spelled, name.package, name.id, options)
        self._adapter = adapter_of(name)
        if size is None:
            size = self._adapter.ROWS
        self._size = size
        first = next(self._rows(), None)
        if first is None:
            raise DataError(f"{name.spelled!r} has no rows: expected at least one")
        kinds = {
            key: pa.int64() if isinstance(value, int) else pa.string()
            for key, value in first.items()
        }
        kinds["prompt"] = _MESSAGES if self._is_chat else pa.string()
        self.schema = pa.schema([*kinds.items()])

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        rows = islice(self._rows(), self._size)
        while batch := list(islice(rows, _BATCH)):
            yield pa.RecordBatch.from_pylist([self._as_stored(row) for row in batch], self.schema)

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        source = f"{self._name.package}/{self._name.id}"
        for row in self._adapter.rows(self._name, self._seed):
            yield {
                "prompt": row["prompt"],
                "answer": "",
                **{key: value for key, value in row.items() if key != "prompt"},
                "data_source": source,
            }

    def _as_stored(self, row: Mapping[str, Any]) -> Mapping[str, object]:
        return {**row, "prompt": self._prompt(row["prompt"])}

    def _prompt(self, prompt: Any) -> object:
        messages = prompt
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        texts = [str(message["content"]) for message in messages]
        texts[0] = self._before + texts[0]
        if not self._is_chat:
            return "\n".join(texts)
        roles = [message["role"] for message in messages]
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def _whole(name: EcosystemName, value: object, option: str, *, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DataError(
            f"{name.spelled!r}: {option}={value!r}: expected a whole number of at least {least}"
        )
    return value
