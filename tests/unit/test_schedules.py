"""Laws of schedules: complete, in an order that can be kept, with the bubbles of the formulas, and PyTorch's where it has them."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.errors import HocketError
from hocket.split import Axis
from hocket.split.pipeline import SCHEDULES, Action, Costs, Schedule, Span, Timeline, bubble, make, simulate
from hocket.split.pipeline.draw import picture, text
from hocket.split.pipeline.schedules import before
from hocket.split.pipeline.timeline import gather

names = st.sampled_from(sorted(SCHEDULES))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, int, int, int, Schedule]:
    """Any schedule that can be made: its name, processes, micro-batches, stages on each process, and itself."""
    method = SCHEDULES[draw(names)]
    processes, stages_per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 3)) if method.several else 1
    num_microbatches = (
        processes * draw(st.integers(1, 4)) if method.rounds else draw(st.integers(processes if method.fills else 1, 20))
    )
    return (
        method.name,
        processes,
        num_microbatches,
        stages_per_rank,
        make(method.name, processes, num_microbatches, stages_per_rank),
    )


@given(schedules())
def test_each_stage_takes_each_micro_batch_forward_and_back_once(made: Any) -> None:
    name, processes, num_microbatches, stages_per_rank, schedule = made
    backward = "IW" if name == "zero-bubble" else "B"
    wanted = {(kind, s, j) for kind in f"F{backward}" for s in range(processes * stages_per_rank) for j in range(num_microbatches)}
    assert Counter(a for row in schedule for a in row) == Counter(Action(*a) for a in wanted)
    assert all(a.stage % processes == process for process, row in enumerate(schedule) for a in row)


@given(schedules())
def test_nobody_waits_for_ever_and_nothing_runs_before_what_it_needs(made: Any) -> None:
    *_, schedule = made
    timeline = simulate(schedule, Costs(1, 2, transfer=0.5))
    ends = {span.action: span.end for row in timeline.rows for span in row}
    place = {a: process for process, row in enumerate(schedule) for a in row}
    for process, row in enumerate(timeline.rows):
        for span in row:
            for a in before(span.action, frozenset(ends)):
                assert span.start >= ends[a] + 0.5 * (place[a] != process)


@given(schedules())
def test_1f1b_holds_few_micro_batches_and_gpipe_all(made: Any) -> None:
    name, processes, num_microbatches, stages_per_rank, schedule = made
    for process, row in enumerate(schedule):
        held, most = 0, 0
        for action in row:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
        if name in ("1f1b", "pipedream"):
            assert most <= processes - process
        elif name == "zero-bubble" and stages_per_rank == 1:
            assert most <= processes
        else:
            assert most <= {"naive": 1}.get(name, num_microbatches * stages_per_rank)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 20), st.sampled_from([1.0, 2.0, 3.0]))
def test_the_bubble_is_the_formula(name: str, stages: int, num_microbatches: int, backward: float) -> None:
    num_microbatches = max(num_microbatches, stages)
    assert bubble(make(name, stages, num_microbatches), Costs(1, backward)) == pytest.approx(
        (stages - 1) / (num_microbatches + stages - 1)
    )


def test_known_bubbles() -> None:
    assert bubble(make("gpipe", 4, 8)) == bubble(make("1f1b", 4, 8)) == bubble(make("1f1b", 4, 8), Costs(1, 1)) == 3 / 11
    assert bubble(make("naive", 4, 8)) == 3 / 4
    assert bubble(make("interleaved", 4, 8, stages_per_rank=2)) == pytest.approx(3 / (2 * 8 + 3))
    assert bubble(make("zero-bubble", 4, 8)) == pytest.approx(3 / (3 * 8 + 3))  # a third of 1f1b's idle time
    assert bubble(make("pipedream", 4, 400)) < 0.01  # only filling and draining


@given(st.integers(1, 6), st.integers(1, 20))
def test_gpipe_and_1f1b_are_their_definitions(stages: int, num_microbatches: int) -> None:
    """GPipe: all forwards, then all backwards. 1F1B: a forward for itself and each later stage, then one backward, one forward."""
    num_microbatches = max(num_microbatches, stages)
    forward, backward = ([f"{{}}{kind}{j}" for j in range(num_microbatches)] for kind in "FB")
    for stage, row in enumerate(make("gpipe", stages, num_microbatches)):
        assert [str(a) for a in row] == [a.format(stage) for a in forward + backward]
    for stage, row in enumerate(make("1f1b", stages, num_microbatches)):
        ahead = stages - stage
        pairs = itertools.zip_longest(backward, forward[ahead:])
        wanted = [*forward[:ahead], *(a for pair in pairs for a in pair if a is not None)]
        assert [str(a) for a in row] == [a.format(stage) for a in wanted]


TABLES = {
    ("interleaved", 2, 4, 2): [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ],
    ("interleaved", 3, 6, 2): [
        "0F0 0F1 0F2 3F0 3F1 3F2 0F3 0F4 3B0 0F5 3B1 3F3 3B2 3F4 0B0 3F5 0B1 0B2 3B3 3B4 3B5 0B3 0B4 0B5",
        "1F0 1F1 1F2 4F0 4F1 4F2 4B0 1F3 4B1 1F4 4B2 1F5 1B0 4F3 1B1 4F4 1B2 4F5 4B3 4B4 4B5 1B3 1B4 1B5",
        "2F0 2F1 2F2 5F0 5B0 5F1 5B1 5F2 5B2 2F3 2B0 2F4 2B1 2F5 2B2 5F3 5B3 5F4 5B4 5F5 5B5 2B3 2B4 2B5",
    ],
    ("zero-bubble", 3, 6, 1): [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0F5 0I3 0W3 0I4 0W4 0I5 0W5",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1F4 1I3 1W2 1F5 1I4 1W3 1I5 1W4 1W5",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2F4 2I4 2W2 2F5 2I5 2W3 2W4 2W5",
    ],
    ("zero-bubble", 2, 4, 2): [
        "0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3",
        "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3",
    ],
}
"""Those of PyTorch 2.13's ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble, written down."""


