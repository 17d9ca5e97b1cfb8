"""Configs: read, refused by name before anything starts, written back, and every key read by
somebody.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coerce import Coercer
from siirl_dask.config import (
    Config,
    DataConfig,
    Dtype,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
    parse_bytes,
    parse_ports,
)
from siirl_dask.config.file import (
    Interpolated,
    dump,
    load,
    load_config_file,
    load_recorded,
    load_text,
    shipped,
)
from siirl_dask.config.file.layers import config_keys, override, shipped_files
from siirl_dask.errors import ConfigError
from tests import parsed
from tests.names import NEIGHBOURS

ROOT = Path(__file__).resolve().parents[2]
NEEDED = "data: {url: rows}\nmodel: {path: model}\n"


def groups(kind: type = Config, name: str = "") -> dict[str, type]:
    """Every group by its full name: ``rollout``, ``rollout.vllm``."""
    found = {}
    for key, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            full = f"{name}.{key}" if name else key
            found |= {full: hint, **groups(hint, full)}
    return found


GROUPS = groups()


def plain(value: object) -> bool:
    """No OmegaConf container in it."""
    if is_dataclass(value):
        return all(plain(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    if isinstance(value, dict):
        return all(map(plain, value.values()))
    return value is None or isinstance(value, (str, int, float, Enum))


LITERAL = st.one_of(
    NEIGHBOURS.map(lambda pair: pair[0]),
    st.sampled_from(
        [
            "007",
            "1e5",
            "0x10",
            "12:30:00",
            "a #b",
            "a: b",
            "[x]",
            "{a}",
            "yes",
            "!x",
            "*x",
            "%x",
            "- x",
        ]
    ),
)


@given(key=st.sampled_from(["run.url", "data.url", "model.path"]), name=LITERAL)
def test_a_text_on_the_command_line_is_as_it_is_written(key, name):
    group, field = key.split(".")
    assert override(f"{key}={name}").values == {group: {field: name}}


def test_a_run_with_any_name_reads_back_its_name():
    names = {
        "run.url": "memory://a/[1] #b 50%25",
        "data.url": "memory://a/{x}: *?",
        "model.path": "memory://'q' \"é\"",
    }
    overrides = ["data.prepare=null", *(f"{key}={name}" for key, name in names.items())]
    config = load_config_file(shipped("quickstart.yaml"), overrides).config
    for read in (config, load_text(dump(config), "config.yaml")):
        assert {
            "run.url": read.run.url,
            "data.url": read.data.url,
            "model.path": read.model.path,
        } == names


def test_a_file_and_overrides(write):
    path = write(
        NEEDED
        + (
            "rollout:\n  n: 4\nrun: {name: first}\ncluster: {workers: 4, placement: {rollout: [0, "
            "1]}}\n"
        )
    )
    file = load_config_file(
        path,
        [
            "rollout.n=16",
            "cluster.placement.policy=[2,3]",
            "trainer.betas=[0.8, 0.9]",
            "trainer.lr=2e-6",
        ],
    )
    config = file.config
    assert config.rollout.n == 16
    assert config.run.url == "runs/first"
    assert config.cluster.placement == {"rollout": [0, 1], "policy": [2, 3]}
    assert config.trainer.betas == (0.8, 0.9)
    assert config.trainer.lr == 2e-6
    assert (file.roles, file.nodes, file.validation_nodes) == ({}, [], [])
    assert plain(config)


def test_the_dag_sees_the_values(write):
    path = write(
        NEEDED
        + """
trainer: {lr: 1}
roles: {policy: {build: "m:f", with: {trainer: "${trainer}"}}}
nodes:
  - {name: a, run: "m:f", role: policy, with: {rollout: "${rollout}", n: "${rollout.n}", url: "${run.url}/x"}}
