"""A Chromium of this machine, driven by playwright, for pages that only a browser can judge."""

import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def browser_page(*, dark=False, width=1366, height=900):
    """A page of a fresh browser, and the list of its console's errors; skips the test without a
    Chromium.
    """
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the browser, and is not installed"
    )
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium on this machine: none of {', '.join(NAMES)} is there")
    errors = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if dark else "light",
            )
            page.on(
                "console",
                lambda message: errors.append(message.text) if message.type == "error" else None,
            )
            page.on("pageerror", lambda error: errors.append(str(error)))
            yield page, errors
        finally:
            browser.close()
