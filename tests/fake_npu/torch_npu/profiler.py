"""The profiler: torch's of the host, under the names of torch_npu's."""

from enum import Enum
from types import SimpleNamespace

import torch

from torch_npu.calls import count

ProfilerActivity = Enum("ProfilerActivity", ["CPU", "NPU"])
ProfilerLevel = SimpleNamespace(Level0="Level0", Level1="Level1", Level2="Level2")


def _ExperimentalConfig(*, profiler_level):
    return profiler_level


class _KinetoProfile:
    def __init__(self, *, activities, experimental_config, **details):
        assert ProfilerActivity.NPU in activities
        count(f"profile.{experimental_config}")
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], **details
        )
        self.start, self.stop = self._profile.start, self._profile.stop
        self.export_chrome_trace = self._profile.export_chrome_trace
