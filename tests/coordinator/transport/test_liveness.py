"""A process counts as gone when no ping is answered for the whole time, and not before."""

import asyncio
import selectors

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.coordinator.transport.peers import answers

SECONDS = 4.5


class Clock(selectors.SelectSelector):
    """A selector that waits for nobody: the time that it is asked to wait has passed at once."""

    now = 0.0

    def select(self, timeout=None):
        if timeout is not None and timeout > 0:
            self.now += timeout
        return super().select(0)


class TimedLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock):
        self.clock = clock
        super().__init__(clock)

    def time(self):
        return self.clock.now


def seconds_until(ping):
    """Return whether ``ping(clock)`` is answered, and after how many seconds it is known."""
    clock = Clock()
    with asyncio.Runner(loop_factory=lambda: TimedLoop(clock)) as runner:
        alive = runner.run(answers(lambda: ping(clock), SECONDS))
        return alive, clock.now


async def silent(clock):
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def refuses(clock):
    return False


@pytest.mark.parametrize("ping", [silent, refuses])
def test_one_that_never_answers_is_waited_for_the_whole_time_and_no_longer(ping):
    alive, seconds = seconds_until(ping)
    assert not alive
    assert seconds == pytest.approx(SECONDS)


@given(st.floats(0, 0.899), st.booleans())
def test_one_that_answers_after_an_outage_is_alive_by_an_old_ping_or_a_new_one(part, arrives_late):
    """Behind a link that is down for nine tenths of the time, either what was sent then arrives
    or what is sent now.
    """
    up_again = part * SECONDS

    async def ping(clock):
        if clock.now < up_again and not arrives_late:
            await silent(clock)
        await asyncio.sleep(up_again - clock.now)
        return True

    alive, seconds = seconds_until(ping)
    assert alive
    assert up_again - 1e-6 <= seconds <= up_again + SECONDS / 10 + 1e-6


@given(st.integers(0, 9), st.floats(SECONDS / 4, 100))
def test_time_in_which_this_process_stood_still_does_not_count(slice_of_it, standstill):
    """As under SIGSTOP, in any slice of the time."""
    asked = []

    async def ping(clock):
        asked.append(clock.now)
        if len(asked) == slice_of_it + 1:
            clock.now += standstill  # the event loop stands still
        if len(asked) < 11:
            await silent(clock)
        return True

    assert seconds_until(ping)[0]
