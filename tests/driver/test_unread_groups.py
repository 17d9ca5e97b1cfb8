"""A key that is set and read by nothing is refused: it would change nothing, and nobody would
notice.
"""

import pytest

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.checks.unread_groups import check_read
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError
from siirl_dask.recipes.agents import agents


def read(config, *overrides):
    file = load_config_file(shipped(config), overrides)
    check_read(file.config, [dag for dag in dags(file) if dag is not None])


@pytest.mark.parametrize(
    ("config", "override", "said"),
    [
        ("quickstart.yaml", "agents={a: {}, b: {}}", "agents.a: no node of the DAG has agent: a"),
        ("quickstart_agents.yaml", "agents.c={}", "agents.c: no node of the DAG has agent: c"),
        (
            "quickstart.yaml",
            "environments.turns=3",
            "environments.turns=3: no node of the DAG reads environments",
        ),
        (
            "quickstart_turns.yaml",
            "endpoint.timeout=5",
            "endpoint.timeout=5.0: no node of the DAG reads endpoint",
        ),
    ],
)
def test_a_group_that_nothing_reads_is_refused(config, override, said):
    with pytest.raises(ConfigError, match=said):
        read(config, override)


@pytest.mark.parametrize(
    "config",
    [
        "quickstart",
        "quickstart_turns",
        "quickstart_tools",
        "quickstart_selfplay",
        "quickstart_agents",
        "quickstart_marft",
    ],
)
def test_shipped_groups_are_read(config):
    read(f"{config}.yaml")


def test_the_recipe_acts_for_all_agents():
    config = load_config_file(shipped("quickstart_agents.yaml"), ["agents.c={share: a}"]).config
    check_read(config, [agents(config)])
