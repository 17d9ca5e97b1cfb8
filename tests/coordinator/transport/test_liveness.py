"""A process counts as gone when no ping is answered for the whole time, and not before."""

import asyncio
import time

from siirl_dask.coordinator.transport.peers import answers


def seconds_until(ping, seconds):
    began = time.monotonic()
    return asyncio.run(answers(ping, seconds)), time.monotonic() - began


def test_one_that_never_answers_is_given_the_whole_time_and_no_more():
    async def silent():
        await asyncio.Event().wait()

    async def refuses():
        return False

    for ping in (silent, refuses):
        alive, seconds = seconds_until(ping, 0.5)
        assert not alive
        assert 0.5 <= seconds < 2


def test_one_that_answers_at_the_last_moment_is_alive_by_an_old_ping_or_a_new_one():
    """Behind a link that is down for nine tenths of the time, either what was sent then arrives
    or what is sent now.
    """
    for arrives_late in (True, False):
        began = time.monotonic()

        async def ping(began=began, arrives_late=arrives_late):
            if time.monotonic() < began + 0.85 and not arrives_late:
                await asyncio.Event().wait()
            await asyncio.sleep(began + 0.85 - time.monotonic())
            return True

        alive, seconds = seconds_until(ping, 1.0)
        assert alive
        assert 0.8 < seconds < 1.0


def test_time_in_which_this_process_stood_still_does_not_count():
    asked = []

    async def ping():
        asked.append(time.monotonic())
        if len(asked) == 9:
            time.sleep(2)  # the event loop stands still, as under SIGSTOP
        if len(asked) < 11:
            await asyncio.Event().wait()
        return True

    assert seconds_until(ping, 0.5)[0]
