"""A run when links and hosts fail: what can go on goes on, and the rest is said at once, by name."""

import subprocess
import time

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]
PEER_TIMEOUT = 15  # seconds: the default between hosts


def message(driver):
    """The line with which the driver says why it ends, and the seconds until then."""
    began, lines = time.monotonic(), []
    for line in driver.process.stdout:
        lines.append(line)
        if line.startswith("error: "):
            return line, time.monotonic() - began
    raise AssertionError("".join(lines))


OUTAGES = [
    pytest.param(1, 2, marks=pytest.mark.sweep),
    pytest.param(1, 8, marks=pytest.mark.sweep),
    (1, 13),
    pytest.param(3, 8, marks=pytest.mark.sweep),
]
"""Host whose link is down, and for how many seconds."""


@pytest.mark.parametrize(("where", "seconds"), OUTAGES)
def test_a_link_that_is_down_for_less_than_the_peer_timeout_costs_nothing_but_time(
    cluster_of_three, digits_on, where, seconds
):
    """The link of a worker's host, or that of the driver's."""
    lab, cluster = cluster_of_three(count=4)
    driver = digits_on(cluster, lab.hosts[3], "run.steps=20")
    driver.wait_for_steps(2)
    lab.pull(lab.hosts[where])
    with pytest.raises(subprocess.TimeoutExpired):
        driver.process.wait(seconds)
    lab.plug(lab.hosts[where])
    driver.succeeds()
    assert driver.steps() == 20


@pytest.mark.parametrize("event", ["pull", pytest.param("power_off", marks=pytest.mark.sweep)])
def test_a_worker_that_is_cut_off_is_named_before_the_run_is_tidied_up(cluster_of_three, digits_on, event):
    lab, cluster = cluster_of_three()
    driver = digits_on(cluster, lab.hosts[0], "run.steps=100000", "run.max_restarts=0")
    driver.wait_for_steps(2)
    getattr(lab, event)(lab.hosts[1])
    line, seconds = message(driver)
    print(f"{event}: message after {seconds:.1f} s, end after {driver.end(60)[1]:.1f} s more: {line}")
    assert seconds < PEER_TIMEOUT + 2
    assert "no sign of life within 15 s (cluster.peer_timeout)" in line
    assert "worker '1'" in line


@pytest.mark.parametrize("event", ["pull", pytest.param("power_off", marks=pytest.mark.sweep)])
def test_a_driver_that_is_cut_off_from_the_scheduler_says_so(cluster_of_three, digits_on, event):
    """Its own link fails, or the scheduler's host goes down."""
    lab, cluster = cluster_of_three(count=4)
    driver = digits_on(cluster, lab.hosts[3], "run.steps=100000", "run.max_restarts=0")
    driver.wait_for_steps(2)
    getattr(lab, event)(lab.hosts[3] if event == "pull" else lab.hosts[0])
    line, seconds = message(driver)
    print(f"{event}: message after {seconds:.1f} s, end after {driver.end(60)[1]:.1f} s more: {line}")
    assert seconds < PEER_TIMEOUT + 2
    assert "no sign of life of the scheduler at tcp://198.18.0.10:8786 within 15 s (cluster.peer_timeout" in line


def test_a_cluster_whose_driver_was_cut_off_takes_the_next_run(cluster_of_three, digits_on):
    lab, cluster = cluster_of_three(count=4)
    first = digits_on(cluster, lab.hosts[3], "run.steps=100000")
    first.wait_for_steps(2)
    lab.power_off(lab.hosts[3])
    assert digits_on(cluster, lab.hosts[0], name="next").succeeds()["steps"] == 3
