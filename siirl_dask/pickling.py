"""Serializes a user's functions for other processes, which may be unable to import them.

cloudpickle sends the code of such functions. Since 3.1.3 it leaves out the files that they are
defined in, so that no stack of a reward that hangs or raises names the user's line: here they stay.
"""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle


def dumps(value: object) -> bytes:
    """Serialize ``value`` as ``cloudpickle.dumps`` does, with the names of the files of
    functions.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _reduce(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    make, arguments, *_ = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _with_file, (make, arguments, code.co_filename)


def _with_file(make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    dispatch_table: ClassVar = ChainMap({CodeType: _reduce}, cloudpickle.Pickler.dispatch_table)
