"""Every check of the conformance suite, on a store that fails at one operation, before or after
it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from siirl_storage import TableNotFound, append, create_table, open_table
from siirl_storage.conformance import CHECKS, sample, what_others_write_is_seen_after_a_listing
from siirl_storage.faults import FaultPlan, How, inject

FAILURES = (How.BEFORE, How.AFTER)
# it goes round open_fs
SWEPT = [check for check in CHECKS if check is not what_others_write_is_seen_after_a_listing]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultPlan]:
    monkeypatch.setitem(fsspec.config.conf, "faulty", {})
    plan = FaultPlan(str(tmp_path / "plan.json"))
    plan.set()
    inject(plan.file)
    return plan


def sweep(
    check: Callable[[str], None], plan: FaultPlan, folder: Path | str, every: int = 1
) -> None:
    """Run ``check`` with a failure at every ``every``-th of its operations."""
    check(f"faulty://{folder}/straight")
    attempts = [(at, how) for at in range(1, len(plan.operations()) + 1, every) for how in FAILURES]
    met = 0
    for at, how in attempts:
        plan.set(at, how)
        check(f"faulty://{folder}/{how}-{at}")
        met += len(plan.operations()) >= at
    # threads that race do not always as many operations
    assert met > len(attempts) / 2, "most failures were not met"


@pytest.mark.parametrize("check", SWEPT, ids=lambda check: check.__name__)
def test_conforms_with_a_failure_at_every_tenth_operation(
    check: Callable[[str], None], plan: FaultPlan, tmp_path: Path
) -> None:
    sweep(check, plan, tmp_path, every=10)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", SWEPT, ids=lambda check: check.__name__)
def test_conforms_with_a_failure_at_any_operation(
    check: Callable[[str], None], plan: FaultPlan, tmp_path: Path
) -> None:
    sweep(check, plan, tmp_path)


@pytest.mark.parametrize("target", ["file", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_table_with_a_failure_at_any_operation_has_each_row_once(
    plan: FaultPlan, tmp_path: Path, target: str, request: pytest.FixtureRequest
) -> None:
    folder = str(tmp_path)
    if target == "s3":
        folder = f"{request.getfixturevalue('s3').removeprefix('s3://')}/{uuid4().hex}"
        inject(plan.file, target, use_listings_cache=False)

    def write(url: str) -> None:
        create_table(url, [sample(0, 10)])
        append(url, [sample(10, 10)])
        assert open_table(url).to_table().equals(sample(0, 20))
        assert open_table(url).version == 2

    sweep(write, plan, folder)


def test_what_is_counted_is_what_is_done(plan: FaultPlan, tmp_path: Path) -> None:
    with pytest.raises(TableNotFound):
        open_table(f"faulty://{tmp_path}/nothing")
    assert {name for name, _, _ in plan.operations()} == {"find"}
