"""The group ``agents``: each agent has the run's values with its own over them, and mistakes
have a name.
"""

import pytest

from siirl_dask.config.file import dump, load, load_config_file, load_text
from siirl_dask.errors import ConfigError

RUN = """
data: {url: rows}
model: {path: /models/one}
rollout: {n: 4, max_response_length: 20}
trainer: {lr: 1e-4, warmup_steps: 5, lora: {alpha: 8}}
algorithm: {minibatches: 2}
agents:
  a: {}
  b: {model: {path: /models/two}, trainer: {lr: 3e-4}, rollout: {temperature: 0.5}}
"""


def test_an_agent_has_the_runs_values_where_it_has_none_of_its_own(write):
    agents = load(write(RUN), ["trainer.eps=1e-6", "agents.b.trainer.lora.rank=2"]).agents
    assert list(agents) == ["a", "b"]
    assert [agent.model.path for agent in agents.values()] == ["/models/one", "/models/two"]
    assert [agent.trainer.lr for agent in agents.values()] == [1e-4, 3e-4]
    assert [agent.trainer.lora.rank for agent in agents.values()] == [0, 2]
    assert [agent.trainer.lora.alpha for agent in agents.values()] == [8.0, 8.0]
    assert [agent.trainer.eps for agent in agents.values()] == [1e-6, 1e-6]
    assert [agent.algorithm.minibatches for agent in agents.values()] == [2, 2]


def test_the_first_agent_samples_as_the_run_says_and_others_once_unless_they_say_otherwise(write):
    assert [agent.rollout.n for agent in load(write(RUN)).agents.values()] == [4, 1]
    assert [
        agent.rollout.n for agent in load(write(RUN), ["agents.b.rollout.n=3"]).agents.values()
    ] == [4, 3]


def test_a_file_over_another_changes_single_keys_of_an_agent(write):
    write(RUN, "base.yaml")
    agents = load(
        write("base: base.yaml\nagents: {b: {trainer: {betas: [0.8, 0.9]}}, c: {}}\n")
    ).agents
    assert (agents["b"].trainer.lr, agents["b"].trainer.betas) == (3e-4, (0.8, 0.9))
    assert agents["c"].model.path == "/models/one"


def test_a_dumped_config_is_loaded_as_it_was(write):
    config = load(
        write(RUN), ["agents.c.share=b", "trainer.schedule=linear", "rollout.max_staleness=1"]
    )
    assert load_text(dump(config), "dumped") == config
    assert config.agents["b"].algorithm.correction == "siirl_dask.algorithms:truncated_is"


def test_stale_rows_are_not_corrected_where_the_ratio_is_to_the_sampler_already(write):
    engines = "agents.b.algorithm.old_logprobs=siirl_dask.nodes:rollout_logprobs"
    agents = load(write(RUN), ["agents.c.share=b", "rollout.max_staleness=1", engines]).agents
    assert agents["b"].algorithm.correction is None
    assert agents["a"].algorithm.correction == "siirl_dask.algorithms:truncated_is"


def test_a_dag_in_yaml_sees_an_agents_whole_groups(write):
    nodes = """
roles: {policy: {build: "siirl_dask.training:build_trainer", with: {trainer: "${agents.b.trainer}"}}}
"""
    file = load_config_file(write(RUN + nodes))
    told = file.roles["policy"]["with"]["trainer"]
    assert (told["lr"], told["warmup_steps"]) == (3e-4, 5)


def test_who_shares_has_the_others_model_trainer_and_algorithm(write):
    agents = load(write(RUN), ["agents.c.share=b", "agents.c.rollout.temperature=0.9"]).agents
    assert agents["c"].model == agents["b"].model
    assert agents["c"].trainer == agents["b"].trainer
    assert agents["c"].rollout.temperature == 0.9


