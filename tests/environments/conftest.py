"""Fixtures of the tests of environments: what runs them, built and closed, and one episode of
theirs.
"""

import json
from contextlib import contextmanager

import pytest

from siirl_dask.config import EnvironmentsConfig
from siirl_dask.config.file import shipped
from siirl_dask.context import Device, Rank
from siirl_dask.environments import build_environments
from siirl_dask.models.broken_imports import hide
from siirl_dask.testing.environments import Answers, action
from tests.environments.trained_rows import FIRST_SEED, imported

hide()

WAYS = {"threads": {}, "loop": {}, "processes": {"processes": 1}}
"""Options of the places of environments."""


@contextmanager
def built(environment=None, *, tools=(), by_name=None, model=None, **options):
    environments = build_environments(
        Device("w"),
        Rank(),
        environments=EnvironmentsConfig(**options),
        environment=environment,
        by_name=by_name,
        tools=tools,
        model=model,
    )
    try:
        yield environments
    finally:
        environments.close()


class Player:
    """Plays episodes one call after the other."""

    def __init__(self, environments):
        self.answers = Answers()
        self.session = environments.session(self.answers)

    def reset(self, episode=0, *, seed=0, **row):
        self.session.reset(episode, {"prompt": "p", "answer": ""} | row, seed)
        return self.answers.take(1)[episode]

    def step(self, text, episode=0):
        self.session.step(episode, action(text))
        return self.answers.take(1)[episode]


@pytest.fixture
def play():
    """``play(environment, ...)`` builds it, opens a session and returns its player."""
    open_now = []

    def begin(environment=None, **options):
        context = built(environment, **options)
        player = Player(context.__enter__())
        player.session.__enter__()
        open_now.append((context, player))
        return player

    yield begin
    for context, player in open_now:
        player.session.__exit__(None, None, None)
        context.__exit__(None, None, None)


@pytest.fixture
def trained(train, tmp_path):
    """Train three steps in an environment, on rows that are imported from ``source``; gives the
    rows of all steps.
    """

    def start(run, name, source, *overrides, columns="[prompt, answer, seed]"):
        table = tmp_path / "table"
        if not table.exists():
            imported(f"{source}&chat=false&size=24&seed={FIRST_SEED}", table)
        finished = train(
            run,
            f"data.url={table}",
            f"environments.environment={json.dumps(name)}",
            f"environments.columns={columns}",
            "environments.turns=3",
            "environments.turn_tokens=2",
            "rollout.max_response_length=400",
            "data.max_prompt_length=900",
            "data.batch_size=4",
            "rollout.n=2",
            *overrides,
            config_file=shipped("dags/turns.yaml"),
        )
        return [
            {**row, "step": step}
            for step in (1, 2, 3)
            for row in finished.table("rollouts", step).to_pylist()
        ]

    return start