@pytest.mark.parametrize("name, processes, num_microbatches, stages_per_rank", TABLES)
def test_interleaved_and_zero_bubble_are_pytorchs(name: str, processes: int, num_microbatches: int, stages_per_rank: int) -> None:
    made = make(name, processes, num_microbatches, stages_per_rank)
    assert [" ".join(map(str, row)) for row in made] == TABLES[name, processes, num_microbatches, stages_per_rank]


def test_shares_keep_communication_apart() -> None:
    forward, backward = Action("F", 0, 0), Action("B", 0, 0)
    ahead, back = Action("F", 1, 0), Action("B", 1, 0)
    first = (Span(forward, 0.0, 1.0), Span(backward, 6.0, 8.0))
    second = (Span(ahead, 2.0, 3.0), Span(back, 3.0, 5.0))
    shares = Timeline((first, second)).shares()
    # Each transfer takes one second: of process 0's five idle seconds four are bubble, of process 1's five too.
    assert (shares.computing, shares.bubble, shares.communication) == (6.0, 4.0 + 1.0 + 3.0, 2.0)
    assert (shares.bubble_share, shares.communication_share) == (8 / 14, 2 / 16)
    timeline = Timeline((first, second))
    assert Timeline.from_dict(timeline.to_dict()) == timeline


def test_nothing_that_ran_has_no_shares() -> None:
    empty = Timeline(((), ()))
    assert (empty.length, empty.bubble_share, empty.shares().communication_share) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("ahead, shift", [(0.0, 0.0), (0.5, 0.0), (1000.0, 1000.0), (-1000.0, -1000.0)])
