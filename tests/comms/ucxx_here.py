"""Whether tests may speak UCX: where its package is installed, over tcp and memory of this host."""

import importlib.util
import os

import pytest

needs_ucxx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="needs ucxx")
os.environ.setdefault("UCX_TLS", "tcp,self,sm")
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
