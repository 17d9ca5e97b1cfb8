"""Stands for torch_npu on a machine without an NPU: a device ``npu`` of torch's own (PrivateUse1)
whose memory is the host's, with a backend ``hccl`` of torch.distributed over gloo.

Its tensors say that they are on ``npu:0``, are refused among those of a CPU or of another NPU, and
are computed on the CPU. What the real one refuses is refused, and what is asked of it is counted in
``calls``; with the variable ``FAKE_NPU_CALLS`` each process tells its counts in a file of that
folder. torch's autograd knows one device of Python's: backward passes run on ``npu:0``, so a
process should see one (``FAKE_NPU_TAKEN``).
"""

import sys

from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend(
    "npu", sys.modules.setdefault("torch.npu", __import__("torch_npu.npu").npu)
)

from torch_npu import autocast, hccl, npu, pinned, profiler, tensor  # noqa: E402, F401
from torch_npu.calls import calls  # noqa: E402, F401
from torch_npu.operators import (  # noqa: E402, F401
    npu_apply_adam_w,
    npu_fusion_attention,
    npu_rms_norm,
    npu_rotary_mul,
    npu_swiglu,
)


def _autoload():
    """Called by torch when it is imported, by the entry point ``torch.backends``."""
