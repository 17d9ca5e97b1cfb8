"""Where a run that takes in workers is interrupted, and what counts as a failure."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.config import CheckpointConfig, ClusterConfig, Config, RunConfig, ValidationConfig
from siirl_dask.driver.iterations import iterations
from siirl_dask.driver.recovery.elastic import until_stopped
from siirl_dask.driver.recovery.restarts import Restarts
from siirl_dask.errors import ConfigError, WorkerLeft, WorkerLost, WorkersJoined
from siirl_dask.planner import Phase


def plan(steps, save, validate, done=0):
    config = Config(
        run=RunConfig(steps=steps),
        checkpoint=CheckpointConfig(every=save),
        validation=ValidationConfig(url="memory://there", every=validate),
    )
    return iterations(config, [Phase.TRAIN, Phase.VALIDATION, Phase.TEST], done)


def numbers(those, phase):
    return [iteration.step for iteration in those if iteration.phase is phase]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(0, 30))
def test_whenever_workers_join_all_is_done_once_and_the_last_step_is_drained_and_saved(
    steps, save, validate, after
):
    whole, first = [*plan(steps, save, validate)], []
    for iteration in until_stopped(plan(steps, save, validate), lambda: len(first) >= after, steps):
        first.append(iteration)
    done = max(numbers(first, Phase.TRAIN), default=0)
    ended = done < steps
    rest = [*plan(steps, save, validate, done)] if ended else []
    for phase in (Phase.TRAIN, Phase.VALIDATION, Phase.TEST):
        assert numbers([*first, *rest], phase) == numbers(whole, phase), phase
    assert [iteration.sequence for iteration in first] == list(range(len(first)))
    if ended:
        assert (first[-1].phase, first[-1].step) == (Phase.CHECKPOINT, done)
        assert next(one for one in first if one.phase is Phase.TRAIN and one.step == done).drain
        assert len(first) <= max(after, 1) + 5
    else:
        assert first == whole


def test_workers_that_come_and_go_use_up_no_restarts_of_an_elastic_run():
    restarts = Restarts(1, note=lambda text: None, announce=lambda error: None, elastic=True)
    for number in range(5):
        for kind in (WorkerLeft, WorkersJoined):
            failure = kind(str(number))
            assert restarts.after(failure, 3)
            restarts.pause(failure)
            restarts.resumed(3, 2 + number, 1)
    assert [restart.workers for restart in restarts.done] == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert restarts.after(WorkerLost("x"), 3)
    assert not restarts.after(WorkerLost("y"), 3)


def test_in_another_run_a_worker_that_left_is_a_lost_worker():
    restarts = Restarts(1, note=lambda text: None, announce=lambda error: None)
    assert restarts.after(WorkerLeft("x"), 3)
    assert not restarts.after(WorkerLeft("y"), 3)


def test_the_seconds_of_a_change_count_from_the_last_step():
    restarts = Restarts(0, note=lambda text: None, announce=lambda error: None, elastic=True)
    joined = WorkersJoined("x")
    joined.since = 1e-9  # long ago
    restarts.after(joined, 3)
    restarts.resumed(3, 2, 1)
    assert restarts.done[0].seconds > 1


def test_what_cannot_be_elastic_is_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"cluster.max_workers=4 is for an elastic run: set cluster.elastic=true"
    ):
        ClusterConfig(max_workers=4)
    with pytest.raises(ConfigError, match=r"cluster.max_workers=1 is less than cluster.workers=2"):
        ClusterConfig(elastic=True, max_workers=1)
    with pytest.raises(
        ConfigError,
        match=r"cluster.replacement_timeout=10.0 is for an elastic run: set cluster.ela",
    ):
        ClusterConfig(replacement_timeout=10.0)
    elastic = ClusterConfig(elastic=True)
    with pytest.raises(ConfigError, match=r"cluster.elastic=true with checkpoint.every=0"):
        Config(cluster=elastic, checkpoint=CheckpointConfig(every=0))
    with pytest.raises(ConfigError, match=r"cluster.replacement_timeout=-1: expected at least 0"):
        replace(elastic, replacement_timeout=-1)
