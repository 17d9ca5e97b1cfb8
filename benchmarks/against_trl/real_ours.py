"""A run of this package with a real model: transformers generates, plain torch learns.

python -m against_trl.real_ours SETTING CURVES.json    # SETTING: JSON
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from .real_setting import RealSetting
from .run_ours import overrides, train_ours
from .setting import Curves, answer_to

_CONFIG = Path(__file__).resolve().parents[1] / "real_model.yaml"


def run_ours(setting: RealSetting, url: str) -> Curves:
    """Everything that the run writes is left below ``url``."""
    return train_ours(_CONFIG, overrides(setting, url), url)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        answer_to(sys.argv[1:], partial(run_ours, url=folder), RealSetting)
