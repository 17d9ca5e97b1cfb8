"""Reinforcement-learning post-training of language models with no centre. See README.md and docs/."""

import sys

from siirl_dask.broken_imports import HideBroken

__version__ = "0.1.0"

sys.meta_path.insert(0, HideBroken())
