"""The DAG of the planner's tests."""

from tests.planner.conftest import grpo, source

__all__ = ["grpo", "source"]
