"""``siirl_dask``'s public names: pinned, imported when they are first used, and nothing before
that.
"""

import json
import subprocess
import sys

import pytest

import siirl_dask

PUBLIC = (
    "DAG Adaptive Config Context Node Role Rows agents attach columns dapo grpo load main open_run ppo run "
    "submit turns"
)


def test_the_public_names_are_these():
    assert siirl_dask.__all__ == PUBLIC.split()
    assert set(PUBLIC.split()) <= set(dir(siirl_dask))


@pytest.mark.parametrize("name", siirl_dask.__all__)
def test_a_public_name_is_what_it_is_called(name):
    assert getattr(siirl_dask, name).__name__ == name


def test_any_other_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'siirl_dask' has no attribute 'grop'"):
        siirl_dask.grop  # noqa: B018


def test_importing_the_package_loads_no_other():
    code = (
        "import json, sys; before = set(sys.modules)\n"
        "import siirl_dask\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before} - "
        "sys.stdlib_module_names\n"
        "inner = [name for name in sys.modules if name.startswith('siirl_dask.')]\n"
        "siirl_dask.DAG\n"
        "print(json.dumps([sorted(loaded), inner, 'siirl_dask.planner' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["siirl_dask"], [], True]
