"""Each check of the doctor names a real fault with its cure, and leaves nothing behind."""

import json
import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from fsspec import AbstractFileSystem

from siirl_dask.cli import main
from siirl_dask.config import ClusterConfig, Engine
from siirl_dask.context import DeviceKind
from siirl_dask.driver.doctor import DoctorState, machine, packages, storage
from siirl_dask.driver.doctor.cluster import check_cluster
from siirl_dask.driver.doctor.devices import count_nodes, judge_interface, judge_unseen
from siirl_dask.driver.doctor.vllm import judge_vllm
from tests.conftest import digits_overrides


def faults(findings):
    return {
        each.part: (each.text, each.cure) for each in findings if each.state is DoctorState.FAULT
    }


def install(folder, name, version, *lines):
    """Put the metadata of a package where Python finds it first."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    text = [f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}", *lines]
    (info / "METADATA").write_text("\n".join(text) + "\n")


def test_this_environment_is_as_the_package_asks():
    assert not faults(packages.check_packages())


def test_a_package_of_another_version_is_named_also_one_of_an_extra(tmp_path, monkeypatch):
    install(tmp_path, "torch", "2.1.0")
    install(tmp_path, "vllm", "0.11.0")
    monkeypatch.syspath_prepend(tmp_path)
    found = faults(packages.check_packages())
    assert found["torch"] == (
        "2.1.0 is installed, and siirl_dask needs torch<2.14,>=2.11",
        "pip install 'torch<2.14,>=2.11'",
    )
    assert found["vllm"][1] == "pip install 'vllm<0.33,>=0.32'"
    assert len(found) == 2


@pytest.mark.parametrize(("name", "version"), [("torch", "2.10.1"), ("transformers", "5.15.0")])
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_torch_or_transformers_that_cannot_work_is_refused_in_one_line_before_workers_start(
    tmp_path, monkeypatch, capsys, digits_task, name, version, command
):
    install(tmp_path / "site", name, version)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(SystemExit) as stopped:
        main([command, "configs/quickstart.yaml", *digits_overrides(digits_task, tmp_path / "run")])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {name} {version} is installed in ")
    assert f"and siirl_dask needs {name}<" in line
    assert f"pip install '{name}<" in line
    assert not (tmp_path / "run").exists()


def test_a_newer_torch_is_left_to_the_doctor(tmp_path, monkeypatch):
    install(tmp_path, "torch", "2.99.0")
    monkeypatch.syspath_prepend(tmp_path)
    packages.refuse_older()
    assert "torch" in faults(packages.check_packages())


def test_without_its_sources_the_package_asks_for_what_it_was_installed_with(tmp_path, monkeypatch):
    install(
        tmp_path,
        "siirl_dask",
        "9.9",
        "Requires-Python: >=4",
        "Requires-Dist: pyarrow>=9999",
        "Requires-Dist: not-on-any-machine>=1",
        'Requires-Dist: fsspec>=9999; extra == "s3"',
        'Requires-Dist: not-there-either; extra == "s3"',
        'Requires-Dist: pytest>=9999; extra == "test"',
        "Provides-Extra: s3",
        "Provides-Extra: test",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("siirl_dask.__file__", str(tmp_path / "siirl_dask" / "__init__.py"))
    found = faults(packages.check_packages())
    assert set(found) == {"python", "pyarrow", "not-on-any-machine", "fsspec"}
    assert "it is not installed" in found["not-on-any-machine"][0]


LIMITS = """
import json, resource
from dataclasses import asdict
from siirl_dask.driver.doctor.machine import check_limits
for limits in ((192, 4096), (100, 4096), (100, 150)):
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    print(json.dumps([asdict(each) for each in check_limits(8)]))
"""


def test_a_low_limit_of_open_files_is_a_fault_with_the_cure_that_the_hard_limit_allows():
    done = subprocess.run(
        [sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True
    )
    found = [
        each
        for line in done.stdout.splitlines()
        for each in json.loads(line)
        if each["part"] == "open files"
    ]
    assert [each["cure"] for each in found] == [
        "",
        "ulimit -n 192",
        "raise nofile in /etc/security/limits.conf to 192",
    ]
    assert {each["text"] for each in found[1:]} == {
        "a process may open 100, and a run with 8 workers wants 192"
    }


def test_no_room_for_shared_memory_or_temporary_files_is_a_fault(tmp_path):
    assert "--shm-size" in machine.shared_memory(Path("/sys")).cure  # a file system without a byte
    assert machine.shared_memory(tmp_path / "none").cure == "mount -t tmpfs tmpfs /dev/shm"
    for folder, said in {"/sys": "has 0 B free", str(tmp_path / "none"): "is not there"}.items():
        assert said in faults(machine.check_machine(1, 1, folder))["temporary files"][0]
    assert "temporary files" not in faults(machine.check_machine(1, 1, str(tmp_path)))


def test_devices_that_torch_does_not_see_are_told_with_why(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    there = {"nvidia": count_nodes("nvidia", tmp_path)}
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for cuda, said in {
        None: "2 of nvidia are there, .* sees none: it is built for CPUs",
        "13.0": "CUDA 13.0",
    }.items():
        found = judge_unseen(there, "2.13.0", cuda)
        assert found.state is DoctorState.FAULT
        assert found.cure
        assert re.search(said, found.text)
    assert judge_unseen({}, "2.13.0", None).state is DoctorState.OK
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on purpose
    assert judge_unseen(there, "2.13.0", None).state is DoctorState.OK


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        ("eth", "eth0, eth1"),
        ("=eth0", "eth0"),
        ("=eth", None),
        ("ib0,eth1", "eth1"),
        ("^lo,eth0", "eth1"),
        ("^=lo", "eth0, eth1"),
        ("bond0", None),
    ],
)
def test_a_variable_that_names_no_interface_of_the_machine_is_a_fault(value, taken):
    found = judge_interface("NCCL_SOCKET_IFNAME", value, ["lo", "eth0", "eth1"])
    assert found.state is (DoctorState.OK if taken else DoctorState.FAULT)
    assert found.text == f"NCCL_SOCKET_IFNAME={value} " + (
        f"takes {taken}" if taken else "fits no interface of this machine"
    )


def test_a_vllm_for_other_devices_than_torchs_is_a_fault():
    said = [sys.executable, "-c", """print('{"version": "0.32.0", "device": "cpu"}')"""]
    for kind, state in {DeviceKind.CUDA: DoctorState.FAULT, DeviceKind.CPU: DoctorState.OK}.items():
        with subprocess.Popen(
            said, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as probe:
            assert judge_vllm(probe, Engine.auto, kind).state is state


def test_without_vllm_only_a_run_that_names_it_has_a_fault():
    states = {engine: judge_vllm(None, engine, DeviceKind.CPU).state for engine in Engine}
    assert states == {
        engine: DoctorState.FAULT if engine is Engine.vllm else DoctorState.NOTE
        for engine in Engine
    }


def test_a_round_trip_in_a_store_leaves_nothing_behind(store_url):
    fs, path = fsspec.url_to_fs(store_url)
    found = storage.check_storage(f"{store_url}/runs/mine")
    assert found.state is DoctorState.OK, found.text
    fs.invalidate_cache()
    assert not fs.exists(path)
    assert not fs.exists(f"{path}/runs")


def test_a_run_that_is_there_is_left_as_it_is(tmp_path):
    (tmp_path / "config.yaml").touch()
    assert storage.check_storage(str(tmp_path)).state is DoctorState.OK
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file", "no folder that this user can write to"),
        ("file/below/it", "no folder that this user can write to"),
        ("s33://bucket/run", "did you mean s3://"),
        ("s3://no-such-bucket/run", "s3://no-such-bucket/run cannot be written: "),
    ],
)
def test_a_place_that_cannot_be_written_is_a_fault(place, said, request, tmp_path, monkeypatch):
    if place.startswith("s3:"):
        request.getfixturevalue("s3")
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    found = storage.check_storage(place)
    assert found.state is DoctorState.FAULT
    assert said in found.text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_store_that_does_not_answer_is_a_fault_with_its_last_error(s3, monkeypatch):
    import s3fs

    monkeypatch.setattr(storage, "_PATIENCE", 1.0)
    monkeypatch.setattr(storage, "_RETRIES", 0.5)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    found = storage.check_storage(f"{s3}/run")
    s3fs.S3FileSystem.clear_instance_cache()
    assert found.state is DoctorState.FAULT
    assert re.search(r"has not answered in 1 s|cannot be written: .*127\.0\.0\.1:9", found.text)


class Careless(AbstractFileSystem):
    """A store that replaces a file where it was asked to create one."""

    protocol = "careless"
    files: dict[str, bytes] = {}  # noqa: RUF012

    def pipe_file(self, path, value, mode="overwrite", **options):
        self.files[self._strip_protocol(path)] = value

    def cat_file(self, path, start=None, end=None, **options):
        return self.files[self._strip_protocol(path)]

    def info(self, path, **options):
        if not any(name.startswith(self._strip_protocol(path)) for name in self.files):
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": 0}

    def rm(self, path, recursive=False, maxdepth=None):
        for name in [name for name in self.files if name.startswith(self._strip_protocol(path))]:
            del self.files[name]


def test_a_store_that_lets_two_writers_create_one_file_is_a_fault(monkeypatch):
    fsspec.register_implementation("careless", Careless, clobber=True)
    found = storage.check_storage(f"careless://{uuid4().hex}/run")
    assert found.state is DoctorState.FAULT
    assert "lets two writers create one file" in found.text
    assert not Careless.files


FEW = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))"


def pretend():
    from siirl_dask.worker.process import report

    report.__version__ = "0.0.9"


def test_a_cluster_has_faults_by_host_and_by_worker(cluster, tmp_path):
    client = cluster(a={"before": FEW}, b={"before": FEW, "environment": {"NCCL_ALGO": "Ring"}})
    address, file = client.scheduler.address, str(tmp_path / "scheduler.json")
    findings = check_cluster(ClusterConfig(workers=2, scheduler_file=file))
    (part,) = faults(findings)
    assert part == "host 127.0.0.1"
    assert faults(findings)[part][0].startswith("open files: a process may open 120")
    assert any("NCCL_ALGO" in each.text and each.state is DoctorState.NOTE for each in findings)
    (b,) = [
        at
        for at, worker in client.scheduler_info(n_workers=-1)["workers"].items()
        if worker["name"] == "b"
    ]
    client.run(pretend, workers=[b])
    found = faults(check_cluster(ClusterConfig(workers=3, address=address)))
    assert found["cluster"] == (
        f"the scheduler at {address} has 2 workers, and a run wants 3",
        "start more, or lower cluster.workers",
    )
    assert "0.0.9 on worker 'b'" in found["versions"][0]


def test_workers_without_the_resources_that_a_run_asks_for_are_a_fault(cluster):
    def gpus(count):
        return {"arguments": ["--resources", f"GPU={count} MEMORY=8"]}

    client = cluster(a=gpus(1), b=gpus(2))
    address = client.scheduler.address

    def examined(workers, **resources):
        there = ClusterConfig(workers=workers, address=address, resources=resources)
        return check_cluster(there)

    for workers, resources, said in (
        (1, {"TPU": 1}, "0 of 2 workers have .* none has any TPU"),
        (1, {"GPU": 4}, "0 of 2 workers have .* none has more than 2 of GPU"),
        (2, {"GPU": 2}, r"1 of 2 workers have cluster\.resources={'GPU': 2}, and a run wants 2$"),
    ):
        text, cure = faults(examined(workers, **resources))["resources"]
        assert re.search(said, text), text
        ((name, amount),) = resources.items()
        assert (
            f'dask worker {address} --nthreads 1 --memory-limit 0 --resources "{name}={amount}"'
            in cure
        )
    findings = examined(2, GPU=1, MEMORY=8)
    assert not faults(findings)
    assert any("2 workers with GPU=1 MEMORY=8" in each.text for each in findings)


def test_resources_of_workers_that_a_run_starts_here_are_a_fault():
    found = faults(check_cluster(ClusterConfig(resources={"GPU": 1})))
    text, cure = found["resources"]
    assert "have no resources" in text
    assert "leave it out" in cure


def test_a_cluster_that_is_not_there_is_a_fault_with_what_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("siirl_dask.driver.doctor.cluster._PATIENCE", 0.5)
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / "spec.yaml").write_text("class: distributed.LocalClusterr\nkwargs: {}\n")
    for cluster, said in {
        "nobody": (
            {"address": "tcp://127.0.0.1:9"},
            "no Dask scheduler answers at 'tcp://127.0.0.1:9'",
        ),
        "no address": ({"address": "tcp//127"}, "no Dask scheduler answers at 'tcp//127'"),
        "no file": ({"scheduler_file": str(tmp_path / "none.json")}, "has not come"),
        "damaged": ({"scheduler_file": str(tmp_path / "damaged.json")}, "is none that"),
        "spec": ({"spec": str(tmp_path / "spec.yaml")}, "did you mean 'LocalCluster'"),
    }.values():
        (finding,) = check_cluster(ClusterConfig(**cluster))
        assert finding.state is DoctorState.FAULT
        assert said in finding.text
        assert finding.cure
