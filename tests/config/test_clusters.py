"""The recipes in configs/clusters that are no specs of Dask clusters: as far as can be known
without one.
"""

import subprocess

import kubernetes_validate
import pytest
import yaml

from siirl_dask.config.file.layers import shipped_files

FOLDER = shipped_files("clusters")["slurm.yaml"].parent
MANIFEST = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
PARTS = {part["kind"]: part for part in MANIFEST}


@pytest.mark.parametrize(
    "part", MANIFEST, ids=lambda part: f"{part['kind']} {part['metadata']['name']}"
)
def test_the_manifest_is_what_kubernetes_takes(part):
    kubernetes_validate.validate(part, "1.30", strict=True)


def test_what_the_manifest_selects_and_mounts_is_in_it():
    pods = {
        kind: part["spec"]["template"] for kind, part in PARTS.items() if "template" in part["spec"]
    }
    labels = [pod["metadata"]["labels"] for pod in pods.values() if "metadata" in pod]
    services = [part for part in MANIFEST if part["kind"] == "Service"]
    assert all(part["spec"]["selector"] in labels for part in services)
    for kind in ("Deployment", "StatefulSet"):
        assert PARTS[kind]["spec"]["selector"]["matchLabels"] == pods[kind]["metadata"]["labels"]
    names = [part["metadata"]["name"] for part in services]
    assert PARTS["StatefulSet"]["spec"]["serviceName"] in names
    for pod in pods.values():
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        (container,) = pod["spec"]["containers"]
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
        words = " ".join([*container["command"], *container.get("args", [])])
        assert "tcp://" not in words or "tcp://siirl-scheduler:8786" in words


def test_the_driver_of_the_manifest_waits_for_all_workers():
    (workers,) = PARTS["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    (driver,) = PARTS["Job"]["spec"]["template"]["spec"]["containers"]
    of_a_pod = next(
        int(variable["value"]) for variable in workers["env"] if variable["name"] == "WORKERS"
    )
    assert (
        f"cluster.workers={PARTS['StatefulSet']['spec']['replicas'] * of_a_pod}" in driver["args"]
    )
    assert workers["resources"]["limits"]["nvidia.com/gpu"] == of_a_pod


@pytest.mark.parametrize("script", ["slurm.sbatch", "mpi.sh"])
def test_a_script_is_one_that_bash_reads(script):
    subprocess.run(["bash", "-n", FOLDER / script], check=True)
