"""The day on a GPU (``benchmarks/gpu``), without one: its page, its results when it is cut off,
its bundle.
"""

import ast
import importlib
import json
import os
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
NAMES = [path.stem for path in FOLDER.glob("*.py")]
MACHINE = {
    "part": "probe",
    "figure": "machine",
    "device": "NVIDIA H100 80GB HBM3",
    "on_cpu": False,
    "memory_gib": 79.1,
    "cores": 16,
    "python": "3.12.3",
    "cuda": "13.0",
    "versions": {"torch": "2.11.0"},
    "commit": "abc1234",
}


@pytest.fixture
def script(monkeypatch):
    """Import a script of the folder, as one that lies there would."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


def environment(**variables):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "storage")])
    return {**os.environ, "PYTHONPATH": paths, "SIIRL_TEST_DEVICE": "cpu", **variables}


def wait_for(condition):
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_page_shows_what_was_measured_next_to_what_was_predicted(tmp_path):
    lines = [
        MACHINE,
        {"part": "train-torch", "figure": "train/torch", "update_tokens_s": 1.0},
        {"part": "train-torch", "figure": "train/torch", "update_tokens_s": 71234.0, "mfu": 0.213},
        {
            "part": "kernels",
            "state": "failed",
            "seconds": 40.0,
            "code": 1,
            "passed": 11,
            "failed": 1,
            "error": 0,
        }
        | {
            "skipped": 0,
            "failures": ["tests/gpu/test_kernels.py::test_one"],
            "printed": ["heads of 64: flex"],
        }
        | {"last": ["AssertionError: 3 != 4"]},
        {"part": "trl", "state": "timed out", "seconds": 75.0, "code": -9, "last": ["step 2 of 3"]},
    ]
    write_lines(tmp_path / "results.jsonl", lines)
    command = [
        sys.executable,
        str(FOLDER / "page.py"),
        str(tmp_path / "results.jsonl"),
        "--out",
        str(tmp_path / "p.md"),
    ]
    subprocess.run(command, check=True, timeout=60)
    text = (tmp_path / "p.md").read_text()
    assert "One NVIDIA H100 80GB HBM3" in text
    assert "No GPU has run it yet" not in text
    assert "| `torch`: update, tokens/s | 66,000 to 117,000 | 71,234 |" in text
    assert "| `torch`: MFU of the update | 22 to 36 % | 21.3% |" in text
    assert "| kernels | failed | 11 | 1 | 0 | 40.0 |" in text
    assert "* `tests/gpu/test_kernels.py::test_one`" in text
    assert "    heads of 64: flex" in text
    missing = text.partition("## What is missing")[2]
    assert "* quickstart: it has no line of results" in missing
    assert "trl timed out\n\n    step 2 of 3" in missing


def test_the_page_of_the_documentation_is_that_of_the_stored_lines(script):
    stored = ROOT / "benchmarks" / "results" / "gpu.jsonl"
    lines = script("results").read(stored) if stored.exists() else []
    page = script("page").page(lines)
    assert (ROOT / "docs" / "benchmarks" / "gpu.md").read_text() == page, (
        "python benchmarks/gpu/page.py"
    )
    assert lines or "No GPU has run it yet" in page


def test_what_is_known_stays_when_the_day_is_cut_off(tmp_path):
    out = tmp_path / "out"
    command = ["bash", str(FOLDER / "first_run.sh")]
    # it is started elsewhere than in the root, where it would leave its logs
    site = f"{ROOT}:{ROOT}/storage"
    variables = environment(OUT=str(out), PY=sys.executable, ONLY="probe ceilings", SITE=site)
    day = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: (out / "results.jsonl").exists() or day.poll() is not None)
        started = psutil.Process(day.pid).children(recursive=True)
        day.terminate()
        assert day.wait(60) == 143
    finally:
        day.kill()
    assert started
    assert not [
        process for process in started if process.is_running() and process.status() != "zombie"
    ]
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert lines[0]["figure"] == "machine"
    states = {line["part"]: line["state"] for line in lines if "state" in line}
    assert states == {"probe": "cut off", "ceilings": "left out", "day": "cut off"}
    assert "ceilings: left out" in (out / "summary.txt").read_text()
    assert sorted(path.name for path in out.iterdir()) == [
        "all.log",
        "logs.tgz",
        "results.jsonl",
        "summary.txt",
    ]


def test_a_line_without_its_end_does_not_count(script, tmp_path):
    results = script("results")
    results.append(tmp_path, part="probe", state="passed", seconds=1.0)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"part": "trl", "sta')
    assert [line["part"] for line in results.read(tmp_path / "results.jsonl")] == ["probe"]


def test_a_part_whose_time_is_over_ends_with_all_that_it_started_and_says_how_far_it_came(
    script, tmp_path
):
    parts, processes = script("parts"), script("processes")
    stubborn = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', "
        "flush=True); time.sleep(90)"
    )
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}])\n"
        "print(f'child {child.pid}', flush=True)\n"
        "time.sleep(90)\n"
    )
    part = parts.Part("slow", "bench", 90.0, ("-c", code))
    log = tmp_path / "slow.log"
    running = processes.Running.start(part, tmp_path, log, os.environ, part.seconds)
    wait_for(lambda: "deaf" in log.read_text() and "child" in log.read_text())
    (child,) = [
        int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("child")
    ]
    running.deadline = time.monotonic()
    wait_for(running.ended)
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")
    line = running.outcome()
    assert line["state"] == "timed out"
    assert f"child {child}" in line["last"]
    assert line["last"][-1] == "KeyboardInterrupt"


def test_verdicts_are_counted_in_a_log_that_was_cut_off(script):
    log = (
        "tests/gpu/test_kernels.py::test_a[64] PASSED    [ 10%]\n"
        "tests/gpu/test_kernels.py::test_a[80] \ntorch.float32, heads of 80 and 80: flex\nPASSED   "
        " [ 20%]\n"
        "tests/gpu/test_kernels.py::test_b SKIPPED (it needs liger_kernel)    [ 30%]\n"
        "tests/gpu/test_kernels.py::test_c FAILED    [ 40%]\n"
        "tests/gpu/test_kernels.py::test_d "
    )
    found = script("processes").tests_of(log)
    assert found == {
        "passed": 2,
        "failed": 1,
        "error": 0,
        "skipped": 1,
        "printed": ["torch.float32, heads of 80 and 80: flex"],
    }


def test_an_unknown_part_is_an_error_by_name_before_anything_runs(tmp_path):
    variables = environment(
        OUT=str(tmp_path / "out"), PY=sys.executable, ONLY="bench trk", SITE=str(ROOT)
    )
    command = ["bash", str(FOLDER / "first_run.sh")]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert (
        "ONLY='bench trk': trk is no group and no part; groups are probe, checks, bench, trl, speed"
        in done.stderr
    )
    assert not (tmp_path / "out").exists()


def names_left_out(pick):
    """Return the names that ``-k`` leaves out; None where it takes nothing but what it names."""
    terms = pick.split(" and ")
    if not all(term.startswith("not ") for term in terms):
        return None
    return {term.removeprefix("not ") for term in terms}


def needs_several_devices(file):
    """Return, for each of the file's own tests, whether one device leaves it out."""
    functions = [
        node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)
    ]
    return {
        function.name: any(
            ast.unparse(each).startswith("pytest.mark.gpu(devices=")
            for each in function.decorator_list
        )
        for function in functions
    }


