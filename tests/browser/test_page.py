"""The page in a real browser: it sorts, filters, answers to pointer and keyboard, and can be read everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser.study import free_runs, hundred_runs, timeline, write_run, write_split
from hocket import ClusterSpec
from hocket.prediction import whatif
from hocket.report import build

pytestmark = pytest.mark.browser

Visit = Callable[..., Any]
SHOWN = "[...document.querySelectorAll('#table tbody tr')].filter(r => !r.hidden)"
HOSTILE = "<script>alert('title')</script><img src=x onerror=alert(1)>"
EVERY = ("ten", "hundred", "dense", "free")


def column(page: Any, name: str) -> list[str]:
    """What the visible cells of a column sort by."""
    place = page.evaluate("n => [...document.querySelectorAll('#table thead th')].findIndex(h => h.dataset.name === n)", name)
    return page.evaluate(f"i => {SHOWN}.map(r => r.cells[i].dataset.v)", place)


def boxes(page: Any, selector: str) -> list[dict[str, float]]:
    """The places of visible elements on the page."""
    found = (each.bounding_box() for each in page.query_selector_all(selector))
    return [box for box in found if box and box["width"] and box["height"]]


def meet(a: dict[str, float], b: dict[str, float]) -> bool:
    """Whether two boxes overlap."""
    across = a["x"] < b["x"] + b["width"] and b["x"] < a["x"] + a["width"]
    return across and a["y"] < b["y"] + b["height"] and b["y"] < a["y"] + a["height"]


@pytest.mark.parametrize("name", ["accuracy", "sent_mb_per_worker", "times_fewer_bytes", "seconds", "rate"])
def test_numbers_sort_as_numbers_both_ways(pages: dict[str, Path], visit: Visit, name: str) -> None:
    page = visit(pages["ten"])
    button = page.locator(f"th[data-name={name}] button")
    for direction in ("descending", "ascending", "descending"):
        button.click()
        assert page.get_attribute(f"th[data-name={name}]", "aria-sort") == direction
        assert page.locator("th[aria-sort]").count() == 1
        keys = column(page, name)
        values = [float(k) for k in keys if k]
        assert values == sorted(values, reverse=direction == "descending")
        assert len(set(values)) > 1
        assert keys[len(values) :] == [""] * (len(keys) - len(values)), "what is not known comes last"


def test_what_lies_far_below_the_frontier_is_marked_at_its_foot(tmp_path: Path, visit: Visit) -> None:
    for strategy, accuracy, sent in (
        ("bulk", 0.70, 1000),
        ("local(4)", 0.68, 250),
        ("local(16)", 0.66, 300),
        ("local(64)", 0.1, 900),
    ):
        line = {"epoch": 1, "accuracy": accuracy, "loss": 1.0, "seconds": None, "bytes_sent": sent * 10**6}
        write_run(tmp_path / strategy, strategy, [line], virtual=True, epochs=1)
    page = visit(build([tmp_path], tmp_path / "out", png=False).path)
    foot, points = boxes(page, "#frontier .further"), boxes(page, "#frontier .mark .dot")
    assert (len(foot), len(points)) == (1, 3)
    assert foot[0]["y"] > max(point["y"] for point in points)
    assert "further down" in page.inner_text("#frontier")
    assert max(p["y"] for p in points) - min(p["y"] for p in points) > 100, "the others have the height of the chart"


def test_words_sort_naturally(pages: dict[str, Path], visit: Visit) -> None:
    page = visit(pages["ten"])
    page.click("th[data-name=strategy] button")
    names = column(page, "strategy")
    assert names.index("local(4) + allreduce") < names.index("local(16) + allreduce")


def test_the_filter_takes_rows_away_and_dims_charts(pages: dict[str, Path], visit: Visit) -> None:
    page = visit(pages["ten"], reduced_motion="reduce")
    before = len(column(page, "strategy"))
    page.fill("#filter", "local gossip")
    names = column(page, "strategy")
    assert 0 < len(names) < before
    assert all("local" in n and "gossip" in n for n in names)
    assert page.inner_text("#shown") == f"{len(names)} of {before} rows"
    for figure in ("epochs", "cost", "frontier", "bars"):
        kept = page.evaluate(
            "f => [...document.querySelectorAll(`#${f} .mark`)].map(m => [m.ariaLabel, m.classList.contains('out')])", figure
        )
        assert kept
        assert all(out != ("local" in label and "gossip" in label.split(":")[0]) for label, out in kept)
    assert page.evaluate("Number(getComputedStyle(document.querySelector('.mark.out')).opacity)") < 0.2
    page.fill("#filter", "nothing like this")
    assert page.inner_text("#shown") == "No row matches."
    page.fill("#filter", "")
    assert len(column(page, "strategy")) == before
    assert page.locator(".mark.out").count() == 0


@pytest.mark.parametrize("figure", ["epochs", "cost", "frontier", "bars"])
def test_hovering_shows_the_right_figures_and_highlights_everywhere(pages: dict[str, Path], visit: Visit, figure: str) -> None:
    page = visit(pages["ten"])
    page.locator(f"#{figure}").scroll_into_view_if_needed()
    mark = page.locator(f"#{figure} .mark.baseline")
    part = mark.locator("rect" if figure == "bars" else ".dot").first
    box = part.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    check_tip(page, "bulk + allreduce")
    page.mouse.move(2, 2)
    assert page.is_hidden("#tip")
    assert page.locator(".hot").count() == 0


@pytest.mark.parametrize("figure", ["epochs", "cost", "frontier", "bars"])
def test_the_keyboard_does_what_the_pointer_does(pages: dict[str, Path], visit: Visit, figure: str) -> None:
    page = visit(pages["ten"])
    assert page.locator(f"#{figure} .mark[tabindex='0']").count() == 1, "one tab stop per chart"
    page.focus(f"#{figure} .mark[tabindex='0']")
    seen = []
    for _ in range(page.locator(f"#{figure} .mark").count()):
        name = page.inner_text("#tip strong")
        check_tip(page, name)
        seen.append(name)
        page.keyboard.press("ArrowRight")
    assert len(set(seen)) == len(seen) == 10
    assert page.inner_text("#tip strong") == seen[0], "arrows go round"
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")


def test_the_tooltip_follows_the_focus_when_the_page_scrolls(pages: dict[str, Path], visit: Visit) -> None:
    page = visit(pages["ten"])
    page.focus("#epochs .mark[tabindex='0']")
    before = page.locator("#tip").bounding_box()["y"]
    page.evaluate("new Promise(done => { scrollBy(0, 60); requestAnimationFrame(() => requestAnimationFrame(done)) })")
    assert page.is_visible("#tip")
    assert page.locator("#tip").bounding_box()["y"] == pytest.approx(before - 60, abs=2)


def check_tip(page: Any, strategy: str) -> None:
    """The tooltip has the figures of the table, and the strategy is highlighted in every chart, the legend and the table."""
    assert page.inner_text("#tip strong") == strategy
    cells = page.evaluate(
        f"s => {SHOWN}.find(r => r.cells[0].dataset.v === s).cells[1].textContent + '|' + "
        f"{SHOWN}.find(r => r.cells[0].dataset.v === s).cells[4].textContent",
        strategy,
    )
    accuracy, seconds = cells.split("|")
    tip = page.inner_text("#tip")
    assert f"{accuracy} %" in tip
    assert f"{seconds} s" in tip
    assert "measured" in tip
    hot = page.evaluate("[...document.querySelectorAll('.hot')].map(e => [e.closest('figure')?.id ?? e.tagName, e.dataset.series])")
    assert {place for place, _ in hot} >= {"epochs", "cost", "frontier", "bars", "BUTTON", "TR"}
    assert len({series for _, series in hot}) == 1
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= page.viewport_size["width"]


def test_a_tap_shows_the_tooltip(pages: dict[str, Path], visit: Visit) -> None:
    page = visit(pages["ten"], 390, 844, has_touch=True, is_mobile=True)
    page.locator("#frontier").scroll_into_view_if_needed()
    box = page.locator("#frontier .mark.baseline .dot").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert page.inner_text("#tip strong") == "bulk + allreduce"
    place = page.locator("#tip").bounding_box()
    assert place["x"] >= 0
    assert place["x"] + place["width"] <= 390


def test_a_legend_key_can_be_kept(pages: dict[str, Path], visit: Visit) -> None:
    page = visit(pages["ten"])
    key = page.locator(".key").nth(3)
    key.click()
    page.mouse.move(2, 2)
    page.evaluate("document.activeElement.blur()")
    assert key.get_attribute("aria-pressed") == "true"
    assert set(page.evaluate("[...document.querySelectorAll('.mark.hot')].map(m => m.dataset.series)")) == {
        key.get_attribute("data-series")
    }
    key.click()
    assert key.get_attribute("aria-pressed") == "false"


def test_predicted_seconds_are_drawn_with_their_cluster(tmp_path: Path, visit: Visit) -> None:
    for strategy, seconds in (("bulk + allreduce", 4.0), ("local(4)", 1.0)):
        part = {"seconds": seconds, "compute_s": seconds / 2, "wait_s": seconds / 4, "transfer_s": seconds / 4}
        lines = [{"epoch": e, "accuracy": 0.3 * e, "loss": 1.0, "bytes_sent": 1000, **part} for e in (1, 2)]
        write_run(tmp_path / strategy, strategy, lines, epochs=2, virtual=True, spec={"name": "1gbit"}, slowdown="1,1,1,1,4")
        write_run(tmp_path / f"real {strategy}", strategy, lines, epochs=2)
    page = visit(build([tmp_path], tmp_path, png=False).path)
    page.select_option("select[name=kind]", "virtual")
    for figure in ("#cost", "#bars"):
        assert "predicted for 1gbit" in page.inner_text(f"{figure} figcaption")
        assert "seconds, predicted for 1gbit" in page.text_content(f"{figure} svg")
        assert page.locator(f"{figure} .mark").count() == 2
    assert "predicted for 1gbit" in page.inner_text(".facet:visible")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_selector("#bars svg[viewBox^='0 0 358 ']")
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes(page, ".plot svg text"))
    page.select_option("select[name=kind]", "real")
    for figure in ("#cost", "#bars"):
        assert "measured" in page.inner_text(f"{figure} figcaption")
        assert "predicted" not in page.text_content(figure)


@pytest.mark.parametrize("width", [1280, 390])
def test_how_old_gradients_were_is_drawn_and_told(tmp_path: Path, visit: Visit, width: int) -> None:
    page = visit(build([free_runs(tmp_path)], tmp_path, png=False).path, width)
    assert page.locator("#staleness .mark").count() == 5, "the baseline goes in step"
    assert page.locator("#staleness .column.solid").count() == 5
    page.locator("#staleness").scroll_into_view_if_needed()
    mark = page.locator("#staleness .mark").first
    name = mark.get_attribute("aria-label").split(":")[0]
    values = [column(page, f"staleness_{part}")[column(page, "strategy").index(name)] for part in ("median", "largest")]
    for part, told in ((".solid", f"staleness {values[0]}: "), (".column >> nth=-1", f"staleness {values[1]}: ")):
        box = mark.locator(part).bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        assert page.inner_text("#tip strong") == name
        assert page.inner_text("#tip .at").startswith(told)
        assert re.search(r"staleness [\d,]+: [\d,]+ of [\d,]+ gradients, [\d.]+ %$", page.inner_text("#tip .at"))
    tip = page.inner_text("#tip dl").split("\n")
    assert [tip[tip.index(part) + 1] for part in ("median staleness", "largest staleness")] == values
    assert f"median {values[0]}, largest {values[1]}" in mark.text_content()
    ticks = boxes(page, "#staleness svg > text")
    assert not any(meet(a, b) for i, a in enumerate(ticks) for b in ticks[:i])
    page.mouse.move(2, 2)
    page.focus("#staleness .mark[tabindex='0']")
    assert page.inner_text("#tip .at").startswith(f"staleness {values[0]}: ")


@pytest.mark.parametrize("width", [1280, 390])
def test_long_tails_share_columns(pages: dict[str, Path], visit: Visit, width: int) -> None:
    page = visit(pages["free"], width)
    assert page.locator("#staleness .mark").count() == 20
    assert "a column holds several values" in page.inner_text("#staleness figcaption")
    assert min(box["width"] for box in boxes(page, "#staleness .column")) > 3
    page.locator("#staleness").scroll_into_view_if_needed()
    box = page.locator("#staleness .mark").first.locator(".column").last.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] - 4)
    assert re.match(r"staleness [\d,]+–5,\d+: 10 of 3,010 gradients", page.inner_text("#tip .at"))
    texts = boxes(page, "#staleness .mark text")
    assert not any(meet(a, b) for i, a in enumerate(texts) for b in texts[:i])


def test_without_ages_there_is_no_chart_of_them(pages: dict[str, Path], tmp_path: Path, visit: Visit) -> None:
    page = visit(pages["ten"])
    assert page.is_hidden("#staleness")
    assert page.locator("#staleness svg, th[data-name^=staleness], th[data-name=lost]").count() == 0
    free_runs(tmp_path / "a", 2, workers=4)
    for strategy in ("bulk + allreduce", "local(4)", "local(16)", "gossip"):
        write_run(tmp_path / "b" / strategy, strategy, workers=8)
    page = visit(build([tmp_path], tmp_path, png=False).path)
    assert page.is_hidden("#staleness"), "the facet that is shown first has none"
    page.select_option("select[name=workers]", "4")
    assert page.locator("#staleness .mark").count() == 2
    page.select_option("select[name=workers]", "8")
    assert page.is_hidden("#staleness")


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark"), (320, "light")])
def test_a_timeline_fits_and_can_be_read_without_scripts(pages: dict[str, Path], visit: Visit, width: int, scheme: str) -> None:
    page = visit(pages["split"], width, color_scheme=scheme, java_script_enabled=False)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#split h3").all_inner_texts() == ["bulk + allreduce on data=2,pipeline=2"]
    assert page.locator("#split .comm-stats tbody tr").all_inner_texts() == ["data\t200 MB\t20.0 s", "pipeline\t50.0 MB\t5.00 s"]
    assert "The bubble is 21.0\u00a0%" in page.inner_text("#split figcaption")
    assert page.locator("#split .parts").inner_text().split("\n") == ["forward", "backward", "idle"]
    (box,) = boxes(page, "#split svg")
    assert box["width"] > 200
    bars, texts = boxes(page, "#split rect:not(.idle)"), boxes(page, "#split svg text, .lanes span")
    assert len(bars) == 16
    assert all(box["x"] - 1 <= bar["x"] and bar["x"] + bar["width"] <= box["x"] + box["width"] + 1 for bar in bars)
    assert max(bar["x"] + bar["width"] for bar in bars) == pytest.approx(box["x"] + box["width"], abs=1), "as long as it took"
    assert all(text["x"] >= 0 and text["x"] + text["width"] <= width for text in texts)
    assert not any(meet(a, b) for i, a in enumerate(texts) for b in texts[:i])
    paper = colour(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    for selector, style, ground in ((".lanes span", "color", paper), ("svg > text", "fill", paper)):
        ink = colour(page.evaluate(f"getComputedStyle(document.querySelector('#split {selector}')).{style}"))
        assert contrast(ink, ground) >= 4.5
    number = colour(page.evaluate("getComputedStyle(document.querySelector('#split g text')).fill"))
    for kind in ("F", "B"):
        bar = colour(page.evaluate(f"getComputedStyle(document.querySelector('#split rect.{kind}')).fill"))
        assert contrast(number, bar) >= 3
        assert contrast(bar, paper) >= 2.5


def test_a_timeline_has_numbers_where_there_is_room(visit: Visit, tmp_path: Path) -> None:
    write_split(tmp_path, "pipeline=2", timeline(num_microbatches=8))
    path = build([tmp_path], tmp_path, png=False).path
    page = visit(path)
    wide = boxes(page, "#split g text")
    page.set_viewport_size({"width": 390, "height": 844})
    narrow = boxes(page, "#split g text")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert len(wide) > len(narrow) > 0
    for texts in (wide, narrow):
        assert not any(meet(a, b) for i, a in enumerate(texts) for b in texts[:i])


def test_selectors_change_answers_charts_and_table(pages: dict[str, Path], visit: Visit) -> None:
    page = visit(pages["hundred"])
    assert page.locator("#choose select").count() == 4
    page.select_option("select[name=kind]", "virtual")
    assert page.locator(".facet:visible").count() == 1
    assert "virtual: counted, not timed" in page.inner_text(".facet:visible")
    assert set(column(page, "kind")) == {"virtual"}
    assert "no clock" in page.inner_text("#cost figcaption")
    assert "no clock" in page.inner_text("#bars")
    assert page.is_visible("#workers svg")
    page.select_option("select[name=workers]", "64")
    assert set(column(page, "workers")) == {"64"}
    page.select_option("select[name=data]", "cifar10")
    assert set(column(page, "data")) == {"cifar10"}
    assert page.input_value("select[name=model]") in page.inner_text(".facet:visible h2")
    assert page.is_hidden("th[data-name=workers]")
    page.check("#all")
    assert page.is_visible("th[data-name=workers]")
    assert len(column(page, "data")) == page.locator("#table tbody tr").count()


def test_one_facet_needs_no_selector(pages: dict[str, Path], visit: Visit) -> None:
    page = visit(pages["ten"])
    assert page.is_hidden("#choose")
    assert page.is_hidden("#workers")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("width, height", [(1280, 900), (390, 844), (320, 640), (860, 700)])
def test_nothing_sticks_out_and_legends_cover_no_plot(
    pages: dict[str, Path], visit: Visit, name: str, width: int, height: int
) -> None:
    page = visit(pages[name], width, height)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    plots, legends = boxes(page, ".plot .area"), boxes(page, "#legend, .legend-parts")
    assert len(plots) >= 3
    assert len(legends) >= 1
    assert not any(meet(a, b) for a in plots for b in legends)
    for text in boxes(page, ".plot svg text"):
        assert text["x"] >= 0
        assert text["x"] + text["width"] <= width


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("width", [1280, 390])
def test_labels_on_the_frontier_do_not_overlap(pages: dict[str, Path], visit: Visit, name: str, width: int) -> None:
    page = visit(pages[name], width)
    inside = "texts => texts.map(t => t.getBBox()).map(b => ({x: b.x, y: b.y + 2, width: b.width, height: b.height - 4}))"
    inner = page.eval_on_selector_all("#frontier .mark text", inside)  # a text's box is a little taller than its letters
    assert inner
    assert not [(a, b) for i, a in enumerate(inner) for b in inner[:i] if meet(a, b)]
    ticks = boxes(page, "#frontier svg > text")
    assert not any(meet(a, b) for i, a in enumerate(ticks) for b in ticks[:i])


def test_many_bars_fold(pages: dict[str, Path], visit: Visit) -> None:
    page = visit(pages["dense"])
    assert page.locator("#bars .mark").count() <= 24
    page.click("#bars .more")
    assert page.locator("#bars .mark").count() == 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(pages: dict[str, Path], visit: Visit, scheme: str) -> None:
    page = visit(pages["ten"], color_scheme=scheme)
    paper = colour(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (luminance(paper) < 0.1) == (scheme == "dark")
    for selector in (
        "body",
        ".summary",
        ".figure",
        ".strategy",
        ".detail",
        ".question",
        "td",
        "tr.unranked td",
        ".unit",
        ".key .no",
        "figcaption p",
    ):
        ink = colour(page.evaluate("s => getComputedStyle(document.querySelector(s)).color", selector))
        assert contrast(ink, paper) >= 4.5, selector
    text = colour(page.evaluate("getComputedStyle(document.querySelector('.plot svg text')).fill"))
    assert contrast(text, paper) >= 4.5
    for index in range(7):
        line = colour(
            page.evaluate(
                "i => { document.body.style.outlineColor = `var(--c${i})`; return getComputedStyle(document.body).outlineColor }",
                index,
            )
        )
        assert contrast(line, paper) >= 2.5, f"--c{index}"


def colour(text: str) -> tuple[float, ...]:
    """Red, green and blue of ``rgb(…)``."""
    return tuple(float(v) / 255 for v in re.findall(r"[\d.]+", text)[:3])


def luminance(rgb: tuple[float, ...]) -> float:
    """WCAG's relative luminance."""
    parts = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """WCAG's contrast ratio."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("width", [1280, 390])
def test_without_scripts_answers_and_tables_can_be_read(pages: dict[str, Path], visit: Visit, width: int) -> None:
    page = visit(pages["hundred"], width, java_script_enabled=False)
    facets = page.locator(".facet")
    assert facets.count() == 6
    assert all(facets.nth(i).is_visible() for i in range(facets.count()))
    rows = page.locator("#table tbody tr")
    assert all(rows.nth(i).is_visible() for i in (0, rows.count() // 2, rows.count() - 1))
    assert "charts need scripts" in page.inner_text("noscript")
    assert page.is_hidden("#charts")
    assert page.is_hidden("#table-tools")
    box = page.locator("main").bounding_box()
    assert box["width"] <= width


def test_hostile_names_do_not_run(visit: Visit, tmp_path: Path) -> None:
    for index, strategy in enumerate(("bulk + allreduce", f"local(4) + {HOSTILE}", "local(4) + \u2028</script>")):
        write_run(tmp_path / str(index), strategy)
    write_run(tmp_path / "failed", "local(8)", [], failure=HOSTILE)
    write_split(tmp_path / "split", HOSTILE, timeline(), pipe=HOSTILE, workers=4)
    page = visit(build([tmp_path], tmp_path, HOSTILE, png=False).path)
    assert page.inner_text("h1") == HOSTILE
    assert page.title() == HOSTILE
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert page.inner_text("#split h3") == f"bulk + allreduce on {HOSTILE}"
    assert f"schedule {HOSTILE}" in page.inner_text("#split figcaption")
    assert f"local(4) + {HOSTILE}" in column(page, "strategy")
    page.hover(".key:nth-child(2)")
    page.focus("#frontier .mark[tabindex='0']")
    assert page.is_visible("#tip")


def test_one_run_and_no_accuracy_make_a_page_too(visit: Visit, tmp_path: Path) -> None:
    bare = [{"epoch": 1, "accuracy": None, "loss": 1.0, "seconds": None, "bytes_sent": 0}]
    write_run(tmp_path / "none", "bulk + allreduce", bare, epochs=1, workers=1)
    one = [
        {
            "epoch": 1,
            "accuracy": 0.5,
            "loss": 1.0,
            "seconds": 0.0,
            "compute_s": 0.0,
            "wait_s": 0.0,
            "transfer_s": 0.0,
            "bytes_sent": 7,
        }
    ]
    write_run(tmp_path / "one", "bulk + allreduce", one, epochs=1, workers=2)
    page = visit(build([tmp_path], tmp_path, png=False).path, 390, 844)
    assert page.is_visible("#epochs svg")
    page.select_option("select[name=workers]", "1")
    assert "nothing to rank" in page.inner_text(".facet:visible")
    assert "NaN" not in page.inner_html("#charts")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_it_is_drawn_anew_when_the_window_changes(visit: Visit, tmp_path: Path) -> None:
    page = visit(build([hundred_runs(tmp_path)], tmp_path, png=False).path)
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_selector("#epochs svg[viewBox^='0 0 358 ']")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_sliders_say_what_other_links_and_more_workers_would_do(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, stops in (("BITS", (1e8, 1e10)), ("LATENCIES_S", (1e-5, 1e-2)), ("WORKERS", (4, 64))):
        monkeypatch.setattr(whatif, name, stops)
    for strategy in ("bulk + allreduce", "local(16) + allreduce", "async + server"):
        write_run(tmp_path / strategy, strategy, parameters=25_000_000, steps=100)
    spec = ClusterSpec(name="two <links>", bandwidth=12.5e6, latency_s=1e-5)
    page = visit(build([tmp_path], tmp_path, png=False, predicted=lambda rows: whatif.what_if(rows, spec)).path)
    assert page.locator(".beside tbody tr").count() == 2, "strategies whose workers step together"
    assert re.fullmatch(r"[\d.]+", page.inner_text(".beside tbody tr:first-child td:nth-child(2)"))

    def steps() -> dict[str, float]:
        rows = page.locator(".what-if-table tbody tr").all()
        return {row.locator("th").inner_text(): float(row.locator("td").first.inner_text()) for row in rows}

    def choose(axis: str, place: int) -> None:
        page.locator(f".what-if input[data-axis={axis}]").fill(str(place))

    slow = steps()
    assert "100 Mbit/s" in page.inner_text(".sliders")
    assert slow["local(16) + allreduce"] < slow["bulk + allreduce"]
    assert page.inner_text(".what-if-table tbody tr:first-child th") == "local(16) + allreduce", "the fastest comes first"
    choose("bits", 1)
    fast = steps()
    assert fast["bulk + allreduce"] < slow["bulk + allreduce"]
    choose("latency_s", 1)
    far = steps()
    assert far["bulk + allreduce"] > fast["bulk + allreduce"]
    page.locator(".what-if input[data-axis=workers]").press("ArrowRight")
    assert page.locator("output").last.inner_text() == "64"
    assert steps()["bulk + allreduce"] > far["bulk + allreduce"]
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
