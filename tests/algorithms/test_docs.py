"""docs/algorithms.md names what there is, all of it, and where it is tested."""

import inspect
import re
from pathlib import Path

import siirl_dask.algorithms as algorithms
import siirl_dask.nodes as nodes

HERE = Path(__file__).parent
TEXT = (HERE.parents[1] / "docs" / "algorithms.md").read_text()


def options_shown():
    """(function, option, default) of each ``function`` `{option: number}` in a table."""
    for name, options in re.findall(r"`([a-z_0-9]+)` `\{([^}]*)\}`", TEXT):
        for option, number in re.findall(r"(\w+): ([^,]+)", options):
            yield name, option, number


def test_every_function_is_named():
    functions = [name for name in algorithms.__all__ if inspect.isfunction(getattr(algorithms, name))]
    assert len(functions) > 30
    assert not [name for name in functions if f"`{name}`" not in TEXT]


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"test_\w+\.py", TEXT))
    assert named == {path.name for path in HERE.glob("test_*.py")} - {Path(__file__).name}


def test_every_node_that_is_named_exists():
    named = re.findall(r"siirl_dask\.nodes:(\w+)", TEXT)
    assert named
    assert not [name for name in named if not hasattr(nodes, name)]


def test_every_option_that_is_shown_is_taken_and_a_default_but_for_variants():
    variants = {("ppo_clip", "dual_clip", "3.0"), ("ppo_clip", "clip_high", "0.28")}
    shown = list(options_shown())
    assert len(shown) > 20
    for name, option, number in shown:
        default = inspect.signature(getattr(algorithms, name)).parameters[option].default
        expected = inspect.Parameter.empty if number == "..." else float(number)
        assert default == expected or (name, option, number) in variants, f"{name} {option}: {default}, not {number}"
