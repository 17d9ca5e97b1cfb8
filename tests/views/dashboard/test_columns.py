"""A viewer gets what has changed, and nothing of what has not."""

from bokeh.document import Document
from bokeh.models import ColumnDataSource

from siirl_dask.views.dashboard.columns import numbers, show_columns


def test_only_columns_that_have_changed_are_sent_and_all_with_other_rows():
    source, document, sent = ColumnDataSource({"name": [], "size": []}), Document(), []
    document.add_root(source)
    document.on_change(lambda event: sent.append(sorted(getattr(event, "cols", None) or ("all",))))
    show_columns(source, {"name": ["a", "b"], "size": numbers([1, 2])})
    assert sent == [["all"]]
    show_columns(source, {"name": ["a", "b"], "size": numbers([1, 2])})
    assert sent == [["all"]]
    show_columns(source, {"name": ["a", "b"], "size": numbers([1, 3])})
    assert sent == [["all"], ["size"]]
    assert list(source.data["size"]) == [1, 3]
    show_columns(source, {"name": ["a"], "size": numbers([1])})
    assert sent == [["all"], ["size"], ["all"]]
