"""The site that `make docs` builds of docs/."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import siirl_dask

ROOT = Path(__file__).parents[1]
_PUBLISHED = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def test_the_page_of_python_has_every_public_name():
    pages = _PUBLISHED.findall((ROOT / "docs" / "api.md").read_text())
    assert sorted(path.rpartition(".")[2] for path in pages) == sorted(siirl_dask.__all__)


@pytest.mark.slow
def test_the_site_has_no_dead_link_and_the_docstrings_of_public_names(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "first-run.html", "source/pipelines/vlm.py.txt"):
        assert (tmp_path / "site" / page).is_file(), page
    api = (tmp_path / "site" / "api.html").read_text()
    for path in _PUBLISHED.findall((ROOT / "docs" / "api.md").read_text()):
        assert f'id="{path}"' in api, path