@pytest.mark.parametrize(
    "file", sorted((ROOT / "tests" / "gpu").glob("test_*.py")), ids=lambda file: file.stem
)
def test_a_new_test_of_a_device_is_run_on_the_day(script, file):
    """The first day left out the test of captured steps, which no part named."""
    picks = [part.arguments[-1] for part in script("parts").PARTS if file.name in str(part)]
    rests = [names for names in map(names_left_out, picks) if names is not None]
    assert rests, f"every part takes some of {file.name} by name, and no part takes the rest"
    others = [pick for pick in picks if names_left_out(pick) is None]
    here = {name for name in set.union(*rests) if name in file.read_text()}
    for name in here - {"vllm"}:
        elsewhere = any(pick.split(" and ")[0] == name for pick in others)
        named = [several for test, several in needs_several_devices(file).items() if name in test]
        assert elsewhere or (named and all(named)), f"{name} of {file.name} is in no part"


def test_the_bundle_has_every_dependency_that_the_machine_lacks(script):
    bundle = script("bundle")
    there = bundle.packages_there((FOLDER / "there.txt").read_text())
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = {each.name for each in bundle.wanted(pyproject, there)}
    project = {Requirement(text).name for text in pyproject["project"]["dependencies"]}
    assert names == project - {name for name in project if name.replace("_", "-") in there} - {
        "duckdb"
    } | {
        "liger-kernel",
        "trl",
    }
    assert {"dask", "distributed", "tornado"} <= names
    assert not {"torch", "transformers", "duckdb"} & names


def test_the_bundle_has_every_script_that_the_machine_runs(script):
    here = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".sh")}
    assert here - set(script("bundle").SCRIPTS) == {"bundle.py", "page.py", "predictions.py"}


def write_wheel(folder, name, version, *needs):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {n}" for n in needs),
        ]
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n\n")
    return path


def test_a_bundle_is_closed_under_what_its_wheels_need_on_that_machine(script, tmp_path):
    wheels = {
        "dask": write_wheel(
            tmp_path,
            "dask",
            "2.0",
            "partd>=1",
            "torch>=2",
            'old; python_version < "3.12"',
            "duckdb",
        ),
        "partd": write_wheel(tmp_path, "partd", "1.4", "locket", 'extra-one; extra == "complete"'),
        "locket": write_wheel(tmp_path, "locket", "1.0"),
    }
    bundle = script("bundle")
    got = bundle.gather(
        [Requirement("dask>=2")], {"torch"}, lambda requirement: wheels[requirement.name]
    )
    assert sorted(got) == ["dask", "locket", "partd"]


def test_wheels_that_cannot_go_together_are_not_bundled(script, tmp_path):
    wheels = {
        "a": write_wheel(tmp_path, "a", "1.0", "b<2"),
        "b": write_wheel(tmp_path, "b", "3.0"),
    }
    with pytest.raises(
        ValueError, match=r"b<2 is needed, and b-3\.0-py3-none-any\.whl was downloaded before"
    ):
        script("bundle").gather(
            [Requirement("b"), Requirement("a")],
            set(),
            lambda requirement: wheels[requirement.name],
        )
