"""Fixtures of the tests of rewards."""

import pytest

from siirl_dask.errors import ConfigError
from siirl_dask.rewards.code_execution.sandbox import SandboxLimits, passes


@pytest.fixture(scope="session")
def isolation():
    """Skip the tests where the kernel or the container does not allow code to be isolated."""
    try:
        passes("", "", SandboxLimits())
    except ConfigError as error:
        pytest.skip(str(error))
