"""The run's page in a real browser while a tiny run goes on: it fills, a click shows a sample,
nothing goes wrong.
"""

import signal

import pytest

from tests.clusters import lasting_port
from tests.e2e.browser import browser_page

DATA = """(name) => {
  const model = Bokeh.documents[0].get_model_by_name(name)
  return Array.from(Object.values(model.data)[0]).length
}"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_browser_sees_the_run_while_it_goes_on(start, tmp_path, monkeypatch):
    """The run stands still while a sample is clicked: a browser without a GPU has no time
    between tiny steps.
    """
    port, gate = lasting_port(), tmp_path / "gate"
    monkeypatch.setenv("WAITED_FOR", str(gate))
    gate.touch()
    waits = "rewards.function=tests.e2e.rewards:waits_for_a_file"
    with browser_page() as (page, errors):
        # the run and the browser share the machine with other tests
        page.set_default_timeout(90_000)
        run = start(
            waits,
            "run.steps=100000",
            f"observe.dashboard_port={port}",
            "data.batch_size=8",
            "rollout.n=2",
        )
        run.wait_for_steps(4)
        gate.unlink()
        page.goto(f"http://127.0.0.1:{port}/status")
        page.click('a[href="siirl"]')
        page.wait_for_function("() => window.Bokeh && Bokeh.documents.length > 0", polling=300)
        for name in (
            "curve reward",
            "timeline bars",
            "live bars",
            "sample rows",
            "worker rows",
            "matrix",
        ):
            page.wait_for_function(f"(name) => ({DATA})(name) > 0", arg=name, polling=300)
        page.click(".slick-row >> nth=1")
        page.wait_for_selector("pre.siirl-text")
        assert page.locator("pre.siirl-text").count() >= 2
        assert page.locator("pre.siirl-text span[title]").count() > 0, "its tokens have colours"
        before = page.evaluate(DATA, "curve reward")
        shown = int(page.locator(".slick-row .slick-cell").first.inner_text())
        gate.touch()
        run.wait_for_steps(run.steps() + 3)
        gate.unlink()
        page.wait_for_function(
            f"(before) => ({DATA})('curve reward') > before", arg=before, polling=300
        )
        first = page.locator(".slick-row .slick-cell").first
        for _ in range(100):
            if int(first.inner_text()) > shown:
                break
            page.wait_for_timeout(200)
        assert int(first.inner_text()) > shown, "the table draws the rows of later steps"
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= 1366, "it fits a laptop's width"
        page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
        assert (tmp_path / "page.png").stat().st_size > 50_000
        assert errors == []
        gate.touch()
        run.process.send_signal(signal.SIGINT)
        page.wait_for_selector("#siirl-farewell:not([hidden])")
        farewell = page.inner_text("#siirl-farewell")
        assert "has ended: interrupted" in farewell
        assert "siirl-dask serve" in farewell
        assert page.locator("span.chip.live").count() == 0, "it does not say that it trains"
    run.end(timeout=60)
