"""The three places of environments pass the conformance suite that is shipped for others."""

from types import MappingProxyType

from siirl_dask.config import EnvironmentsConfig
from siirl_dask.context import Device, Rank
from siirl_dask.environments import build_environments
from siirl_dask.testing.environments import COLUMNS, AsyncCountdown, EnvironmentsTests


class TestInTheWorker(EnvironmentsTests):
    limits = MappingProxyType({})

    def make_environments(self, kind, max_open):
        config = EnvironmentsConfig(columns=[*COLUMNS], max_open=max_open, **self.limits)
        return build_environments(Device("w"), Rank(), environments=config, environment=kind)


class TestInTheWorkerOneCallAtATime(TestInTheWorker):
    limits = MappingProxyType({"concurrency": 1})


class TestOnTheEventLoop(TestInTheWorker):
    kind = AsyncCountdown
    limits = MappingProxyType({"timeout": 60})


class TestInProcesses(TestInTheWorker):
    limits = MappingProxyType({"processes": 2, "timeout": 60})


class TestAsyncInProcesses(TestInTheWorker):
    kind = AsyncCountdown
    limits = MappingProxyType({"processes": 1})
