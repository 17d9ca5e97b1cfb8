"""Runs across hosts do not depend on what names the hosts have, or on which kind of address;
local ones stay local.
"""

import pytest

from siirl_dask.config.file import shipped
from siirl_dask.testing.hosts import Lab, Names
from tests.conftest import digits_overrides
from tests.forked_programs import ForkedProgram
from tests.hosts.conftest import APART

SWEEP = pytest.mark.sweep
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@SWEEP  # test_same_numbers.py has Debian's names, and almost all others the hosts' addresses
@pytest.mark.parametrize("names", Names)
def test_a_run_across_hosts_does_not_care_what_their_names_resolve_to(
    cluster_of_three, digits_on, names
):
    lab, cluster = cluster_of_three(names=names)
    assert digits_on(cluster, lab.hosts[0]).succeeds()["steps"] == 3


def test_a_run_across_hosts_goes_over_ipv6(cluster_of_three, digits_on):
    lab, cluster = cluster_of_three(ipv6=True)
    for host in lab.hosts:
        host.run("ip", "-4", "addr", "flush", "dev", "eth0")
    assert digits_on(cluster, lab.hosts[0]).succeeds()["steps"] == 3


@pytest.mark.parametrize("engine", [pytest.param("transformers", marks=SWEEP), "vllm"])
def test_no_process_of_a_run_on_one_machine_listens_to_its_network(digits_task, tmp_path, engine):
    """The host's name leads to its address on the network: where gloo listens by default."""
    overrides = [
        *(
            *digits_overrides(digits_task, tmp_path / "run"),
            "cluster.workers=3",
            APART,
            "run.steps=2",
        ),
        *(
            f"rollout.engine={engine}",
            "rewards.function=tests.hosts.rewards:nobody_listens_to_the_network",
        ),
    ]
    words = ("-m", "siirl_dask.cli", "run", shipped("quickstart.yaml"), *overrides)
    with Lab(1) as lab:
        process = ForkedProgram(words, None, tmp_path / "output", host=lab.hosts[0])
        out, _ = process.communicate()
    assert process.returncode == 0, out