def test_agents_over_one_base_are_known_to_each_other_and_have_the_firsts_values(write):
    config = load(
        write(RUN),
        ["trainer.lora.rank=2", "agents.c.base=a", "agents.d.base=a", "agents.d.trainer.lr=1"],
    )
    agents = config.agents
    assert [agent.base for agent in agents.values()] == [
        ["a", "c", "d"],
        [],
        ["a", "c", "d"],
        ["a", "c", "d"],
    ]
    assert agents["c"].model == agents["a"].model
    assert [agents[name].trainer.lr for name in "acd"] == [1e-4, 1e-4, 1.0]
    assert load_text(dump(config), "dumped") == config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["agents.c.base=a"],
            r"the agents \['a', 'c'\] are over one base .* there are no adapters",
        ),
        (["agents.b.base=a"], r"agents\.b\.model differs from that of 'a', whose base it has"),
        (
            ["agents.c.base=a", "agents.c.trainer.backend=fsdp"],
            r"agents\.c\.trainer\.backend differs from that of 'a'",
        ),
        (
            ["agents.c.base=a", "agents.c.trainer.lora.rank=3"],
            r"agents\.c\.trainer\.lora differs from that of 'a'",
        ),
        (
            ["agents.c.base=a", "agents.c.rollout.max_rows=3"],
            r"agents\.c\.rollout\.max_rows differs from that of 'a'",
        ),
        (
            ["agents.c.base=a", "trainer.park=true"],
            r"agents\.a\.trainer\.park=true: a base that agents have in common",
        ),
        (
            ["agents.c.base=a", "agents.c.share=a"],
            r"agents\.c\.base='a' and share='a': .* leave one of them out",
        ),
        (["agents.c.base=a", "agents.d.base=c"], r"agents\.d\.base='c': that agent's base is 'a'"),
        (
            ["agents.c.base=d", "agents.d={}"],
            r"agents\.c\.base='d': expected an agent named before it .*\['a', 'b'\]",
        ),
        (["agents.c.base=c"], r"agents\.c\.base='c': expected an agent named before it"),
        (["agents.c.base=aa"], r"agents\.c\.base='aa': expected .*did you mean 'a'"),
    ],
)
def test_a_base_that_cannot_be_shared_is_refused_by_name(overrides, said, write):
    rank = [] if "no adapters" in said else ["trainer.lora.rank=2"]
    with pytest.raises(ConfigError, match=said):
        load(write(RUN), [*rank, *overrides])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("agents.b.trainer.lrr=1", r"unknown key 'agents\.b\.trainer\.lrr'.*did you mean 'lr'"),
        ("agents.b.trainr.lr=1", r"unknown key 'agents\.b\.trainr'.*did you mean 'trainer'"),
        ("agents.b.rollout.n=many", r"agents\.b\.rollout\.n='many': expected a whole number"),
        (
            "agents.b.rollout.weight_bucket=1MiB",
            r"agents\.b\.rollout\.weight_bucket: it is one for the whole run",
        ),
        (
            "agents.b.algorithm.minibatches=1000",
            r"agents\.b\.algorithm\.minibatches=1000: expected at most data\.batch",
        ),
        (
            "agents.b.share=a",
            r"agents\.b\.model differs from that of 'a', whose engine and policy it shares",
        ),
        ("agents.b.share=b", r"agents\.b\.share='b': expected an agent named before it .*\['a'\]"),
        ("agents.b_2.share=b", r"agents\.b_2: expected a name of letters and digits"),
        ("agents=3", r"agents=3: expected a mapping by name"),
        (
            "agents.b.trainer.max_skipped_steps=3",
            r"agents\.b\.trainer\.max_skipped_steps=3 with run\.on_nan=stop",
        ),
    ],
)
def test_a_mistake_is_refused_by_its_name(override, said, write):
    with pytest.raises(ConfigError, match=said):
        load(write(RUN), [override])


SERVED = """
data: {url: rows}
model: {path: /models/one}
rollout: {engine: server, server: {urls: ["http://one:8000"], weights_folder: /weights}}
trainer: {lora: {rank: 4}}
agents: {a: {}, b: {}}
"""


def test_agents_with_weights_of_their_own_have_servers_of_their_own(write):
    """A server has the weights of one: the other's first turn ended the run."""
    said = r"agents\.b\.rollout\.server\.urls: http://one:8000 is also a server of 'a'"
    with pytest.raises(ConfigError, match=said):
        load(write(SERVED))
    with pytest.raises(ConfigError, match="is also a server of 'a'"):
        load(write(SERVED), ["agents.b.rollout.server.urls=[http://two:8000,http://ONE:8000/]"])
    for given in (
        ["agents.b.rollout.server.urls=[http://two:8000]"],
        ["agents.b.share=a"],
        ["agents.a.base=a", "agents.b.base=a"],
    ):
        assert list(load(write(SERVED), given).agents) == ["a", "b"]
