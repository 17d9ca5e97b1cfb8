"""Small steps on end leave nothing behind: a sample of ``benchmarks/soak.py``."""

import shutil

import pytest

from benchmarks.soak import measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = [120, pytest.param(300, marks=pytest.mark.sweep)]
"""With a validation every 5 and a checkpoint every 10: what either leaves behind is several
times a bound."""


@pytest.fixture(scope="module", params=STEPS)
def soak(request, quickstarts_task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    shutil.copytree(quickstarts_task, folder / "runs")
    return measure(folder, request.param, ["validation.every=5", "checkpoint.every=10"])


@pytest.mark.parametrize(
    ("measured", "bound"), [("fds", 2), ("threads", 2), ("arena", 2), ("rss", 40)]
)
def test_no_process_keeps_more_with_every_step(soak, measured, bound):
    assert len(soak.processes) >= 3
    for process in soak.processes:
        early, late = soak.growth(process, measured)
        assert late <= early + bound, f"{process}: {measured} {early} -> {late}"


def test_nothing_is_left_in_shared_memory(soak):
    assert not soak.left
