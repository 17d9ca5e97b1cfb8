"""``siirl-dask doctor`` as a user types it."""

import json
import os
import resource
import subprocess
import sys

import pytest

from siirl_dask.cli import main
from siirl_dask.config.file import shipped
from siirl_dask.driver.doctor.finding import fault, note, ok

DOCTOR = [sys.executable, "-m", "siirl_dask.cli", "doctor"]


@pytest.fixture
def broken(tmp_path):
    """An environment with a vLLM that cannot be imported, and an interface that is not there."""
    (tmp_path / "broken" / "vllm").mkdir(parents=True)
    (tmp_path / "broken" / "vllm" / "__init__.py").write_text(
        "raise ImportError('undefined symbol')"
    )
    path = os.pathsep.join([str(tmp_path / "broken"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "NCCL_SOCKET_IFNAME": "=nowhere0"}


def test_faults_are_told_with_their_cures_as_json(tmp_path, broken):
    (tmp_path / "file").touch()

    def few_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (120, 4096))

    with_config = [str(shipped("quickstart.yaml")), "run.url=file/run"]
    how = {"cwd": tmp_path, "env": broken, "preexec_fn": few_files}
    told = subprocess.run(
        [*DOCTOR, *with_config, "--json"], capture_output=True, text=True, check=False, **how
    )
    assert not told.stderr
    data = json.loads(told.stdout)
    found = {each["part"]: each for each in data["findings"] if each["state"] == "fault"}
    assert set(found) == {"open files", "interface", "storage", "vllm"}
    assert (told.returncode, data["faults"]) == (1, 4)
    assert all(
        each["text"] and each["cure"] and "\n" not in each["cure"] for each in found.values()
    )
    assert {"python", "packages", "memory", "devices", "collectives", "cluster"} <= {
        each["part"] for each in data["findings"]
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "file"]


def test_findings_are_told_as_text_and_the_exit_code_says_whether_one_is_a_fault(
    monkeypatch, capsys
):
    found = [
        ok("python", "3.11"),
        note("cores", "2", "they take turns"),
        fault("vllm", "it is \x1b[2J", "pip install"),
    ]
    for findings, code, last in (
        (found[:2], 0, "no fault in 2 findings"),
        (found, 1, "1 fault in 3 findings"),
    ):
        monkeypatch.setattr(
            "siirl_dask.commands.doctor.examine", lambda config, findings=findings: findings
        )
        with pytest.raises(SystemExit, match=str(code)):
            main(["doctor"])
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == last
        assert lines[:3] == ["ok    python  3.11", "note  cores   2", f"{'':14}they take turns"]
    assert lines[3:5] == ["fault vllm    it is \N{REPLACEMENT CHARACTER}[2J", f"{'':14}pip install"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such.yaml"], "no-such.yaml"),
        (["quickstart.yaml", "run.stepz=3"], "did you mean 'steps'"),
        (["--cluster", "slurm.yaml"], "expected siirl-dask doctor CONFIG"),
        (["run.url=here"], "'run.url=here' is given without a CONFIG"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused_before_anything(
    arguments, said, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(shipped("quickstart.yaml").parent)
    monkeypatch.setattr(
        "siirl_dask.commands.doctor.examine", lambda config: pytest.fail("it was examined")
    )
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", *arguments])
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom siirl_dask.cli import main\ntry:\n main(['doctor', '--help'])\nexcept "
        "SystemExit: pass\n"
    )
    heavy = (
        "print([name for name in ('torch', 'vllm', 'dask', 'transformers') if name in "
        "sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code + heavy], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
