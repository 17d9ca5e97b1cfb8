import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)  # faster than more on models this small, and many times so on a machine that is busy


@pytest.fixture(autouse=True, scope="module")
def leave_groups():
    """FSDP makes a process group also for one rank, and what is run next in this process may want its own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
