"""A run when links and hosts fail: what can go on goes on, and the rest is said at once, by name.

What leaves a cluster whole happens to one: its workers outlive the runs of these tests.
"""

import signal
import subprocess
import time

import pytest

from siirl_dask.testing.hosts import Lab, Names
from tests.hosts.conftest import forked_cluster
from tests.slowdown import Slowdown

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]
PEER_TIMEOUT = 15  # seconds: the default between hosts
PORTS = range(20000, 21000)


@pytest.fixture(scope="module")
def four_hosts(tmp_path_factory):
    """A lab of four hosts whose kernels give out the ports of PORTS, with a scheduler on the first
    and a worker on each of three.
    """
    with Lab(4, names=Names.LOOPBACK) as lab:
        for host in lab.hosts:
            ports = f"{PORTS[0]} {PORTS[-1]}"
            host.run("sh", "-c", f"echo {ports} > /proc/sys/net/ipv4/ip_local_port_range")
        folder = tmp_path_factory.mktemp("dask")
        yield (
            lab,
            forked_cluster(lab.hosts[0], lab.hosts[:3], folder, arguments=("--interface", "eth0")),
        )


def message(driver):
    """The line with which the driver says why it ends, the seconds until then, and how much longer
    than on an idle machine such seconds may take.
    """
    began, lines = time.monotonic(), []
    with Slowdown() as measured:
        for line in driver.process.stdout:
            lines.append(line)
            if line.startswith("error: "):
                return line, time.monotonic() - began, measured.factor
    raise AssertionError("".join(lines))


def test_with_the_kernels_port_range_all_that_listens_between_hosts_is_in_it(four_hosts, digits_on):
    lab, cluster = four_hosts
    driver = digits_on(cluster, lab.hosts[0], "run.steps=1000")
    driver.wait_for_steps(1)
    for host in lab.hosts[:3]:
        listening = host.run("ss", "-Hltn", "src", host.address).splitlines()
        ports = {int(line.split()[3].rpartition(":")[2]) for line in listening} - {8786}
        assert len(ports) >= 3, "a worker, its nanny and gloo"
        assert all(port in PORTS for port in ports), ports
    lab.hosts[0].signal(driver.process, signal.SIGINT)
    driver.end()


OUTAGES = [
    pytest.param(1, 2, marks=pytest.mark.sweep),
    pytest.param(1, 8, marks=pytest.mark.sweep),
    (1, 13),
    pytest.param(3, 8, marks=pytest.mark.sweep),
]
"""Host whose link is down, and for how many seconds."""


@pytest.mark.parametrize(("where", "seconds"), OUTAGES)
def test_a_link_that_is_down_for_less_than_the_peer_timeout_costs_nothing_but_time(
    four_hosts, digits_on, where, seconds
):
    """The link of a worker's host, or that of the driver's."""
    lab, cluster = four_hosts
    driver = digits_on(cluster, lab.hosts[3], "run.steps=20")
    driver.wait_for_steps(2)
    lab.pull(lab.hosts[where])
    with pytest.raises(subprocess.TimeoutExpired):
        driver.process.wait(seconds)
    lab.plug(lab.hosts[where])
    driver.succeeds()
    assert driver.steps() == 20


def check_no_sign_of_the_scheduler(driver):
    line, seconds, slowdown = message(driver)
    print(f"message after {seconds:.1f} s, end after {driver.end(60)[1]:.1f} s more: {line}")
    assert seconds < PEER_TIMEOUT + 2 * slowdown
    assert (
        "no sign of life of the scheduler at tcp://198.18.0.10:8786 within 15 s "
        "(cluster.peer_timeout" in line
    )


def test_a_driver_that_is_cut_off_says_so_and_its_cluster_takes_the_next_run_at_once(
    four_hosts, digits_on
):
    """To the cluster it is as if the driver's host had no power."""
    lab, cluster = four_hosts
    driver = digits_on(cluster, lab.hosts[3], "run.steps=100000", "run.max_restarts=0")
    driver.wait_for_steps(2)
    lab.pull(lab.hosts[3])
    following = digits_on(cluster, lab.hosts[0], name="next")
    check_no_sign_of_the_scheduler(driver)
    assert following.succeeds()["steps"] == 3
    lab.plug(lab.hosts[3])


@pytest.mark.sweep
def test_a_driver_whose_scheduler_has_no_power_says_so(cluster_of_three, digits_on):
    lab, cluster = cluster_of_three(count=4)
    driver = digits_on(cluster, lab.hosts[3], "run.steps=100000", "run.max_restarts=0")
    driver.wait_for_steps(2)
    lab.power_off(lab.hosts[0])
    check_no_sign_of_the_scheduler(driver)


@pytest.mark.parametrize("event", ["pull", pytest.param("power_off", marks=pytest.mark.sweep)])
def test_a_worker_that_is_cut_off_is_named_before_the_run_is_tidied_up(request, digits_on, event):
    """The last test here, since it takes a worker from the cluster."""
    if event == "pull":
        lab, cluster = request.getfixturevalue("four_hosts")
    else:
        lab, cluster = request.getfixturevalue("cluster_of_three")()
    driver = digits_on(cluster, lab.hosts[0], "run.steps=100000", "run.max_restarts=0")
    driver.wait_for_steps(2)
    getattr(lab, event)(lab.hosts[1])
    line, seconds, slowdown = message(driver)
    print(
        f"{event}: message after {seconds:.1f} s, end after {driver.end(60)[1]:.1f} s more: {line}"
    )
    assert seconds < PEER_TIMEOUT + 2 * slowdown
    assert "no sign of life within 15 s (cluster.peer_timeout)" in line
    assert "worker '1'" in line
