"""Several bases, renamed keys, and groups within groups, in files and in overrides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from siirl_dask.config.file import load, load_config_file, load_text
from siirl_dask.config.file.layers import RENAMED, config_keys
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError, PlanError

NEEDED = "data: {url: rows}\nmodel: {path: model}\n"


def test_a_later_base_of_a_list_wins_and_the_file_wins_over_both(write):
    write(NEEDED + "rollout: {n: 2, top_k: 2, max_rows: 2}\n", "first.yaml")
    write("rollout: {n: 3, top_k: 3}\nnodes: [{name: a}]\n", "second.yaml")
    file = load_config_file(
        write("base: [first.yaml, second.yaml]\nrollout: {n: 4}\n"), ["rollout.min_p=0.5"]
    )
    rollout = file.config.rollout
    assert (rollout.max_rows, rollout.top_k, rollout.n, rollout.min_p) == (2, 3, 4, 0.5)
    assert file.nodes == [{"name": "a"}]


def test_a_base_that_two_bases_share_counts_where_it_is_first(write):
    write(NEEDED + "rollout: {n: 2}\nnodes: [{name: a, run: 'm:f', role: r}]\n", "common.yaml")
    write("base: common.yaml\nrollout: {n: 3}\n", "folder/../left.yaml")
    write("base: common.yaml\nnodes: {a: {rows: grouped}}\n", "right.yaml")
    file = load_config_file(
        write("base: [left.yaml, right.yaml, ./common.yaml]\nnodes: {a: {save_as: t}}\n")
    )
    assert file.config.rollout.n == 3  # common.yaml does not undo what left.yaml changed
    assert file.nodes == [
        {"name": "a", "run": "m:f", "role": "r", "rows": "grouped", "save_as": "t"}
    ]


@pytest.mark.parametrize("bases", ["[]", "null", "''"])
def test_an_empty_base_is_no_base(write, bases):
    assert load(write(f"base: {bases}\n{NEEDED}")).data.url == str(Path.cwd() / "rows")


def test_a_link_to_itself_is_named(tmp_path):
    link = tmp_path / "loop.yaml"
    link.symlink_to(link)
    with pytest.raises(ConfigError, match=r"loop\.yaml: expected a YAML file .*symbolic links"):
        load(link)


def test_a_cycle_is_found_behind_a_list_and_a_folder(write):
    write(NEEDED, "good.yaml")
    write("base: [../good.yaml, b.yaml]\n", "deep/a.yaml")
    write("base: ../run.yaml\n", "deep/b.yaml")
    with pytest.raises(
        ConfigError,
        match=r"b\.yaml: base deep/\.\./run\.yaml makes a cycle: a file cannot be its own",
    ):
        load_config_file(write("base: [good.yaml, deep/a.yaml]\n"))


@pytest.mark.parametrize(
    ("bases", "said"),
    [
        ("[good.yaml, none.yaml]", "run.yaml: base none.yaml: no such file"),
        (
            "[good.yaml, quickstart.yaml]",
            "run.yaml: base quickstart.yaml: no such file; siirl_dask comes with siirl_dask:quickstart.yaml",
        ),
        (
            "[good.yaml, list.yaml]",
            "run.yaml: base list.yaml: holds a list: expected groups of values",
        ),
        (
            "{a: b}",
            "run.yaml: base={'a': 'b'}: expected the path of another file, or a list of such",
        ),
        ("[[good.yaml]]", "run.yaml: base=[['good.yaml']]: expected the path of another file"),
    ],
)
def test_a_base_that_cannot_be_read_names_the_file_that_asks_for_it(write, bases, said):
    write(NEEDED, "good.yaml")
    write("- a\n", "list.yaml")
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config_file(write(f"base: {bases}\n"))


def test_a_text_that_no_file_holds_names_no_base():
    assert load_text(NEEDED.encode(), "here", ["rollout.n=3"]).rollout.n == 3
    with pytest.raises(
        ConfigError,
        match=r"here: base='x\.yaml': only a file that is loaded by its path may name one",
    ):
        load_text(NEEDED + "base: x.yaml", "here")
    with pytest.raises(ConfigError, match=r"here: expected YAML with groups of values: .*utf-8"):
        load_text(b"\xff", "here")


RENAMED_KEYS = [*RENAMED.items(), ("critic.lora_rank", "critic.lora.rank")]


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS)
def test_a_renamed_key_names_the_new_one(write, old, new):
    said = rf"unknown key '{old}'; it is called '{new}' now$"
    with pytest.raises(ConfigError, match=rf"override '{old}=1': {said}"):
        load(write(NEEDED), [f"{old}=1"])
    group, _, key = old.partition(".")
    with pytest.raises(ConfigError, match=rf"run\.yaml: {said}"):
        load(write(f"{NEEDED}{group}: {{{key}: 1}}\n"))
    assert new in config_keys()
    assert old not in config_keys()


def test_an_interpolation_of_a_renamed_key_names_the_new_one(write):
    with pytest.raises(
        ConfigError,
        match=r"run\.name: .*'rollout\.weights_by' not found; it is called 'rollout\.we",
    ):
        load(write(NEEDED + "run: {name: '${rollout.weights_by}'}\n"))


@pytest.mark.parametrize(("old", "new"), [("keep", "save_as"), ("behind", "lag")])
def test_a_renamed_key_of_a_node_names_the_new_one(write, old, new):
    text = (
        f"roles: {{r: {{build: 'math:sqrt'}}}}\nnodes:\n  - {{name: a, run: 'math:sqrt', role: r, "
        f"{old}: 1}}\n"
    )
    with pytest.raises(
        PlanError, match=rf"run\.yaml:5: node 'a' has the key '{old}', which is called '{new}'"
    ):
        dags(load_config_file(write(NEEDED + text)))


def test_a_group_within_a_group_is_merged_key_by_key(write):
    write(NEEDED + "rollout: {n: 2, vllm: {sleep_level: 0, engine_kwargs: {a: 1}}}\n", "base.yaml")
    path = write("base: base.yaml\nrollout: {vllm: {max_num_seqs: 7, engine_kwargs: {b: 2}}}\n")
    rollout = load(path).rollout
    assert (rollout.n, rollout.vllm.sleep_level, rollout.vllm.max_num_seqs) == (2, 0, 7)
    assert rollout.vllm.engine_kwargs == {"b": 2}  # a value, which the later file replaces
    assert load(path, ["rollout.vllm.engine_kwargs.c=3"]).rollout.vllm.engine_kwargs == {
        "b": 2,
        "c": 3,
    }
    assert load(path, ["rollout.vllm.sleep_level=2"]).rollout.vllm.max_num_seqs == 7
    assert load(path, ["rollout.vllm={sleep_level: 2}"]).rollout.vllm.max_num_seqs == 7


NESTED = [
    ("trainer: {lora: {rnk: 1}}", "unknown key 'trainer.lora.rnk' (keys of trainer.lora: ['rank', 'alpha', "
                                  "'targets', 'path']); did you mean 'rank'?"),
    ("trainer: {lora: 4}", "trainer.lora=4: expected a mapping with keys of ['rank', 'alpha', 'targets', 'path']"),
    ("trainer: {lora: {rank: high}}", "trainer.lora.rank='high': expected a whole number (int)"),
    ("critic: {fsdp: {ofload: true}}", "unknown key 'critic.fsdp.ofload'"),
    ("rollout: {sleep_level: 1}", "unknown key 'rollout.sleep_level'"),
    ("trainer: {offload: true}", "did you mean 'trainer.fsdp.offload'?"),
    ("critic: {offload: true}", "did you mean 'critic.fsdp.offload'?"),
    ("rollout: {sleep_level: 1}", "did you mean 'rollout.vllm.sleep_level'?"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), NESTED)
def test_a_wrong_key_of_a_group_within_a_group_is_refused(write, text, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(write(f"{NEEDED}{text}\n"))
