"""``hocket watch`` in a real browser, on a training that really runs."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.study import write_run
from process.launch import Command, Nursery, eventually

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(280)]

Start = Callable[..., Command]


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    """Starts ``hocket``; what still runs at the end is killed."""
    started: list[Command] = []

    def command(*arguments: str) -> Command:
        started.append(nursery.command(list(arguments), tmp_path / f"said-{len(started)}", tmp_path))
        return started[-1]

    yield command
    for each in started:
        each.__exit__()


@pytest.fixture
def watched(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens a served page; an error on the page, or a request to anywhere else, fails the test."""
    troubles: list[str] = []
    contexts = []

    def open_page(url: str, **options: Any) -> Any:
        contexts.append(chromium.new_context(viewport={"width": 1280, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda e: troubles.append(f"error: {e}"))
        page.on("dialog", lambda d: (troubles.append(f"dialog: {d.message}"), d.dismiss()))
        page.on("request", lambda r: troubles.append(r.url) if r.url not in (url, f"{url}events", "data:,") else None)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


def served(command: Command) -> str:
    """The address that the command prints."""
    out = command.group.folder / "0.out"
    assert eventually(lambda: out.exists() and out.read_text().endswith("\n"), 120), command.said()
    found = re.match(r"(http://127\.0\.0\.1:\d+/) follows .*; Ctrl-C ends it\.", out.read_text())
    assert found is not None
    return found[1]


def epochs(page: Any) -> int:
    return int(re.search(r"epoch (\d+) of 100000", page.inner_text("#progress"))[1])  # type: ignore[index]


def test_a_page_follows_a_training_and_ends_with_ctrl_c(start: Start, watched: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--workers", "4", "--virtual", "--model", "mlp", "--cluster", "1gbit", "--slowdown", "1,1,1,3", "--no-checkpoints"]
    training = start("train", *options, "--epochs", "100000", "--device", "cpu", "--out", str(out))
    assert eventually(lambda: (out / "metrics.jsonl").exists() or training.poll() is not None, 120), training.said()
    server = start("watch", str(out), "--port", "0")
    page = watched(served(server), color_scheme="dark")
    first = epochs(page)
    page.click("th[data-name=epochs] button")
    page.fill("#filter", "bulk")
    page.click(".key")
    page.focus("#loss .mark")
    for selector in ("#epochs svg .line", "#loss svg .line", "#bars .segment"):
        assert page.locator(selector).count() > 0, selector
    page.wait_for_function(
        "from => Number(document.querySelector('#progress').innerText.match(/epoch (\\d+) of/)[1]) > from + 1", arg=first
    )
    assert page.get_attribute("th[data-name=epochs]", "aria-sort") == "descending", "what was sorted stays so"
    assert page.get_attribute(".key", "aria-pressed") == "true"
    assert page.input_value("#filter") == "bulk"
    assert page.evaluate("document.activeElement.closest('figure').id") == "loss", "focus stays in its chart"
    assert int(page.get_attribute("#table tbody tr td:nth-of-type(4)", "data-v") or 0) > 1
    assert page.locator("#steps .dot").count() == 4, "one for each worker"
    assert "worker 3: 3.0× the median" in page.inner_text("#steps") or "worker 3: 3.1× the median" in page.inner_text("#steps")
    assert page.inner_text("#connection") == "Following."
    assert page.is_hidden("#frontier")
    os.kill(training.pid, signal.SIGINT)
    assert training.ended(60).returncode == 130
    os.kill(server.pid, signal.SIGINT)
    ended = server.ended(60)
    assert (ended.returncode, ended.stderr) == (0, "")
    page.wait_for_function("document.querySelector('#connection').innerText.includes('connection is lost')")
    assert sorted(path.name for path in out.iterdir()) == ["metrics.jsonl", "run.json"], "watching leaves nothing"


def test_hostile_names_do_not_run_when_they_come_later(start: Start, watched: Callable[..., Any], tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    runs = tmp_path / "runs"
    write_run(runs / "one", "bulk + allreduce", epochs=20)
    page = watched(served(start("watch", str(runs), "--port", "0")))
    assert page.locator("#table tbody tr").count() == 1
    write_run(runs / "two", f"local(4) + {hostile}", failure=hostile)
    (runs / "two" / "metrics.jsonl").write_text(json.dumps({"epoch": 1, "accuracy": 0.5, "loss": 1.0, "bytes_sent": 1}) + "\n{")
    page.wait_for_selector("#table tbody tr:nth-child(2)")
    assert f"failed: {hostile}" in page.inner_text("#progress")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 3
    assert page.locator(".key").count() == 2
