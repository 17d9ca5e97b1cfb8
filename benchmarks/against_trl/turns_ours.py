"""A run of this package with a tool: `play` on the rollout workers, plain torch learns.

python -m against_trl.turns_ours SETTING CURVES.json    # SETTING: JSON
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from siirl_dask.tasks.calculator import Calculator

from .run_ours import overrides, train_ours
from .setting import Curves, answer_to
from .turns_setting import SlowCalculator, TurnsSetting

_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart_tools.yaml"
EPISODES = 4
"""Episodes of each validation prompt."""


def run_ours(setting: TurnsSetting, url: str) -> Curves:
    """Everything that the run writes is left below ``url``."""
    environment = SlowCalculator if setting.slow else Calculator
    values = {
        **overrides(setting, url),
        "environments.environment": f"{environment.__module__}:{environment.__name__}",
        "environments.turns": setting.turns,
        "environments.turn_tokens": "null",
        "validation.temperature": setting.temperature,
        "validation.n": EPISODES,
    }
    return train_ours(_CONFIG, values, url)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        answer_to(sys.argv[1:], partial(run_ours, url=folder), TurnsSetting)
