"""Laws of schedules: complete, in an order that can be kept, with the bubbles of the formulas, and PyTorch's where it has them."""

from __future__ import annotations

import re
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
from hocket.split.pipeline import SCHEDULES, Action, Costs, Schedule, Span, Timeline, bubble, make, simulate
from hocket.split.pipeline.draw import picture, text
from hocket.split.pipeline.schedules import before

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
def test_gpipe_and_1f1b_are_pytorchs(stages: int, num_microbatches: int) -> None:
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    num_microbatches = max(num_microbatches, stages)
    for name, method in (("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")):
        order = getattr(getattr(theirs, method, None), "_get_pipeline_order", None)
        if order is None:
            pytest.skip("PyTorch has no table of it")
        table = order(SimpleNamespace(_num_stages=stages, _n_microbatches=num_microbatches))
        if name == "1f1b":  # PyTorch's table numbers the last stage's forwards from 1; what it runs is right
            del table[stages - 1]
        for rank, row in table.items():
            assert written(row) == [str(a) for a in make(name, stages, num_microbatches)[rank]]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["interleaved", "zero-bubble"]))
def test_interleaved_and_zero_bubble_are_pytorchs(processes: int, rounds: int, stages_per_rank: int, name: str) -> None:
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    class_ = {"interleaved": "ScheduleInterleaved1F1B", "zero-bubble": "ScheduleInterleavedZeroBubble"}[name]
    order = getattr(getattr(theirs, class_, None), "_calculate_single_rank_operations", None)
    if order is None:
        pytest.skip("PyTorch has no table of it")
    num_microbatches = processes * rounds
    known = {
        "n_local_stages": stages_per_rank,
        "pp_group_size": processes,
        "_n_microbatches": num_microbatches,
        "microbatches_per_round": processes,
    }
    for rank, row in enumerate(make(name, processes, num_microbatches, stages_per_rank)):
        assert written(order(SimpleNamespace(**known), rank)) == [str(a) for a in row]


def written(row: list[Any]) -> list[str]:
    """A row of PyTorch's table as we write it, without what is not computing."""
    return [str(a) for a in row if a is not None and re.fullmatch(r"\d+[FBIW]\d+", str(a))]


def test_shares_keep_communication_apart() -> None:
    forward, backward = Action("F", 0, 0), Action("B", 0, 0)
    ahead, back = Action("F", 1, 0), Action("B", 1, 0)
    first = (Span(forward, 0.0, 1.0), Span(backward, 6.0, 8.0))
    second = (Span(ahead, 2.0, 3.0), Span(back, 3.0, 5.0))
    shares = Timeline((first, second)).shares()
    # Each transfer takes one second: of process 0's five idle seconds four are bubble, of process 1's five too.
    assert (shares.computing, shares.bubble, shares.communication) == (6.0, 4.0 + 1.0 + 3.0, 2.0)
    assert shares.bubble_share == 8 / 14
    timeline = Timeline((first, second))
    assert Timeline.from_dict(timeline.to_dict()) == timeline


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
    assert "a picture is a .png or .svg file" in str(shown("--out", str(tmp_path / "x.gif")).exception)
    pytest.importorskip("matplotlib")
    assert shown("--out", str(tmp_path / "x.png")).exit_code == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "cannot be written" in str(shown("--out", str(tmp_path / "none" / "x.png")).exception)
