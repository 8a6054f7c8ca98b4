"""What notebooks show: HTML that cannot run, charts, progress without widgets, and one sentence without matplotlib."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from browser.study import free_runs, ten_runs, write_run
from hocket.errors import HocketError
from hocket.prediction.advise import Advice, Contender, Interval
from hocket.prediction.goal import Goal
from hocket.report import build
from hocket.train.loop import Progress
from hocket.train.simulate import Run

PNG = b"\x89PNG"


def simulated(strategy: str = "local(2)", **options: Any) -> Run:
    x = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    given = {"test_set": (x, y), "workers": 4, "batch_size": 4, "epochs": 7, **options}
    return hocket.simulate(lambda: nn.Linear(5, 2), nn.functional.cross_entropy, (x, y), strategy=strategy, **given)


def test_a_run_shows_its_last_epochs_and_the_whole() -> None:
    run = simulated(cluster="1gbit")
    shown = run._repr_html_()
    assert "<b>local(2) + allreduce, 4 virtual workers, 7 epochs</b>" in shown
    assert "seconds, predicted for 1gbit" in shown
    assert shown.count("<tr>") == 1 + 5 + 1, "a head, five epochs, and all together"
    assert f"{run.accuracy:.1%}" in shown
    assert "accuracy" not in simulated(test_set=None)._repr_html_()
    assert repr(run) == "Run(local(2) + allreduce, 4 virtual workers, 7 epochs)"


def test_runs_are_plotted_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run, same, other = simulated(), simulated(), simulated("bulk", cluster="1gbit")
    assert run.plot()._repr_png_().startswith(PNG)
    run.plot(same, other).save(tmp_path / "runs.png")
    assert (tmp_path / "runs.png").read_bytes().startswith(PNG)
    assert simulated(test_set=None).plot(other).png.startswith(PNG), "by training loss, which both have"
    with pytest.raises(HocketError, match="cannot be written"):
        run.plot().save(tmp_path / "nowhere" / "runs.png")


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, report = simulated(epochs=1), build([ten_runs(tmp_path)], tmp_path, png=False)
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *rest)

    monkeypatch.setattr("hocket.extras.importlib.import_module", without)
    for plot in (run.plot, report.plot):
        with pytest.raises(HocketError, match=r"matplotlib is not installed; install it with: pip install 'hocket\[plot\]'"):
            plot()


def test_a_study_shows_its_answers_and_its_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, make in (("ten", ten_runs), ("free", free_runs)):
        make(tmp_path / name)
    report = build([tmp_path / "ten"], tmp_path / "out", png=False)
    shown = report._repr_html_()
    assert report.answers[0].partition(":")[0] in shown
    assert shown.count("<tr data-row=") == len(report.rows)
    for chart in ("accuracy", "frontier", "bars"):
        assert report.plot(chart).png.startswith(PNG)
    assert build([tmp_path / "free"], tmp_path / "out", png=False).plot("staleness").png.startswith(PNG)
    with pytest.raises(HocketError, match="recorded nothing for the chart 'staleness'"):
        report.plot("staleness")
    with pytest.raises(HocketError, match="There is no chart 'acuracy' — did you mean 'accuracy'"):
        report.plot("acuracy")
    write_run(tmp_path / "two" / "a", "local(4)", workers=8)
    write_run(tmp_path / "two" / "b", "local(4)", workers=4)
    both = build([tmp_path / "two"], tmp_path / "out", png=False)
    first, second = both.by_facet
    assert both.plot(facet=second).png != both.plot(facet=first).png == both.plot().png


def test_a_strategy_says_what_it_does_and_whose_it_is() -> None:
    shown = hocket.Strategy.parse("local(4) + gossip + topk(0.01) | qsgd(4)")._repr_html_()
    assert shown.count("<tr>") == 5
    for text in ("when", "whom", "local(4)", "Local SGD: steps are local", "Lian et al.", "Workers exchange weights."):
        assert text in shown
    assert "``" not in shown


def test_predictions_and_advice_are_tables() -> None:
    found = hocket.predict(parameters=1e6, step_s=0.01, strategies=["bulk", "ssp(1) + server"], workers=[1, 4])
    shown = found._repr_html_()
    assert "predicted for 1gbit" in shown
    assert "Predicted, not measured" in shown
    assert all(f'<td style="text-align: left">{row.strategy}</td>' in shown for row in found.rows)
    one = Contender("local(4) + <b>", 0.1, Interval(0.9, 0.89, 0.91), Interval(3, 2, 4), exchange_share=0.2, why="best")
    advice = Advice("Take <it>.", ("Because.",), one.strategy, 0.1, "hocket train", (one,), Goal(), found.cluster, "mlp on digits")
    shown = advice._repr_html_()
    for text in ("Take &lt;it&gt;.", "Because.", "local(4) + &lt;b&gt;", "90.0% (89.0%–91.0%)", "2.00–4.00", "hocket train"):
        assert text in shown
    assert "<it>" not in shown


class Shown:
    """What a notebook's front end was told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def display(self, shown: str, display_id: bool) -> Shown:
        assert display_id
        self.texts.append(shown)
        return self

    update = lambda self, shown: self.texts.append(shown)  # noqa: E731


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """As in the kernel of a notebook."""
    shown, ipython, display = Shown(), ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: type("Shell", (), {"kernel": object()})()  # type: ignore[attr-defined]
    display.HTML, display.display = str, shown.display  # type: ignore[attr-defined]
    for name, module in (("IPython", ipython), ("IPython.display", display)):
        monkeypatch.setitem(sys.modules, name, module)
    return shown


def test_a_notebook_has_one_bar_that_ends_full(front_end: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    bar = hocket.ProgressBar("<local>")
    bar("trying a rate")
    for step in range(1, 101):
        bar(Progress(1 + step // 51, 2, step, 100))
    assert front_end.texts[0] == "<div>&lt;local&gt; trying a rate</div>"
    assert 2 <= len(front_end.texts) < 50, "not one for every step"
    assert 'value="1.0000"' in front_end.texts[-1]
    assert "step 100 of 100" in front_end.texts[-1]
    assert capsys.readouterr().err == ""


def test_elsewhere_a_bar_is_a_line_on_a_terminal_or_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated(epochs=1, watch=hocket.ProgressBar("quiet"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    simulated(epochs=1, watch=hocket.ProgressBar("local"))
    assert capsys.readouterr().err.endswith("[##############################] epoch 1 of 1, step 3 of 3, 0 s\n")
