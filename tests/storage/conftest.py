"""Every test that takes ``url`` runs on a local folder and on memory://, each time where nothing is yet."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "table") if request.param == "local" else f"memory://tests/{uuid4().hex}"
