"""Plain values are converted to the type of an annotation, or refused with the nearest spelling."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Literal, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.coerce import Coercer
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.planner import resolve


class Speed(StrEnum):
    fast = "fast"
    slow = "slow"


@dataclass
class Inner:
    size: int
    speed: Speed = Speed.slow


@dataclass
class Outer:
    name: str
    inner: Inner
    others: list[Inner] = field(default_factory=list)
    by_name: dict[str, Inner] = field(default_factory=dict)
    maybe: Inner | None = None


class Score(Protocol):
    def __call__(self, response: str) -> float: ...


class Plain(Protocol):
    size: int


def bind(name: str, options: Any, where: str) -> Callable[..., Any]:
    return partial(resolve(name), **options) if options else resolve(name)


values = Coercer(ConfigError)
functions = Coercer(PlanError, bind)

GOOD = [
    # value, annotation, result
    (1, int, 1),
    ("7", int, 7),
    (1e3, int, 1000),
    (1, float, 1.0),
    ("1e-6", float, 1e-6),
    (True, bool, True),
    (7, str, "7"),
    ("fast", Speed, Speed.fast),
    (Speed.fast, Speed, Speed.fast),
    ("b", Literal["a", "b"], "b"),
    (2, Literal[1, 2], 2),
    (None, int | None, None),
    ("3", int | None, 3),
    (None, None | int, None),
    ([1, "2"], list[int], [1, 2]),
    ((1, 2), list[int], [1, 2]),
    ([0.5, 1], tuple[float, float], (0.5, 1.0)),
    ([1, 2, 3], tuple[int, ...], (1, 2, 3)),
    ([], tuple[int, ...], ()),
    (["a", 1], tuple[str, int], ("a", 1)),
    ([1], Sequence[float], [1.0]),
    ({"a": "1"}, dict[str, int], {"a": 1}),
    ({"a": ["1"]}, Mapping[str, list[int]], {"a": [1]}),
    ({"a": [1, {"b": None}]}, Any, {"a": [1, {"b": None}]}),
    ({"a": 1}, dict, {"a": 1}),
    ("text", Any, "text"),
    ({"size": "4", "speed": "fast"}, Inner, Inner(4, Speed.fast)),
    (Inner(2), Inner, Inner(2)),
    (
        {"name": 1, "inner": {"size": 1}, "others": [{"size": 2}], "by_name": {"x": {"size": 3}}},
        Outer,
        Outer("1", Inner(1), [Inner(2)], {"x": Inner(3)}),
    ),
    (
        {"name": "x", "inner": {"size": 1}, "maybe": {"size": 5}},
        Outer,
        Outer("x", Inner(1), maybe=Inner(5)),
    ),
    ("math:sqrt", str, "math:sqrt"),
]


@pytest.mark.parametrize(("value", "hint", "expected"), GOOD)
def test_a_value_becomes_what_its_annotation_asks_for(value, hint, expected):
    made = values(value, hint, "key")
    assert made == expected
    assert type(made) is type(expected)


BAD = [
    # value, annotation, error
    ("eight", int, "run.yaml: key='eight': expected a whole number (int)"),
    (1.5, int, "key=1.5: expected a whole number (int)"),
    (math.nan, int, "key=nan: expected a whole number (int)"),
    (True, int, "key=True: expected a whole number (int)"),
    (None, int, "key=None: expected a whole number (int)"),
    ([1], float, "key=[1]: expected a number (float)"),
    (1, bool, "key=1: expected true or false (bool)"),
    ("true", bool, "key='true': expected true or false (bool)"),
    (["x"], str, "key=['x']: expected a text (str)"),
    ("x", int | None, "key='x': expected a whole number (int)"),
    ("fats", Speed, "key='fats': expected one of ['fast', 'slow']; did you mean 'fast'?"),
    ("quick", Speed, "key='quick': expected one of ['fast', 'slow']"),
    (["fast"], Speed, "key=['fast']: expected one of ['fast', 'slow']"),
    ("c", Literal["a", "b"], "key='c': expected one of ['a', 'b']"),
    (1, list[int], "key=1: expected a list of any number of values"),
    ("12", list[int], "key='12': expected a list of any number of values"),
    ([1, "x"], list[int], "key[1]='x': expected a whole number (int)"),
    ({"a": 1}, list[int], "key={'a': 1}: expected a list of any number of values"),
    ([1], tuple[int, int], "key=[1]: expected a list of 2 values, as in [0, 1]"),
    ([1, 2, 3], tuple[int, int], "key=[1, 2, 3]: expected a list of 2 values"),
    ([["x"]], list[list[int]], "key[0][0]='x': expected a whole number (int)"),
    ([1], dict[str, int], "key=[1]: expected a mapping"),
    ({"a": "x"}, dict[str, int], "key.a='x': expected a whole number (int)"),
    (5, Inner, "key=5: expected a mapping with keys of ['size', 'speed']"),
    (
        {"sise": 1},
        Inner,
        "key has an unknown key 'sise' (keys: ['size', 'speed']); did you mean 'size'?",
    ),
    ({"speed": "fast"}, Inner, "key lacks ['size'], which Inner needs"),
    (
        {"name": "x", "inner": {"size": "y"}},
        Outer,
        "key.inner.size='y': expected a whole number (int)",
    ),
    (
        {"name": "x", "inner": {"size": 1, "sped": "fast"}},
        Outer,
        "key.inner has an unknown key 'sped' (keys: ['size', 'speed']); did you mean 'speed'?",
    ),
    (
        {"name": "x", "inner": {"size": 1}, "others": [{"size": 1}, {"size": 1, "speed": "slwo"}]},
        Outer,
        "key.others[1].speed='slwo': expected one of ['fast', 'slow']; did you mean 'slow'?",
    ),
    (
        {"name": "x", "inner": {"size": 1}, "by_name": {"a": {}}},
        Outer,
        "key.by_name.a lacks ['size'], which Inner needs",
    ),
]


@pytest.mark.parametrize(("value", "hint", "said"), BAD)
def test_a_wrong_value_is_refused_where_it_is_written(value, hint, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        values(value, hint, "run.yaml: key")


def test_the_error_is_the_one_that_the_caller_chose():
    with pytest.raises(PlanError, match="n='x': expected a whole number"):
        functions("x", int, "n")


CALLABLES = [Callable[..., float], Callable, Score, Callable[..., float] | None, None | Score]


@pytest.mark.parametrize("hint", CALLABLES)
def test_a_name_becomes_the_function_where_one_is_wanted(hint):
    assert functions("math:sqrt", hint, "key") is math.sqrt
    assert functions(math.sqrt, hint, "key") is math.sqrt
    assert functions({"run": "math:sqrt"}, hint, "key") is math.sqrt
    made = functions({"run": "math:isclose", "with": {"abs_tol": 1}}, hint, "key")
    assert (made.func, made.keywords) == (math.isclose, {"abs_tol": 1})


def test_functions_within_lists_mappings_and_values_without_annotation():
    call = {"run": "math:isclose", "with": {"abs_tol": 1}}
    assert functions(["math:sqrt"], list[Callable[..., float]], "key") == [math.sqrt]
    assert functions({"a": "math:sqrt"}, dict[str, Score], "key") == {"a": math.sqrt}
    assert functions({"deep": [call]}, Any, "key")["deep"][0].keywords == {"abs_tol": 1}
    # a text that nobody asked to be a function
    assert functions("math:sqrt", Any, "key") == "math:sqrt"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "key=5: expected a function, 'module:function' or {run: ..., with: {...}}"),
        (None, "key=None: expected a function"),
        (
            {"rnu": "math:sqrt"},
            "key has an unknown key 'rnu' (keys: ['run', 'with']); did you mean 'run'?",
        ),
        ("math:sqr", "'math:sqr': module 'math' has no function 'sqr'; did you mean 'sqrt'?"),
        ({"with": {}}, "'' names no function"),
    ],
)
def test_what_names_no_function_is_refused(value, said):
    with pytest.raises(PlanError, match=re.escape(said)):
        functions(value, Callable[..., float], "key")


def test_a_call_without_a_function_is_none_where_none_will_do():
    empty = {"run": None, "with": {}}
    assert functions(empty, Callable[..., float] | None, "key") is None
    with pytest.raises(PlanError, match=r"key.*names no function|names no function"):
        functions(empty, Callable[..., float], "key")
    with pytest.raises(PlanError, match="names no function"):
        functions({"run": None, "with": {"n": 1}}, Callable[..., float] | None, "key")


def test_a_protocol_without_call_is_no_function():
    assert functions("math:sqrt", Plain, "key") == "math:sqrt"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_plain_data_without_annotation_stays_as_it_is(value):
    assert values(value, Any, "key") == value


@given(
    plain,
    st.sampled_from(
        [int, float, bool, str, Speed, Inner, list[int], tuple[int, int], dict[str, int]]
    ),
)
def test_any_value_becomes_the_type_or_is_refused_by_name(value, hint):
    try:
        made = values(value, hint, "key")
    except ConfigError as error:
        made, said = None, str(error)
    if made is None:
        assert said.startswith("key")
    else:
        assert type(made) is getattr(hint, "__origin__", hint)
        assert values(made, hint, "key") == made
