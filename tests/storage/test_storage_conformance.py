"""The shipped conformance suite, on the two stores that need no server."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import siirl_storage
from siirl_storage.conformance import CHECKS

PUBLIC = """
RETRY_SECONDS ROWS_PER_GROUP ROWS_PER_PART Conflict CorruptPart FooterCache Format Part RowGroup Snapshot StorageError
TableNotFound TooLarge append commit commit_parts complete_parts create_table is_of_store is_transient join open_fs
open_table PartsDiffer PartsRecord parse_part_name part_name read_record
remove_file remove_tree retries_end_at retry retry_seconds set_retry_seconds stage stage_part
write_atomic write_exclusive write_part
FileDigest absolute by_folder digest_file full_disk_named full_name is_below is_full list_files newest_parts
newest_record open_input parse_part part_entry read_footer read_rows
"""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conforms(check: Callable[[str], None], url: str) -> None:
    check(url)


def test_public_names_change_only_on_purpose() -> None:
    assert sorted(siirl_storage.__all__) == sorted(PUBLIC.split())
    assert all(hasattr(siirl_storage, name) for name in siirl_storage.__all__)


def test_the_example_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "storage.md").read_text()
    examples = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    assert examples
    (tmp_path / "example.py").write_text("".join(examples))
    runpy.run_path("example.py")
