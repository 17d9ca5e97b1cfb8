"""Every test that takes ``url`` runs on a local folder, on memory:// and on S3, each time where
nothing is yet.
"""

from __future__ import annotations

import pytest


@pytest.fixture
def url(store_url: str) -> str:
    return store_url
