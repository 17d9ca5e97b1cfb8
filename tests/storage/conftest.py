"""Every test that takes ``url`` runs on a local folder, on memory:// and on S3, each time where nothing is yet."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest


@pytest.fixture(params=["local", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "local":
            return str(tmp_path / "table")
        case "memory":
            return f"memory://tests/{uuid4().hex}"
    return f"{request.getfixturevalue('s3')}/{uuid4().hex}"
