"""Packages may be absent: tests of devices are collected without those of a cluster, and workers
never load DuckDB.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLUSTER = ("antlr4", "bokeh", "dask", "distributed", "duckdb", "omegaconf", "tornado")
"""Packages of a whole run, which an image made for GPUs does not have."""
UNUSED = ("PIL", "msgpack", "rich")
"""Dependencies that docs/status.md does not ask for on such a machine."""
HIDE = """
import sys
from importlib.machinery import PathFinder

hidden = sys.argv.pop(1).split(",")
find = PathFinder.find_spec


def find_others(finder, name, path=None, target=None):
    if name.partition(".")[0] in hidden:
        return None
    return find(name, path, target)


PathFinder.find_spec = classmethod(find_others)
"""
"""Makes packages absent for all that asks, as where they are not installed."""
COLLECT = """
import pytest

chosen = ["--collect-only", "-q", "-m", "gpu", "--confcutdir=tests/gpu", "-p", "no:cacheprovider", "tests/gpu"]
sys.exit(pytest.main(chosen))
"""
ROOMS = (
    "algorithms",
    "coordinator",
    "environments",
    "nodes",
    "rewards",
    "rollout",
    "training",
    "worker",
)
"""Rooms whose code runs in workers."""
IMPORT_ALL = """
import importlib
import pkgutil

from siirl_dask.models.broken_imports import hide

hide()
OPTIONAL = ("gymnasium", "mcp", "megatron", "mindspeed", "peft", "reasoning_gym", "sglang", "sklearn")
OPTIONAL += ("textarena", "torch_npu", "ucxx", "verifiers", "vllm")
imported = 0
for room in sys.argv.pop(1).split(","):
    package = importlib.import_module(f"siirl_dask.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "vllm" in module.name or "sglang" in module.name:
            continue  # engines' own packages take ten seconds to import
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in OPTIONAL:
                raise
        imported += 1
print(imported)
"""


STARTS = (
    "cli",
    "driver.run",
    "driver.submit",
    "worker.dag_worker",
    "nodes",
    "training",
    "runs.reader",
)
"""Modules that programs, commands and workers begin with."""
WITHOUT_TRANSFORMERS = """
import sys

import siirl_dask

for name in siirl_dask.__all__:
    getattr(siirl_dask, name)
    assert "transformers" not in sys.modules, name
print(len(siirl_dask.__all__))
"""
WITHOUT_PANDAS = """
import importlib
import sys
from importlib.util import find_spec

from siirl_dask.models.broken_imports import hide

assert find_spec("pandas") is not None, "the extra test brings it"
for module in sys.argv[1:]:
    importlib.import_module(f"siirl_dask.{module}")
    assert "pandas" not in sys.modules, module
hide()
from transformers import AutoModelForCausalLM, AutoTokenizer

import transformers.modeling_utils

asking = ("transformers.generation.candidate_generator", "transformers.loss.loss_utils")
for module in (*asking, "accelerate.commands.config.sagemaker"):
    assert module in sys.modules, "the names of the modules that would import them"
loaded = {name.partition(".")[0] for name in sys.modules}
assert find_spec("boto3") is not None, "moto brings it"
assert not loaded & {"sklearn", "scipy", "boto3"}, "half a second each and more"
from transformers.utils import import_utils

structures = import_utils.create_import_structure_from_path.cache_info()
assert structures.misses == structures.currsize > 128, "half a second, for folders that are read twice"
found = import_utils.PACKAGE_DISTRIBUTION_MAPPING
assert "_all" not in vars(found), "half a second, for the files of all that is installed"
assert found["torch"] == ["torch"]
from importlib.metadata import packages_distributions

assert dict(found) == dict(packages_distributions())
assert (found["PIL"], found.get("no_such_package", [])) == (["pillow"], [])
if find_spec("sklearn") is not None:
    import sklearn.metrics  # rewards may use it
"""


def python(code, *arguments):
    places = [str(ROOT), str(ROOT / "storage"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


def test_tests_of_devices_are_collected_without_the_packages_of_a_cluster():
    done = python(HIDE + COLLECT, ",".join([*CLUSTER, *UNUSED]))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "test_trainers.py::" in done.stdout
    assert "test_runs.py::" in done.stdout
    assert "error" not in done.stdout.splitlines()[-1]


def test_no_module_of_a_worker_imports_duckdb():
    done = python(HIDE + IMPORT_ALL, "duckdb", ",".join(ROOMS))
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.splitlines()[-1]) > 150


def test_no_start_imports_or_reads_what_it_does_not_need_for_half_a_second_each():
    done = python(WITHOUT_PANDAS, *STARTS)
    assert done.returncode == 0, done.stderr[-3000:]


def test_no_public_name_imports_transformers_before_run_can_hide_packages_that_are_broken():
    done = python(WITHOUT_TRANSFORMERS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 15
