"""The lab of hosts: each host is one as a program sees it, links behave as links, and nothing is
left behind.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from siirl_dask.testing.hosts import Lab, LabError, Links, Names, why_no_lab

REASON = why_no_lab()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 7777))
print("ready", flush=True)
peer, _ = server.accept()
peer.settimeout(float(sys.argv[2]))
received, began = 0, None
while block := peer.recv(1 << 20):
    began = began or time.monotonic()
    received += len(block)
print(received, time.monotonic() - began)
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7777))
for _ in range(int(sys.argv[2])):
    peer.sendall(bytes(1 << 20))
"""
ROUND_TRIP = """
import socket, statistics, sys, time
peer = socket.create_connection((sys.argv[1], 7778))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
seconds = []
for _ in range(9):
    began = time.monotonic()
    peer.sendall(b"x")
    peer.recv(1)
    seconds.append(time.monotonic() - began)
print(statistics.median(seconds))
"""
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7778))
print("ready", flush=True)
peer, _ = server.accept()
while block := peer.recv(1):
    peer.sendall(block)
"""


def python(host, code, *arguments):
    process = host.start(sys.executable, "-c", code, *arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def bytes_per_second(lab, mebibytes):
    receiver = python(lab.hosts[1], RECEIVE, lab.hosts[1].address, 60)
    lab.hosts[0].run(sys.executable, "-c", SEND, lab.hosts[1].address, mebibytes)
    received, seconds = receiver.communicate()[0].split()
    assert int(received) == mebibytes << 20
    return int(received) / float(seconds)


def test_each_host_has_its_own_name_processes_shared_memory_and_boot_id():
    with Lab(2) as lab:
        assert [host.run("hostname").strip() for host in lab.hosts] == ["host0", "host1"]
        lab.hosts[0].run("touch", "/dev/shm/ours")
        assert lab.hosts[1].run("ls", "/dev/shm") == "" != lab.hosts[0].run("ls", "/dev/shm")
        boots = {host.run("cat", "/proc/sys/kernel/random/boot_id") for host in lab.hosts}
        assert len({*boots, Path("/proc/sys/kernel/random/boot_id").read_text()}) == 3
        assert lab.hosts[0].run("sh", "-c", "echo $$").strip() != str(os.getpid())
        assert str(os.getpid()) not in lab.hosts[0].run("ls", "/proc").split()


@pytest.mark.parametrize(
    ("names", "own", "other"),
    [
        (Names.ADDRESS, "198.18.0.10", "198.18.0.11"),
        (Names.LOOPBACK, "127.0.1.1", "198.18.0.11"),
        (Names.NONE, "", ""),
    ],
)
def test_a_name_is_at_the_address_that_the_lab_was_asked_for(names, own, other):
    with Lab(2, names=names) as lab:
        found = [
            lab.hosts[0].run("sh", "-c", f"getent hosts {name} || true").split()
            for name in ("host0", "host1")
        ]
        assert [entry[0] if entry else "" for entry in found] == [own, other]


def test_a_private_folder_is_empty_and_other_hosts_do_not_see_what_is_written_there(tmp_path):
    tmp_path.joinpath("before").touch()
    with Lab(2, private=[tmp_path]) as lab:
        lab.hosts[0].run("touch", tmp_path / "own")
        assert lab.hosts[0].run("ls", tmp_path) == "own\n"
        assert lab.hosts[1].run("ls", tmp_path) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["before"]


def test_a_file_can_be_linked_from_its_full_path_to_a_relative_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("file").touch()
    with Lab(1) as lab:
        # refused where the working directory is of another namespace
        lab.hosts[0].run("ln", tmp_path / "file", "link")
    assert tmp_path.joinpath("link").exists()


@pytest.mark.parametrize("delay", [0, 0.001])
def test_no_more_than_the_rate_of_a_link_crosses_it(delay):
    with Lab(2, links=Links(bits_per_second=200e6, delay=delay)) as lab:
        assert bytes_per_second(lab, 16) < 200e6 / 8 * 1.1
        lab.set_rate(None)
        assert bytes_per_second(lab, 64) > 200e6 / 8 * 1.5


def test_a_frame_takes_the_delay_of_the_link_each_way():
    with Lab(2, links=Links(delay=0.02)) as lab:
        echo = python(lab.hosts[1], ECHO, lab.hosts[1].address)
        assert (
            float(lab.hosts[0].run(sys.executable, "-c", ROUND_TRIP, lab.hosts[1].address)) >= 0.04
        )
        echo.communicate()


@pytest.mark.parametrize("delay", [0, 0.001])
def test_a_pulled_link_lets_nothing_pass_until_it_is_plugged_in_and_tcp_goes_on(delay):
    with Lab(2, links=Links(bits_per_second=100e6, delay=delay)) as lab:
        receiver = python(lab.hosts[1], RECEIVE, lab.hosts[1].address, 60)
        lab.pull(lab.hosts[1])
        sender = lab.hosts[0].start(sys.executable, "-c", SEND, lab.hosts[1].address, 4)
        with pytest.raises(subprocess.TimeoutExpired):
            receiver.wait(1)
        lab.plug(lab.hosts[1])
        assert receiver.communicate()[0].startswith(f"{4 << 20} ")
        assert sender.wait() == 0


def test_peers_of_a_crashed_host_are_told_and_those_of_one_without_power_are_not():
    endless = SEND.replace("for _ in range(int(sys.argv[2])):", "while True:")
    for told in (True, False):
        with Lab(2, links=Links(bits_per_second=100e6)) as lab:
            receiver = python(lab.hosts[1], RECEIVE, lab.hosts[1].address, 1)
            lab.hosts[0].start(sys.executable, "-c", endless, lab.hosts[1].address, 0)
            lab.hosts[0].run(
                "sh", "-c", "until ss -tn state established | grep -q 7777; do :; done"
            )
            lab.hosts[0].crash() if told else lab.power_off(lab.hosts[0])
            assert receiver.wait() == (0 if told else 1)  # the end of the stream, or the time-out


def test_a_signal_reaches_the_program_on_the_host_and_not_what_waits_for_it():
    code = """
import signal
try:
    print("ready", flush=True)
    signal.pause()
except KeyboardInterrupt:
    print("told")
"""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a shell
    try:
        with Lab(1) as lab:
            process = python(lab.hosts[0], code)
            lab.hosts[0].signal(process, signal.SIGINT)
            assert process.communicate()[0] == "told\n"
            assert process.returncode == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_fails_says_what_it_printed():
    with Lab(1) as lab, pytest.raises(LabError, match=r"exit status 3\nout\nerr"):
        lab.hosts[0].run("sh", "-c", "echo out; echo err >&2; exit 3")


@pytest.mark.parametrize("delay", [0, 0.001])
def test_a_lab_whose_process_is_killed_leaves_no_process_and_no_link(delay):
    code = f"""
import subprocess, sys
from siirl_dask.testing.hosts import Lab, Links
lab = Lab(2, links=Links(delay={delay}))
programs = [host.start("sleep", "1000", stdin=subprocess.DEVNULL) for host in lab.hosts]
print(*[host.pid for host in lab.hosts], *[child for p in programs for child in
    open(f"/proc/{{p.pid}}/task/{{p.pid}}/children").read().split()], flush=True)
sys.stdin.read()
"""
    links = set(Path("/sys/class/net").iterdir())
    maker = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) >= 2
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    maker.kill()
    maker.communicate()
    late = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < late
    assert set(Path("/sys/class/net").iterdir()) == links
