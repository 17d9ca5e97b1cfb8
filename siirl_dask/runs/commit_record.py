"""``COMMITTED`` of a checkpoint: lists every file with its size and digest, and decides whether it
counts.

It is created exclusively, by the attempt that wrote the checkpoint, or by a later one that voids
it: what the folder is can be decided once, whoever wakes up late.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from siirl_storage import FileDigest, is_below

NAME = "COMMITTED"
_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """The content of ``COMMITTED``."""

    step: int
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    """Digests by path in the folder; empty for a checkpoint of an earlier version, which has
    none."""
    voided_by: int | None = None
    """Attempt that has the folder removed; None for a checkpoint that counts."""

    def to_json(self) -> bytes:
        """Return the text of the file."""
        files = {
            name: [digest.nbytes, digest.sha256] for name, digest in sorted(self.files.items())
        }
        document = {
            "version": _VERSION,
            "step": self.step,
            "voided_by": self.voided_by,
            "sha256": files,
        }
        return (json.dumps(document, indent=1) + "\n").encode()

    @staticmethod
    def from_json(data: bytes, step: int) -> CommitRecord:
        """Read what ``to_json`` wrote for ``step``. ValueError for anything else."""
        document = json.loads(data)
        match document:
            case {"version": 1, "step": int(written)}:
                record = CommitRecord(step=written)
            case {
                "version": 2,
                "step": int(written),
                "voided_by": int() | None as by,
                "sha256": dict(files),
            }:
                digests = {name: _digest(name, value) for name, value in files.items()}
                record = CommitRecord(step=written, files=digests, voided_by=by)
            case _:
                raise ValueError(
                    f"expected version 1 or 2, step, voided_by and sha256, got {document!r:.200}"
                )
        if record.step != step:
            raise ValueError(f"it says step {record.step}, its folder {step}")
        return record


def _digest(name: str, value: object) -> FileDigest:
    match value:
        case [int(nbytes), str(digits)] if nbytes >= 0 and len(digits) == 64 and is_below(name):
            return FileDigest(nbytes, digits)
    raise ValueError(
        f"file {name!r}: {value!r:.100} is not [bytes, 64 hexadecimal digits] of a file in the "
        "folder"
    )