validation_nodes: "${nodes}"
"""
    )
    file = load_config_file(path, ["rollout.n=3", "run.name=mine"])
    options = file.nodes[0]["with"]
    assert options["n"] == 3
    assert options["url"] == "runs/mine/x"
    assert set(options["rollout"]) == {f.name for f in fields(RolloutConfig)}
    assert Coercer(ConfigError)(options["rollout"], RolloutConfig, "rollout") == file.config.rollout
    assert file.roles["policy"]["with"]["trainer"]["lr"] == 1.0
    assert file.validation_nodes == file.nodes
    assert plain(file.nodes)
    assert plain(file.roles)


def test_base_files_come_first_and_may_have_bases(write):
    write(
        NEEDED + "rollout: {n: 2, top_k: 5}\nnodes: [{name: one}, {name: two}]\n",
        "shared/first.yaml",
    )
    write("base: first.yaml\nrollout: {n: 3, max_rows: 7}\n", "shared/second.yaml")
    file = load_config_file(
        write("base: shared/second.yaml\nrollout: {n: 4}\nnodes: [{name: three}]\n")
    )
    assert (file.config.rollout.n, file.config.rollout.top_k, file.config.rollout.max_rows) == (
        4,
        5,
        7,
    )
    assert file.nodes == [{"name": "three"}]


def test_a_mapping_replaces_the_one_of_the_base(write):
    write(
        NEEDED
        + "cluster: {placement: {a: [0], b: [1]}}\nroles: {a: {with: {x: 1}}, b: {build: 'm:f'}}\n",
        "base.yaml",
    )
    path = write("base: base.yaml\ncluster: {placement: {c: [1]}}\nroles: {a: {build: 'm:g'}}\n")
    file = load_config_file(path)
    assert file.config.cluster.placement == {"c": [1]}
    assert file.roles == {"a": {"build": "m:g"}, "b": {"build": "m:f"}}
    assert load(path, ["cluster.placement.a=[0]"]).cluster.placement == {"c": [1], "a": [0]}
    assert load(path, ["cluster.placement={a: [0]}"]).cluster.placement == {"a": [0]}
    assert load(path, ["cluster.placement={}"]).cluster.placement == {}


def test_values_from_the_environment(write, monkeypatch):
    monkeypatch.setenv("SAMPLES", "5")
    assert load(write(NEEDED + 'rollout: {n: "${oc.env:SAMPLES}"}\n')).rollout.n == 5


def test_an_empty_group_and_whole_floats(write):
    config = load(write(NEEDED + "rollout:\nrun: {steps: 1e3, name: 7}\n"))
    assert (config.run.steps, config.run.name, config.rollout) == (1000, "7", RolloutConfig())


def test_in_python_alone():
    assert Config(run=RunConfig(name="x")).run.url == "runs/x"
    assert TrainerConfig(betas=[0.5, 0.6]).betas == (0.5, 0.6)


GROUP_LIST = (
    "(groups: run, cluster, data, images, model, rollout, rewards, environments, endpoint, "
    "algorithm, trainer,"
)
REFUSED = [
    (
        "rollout: {window: 2, partial: true, max_tokens_per_step: 3, max_staleness: 1}",
        ["rollout.max_response_length=6"],
        ["rollout.window=2 with rollout.partial=true"],
    ),
    (
        "rollout: {window: 2, ledger: runs/first/rollouts, in_flight: true, max_staleness: 2}",
        [],
        ["rollout.ledger='runs/first/rollouts' with rollout.in_flight=true"],
    ),
    (
        "rollout: {window: 2}",
        [],
        ["rollout.max_staleness=0: expected", "1 more for a response of 2 steps (rollout.window"],
    ),
    (
        "rollout: {window: 7, max_staleness: 1}",
        ["data.batch_size=8", "algorithm.minibatches=2"],
        ["rollout.window=7: expected at most 6", "data.batch_size=8, algorithm.minibatches=2"],
    ),
    (
        "rollout: {ledger: runs/first/rollouts}",
        [],
        ["rollout.ledger='runs/first/rollouts' with rollout.window=0"],
    ),
    # the file's text, then overrides, then parts of the error
    (
        "rolout: {n: 1}",
        [],
        ["run.yaml: unknown group 'rolout'", GROUP_LIST, "did you mean 'rollout'?"],
    ),
    ("lr: 1", [], ["run.yaml: unknown group 'lr'", "did you mean 'trainer.lr'?"]),
    (
        "validation_node: []",
        [],
        ["unknown group 'validation_node'", "did you mean 'validation_nodes'?"],
    ),
    ("", ["lr=1"], ["override 'lr=1': unknown group 'lr'", "did you mean 'trainer.lr'?"]),
    (
        "rollout: {temprature: 1}",
        [],
        [
            "run.yaml: unknown key 'rollout.temprature'",
            "'temperature'",
            "did you mean 'temperature'?",
        ],
    ),
    ("rollout: {lr: 1}", [], ["unknown key 'rollout.lr'", "did you mean 'trainer.lr'?"]),
    ("rollout: {max_prompt_length: 1}", [], ["did you mean 'data.max_prompt_length'?"]),
    ("rollout: {max_promt_length: 1}", [], ["did you mean 'max_response_length'?"]),
    (
        "data: {weight_decy: 1}",
        [],
        ["unknown key 'data.weight_decy'", "did you mean 'trainer.weight_decay'?"],
    ),
    ("rollout: 5", [], ["run.yaml: rollout=5: expected a mapping with keys of", "'temperature'"]),
    ("rollout: {n: eight}", [], ["run.yaml: rollout.n='eight': expected a whole number (int)"]),
    ("rollout: {n: 1.5}", [], ["rollout.n=1.5: expected a whole number (int)"]),
    ("rollout: {n: true}", [], ["rollout.n=True: expected a whole number (int)"]),
    ("rollout: {n: null}", [], ["rollout.n=None: expected a whole number (int)"]),
    ("rollout: {n: [1]}", [], ["rollout.n=[1]: expected a whole number (int)"]),
    ("run: {steps: .inf}", [], ["run.steps=inf: expected a whole number (int)"]),
    ("run: {steps: 9223372036854775808}", [], ["run.steps=9223372036854775808: expected a whole"]),
    ("rollout: {n: 1e30}", [], ["rollout.n=1e+30: expected a whole number (int)"]),
    ("cluster: {workers: 100000000}", [], ["cluster.workers=100000000: expected at most 65536"]),
    ("run: {name: ..}", [], ["run.name='..': expected the name of a folder below runs/"]),
    ("run: {name: a/../../b}", [], ["run.name='a/../../b': expected the name of a folder"]),
    ("run: {name: ''}", [], ["run.name='': expected the name of a folder"]),
    (
        "",
        ["validation.every=0"],
        ["override 'validation.every=0': validation.every=0: expected at"],
    ),
    ("", ["critic.lr=0"], ["override 'critic.lr=0': critic.lr=0.0: expected more than 0"]),
    ("run: {name: [x]}", [], ["run.name=['x']: expected a text (str)"]),
    ("trainer: {lr: fast}", [], ["trainer.lr='fast': expected a number (float)"]),
    ("observe: {progress: 1}", [], ["observe.progress=1: expected true or false (bool)"]),
    ("trainer: {betas: [0.9]}", [], ["trainer.betas=[0.9]: expected a list of 2 values"]),
    ("trainer: {betas: [0.9, x]}", [], ["trainer.betas[1]='x': expected a number (float)"]),
    ("cluster: {placement: [0]}", [], ["cluster.placement=[0]: expected a mapping"]),
    ("cluster: {placement: {policy: 1}}", [], ["cluster.placement.policy=1: expected a list"]),
    (
        "model: {dtype: bfloat61}",
        [],
        ["model.dtype='bfloat61': expected one of ['auto', 'float32', 'bfloat16']", "did you mean"],
    ),
    ("rollout: {engine: vlm}", [], ["rollout.engine='vlm': expected one of ['transformers'"]),
    # impossible values
    ("rollout: {n: 0}", [], ["run.yaml: rollout.n=0: expected at least 1"]),
    ("rollout: {temperature: 0}", [], ["rollout.temperature=0.0: expected more than 0"]),
    ("rollout: {top_p: 1.5}", [], ["rollout.top_p=1.5: expected more than 0 and at most 1"]),
    ("trainer: {lr: .nan}", [], ["trainer.lr=nan: expected more than 0"]),
    ("trainer: {lr: .inf}", [], ["trainer.lr=inf: expected more than 0, and finite"]),
    (
        "trainer: {betas: [0.9, 1.0]}",
        [],
        ["trainer.betas=(0.9, 1.0): expected two numbers from 0 to below 1"],
    ),
    ("run: {url: ''}", [], ["run.url='': expected a folder or an fsspec URL"]),
    # a newcomer's paths: each would be a local one, and the run's folder made there
    ("run: {url: $HOME/x}", [], ["run.url='$HOME/x': no shell reads this", "${oc.env:HOME}"]),
    ("run: {url: /a/$USER/x}", [], ["write $USER as ${oc.env:USER}"]),
    ("run: {url: 's3:/bucket/x'}", [], ["run.url='s3:/bucket/x': expected s3:// with two slashes"]),
    ("validation: {url: 'C:\\x.parquet'}", [], ["validation.url=", "is a path of Windows"]),
    ("validation: {url: 'x.parquet '}", [], ["'x.parquet ': begins or ends with a blank"]),
    ("", ["data.url=[a,b]"], ["data.url='[a,b]': expected one path or URL, and this is a list"]),
    ("", ["model.path=$HOME/m"], ["model.path='$HOME/m': no shell reads this"]),
    ("trainer: {lora: {rank: -1}}", [], ["run.yaml: trainer.lora.rank=-1: expected at least 0"]),
    ("critic: {lr: 0}", [], ["run.yaml: critic.lr=0.0: expected more than 0"]),
    ("trainer.lora.rank: 8", [], ["in a file it is trainer: {lora: {rank: ...}}"]),
    ("rollout: {temperature: .inf}", [], ["rollout.temperature=inf: expected a finite number"]),
    ("algorithm: {kl_coefficient: -1}", [], ["algorithm.kl_coefficient=-1.0: expected at least 0"]),
    (
        "algorithm: {correction_options: {cap: 2}}",
        [],
        ["correction_options are given without algorithm.correction"],
    ),
    (
        "algorithm: {correction: 'm:f', old_logprobs: 'siirl_dask.nodes:rollout_logprobs'}",
        [],
        [
            "algorithm.correction=m:f with "
            "algorithm.old_logprobs=siirl_dask.nodes:rollout_logprobs",
            "leave one of them",
        ],
    ),
    (
        "algorithm: {minibatches: 64}",
        [],
        ["algorithm.minibatches=64: expected at most data.batch_size=32"],
    ),
    ("observe: {dashboard_port: 70000}", [], ["observe.dashboard_port=70000: expected 0 to 65535"]),
    (
        "cluster: {placement: {policy: [2]}}",
        [],
        ["cluster.placement.policy=[2]: no worker 2", "gives 0 to 1"],
    ),
    (
        "cluster: {placement: {policy: [0, 0]}}",
        [],
        ["cluster.placement.policy=[0, 0]: expected worker indices"],
    ),
    (
        "cluster: {placement: {policy: []}}",
        [],
        ["cluster.placement.policy=[]: expected worker indices"],
    ),
    (
        "cluster: {address: 'tcp://x', scheduler_file: y}",
        [],
        ["cluster.address and cluster.scheduler_file"],
    ),
    # interpolation
    (
        "run: {name: '${run.nme}'}",
        [],
        ["run.yaml: run.name: Interpolation key 'run.nme' not found; did you mean 'run.name'?"],
    ),
    (
        "run: {name: '${rollout.lr}'}",
        [],
        ["run.name: Interpolation key 'rollout.lr' not found; did you mean 'trainer.lr'?"],
    ),
    ("run: {name: '${nme}'}", [], ["run.name: Interpolation key 'nme' not found"]),
    ("run: {name: '${run.name}'}", [], ["run.name: Recursive interpolation detected"]),
    (
        "run: {name: '${oc.env:NOT_SET}'}",
        [],
        ["run.name: ", "'NOT_SET' not found", "set it, or give it a default: ${oc.env:NOT_SET,"],
    ),
    ("run: {name: '${HOME}'}", [], ["'HOME' not found", "is written ${oc.env:HOME}"]),
    ("run: {name: '${env:HOME}'}", [], ["a variable of the environment is written ${oc.env:NAME}"]),
    ("run: {name: '${a'}", [], ["run.yaml: run.name: "]),
    (
        "nodes: [{name: '${rollout.m}'}]",
        [],
        ["run.yaml: nodes[0].name: Interpolation key 'rollout.m' not found"],
    ),
    ("nodes: [{name: '???'}]", [], ["run.yaml: nodes[0].name: Missing mandatory value"]),
    # shapes of the DAG's part
    ("nodes: 5", [], ["run.yaml: nodes=5: expected a list"]),
    (
        "nodes: {a: 1}",
        [],
        ["run.yaml:3: node 'a' is 1: expected a mapping of what to change, or null to remove it"],
    ),
    ("roles: [a]", [], ["run.yaml: roles=['a']: expected a mapping"]),
    ("validation_nodes: 5", [], ["run.yaml: validation_nodes=5: expected a list"]),
    # overrides
    ("", ["rollout.n"], ["override 'rollout.n': expected key=value, such as trainer.lr=2e-6"]),
    ("", ["=1"], ["override '=1': expected key=value"]),
    ("", ["rollout.n=x"], ["override 'rollout.n=x': rollout.n='x': expected a whole number (int)"]),
    ("", ["rollout.m=1"], ["override 'rollout.m=1': unknown key 'rollout.m'"]),
    ("", ["rollout=1"], ["override 'rollout=1': rollout=1: expected a mapping"]),
    (
        "",
        ["trainer.betas=[1"],
        ["override 'trainer.betas=[1': the value of trainer.betas is not YAML"],
    ),
    (
        "",
        ["nodes.0.name=x"],
        ["override 'nodes.0.name=x': node '0' is none of those before it (nodes: [])"],
    ),
    ("", ["roles.policy.build=x"], ["'roles' is for files only", "'base:'"]),
    ("", ["base=x.yaml"], ["'base' is for files only"]),
    ("", ["data.prompt.x=1"], ["data.prompt={'x': 1}: expected a text (str)"]),
]


@pytest.mark.parametrize(("text", "overrides", "parts"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused(write, text, overrides, parts):
    group = text.split(":")[0]
    needed = "".join(
        f"{line}\n" for line in NEEDED.splitlines() if not line.startswith(f"{group}:")
    )
    more = [] if needed == NEEDED else [{"data": "data.url=x", "model": "model.path=x"}[group]]
    with pytest.raises(ConfigError) as caught:
        load_config_file(write(f"{needed}{text}\n"), [*overrides, *more])
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["run.yaml: data.url, model.path: a value is needed", "data.url=..."]),
        ("run: {seed: 1\nrollout: {n: 2}\n", ["run.yaml:2: not YAML"]),
        ("run:\n\tseed: 1\n", ["run.yaml:2: not YAML"]),
        ("run: {seed: 1}\nrun: {seed: 2}\n", ["run.yaml:2: not YAML: found duplicate key run"]),
        (
            "nodes:\n  - {n: ${rollout.n}}\n",
            ["run.yaml:2: not YAML", 'write interpolations in quotes: "${...}"'],
        ),
        ("- a\n", ["run.yaml: holds a list: expected groups of values"]),
        ("5\n", ["run.yaml: expected a YAML file with groups of values"]),
        (
            "base: [1]\n",
            ["run.yaml: base=[1]: expected the path of another file, or a list of such"],
        ),
        ("base: other.yaml\n", ["run.yaml: base other.yaml: no such file"]),
        ("base: run.yaml\n", ["run.yaml: base run.yaml makes a cycle"]),
        ("base: .\n", ["run.yaml: base .: expected a YAML file"]),
    ],
)
def test_files_that_are_refused(write, text, parts):
    with pytest.raises(ConfigError) as caught:
        load_config_file(write(text))
    for part in parts:
        assert part in str(caught.value)


def test_a_cycle_of_bases(write):
    write("base: run.yaml\n", "other.yaml")
    with pytest.raises(ConfigError, match=re.escape("other.yaml: base run.yaml makes a cycle")):
        load_config_file(write("base: other.yaml\n"))


def test_no_such_file(write):
    with pytest.raises(ConfigError, match=re.escape("none/such.yaml: no such file")):
        load_config_file("none/such.yaml")


def test_a_bad_value_of_a_base_is_reported_there(write):
    write("rollout: {n: x}\n", "other.yaml")
    with pytest.raises(ConfigError, match=re.escape("other.yaml: rollout.n='x'")):
        load_config_file(write(f"base: other.yaml\n{NEEDED}"))


def test_shipped(write):
    assert load(shipped("quickstart.yaml")) == load(shipped("quickstart"))
    with pytest.raises(
        ConfigError,
        match=r"no config 'quick' comes with siirl_dask \(there are: \[.*'quickstart.yaml'",
    ):
        shipped("quick")
    with pytest.raises(
        ConfigError, match=r"quickstart.yaml: no such file; siirl_dask comes with .*quickstart.yaml"
    ):
        load_config_file("quickstart.yaml")


@pytest.mark.parametrize("path", sorted(shipped_files().values()), ids=lambda path: path.name)
def test_every_config_in_the_repository_loads(path):
    # which the DAGs leave to whoever stands on them
    load_config_file(path, ["data.url=rows", "model.path=model"])


texts = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=12)
words = st.one_of(
    texts,
    st.sampled_from(
        ["${run.name}", r"\${x}", r"\\${x}", "1e-3", "null", "yes", "007", "a: b", "#", "'"]
    ),
)


folder_names = words.filter(lambda name: {"", ".", ".."}.isdisjoint(name.split("/")))


@settings(max_examples=50, deadline=None)
@given(
    folder_names,
    words,
    st.floats(1e-12, 1e3),
    st.integers(0, 2**62),
    st.booleans(),
    st.none() | words,
)
def test_dump_loads_back_equal(tmp_path_factory, name, path, lr, seed, progress, address):
    config = Config()
    config.run = RunConfig(name=name, seed=seed)
    config.data, config.model = (
        DataConfig(url=path + "x"),
        ModelConfig(path="y" + path, dtype=Dtype.bfloat16, longest_row=9),
    )
    config.trainer = TrainerConfig(lr=lr, betas=(0.25, 0.5))
    config.observe.progress, config.cluster.address = progress, address
    config.cluster.placement = {"policy": [1, 0]}
    file = tmp_path_factory.mktemp("dump") / "config.yaml"
    file.write_text(dump(config))
    assert load(file) == config
    assert load_recorded(file.read_text(), "config.yaml") == config


@pytest.mark.parametrize("before", ["", "a", "50% of ", "x: y #"])
@pytest.mark.parametrize("backslashes", [0, 1, 2, 3])
@pytest.mark.parametrize("what", ["oc.env:SECRET_OF_A_READER", "run.seed", "oc.decode:'1'"])
def test_a_recorded_config_is_refused_where_it_would_read_its_readers_environment(
    before, backslashes, what
):
    """As many backslashes as stand before an interpolation make it text, if they are odd."""
    config = Config(data=DataConfig(url="rows"), model=ModelConfig(path="model"))
    value = before + "a" + "\\" * backslashes + "${" + what + "}"
    text = dump(config).replace("name: run\n", "name: " + json.dumps(value) + "\n")
    if backslashes % 2:
        assert "${" in load_recorded(text, "config.yaml").run.name
        return
    with pytest.raises(Interpolated, match="expected a plain value"):
        load_recorded(text, "config.yaml")


# Every key is read by somebody. A key counts as read where code gets the attribute from something
# that is known to be that group, by annotation (``rollout: RolloutConfig`` ... ``rollout.n``) or by
# way of a Config (``config.rollout.n``), and where a YAML file hands it to a node or role
# (``${rollout.n}``).


@dataclass
class Reads(ast.NodeVisitor):
    """Keys that one source file reads. Names are known within their function, attributes within
    the file.
    """

    attributes: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    found: set[str] = field(default_factory=set)

    KINDS: ClassVar = {
        **{kind.__name__: group for group, kind in reversed(GROUPS.items())},
        "Config": "config",
    }

    def declared(self, annotation: ast.expr | None) -> str | None:
        """The group that an annotation names, ``config`` for the whole."""
        words = re.findall(r"\w+", ast.unparse(annotation)) if annotation else []
        return next((self.KINDS[word] for word in words if word in self.KINDS), None)

    def group_of(self, value: ast.expr) -> str | None:
        match value:
            case ast.Name(name):
                return self.names.get(name)
            case ast.Attribute(inner, name):
                outer = self.group_of(inner)
                if outer == "config" and name in GROUPS:
                    return name
                if f"{outer}.{name}" in GROUPS:
                    return f"{outer}.{name}"
                return self.attributes.get(name) or ("config" if name == "config" else None)
            case ast.Call(func=ast.Name(name)):
                return self.KINDS.get(name)
        return None

    def learn(self, target: ast.expr, group: str | None) -> None:
        match target:
            case ast.Name(name) if group:
                self.names[name] = group
            case ast.Name(name):
                self.names.pop(name, None)
            case ast.Attribute(_, name) if group:
                self.attributes[name] = group

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for item in node.body:
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and (group := self.declared(item.annotation))
            ):
                self.attributes[item.target.id] = group
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        outside = dict(self.names)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.learn(ast.Name(argument.arg), self.declared(argument.annotation))
        self.generic_visit(node)
        self.names = outside

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.learn(node.target, self.declared(node.annotation))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                self.learn(name, self.group_of(value))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        group = self.group_of(node.value)
        if group in GROUPS and isinstance(node.ctx, ast.Load):
            self.found.add(f"{group}.{node.attr}")
        if group == "config" and isinstance(node.ctx, ast.Load):
            self.found.add(node.attr)  # a key that is no group: agents
        self.generic_visit(node)


def reads_of(tree: ast.AST) -> set[str]:
    """Twice: an attribute may be used above the line that says what it is."""
    reads = Reads()
    for _ in range(2):
        reads.visit(tree)
    return reads.found


def test_what_counts_as_reading_a_key():
    source = """
