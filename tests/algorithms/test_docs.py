"""docs/algorithms.md lists every algorithm with its options, and the tests and nodes it names
exist.
"""

import inspect
import re
from pathlib import Path

import yaml

import siirl_dask.algorithms as algorithms
import siirl_dask.nodes as nodes
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags

HERE = Path(__file__).parent
TEXT = (HERE.parents[1] / "docs" / "algorithms.md").read_text()


def options_shown():
    """(function, option, value) of each ``function`` `{option: value}` in a table, the value as
    text.
    """
    for name, options in re.findall(r"`([a-z_0-9]+)` `\{([^}]*)\}`", TEXT):
        for option, value in re.findall(r"(\w+): ([^,]+)", options):
            yield name, option, value


def read_value(text):
    try:
        return float(text)  # YAML 1.1 reads 1e-6 as a string
    except ValueError:
        return yaml.safe_load(text)


def test_every_public_function_is_listed():
    functions = [
        name for name in algorithms.__all__ if inspect.isfunction(getattr(algorithms, name))
    ]
    assert len(functions) > 30
    assert not [name for name in functions if f"`{name}`" not in TEXT]


def test_the_test_files_listed_are_those_that_exist():
    named = set(re.findall(r"test_\w+\.py", TEXT))
    assert named == {path.name for path in HERE.glob("test_*.py")} - {Path(__file__).name}


def test_the_yaml_that_is_shown_makes_dags(tmp_path):
    blocks = [yaml.safe_load(block) for block in re.findall(r"(?:^    .*\n)+", TEXT, re.MULTILINE)]
    assert len(blocks) == 10
    for at, block in enumerate(blocks):
        path = tmp_path / f"{at}.yaml"
        path.write_text(yaml.safe_dump({"base": str(shipped("quickstart")), **block}))
        (train, _) = dags(load_config_file(path))
        assert set(block.get("nodes", ())) <= {node.name for node in train.nodes}


def test_every_node_mentioned_exists():
    named = re.findall(r"siirl_dask\.nodes:(\w+)", TEXT)
    assert named
    assert not [name for name in named if not hasattr(nodes, name)]


def test_options_shown_are_defaults_except_for_known_variants():
    variants = {
        ("grpo", "scale", "batch"),
        ("truncated_is", "level", "sequence"),
        ("masked_is", "level", "sequence"),
        ("turn_returns", "same_turn", "true"),
        ("pass_at_k", "divide_by_std", "true"),
        ("ppo_clip", "dual_clip", "3.0"),
        ("ppo_clip", "clip_high", "0.28"),
    }
    shown = list(options_shown())
    assert len(shown) > 20
    for name, option, value in shown:
        default = inspect.signature(getattr(algorithms, name)).parameters[option].default
        expected = inspect.Parameter.empty if value == "..." else read_value(value)
        assert default == expected or (name, option, value) in variants, (
            f"{name} {option}: {default}, not {value}"
        )
