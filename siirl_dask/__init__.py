"""Reinforcement-learning post-training of language models with no centre. See README.md and docs/.

    from siirl_dask import grpo, load, open_run, run

    config = load("configs/quickstart.yaml", ["trainer.lr=5e-5"])
    run(config, grpo(config))
    open_run(config.run.url).rollouts("SELECT step, avg(reward) FROM rollouts GROUP BY step ORDER BY step")

Names are imported on first use: importing the package itself takes no time and has no side effects.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as typing has it, which takes some milliseconds to import
if TYPE_CHECKING:
    from typing import Any

    from siirl_dask.commands.script import main
    from siirl_dask.config import Config
    from siirl_dask.config.file import load
    from siirl_dask.context import Context
    from siirl_dask.driver.clusters.adaptive import Adaptive
    from siirl_dask.driver.run import run
    from siirl_dask.driver.submit import attach, submit
    from siirl_dask.planner import DAG, Node, Role, Rows, columns
    from siirl_dask.recipes.agents import agents
    from siirl_dask.recipes.dapo import dapo
    from siirl_dask.recipes.grpo import grpo
    from siirl_dask.recipes.ppo import ppo
    from siirl_dask.recipes.turns import turns
    from siirl_dask.runs.reader import open_run

__version__ = "0.2.0"
__all__ = [
    "DAG",
    "Adaptive",
    "Config",
    "Context",
    "Node",
    "Role",
    "Rows",
    "agents",
    "attach",
    "columns",
    "dapo",
    "grpo",
    "load",
    "main",
    "open_run",
    "ppo",
    "run",
    "submit",
    "turns",
]
_PUBLISHED_BY = {
    "Adaptive": "siirl_dask.driver.clusters.adaptive",
    "Config": "siirl_dask.config",
    "Context": "siirl_dask.context",
    "load": "siirl_dask.config.file",
    "main": "siirl_dask.commands.script",
    "open_run": "siirl_dask.runs.reader",
    "run": "siirl_dask.driver.run",
    **dict.fromkeys(("attach", "submit"), "siirl_dask.driver.submit"),
    **dict.fromkeys(("DAG", "Node", "Role", "Rows", "columns"), "siirl_dask.planner"),
    **{name: f"siirl_dask.recipes.{name}" for name in ("agents", "dapo", "grpo", "ppo", "turns")},
}

_WITH_TORCH = ("agents", "attach", "dapo", "grpo", "ppo", "run", "submit", "turns")


def __getattr__(name: str) -> Any:
    if name not in _PUBLISHED_BY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _WITH_TORCH:
        import_module("siirl_dask.devices").check_plugins()
    return getattr(import_module(_PUBLISHED_BY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
