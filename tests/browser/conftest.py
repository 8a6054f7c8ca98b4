"""A real headless Chromium, one for all tests; where there is none they are skipped, saying so."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.study import free_runs, hundred_runs, one_facet, split_runs, ten_runs
from hocket.report import build

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install 'hocket[dev]'")
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no Chromium on this machine: install one of {', '.join(NAMES)} (make browser)")
    with playwright.sync_playwright() as control:
        browser = control.chromium.launch(executable_path=path, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of ten runs, of a hundred over facets or in one, of twenty whose workers do not go in step, and of split models."""
    top = tmp_path_factory.mktemp("pages")
    folders = {
        "ten": ten_runs(top / "ten"),
        "hundred": hundred_runs(top / "hundred"),
        "dense": one_facet(top / "dense", 100),
        "free": free_runs(top / "free", 20, 5000),
        "split": split_runs(top / "split"),
    }
    return {name: build([folder], folder, png=False).path for name, folder in folders.items()}


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page file; any console error or any request but for the file itself fails the test."""
    troubles: list[str] = []
    contexts = []

    def open_page(path: Path, width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda m: troubles.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: troubles.append(f"error: {e}"))
        page.on("dialog", lambda d: (troubles.append(f"dialog: {d.message}"), d.dismiss()))
        page.on("request", lambda r: troubles.append(f"request: {r.url}") if r.url not in (path.as_uri(), "data:,") else None)
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []
