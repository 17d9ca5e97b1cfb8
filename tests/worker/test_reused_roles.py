"""Objects that a worker keeps when its run has lost another worker, and those that it frees."""

import threading

import pytest

from siirl_dask.context import Device, DeviceKind, HoldsNoGroups, Rank
from siirl_dask.devices import accelerator
from siirl_dask.errors import Aborted, RunError
from siirl_dask.planner import Role
from siirl_dask.worker import release as releases
from siirl_dask.worker.monitoring.task_progress import TaskProgress
from siirl_dask.worker.release import Release, await_all
from siirl_dask.worker.roles.role_state import BuiltRoles, build_roles
from siirl_dask.worker.stop import StopFlag

CPU, PLACEMENT = Device("b"), {"role": ("a", "b")}


class Resource:
    """An object of a role that knows nothing of restarts."""

    def __init__(self):
        self.closed, self.rank = False, None

    def close(self):
        self.closed = True


class Engine(HoldsNoGroups, Resource):
    pass


class Trainer(Engine):
    def state(self):
        return {"steps": 3}

    def load_state(self, state):
        pass

    def join_groups(self, rank):
        self.rank = rank


class Sharded(Trainer):
    def leave_groups(self):
        return False


def cannot_build(device, rank):
    raise ValueError("no memory")


def is_reused(resource, *, placement=PLACEMENT, resumes=True):
    built = BuiltRoles(CPU, {"role": resource})
    reused = bool(built.reusable("b", placement, resumes=resumes).resources)
    assert resource.closed is not reused, "neither reused nor freed, or both"
    return reused


def test_objects_stay_whose_role_stays_on_the_worker_and_that_can_take_other_groups():
    assert is_reused(Engine())
    assert is_reused(Trainer())
    assert not is_reused(Resource())
    assert not is_reused(Sharded())
    assert is_reused(Engine(), placement={"role": ("b", "a")})
    assert is_reused(Engine(), placement={"role": ("a", "b", "c")})
    assert not is_reused(Engine(), placement={"role": ("a", "c")})
    assert not is_reused(Engine(), placement={})


def test_without_a_checkpoint_what_has_learned_is_built_anew():
    assert not is_reused(Trainer(), resumes=False)
    assert is_reused(Engine(), resumes=False)


class Failing(Resource):
    def close(self):
        raise RuntimeError("no such engine")


@pytest.mark.parametrize("device", [CPU, Device("b", DeviceKind.CUDA, 0, "card")])
def test_memory_of_what_a_run_has_built_is_given_back_to_the_device(monkeypatch, caplog, device):
    """torch keeps it, and on an existing cluster the process outlives the run: another one on the
    device would not fit.
    """
    freed = []
    engine = Resource()

    def free_cache(kind):
        freed.append((kind, engine.closed))
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(accelerator, "free_cache", free_cache)
    with pytest.raises(RuntimeError, match="no such engine"):
        BuiltRoles(device, {"role": engine, "other": Failing()}).close()
    assert engine.closed
    if device.kind is DeviceKind.CPU:
        assert not freed
    else:
        assert freed == [(DeviceKind.CUDA, True)]
        assert "the memory of cuda:0 is not given back: CUDA error" in caplog.text


def test_nothing_stays_that_was_built_on_another_device():
    engine = Engine()
    assert not BuiltRoles(CPU, {"role": engine}).for_device(Device("b", DeviceKind.CUDA, 0, "card"))
    assert engine.closed


def test_kept_objects_join_the_new_groups_and_are_not_built():
    trainer, rank = Trainer(), Rank(1, 2)
    assert build_roles(
        [Role("role", cannot_build)], CPU, {"role": rank}, reused={"role": trainer}
    ) == {"role": trainer}
    assert trainer.rank is rank


def test_kept_objects_are_closed_when_another_role_cannot_be_built():
    engine = Engine()
    with pytest.raises(RunError, match="no memory"):
        build_roles(
            [Role("role", cannot_build)],
            CPU,
            {"kept": Rank(), "role": Rank()},
            reused={"kept": engine},
        )
    assert engine.closed


def test_what_is_handed_over_is_freed_no_more():
    freed = []
    release = Release(lambda: freed.append(1), TaskProgress())
    assert release.hand_over("b", StopFlag())
    release.end(0.0)
    assert not freed
    assert not release.is_draining


def test_what_was_freed_is_not_handed_over():
    release = Release(lambda: None, TaskProgress())
    release.end(0.0)
    assert not release.hand_over("b", StopFlag())


def test_nothing_is_handed_over_while_a_task_is_inside():
    release, order = Release(lambda: None, TaskProgress()), []
    inside, leave = threading.Event(), threading.Event()

    def work():
        with release.task():
            inside.set()
            leave.wait(10)
            order.append("left")

    task = threading.Thread(target=work)
    task.start()
    inside.wait(10)
    threading.Timer(0.1, leave.set).start()
    assert release.hand_over("b", StopFlag())
    order.append("handed over")
    task.join()
    assert order == ["left", "handed over"]


def test_a_task_that_gets_nothing_done_and_does_not_return_is_told(monkeypatch):
    monkeypatch.setattr(releases, "LEAVE_TIMEOUT", 0.2)
    release = Release(lambda: None, TaskProgress())
    with release.task(), pytest.raises(RunError, match="worker 'b' is still inside a task"):
        release.hand_over("b", StopFlag())


def test_a_next_run_waits_for_tasks_of_an_earlier_one_as_long_as_these_get_something_done(
    monkeypatch,
):
    monkeypatch.setattr(releases, "LEAVE_TIMEOUT", 1.0)
    progress, inside, beat = TaskProgress(), threading.Event(), threading.Event()
    release = Release(lambda: None, progress)

    def work():
        with release.task():
            inside.set()
            for _ in range(40):
                beat.wait(0.05)
                progress.beat()

    task = threading.Thread(target=work)
    task.start()
    inside.wait(60)
    release.end(0.0)
    await_all([release], "b", StopFlag())
    assert not release.is_draining
    task.join()


@pytest.mark.parametrize("is_told", [True, False])
def test_a_task_that_gets_nothing_done_keeps_a_next_run_for_a_while_only(monkeypatch, is_told):
    """Also where its worker has not been told yet that its run is over."""
    monkeypatch.setattr(releases, "LEAVE_TIMEOUT", 0.2)
    release = Release(lambda: None, TaskProgress())
    with release.task():
        if is_told:
            release.end(0.0)
        with pytest.raises(RunError, match="worker 'b' is still inside a task"):
            await_all([release], "b", StopFlag())


def test_a_stop_ends_the_wait_for_what_is_handed_over():
    release, stop = Release(lambda: None, TaskProgress()), StopFlag()
    stop.set("the driver is gone")
    with release.task(), pytest.raises(Aborted):
        release.hand_over("b", stop)


def test_progress_of_objects_that_are_kept_counts_for_the_next_run():
    first, second, third = TaskProgress(), TaskProgress(), TaskProgress()
    first.forward_to(second)
    second.forward_to(third)
    before = third.beats
    first.beat()
    assert third.beats == before + 1