class Engine:
    rollout: RolloutConfig
    def go(self, trainer: TrainerConfig | None, other):
        self._data = self.config.data
        run, n = self.config.run, 1
        self._data.batch_size, trainer.lr, run.seed, other.lr, self.rollout.top_k, run.name.upper()
    def set(self, config: Config, model: ModelConfig):
        config.cluster.workers = config.observe.progress
        model = None
        model.path
def trainer(): trainer.betas
"""
    wanted = {
        "data.batch_size",
        "trainer.lr",
        "run.seed",
        "run.name",
        "rollout.top_k",
        "observe.progress",
    }
    assert {key for key in reads_of(ast.parse(source)) if "." in key} == wanted


def test_every_key_is_read_somewhere():
    read: set[str] = set()
    assert all("Config" in kind for kind in Reads.KINDS)
    for path in parsed.files_below("siirl_dask"):
        # every chain of names that leads to a key begins with a class of these, or with config
        is_about = re.search("Config|config", parsed.text_of(path))
        if is_about and (ROOT / "siirl_dask" / "config") not in path.parents:
            read |= reads_of(parsed.tree_of(path))
    for path in (ROOT / "configs").rglob("*.yaml"):
        read |= set(re.findall(r"\$\{(\w+(?:\.\w+)+)\}", path.read_text()))
    for (
        group,
        kind,
    ) in GROUPS.items():  # groups of one type (trainer, critic) are read by the same code
        alike = [other for other in GROUPS if GROUPS[other] is kind]
        read |= {
            f"{group}.{f.name}"
            for f in fields(kind)
            if any(f"{other}.{f.name}" in read for other in alike)
        }
    unread = [key for key in config_keys() if key not in read]
    assert not unread, f"nobody reads {unread}: use them or remove them from siirl_dask/config"


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2**31), ("500 MB", 5 * 10**8), ("1.5KiB", 1536), ("1048576", 2**20)],
)
def test_a_number_of_bytes_is_read_with_its_unit(text, count):
    assert parse_bytes("data.memory_limit", text) == count


@pytest.mark.parametrize("text", ["", "many", "2 gigs", "-1GB", "1KiB", "GiB"])
def test_a_memory_limit_that_is_none_is_refused_by_name(text):
    with pytest.raises(ConfigError, match=r"data\.memory_limit"):
        DataConfig(url="x", memory_limit=text)


def test_sources_stand_in_for_a_url_change_one_by_one_and_come_back_from_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {sources: {math: {url: s3://a/b, weight: 3}, code: {url: rows}}}\nmodel: {path: "
        "model}\n"
    )
    config = load(file, ["data.sources.math.weight=0.7", "data.sources.more.url=/c"])
    assert [(name, source.weight) for name, source in config.data.sources.items()] == [
        ("math", 0.7),
        ("code", 1.0),
        ("more", 1.0),
    ]
    assert config.data.url is None
    assert config.data.urls == ["s3://a/b", str(Path.cwd() / "rows"), "/c"]
    file.write_text(dump(config))
    assert load(file) == config
    with pytest.raises(
        ConfigError, match=r"data\.sources\.math has an unknown key 'wieght'.*did you mean 'weight'"
    ):
        load(file, ["data.sources.math.wieght=2"])
    with pytest.raises(ConfigError, match=r"both given.*data\.url=null"):
        load(file, ["data.url=x"])


def test_the_mask_that_looks_at_the_current_policy_goes_with_the_engines_log_probs(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "algorithm: {correction: 'siirl_dask.algorithms:mask_off_policy', correction_options: "
        "{limit: 0.5}, old_logprobs: 'siirl_dask.nodes:rollout_logprobs'}"
    )
    algorithm = load(path, ["data.url=a", "model.path=b"]).algorithm
    assert algorithm.correction == "siirl_dask.algorithms:mask_off_policy"


@pytest.mark.parametrize(
    ("written", "ports"),
    [
        ("9000", range(9000, 9001)),
        ("20000:20100", range(20000, 20101)),
        ("'9000'", range(9000, 9001)),
    ],
)
def test_ports_are_a_number_or_a_range(written, ports):
    config = load_text(f"data: {{url: rows, port: {written}}}\nmodel: {{path: model}}\n", "a.yaml")
    assert parse_ports("data.port", config.data.port) == ports


@pytest.mark.parametrize("port", ["0", "70000", "20:10", "1-2", "any", "9000:70000", ""])
def test_a_port_that_is_none_is_refused_by_name(port):
    with pytest.raises(ConfigError, match=r"data\.port='.*': expected a port, or a range"):
        DataConfig(url="rows", port=port)
