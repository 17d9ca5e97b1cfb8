"""CPUs are read, divided fairly, and a process is really bound to them and let go again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.devices.cpus import given_cpus, numa_nodes, read_cpus, share_of, show_cpus
from tests.devices.hosts import make_nodes

CPUS = st.frozensets(st.integers(0, 300))
HERE = given_cpus()
SEVERAL = pytest.mark.skipif(len(HERE) < 2, reason="needs two CPUs to be bound to one of them")


@given(CPUS)
def test_lists_of_cpus_are_read_back_unchanged(cpus):
    assert read_cpus(show_cpus(cpus)) == cpus


def test_lists_are_as_the_kernel_writes_them():
    assert show_cpus({8, 0, 2, 1}) == "0-2,8"
    assert read_cpus("0-3,8\n") == {0, 1, 2, 3, 8}
    assert read_cpus("\n") == frozenset()


@pytest.mark.parametrize("text", ["a", "3-1", "0-", "-1", "0-9999", "1.5", "0 1", "0," * 40_000])
def test_any_other_text_is_refused(text):
    with pytest.raises(ValueError, match="CPUs"):
        read_cpus(text)


def test_this_machine_has_nodes_with_the_cpus_of_this_process():
    nodes = numa_nodes()
    assert not nodes or frozenset().union(*nodes.values()) >= HERE


def test_nodes_that_cannot_be_read_are_left_out(tmp_path):
    make_nodes(tmp_path, range(4), range(4, 8), range(8, 9))
    (tmp_path / "devices/system/node/node1/cpulist").write_text("none")
    (tmp_path / "devices/system/node/node2/cpulist").unlink()
    assert numa_nodes(tmp_path) == {0: frozenset(range(4))}
    assert numa_nodes(tmp_path / "nothing") == {}


@given(CPUS, st.integers(1, 9), st.integers(1, 6))
def test_shares_are_all_of_the_cpus_and_fair(cpus, count, threads):
    shares = [share_of(cpus, place, count, threads, Path("/nonexistent")) for place in range(count)]
    assert frozenset().union(*shares) == cpus
    if any(share != cpus for share in shares):
        sizes = [len(share) for share in shares]
        assert sum(sizes) == len(cpus), "no CPU is two workers'"
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= max(4, threads)


def test_a_share_has_whole_cores(tmp_path):
    make_nodes(tmp_path, [*range(16), *range(32, 48)], threads=2)
    near = frozenset([*range(16), *range(32, 48)])
    assert share_of(near, 0, 4, 1, tmp_path) == {0, 1, 2, 3, 32, 33, 34, 35}
    assert share_of(near, 3, 4, 1, tmp_path) == {12, 13, 14, 15, 44, 45, 46, 47}
    restricted = near - {32, 33, 1}
    shares = [share_of(restricted, place, 3, 1, tmp_path) for place in range(3)]
    assert frozenset().union(*shares) == restricted, "of a container's CPUs, all and no others"
    assert not any(
        cpu in share and cpu + 32 in restricted - share for share in shares for cpu in range(16)
    )


def test_too_few_cpus_are_shared_by_all():
    near = frozenset(range(8))
    assert [share_of(near, place, 2) for place in range(2)] == [
        frozenset(range(4)),
        frozenset(range(4, 8)),
    ]
    assert {share_of(near, place, 3) for place in range(3)} == {near}
    assert {share_of(near, place, 2, 5) for place in range(2)} == {near}, (
        "torch has more threads than a share has CPUs"
    )


PROCESS = """
import json, os, subprocess, sys, threading
from siirl_dask.devices.cpus import CpuBinding, given_cpus, unbind

def inner():
    return sorted(os.sched_getaffinity(0))

def of_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(inner()))
    thread.start()
    thread.join()
    return found[0]

def of_process(freed):
    code = "import os, sys; sys.stdin.read(); print(sorted(os.sched_getaffinity(0)))"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if freed:
        unbind(child.pid)
    return json.loads(child.communicate()[0])

seen, bound = threading.Event(), threading.Event()
earlier = []
def wait():
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    seen.set()
    bound.wait()
    earlier.append(inner())
waiting = threading.Thread(target=wait)
waiting.start()
seen.wait()
binding, cpus = CpuBinding(), json.loads(sys.argv[1])
binding.bind(frozenset(cpus))
bound.set()
waiting.join()
told = {"bound": inner(), "given": sorted(given_cpus()), "later": of_thread(), "earlier": earlier[0]}
told |= {"child": of_process(False), "freed": of_process(True)}
binding.bind(frozenset(cpus))
binding.undo()
print(json.dumps(told | {"after": inner(), "variable": os.environ.get("SIIRL_GIVEN_CPUS")}))
"""


def bound_to(cpus, *before):
    done = subprocess.run(
        [*before, sys.executable, "-c", PROCESS, json.dumps(sorted(cpus))],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@SEVERAL
def test_a_process_is_bound_with_its_threads_and_children_and_let_go():
    one = max(HERE)
    told = bound_to({one, 8000})
    for name in ("bound", "given", "later", "earlier", "child"):
        assert told[name] == [one], name
    assert told["freed"] == told["after"] == sorted(HERE)
    assert told["variable"] is None


@SEVERAL
def test_a_process_is_never_bound_outside_of_the_cpus_that_it_was_given():
    first, *others = sorted(HERE)
    told = bound_to(others, "taskset", "-c", str(first))
    assert {
        tuple(told[name]) for name in ("bound", "later", "earlier", "child", "freed", "after")
    } == {(first,)}


@SEVERAL
def test_a_thread_that_a_library_has_bound_stays_where_it_is():
    code = """
import os, threading
from siirl_dask.devices.cpus import CpuBinding
first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
pinned, done, told = threading.Event(), threading.Event(), []
def pin():
    os.sched_setaffinity(0, {first})
    pinned.set()
    done.wait()
    told.append(os.sched_getaffinity(0) == {first})
thread = threading.Thread(target=pin)
thread.start()
pinned.wait()
CpuBinding().bind(frozenset({last}))
done.set()
thread.join()
print(told, os.sched_getaffinity(0) == {last})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[True]", "True"]


def test_a_process_that_is_not_bound_frees_nobody(monkeypatch):
    from siirl_dask.devices import cpus

    monkeypatch.delenv(cpus.GIVEN, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *given: pytest.fail("nothing is to be set"))
    cpus.unbind(os.getpid())
    cpus.CpuBinding().bind(frozenset())
    cpus.CpuBinding().bind(HERE)
