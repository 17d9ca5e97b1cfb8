"""A lab of hosts on one Linux machine: namespaces with networks between them, to test runs on
several machines.

    with Lab(3, links=Links(bits_per_second=1e9)) as lab:
        lab.hosts[0].run("ping", "-c1", lab.hosts[1].address)
        lab.pull(lab.hosts[1])

``why_no_lab`` says why a machine cannot have one; tests skip with these words.
"""

from siirl_dask.testing.hosts.dask_cluster import DaskCluster
from siirl_dask.testing.hosts.host import Host, LabError
from siirl_dask.testing.hosts.lab import Lab, Links, Names, why_no_lab

__all__ = ["DaskCluster", "Host", "Lab", "LabError", "Links", "Names", "why_no_lab"]
