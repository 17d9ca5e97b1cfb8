"""The role of environments, as YAML and Python describe it, with what a user has in a file of
their own.
"""

import sys

import cloudpickle
import pytest

from siirl_dask.config import EnvironmentsConfig
from siirl_dask.context import Device, Rank
from siirl_dask.environments import Step, build_environments
from siirl_dask.environments.builder import check_environments
from siirl_dask.errors import PlanError
from siirl_dask.planner.spec.dag_spec import bind
from siirl_dask.planner.spec.names import resolve
from tests.environments import worlds
from tests.environments.conftest import Player

MINE = '''
from siirl_dask.environments import Step

GREETING = "hello"


class Mine:
    def reset(self, row, seed):
        return f"{GREETING}, {row['answer']}"

    def step(self, text):
        return Step(reward=1.0, done=True)


def shout(text: str) -> str:
    """Shout.

    Args:
        text: What.
    """
    return text.upper()
'''


@pytest.mark.parametrize("processes", [0, 1])
def test_what_a_user_has_in_a_file_of_their_own_runs_in_the_worker_and_in_processes(
    tmp_path, processes
):
    (tmp_path / "mine.py").write_text(MINE)
    file = f"{tmp_path}/mine.py"
    options = {
        "environments": {"processes": processes, "columns": ["answer"]},
        "environment": f"{file}:Mine",
        "tools": [f"{file}:shout"],
    }
    build = bind(build_environments, options, "role 'environments'")
    module = sys.modules[build.keywords["environment"].__module__]
    # as the driver sends what is the user's own to the workers
    cloudpickle.register_pickle_by_value(module)
    sent = cloudpickle.dumps(build)
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[module.__name__]  # which do not have the file
    environments = cloudpickle.loads(sent)(Device("w"), Rank())
    try:
        player = Player(environments)
        with player.session:
            assert player.reset(answer="you").prompt == "hello, you"
            shouted = player.step(
                '<tool_call>{"name": "shout", "arguments": {"text": "a"}}</tool_call>'
            )
            assert "A" in shouted.observation
            assert player.step("x") == Step(reward=1.0, done=True)
    finally:
        environments.close()


def test_a_role_names_several_environments_and_their_options():
    named = {"run": "tests.environments.worlds:made_by_a_function", "with": {"secret": 3}}
    options = {
        "by_name": {"shop": "tests.environments.worlds:Shop", "made": named},
        "environments": {"turns": 3},
    }
    bound = bind(build_environments, options, "role").keywords
    assert bound["by_name"]["shop"] is worlds.Shop
    assert bound["by_name"]["made"].keywords == {"secret": 3}
    assert bound["environments"] == EnvironmentsConfig(turns=3)
    assert check_environments(bound, ["w"], None).memory == 0


def test_an_environment_that_is_not_there_is_named_before_anything_starts(tmp_path):
    with pytest.raises(PlanError, match=r"has no function 'Gues'; did you mean 'Guess'"):
        resolve("tests.environments.worlds:Gues")
    with pytest.raises(PlanError, match=r"there is no file"):
        bind(
            build_environments,
            {"environments": {}, "environment": f"{tmp_path}/other.py:Mine"},
            "role",
        )