def test_spans_of_another_machines_clock_are_moved_to_ours(ahead: float, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the barrier ours shows 70, the other so much more; processes of one machine share a clock and leave at different times."""
    spans = [(Span(Action("F", 0, 0), 60.0, 62.0),), (Span(Action("F", 1, 0), 63.0 + shift, 65.0 + shift),)]
    monkeypatch.setattr("hocket.split.pipeline.timeline.time", SimpleNamespace(perf_counter=lambda: 70.0))
    monkeypatch.setattr(Axis, "all_reduce", lambda self, values: values)

    told = [[(*span.action, span.start, span.end) for span in row] for row in spans]

    def all_gather_plain(own: Any, group: Any) -> list[Any]:
        assert own == (70.0, told[0])
        return [own, (70.0 + ahead, told[1])]

    monkeypatch.setattr("hocket.split.axis.all_gather_plain", all_gather_plain)
    found = gather(Axis("pipeline", (0, 1)), spans[0])
    assert [[(s.start, s.end) for s in row] for row in found.rows] == [[(0.0, 2.0)], [(3.0, 5.0)]]
    alone = gather(Axis("pipeline"), spans[0])
    assert [[(s.start, s.end) for s in row] for row in alone.rows] == [[(0.0, 2.0)]]


@given(schedules())
def test_a_simulated_timeline_has_the_schedules_bubble(made: Any) -> None:
    *_, schedule = made
    assert simulate(schedule).bubble_share == pytest.approx(bubble(schedule))


def test_pictures() -> None:
    timeline = simulate(make("interleaved", 2, 2))
    assert text(timeline).splitlines()[0] == " 0 │ 0F0 0F1 2F0 2F1 ·   ·   2B0──── ·   2B1──── 0B0──── 0B1────"
    assert text(simulate(make("1f1b", 2, 2), Costs(1, 1.5))).splitlines()[1] == " 1 │ ·  ·  F0─── B0────── F1─── B1────── ·  ·  ·"
    pytest.importorskip("matplotlib")
    assert picture(timeline, "interleaved").startswith(b"\x89PNG")
    assert b"<svg" in picture(timeline, "interleaved", form="svg")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("gpip", 4, 8), "did you mean 'gpipe'"),
        (("1f1b", 4, 3), "1f1b cannot fill 4 stages with 3 micro-batches: give it at least 4, or use gpipe."),
        (("pipedream", 4, 3), "cannot fill 4 stages with 3 mini-batches"),
        (("interleaved", 4, 9), "do not fill: use 8 or 10."),
        (("gpipe", 4, 8, 2), "gpipe has one stage on each process; got 2: use interleaved or zero-bubble."),
        (("gpipe", 0, 8), "at least 1; got 0."),
        (("gpipe", 2, 0), "at least 1; got 0."),
    ],
)
def test_what_cannot_be_made_meets_one_sentence(arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(HocketError) as caught:
        make(*arguments)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_mistakes_meet_one_sentence() -> None:
    with pytest.raises(HocketError, match="has a deadlock at 0B0, 1F1"):
        simulate(((Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1)), (Action("F", 1, 1), Action("B", 1, 0))))
    with pytest.raises(HocketError, match="The cost of backward is a number of units of time above 0; got 0"):
        Costs(1, 0)
    with pytest.raises(HocketError, match="too wide for a terminal"):
        text(simulate(make("naive", 8, 100)))


def test_the_command_draws_any_schedule_and_says_how_much_is_idle(tmp_path: Path) -> None:
    def shown(*options: str) -> Any:
        return CliRunner().invoke(app, ["pipeline", "show", *options])

    drawn = shown("--schedule", "1f1b", "--stages", "4", "--num-microbatches", "8").stdout
    assert text(simulate(make("1f1b", 4, 8))) in drawn
    assert "1f1b, 4 stages, 8 micro-batches: 27.3 % idle" in drawn
    assert all(shown("--schedule", name).exit_code == 0 for name in SCHEDULES)
    assert "did you mean '1f1b'" in str(shown("--schedule", "1f1").exception)
    assert "a picture is a PNG or SVG file" in str(shown("--out", str(tmp_path / "x.gif")).exception)
    pytest.importorskip("matplotlib")
    assert shown("--out", str(tmp_path / "x.png")).exit_code == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "cannot be written" in str(shown("--out", str(tmp_path / "none" / "x.png")).exception)


@pytest.mark.parametrize("unit, scale", [("ms", 1000), ("units", 1)])
def test_a_picture_has_a_bar_for_each_action_where_it_ran(unit: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    save = figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *a, **k: (drawn.append(figure), save(figure, *a, **k))[1])
    timeline = simulate(make("interleaved", 2, 2, stages_per_rank=2), Costs(0.5, 1.0))
    picture(timeline, "a title", unit=unit)
    (axes,) = drawn[0].axes
    spans = [(process, span) for process, row in enumerate(timeline.rows) for span in row]
    assert len(axes.patches) == len(spans)
    for bar, (process, span) in zip(axes.patches, spans, strict=True):
        middle = bar.get_y() + bar.get_height() / 2
        assert (bar.get_x(), bar.get_width(), middle) == pytest.approx(
            (span.start * scale, (span.end - span.start) * scale, process)
        )
        assert bar.get_alpha() == (1 if span.action.stage < 2 else 0.65)
    assert [t.get_text() for t in axes.texts] == [str(span.action.microbatch) for _, span in spans]
    assert axes.get_xlim() == pytest.approx((0, timeline.length * scale))
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "process 0 is on top"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["process 0", "process 1"]
    assert (axes.get_title(loc="left"), axes.get_xlabel()) == ("a title", unit)
    assert len(axes.get_legend().get_texts()) == 2


def test_only_interleaved_has_several_stages_on_a_process_unless_it_is_told() -> None:
    held = {name: {a.stage for a in make(name, 2, 4)[0]} for name in SCHEDULES}
    assert held == {name: {0, 2} if name == "interleaved" else {0} for name in SCHEDULES}
