"""The drawing of a plan: every node, edge and label is there, and none lies on another."""

from __future__ import annotations

from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given

from siirl_dask.planner import TableSizes, compile_chains, estimate
from siirl_dask.views.charts.layers import Bend, lay_out
from siirl_dask.views.plan import draw
from tests.planner.random_dags import QUICKLY, plans

SIZES = TableSizes(prompts=32, prompt_tokens=100, response_tokens=50)
SPLIT = {"rollout": [0, 1], "policy": [2, 3], "reference": [2, 3]}
SVG = "{http://www.w3.org/2000/svg}"


def parsed(text):
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    return root


def rectangles(root, kind):
    """(left, top, right, bottom) of each, on the whole drawing."""
    found = []
    for group in root.findall(f"{SVG}g"):
        down = float(group.get("transform").split(",")[1].rstrip(")"))
        for rect in group.findall(f"{SVG}rect[@class='{kind}']"):
            x, y, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            found.append((x, y + down, x + width, y + down + height))
    return found


def overlap(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def check(root, plan):
    boxes, labels = rectangles(root, "box"), rectangles(root, "label")
    assert len(boxes) == len(plan.flow)
    assert len(labels) == len(estimate(plan, SIZES))
    for one, other in combinations([*boxes, *labels], 2):
        assert not overlap(one, other)
    width, height = float(root.get("width")), float(root.get("height"))
    for left, top, right, bottom in (*boxes, *labels):
        assert left >= 0
        assert top >= 0
        assert right <= width
        assert bottom <= height


@QUICKLY
@given(plans())
def test_nothing_lies_on_anything_else(plan):
    check(parsed(draw({"train": (plan, SIZES)})), plan)


@QUICKLY
@given(plans())
def test_arrows_go_down_and_past_no_node(plan):
    layout = lay_out(list(plan.flow), estimate(plan, SIZES))
    depth = {place: at for at, layer in enumerate(layout.layers) for place in layer}
    assert sum(map(len, layout.layers)) == len(depth), "two places in one"
    for (source, target, *_), path in layout.paths.items():
        assert (path[0], path[-1]) == (source, target)
        assert [depth[place] for place in path] == list(range(depth[source], depth[target] + 1))
        assert all(isinstance(place, Bend) for place in path[1:-1])


@pytest.fixture
def plan(grpo, source):
    return compile_chains(grpo, ["w0", "w1", "w2", "w3"], source, SPLIT)


def test_bold_is_what_moves_and_labels_say_what(plan):
    root = parsed(draw({"train": (plan, SIZES)}))
    lines = {
        line.find(f"{SVG}title").text: line.get("class") for line in root.iter(f"{SVG}polyline")
    }
    moving = {(edge.source, edge.target) for edge in plan.edges if edge.moves}
    bold = {
        tuple(text.split(",")[0].split(" to "))
        for text, style in lines.items()
        if style == "edge moved"
    }
    assert bold == moving
    assert len(lines) == len(estimate(plan, SIZES))
    assert any(text.startswith("rollout to reward, rows stay: ") for text in lines)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "prompt_ids, response_ids" in texts
    assert "256 rows balanced, at most 163.9 kB" in texts


def test_a_colour_for_each_role(plan):
    root = parsed(draw({"train": (plan, SIZES)}))
    legend = {circle.get("fill") for circle in root.iter(f"{SVG}circle")}
    boxes = {rect.get("fill") for rect in root.iter(f"{SVG}rect") if rect.get("class") == "box"}
    assert boxes == legend
    assert len(legend) == 3


def test_phases_are_one_below_the_other(plan):
    root = parsed(draw({"train": (plan, SIZES), "validation": (plan, SIZES)}))
    titles = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "title"]
    assert titles == ["train", "validation"]
    for one, other in combinations(rectangles(root, "box"), 2):
        assert not overlap(one, other)


def test_the_diamond_is_drawn_as_one():
    edges = [("a", "b"), ("a", "c"), ("a", "d"), ("b", "e"), ("c", "e"), ("d", "e"), ("a", "e")]
    layout = lay_out(["a", "b", "c", "d", "e"], edges)
    assert [set(layer) - {Bend(("a", "e"), 1)} for layer in layout.layers] == [
        {"a"},
        {"b", "c", "d"},
        {"e"},
    ]
    assert layout.paths["a", "e"] == ("a", Bend(("a", "e"), 1), "e")


def test_two_chains_side_by_side_do_not_cross():
    edges = [("a", "c"), ("b", "d"), ("c", "f"), ("d", "e")]
    upper, middle, lower = lay_out(["a", "b", "c", "d", "e", "f"], edges).layers
    assert [upper.index("a") < upper.index("b")] == [middle.index("c") < middle.index("d")]
    assert [upper.index("a") < upper.index("b")] == [lower.index("f") < lower.index("e")]
