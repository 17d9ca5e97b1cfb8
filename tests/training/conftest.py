import pytest
import torch
import torch.distributed as dist

# faster than more threads on models this small, above all on a busy machine
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def leave_groups():
    """Destroy the process group that FSDP makes even for one rank, since the next module may
    need its own.
    """
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
