"""Other weights come while vLLM has begun tokens with those before: on accelerators alone, since it
schedules asynchronously nowhere else.
"""

from collections import deque
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")

from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import Request

from siirl_dask.errors import RunError
from siirl_dask.rollout.vllm_engine.reloading import forget_prefixes, preempt_all


def preempted(name, tokens_under_way):
    request = Request(name, [1, 2], SamplingParams(max_tokens=3), pooling_params=None)
    # what Scheduler._preempt_request leaves in one for which there was no memory
    assert request.drop_stale_output is False
    request.num_stale_output_tokens = tokens_under_way
    return request


def test_a_token_of_the_old_weights_that_is_under_way_is_not_taken_as_one_of_the_new():
    waiting = FCFSRequestQueue([preempted("under way", 1), preempted("not begun", 0)])
    reset = []
    core = SimpleNamespace(scheduler=SimpleNamespace(waiting=waiting))
    engine = SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=core),
        reset_prefix_cache=lambda **how: reset.append(how),
    )
    preempt_all(engine)
    assert [request.drop_stale_output for request in waiting] == [True, False]
    assert reset == [{"reset_running_requests": True}]


def test_keys_and_values_of_the_old_weights_that_vllm_keeps_end_the_run():
    """It returns False, and warns in a log that is off."""
    forget_prefixes(SimpleNamespace(reset_prefix_cache=lambda: True))
    with pytest.raises(RunError, match=r"enable_prefix_caching=false"):
        forget_prefixes(SimpleNamespace(reset_prefix_cache=lambda: False))


def test_a_server_is_paused_once_vllm_has_no_token_of_the_old_weights_under_way():
    """Its label is stamped on each token as that arrives: one that is under way while weights are
    replaced would have the label of those that did not sample it.
    """
    scheduler = Scheduler.__new__(Scheduler)
    scheduler._pause_state = PauseState.PAUSED_ALL
    scheduler.finished_req_ids = set()
    scheduler.connector = None
    scheduler.ec_connector = None
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.scheduler = scheduler
    core.engines_running = False
    core.batch_queue = deque(["a step"])
    assert not core._pause_complete()
    core.batch_queue.clear()
    assert core._pause_complete()
