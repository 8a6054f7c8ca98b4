"""Studies: presets are what they say, files are refused by line, stopping and going on changes nothing, failures are kept."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from hocket import compression, sync, topology
from hocket import files as hocket_files
from hocket.cli import demo, display
from hocket.cli import main as cli
from hocket.cli import train as cli_train
from hocket.cli.commands import loaded
from hocket.cli.options import arguments, option
from hocket.cluster.virtual import VirtualCluster
from hocket.compression import NoCompression, Threshold
from hocket.data import DataSet, Normalise
from hocket.drivers.processes import interruptible
from hocket.errors import HocketError, NonFiniteGradient, SettingError
from hocket.files import CannotWrite
from hocket.report import build
from hocket.strategy import Strategy
from hocket.study import file
from hocket.study.carry_out import Data, Virtual, Watch, carry_out, check, finished, sentence
from hocket.study.file import lines_of
from hocket.study.folder import Folder, Outcome
from hocket.study.lr_search import LONGER, MOST, best_lr, found_lr, next_lr, next_try, search_steps, short
from hocket.study.plan import Entry, Outline, Planned, Study, expand, slug
from hocket.study.presets import PRESETS, preset
from hocket.study.process import fail
from hocket.sync import Bulk, Local
from hocket.topology import AllReduce, Gossip
from hocket.train.run import run
from hocket.train.settings import FIELDS, RunSettings, defaults


def tiny() -> DataSet:
    """Two classes of 4×4 images that a line can tell apart."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (48, 1, 4, 4), dtype=torch.uint8, generator=generator)
    y = (x.float().mean((1, 2, 3)) > 127).long()
    return DataSet("tiny", (x, y), (x[:16], y[:16]), 2, Normalise((0.5,), (0.25,)))


def linear(data: DataSet) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, data.classes))


DATA = "test_study_parts:tiny"
MODEL = "test_study_parts:linear"


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small data set and model by name, as a user's own would be."""
    import sys
    from types import ModuleType

    module = ModuleType("test_study_parts")
    module.tiny, module.linear = tiny, linear  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "test_study_parts", module)


def small(strategies: Sequence[str], **options: Any) -> Outline:
    settings = {"data": DATA, "model": MODEL, "batch_size": 3, "epochs": 2, **options.pop("settings", {})}
    return Outline("small", lambda *_: [Entry(s) for s in strategies], settings=settings, **options)


def begun(place: Path, outline: Outline, data: Data | None = None) -> tuple[Folder, Study]:
    place.mkdir(exist_ok=True)
    folder = Folder(place)
    return folder, folder.begin(expand(outline, data or Data()))


def refused(settings: RunSettings, out: Path | None, watch: Watch) -> Sequence[dict[str, Any]]:
    raise AssertionError("no real processes here")


def carried(place: Path, outline: Outline, watch: Watch | None = None, **options: Any) -> list[Outcome]:
    folder, study = begun(place, outline)
    return carry_out(folder, study, Data(), Virtual(Data()), refused, watch, **options)


def figures(place: Path) -> dict[str, list[dict[str, Any]]]:
    """The metrics of all runs, without what differs from run to run."""
    return {
        path.parent.name: [{k: v for k, v in json.loads(line).items() if k != "wall_s"} for line in path.read_text().splitlines()]
        for path in sorted(place.glob("runs/*/metrics.jsonl"))
    }


def files(place: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(place.glob("runs/*/*"))}


# --- presets ---------------------------------------------------------------------------------------------------------------


def test_ten_is_the_study_that_is_reproduced() -> None:
    """Configuration by configuration: period, topology, what is exchanged, and the threshold."""
    table = [
        (1, AllReduce, False, False),
        (1, Gossip, False, False),
        (1, Gossip, False, True),
        (4, AllReduce, True, False),
        (4, Gossip, False, False),
        (4, Gossip, False, True),
        (16, AllReduce, True, False),
        (16, Gossip, False, False),
        (16, Gossip, False, True),
        (32, AllReduce, True, False),
    ]
    found = [Strategy.parse(e.strategy) for e in preset("ten").entries(16, 1000)]
    for strategy, (period, kind, weights, threshold) in zip(found, table, strict=True):
        assert strategy.sync == (Bulk() if period == 1 else Local(period))
        assert type(strategy.topology) is kind
        assert strategy.weights is weights
        assert strategy.compression == (Threshold(0.01, feedback=False) if threshold else NoCompression())
        if kind is Gossip:
            assert strategy.topology == Gossip(), "partners rotate"
    settings = preset("ten").common()
    wanted = {"model": "cnn", "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr_schedule": "constant", "warmup": 0.0}
    wanted |= {"batch_size": 100, "epochs": 50, "augment": False, "last": "drop", "scale_lr": "none"}
    assert {name: settings.by_name()[name] for name in wanted} == wanted
    assert preset("ten").lr == 0.01


def test_ten_modern_is_the_same_ten_with_weights_feedback_momentum_warm_up_and_tuned_rates() -> None:
    ten, modern = ([Strategy.parse(e.strategy) for e in preset(name).entries(16, 1000)] for name in ("ten", "ten-modern"))
    for old, new in zip(ten, modern, strict=True):
        assert (old.sync, old.topology) == (new.sync, new.topology)
        assert new.weights is not (isinstance(new.sync, Bulk) and isinstance(new.topology, AllReduce))
        assert (old.compression == NoCompression()) == (new.compression == NoCompression())
        if new.compression != NoCompression():
            assert new.compression == Threshold(keep=0.05)
            assert new.compression.uses_error_feedback
    outline = preset("ten-modern")
    optimizer = outline.common().optimizer
    assert (optimizer.momentum, optimizer.lr_schedule, optimizer.warmup) == (0.9, "cosine", 5.0)
    assert outline.changed(epochs=20).common().optimizer.warmup == 2.0
    assert outline.lr == "auto"


def test_axes_varies_one_axis_at_a_time_and_leaves_out_no_method() -> None:
    base = Strategy()
    found = [Strategy.parse(e.strategy) for e in preset("axes").entries(16, 1000)]
    assert found[0] == base
    for strategy in found[1:]:
        apart = [axis for axis in ("sync", "topology", "compression") if getattr(strategy, axis) != getattr(base, axis)]
        assert len(apart) == 1 or (strategy.sync.asynchronous and apart == ["sync", "topology"]), strategy
    methods = {type(s.compression) for s in found}
    assert {*compression.METHODS.values(), compression.Chain} <= methods
    assert {type(s.topology) for s in found} == set(topology.METHODS.values())
    assert {type(s.sync) for s in found} == set(sync.METHODS.values())


@pytest.mark.parametrize("name", PRESETS)
def test_every_strategy_of_a_preset_trains(name: str, tmp_path: Path) -> None:
    outline = preset(name).changed((4,), data=DATA, model=MODEL, batch_size=3, epochs=2, max_steps=2, lr=0.05)
    outcomes = carried(tmp_path, outline)
    assert len(outcomes) == len(preset(name).entries(4, 2))
    assert [o.failure for o in outcomes if o.failure] == []


def test_an_unknown_preset_meets_the_nearest_one() -> None:
    with pytest.raises(HocketError, match=r"no study 'ten-modrn' .* — did you mean 'ten-modern'\?$"):
        preset("ten-modrn")


# --- plans -----------------------------------------------------------------------------------------------------------------


def test_a_study_is_strategies_times_workers_times_seeds() -> None:
    study = expand(small(["bulk", "local(2)"], workers=(2, 4), seeds=(0, 1, 2)), Data())
    assert len(study.runs) == 12
    assert len({r.folder for r in study.runs}) == 12
    assert [r.settings.workers.count for r in study.runs] == [2] * 6 + [4] * 6, "the smaller study is whole first"
    assert [r.settings.seed for r in study.runs[:6]] == [0, 0, 1, 1, 2, 2]
    assert all(r.settings.workers.virtual and not r.tuned for r in study.runs)


def test_two_equal_runs_are_refused() -> None:
    with pytest.raises(HocketError, match="the same"):
        expand(small(["local(4)", "local(4) + allreduce"]), Data())
    with pytest.raises(HocketError, match="twice"):
        expand(small(["local(4)"], workers=(2, 2)), Data())


def test_all_runs_have_a_clock_where_some_need_one() -> None:
    outline = small([], workers=(2, 4))
    some = replace(outline, entries=lambda workers, _: [Entry("bulk"), *([Entry("async")] if workers == 4 else [])])
    assert {run.settings.workers.cluster for run in expand(some, Data()).runs} == {"1gbit"}
    assert {run.settings.workers.cluster for run in expand(small(["bulk"], workers=(2, 4)), Data()).runs} == {None}


@pytest.mark.parametrize("name", PRESETS)
def test_a_folder_s_name_is_safe_and_says_what_it_holds(name: str) -> None:
    long = f"gossip(matrix={[[0.25] * 4] * 4})"
    for strategy in (*(e.strategy for e in preset(name).entries(16, 1000)), long):
        found = slug(RunSettings.of(strategy=strategy, workers=16, seed=3))
        assert set(found) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
        assert not found.startswith((".", "-"))
        assert found.endswith("-w16-s3")
        assert len(found) < 100


def test_codes_with_a_momentum_keep_it_to_themselves() -> None:
    study = expand(preset("axes").changed(momentum=0.5), Data())
    found = {(r.settings.strategy.compression.carries_momentum, r.settings.optimizer.momentum) for r in study.runs}
    assert found == {(True, 0.0), (False, 0.5)}


# --- files -----------------------------------------------------------------------------------------------------------------

GOOD = """# mine
title = "Mine # not a comment"
workers = [2,
           4]
seeds = 3
epochs = 2
lr = "auto"
strategies = [
  "bulk + allreduce",  # the baseline
  'local(4)',
]

[[run]]
strategy = "bulk + dgc(0.1)"
momentum = 0.0
workers = 4
lr = 1
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_lines_are_counted_through_texts_of_several_lines() -> None:
    lines = lines_of('a = """\nb = 1\n"""\nc = [ # [\n  "]",\n  {d = 1, e = 2},\n]\n[[run]] # one\nf.g = 1\n[[run]]\n"f" = 1\n')
    assert [lines.of(name) for name in ("a", "c")] == [1, 4]
    assert [lines.of("c", i) for i in (0, 1)] == [5, 6]
    assert [lines.of("run", i, "f") for i in (0, 1)] == [9, 11]
    assert [lines.of("run", i, "none") for i in (0, 1)] == [8, 10]


def test_a_file_is_a_study(tmp_path: Path) -> None:
    study = expand(file.read(written(tmp_path, GOOD)), Data())
    assert study.title == "Mine # not a comment"
    assert study.preset is None
    found = [(str(r.settings.strategy), r.settings.workers.count, r.settings.seed, r.tuned) for r in study.runs]
    assert found == [
        ("bulk + allreduce", 2, 3, True),
        ("local(4) + allreduce", 2, 3, True),
        ("bulk + allreduce", 4, 3, True),
        ("local(4) + allreduce", 4, 3, True),
        ("bulk + allreduce + dgc(0.1)", 4, 3, False),
    ]
    assert study.runs[-1].settings.optimizer.lr == 1.0
    assert all(r.settings.epochs == 2 for r in study.runs)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("epochs = 2", "epoch = 2", 6, ["'epoch'", "did you mean 'epochs'?"]),
        ("epochs = 2", "epochs = 'two'", 6, ["epochs is a whole number", "'two'"]),
        ("epochs = 2", "epochs = true", 6, ["epochs is a whole number", "True"]),
        ("epochs = 2", "epochs = 0", 6, ["epochs", "at least 1"]),
        ("epochs = 2", "strategy = 'bulk'", 6, ["'strategy'", "did you mean 'strategies'?"]),
        ("epochs = 2", "optimizer = 'sdg'", 6, ["sdg", "did you mean 'sgd'"]),
        ("epochs = 2", "lr_schedule = 'cosin'", 6, ["cosin", "did you mean 'cosine'"]),
        ("epochs = 2", "augment = 1", 6, ["augment is true or false", "1"]),
        ("epochs = 2", "within = -1", 6, ["within", "-1"]),
        ("epochs = 2", "epochs == 2", 6, ["not TOML"]),
        ("epochs = 2", "cluster = '1gbi'", 6, ["1gbi", "did you mean '1gbit'"]),
        ("epochs = 2", "virtual = false\ncluster = '1gbit'", 7, ["describes virtual workers"]),
        ("epochs = 2", "cluster = '1gbit'\nslowdown = '1;4'", 7, ["slowdown=1;4"]),
        ("epochs = 2", "slowdown = '1,4'", 6, ["slowdown=1,4", "cluster="]),
        ("epochs = 2", "epochs = 2\nepochs = 3", 7, ["not TOML", "overwrite"]),
        ("           4]", "           0]", 4, ["workers", "at least 1", "got 0"]),
        ("           4]", "           2]", 4, ["workers names 2 twice"]),
        ("seeds = 3", "seeds = []", 5, ["seeds is empty"]),
        ('lr = "auto"', 'lr = "fast"', 7, ["lr is a number or 'auto'", "'fast'"]),
        ('lr = "auto"', "lr = -1", 7, ["lr", "above 0"]),
        ("'local(4)',", "'locl(4)',", 10, ["locl", "did you mean 'local'"]),
        ("'local(4)',", "4,", 10, ["a strategy is text", "4"]),
        ("'local(4)',", "'bulk',", 10, ["line 9", "repeats"]),
        ("title = ", "title = 4 #", 2, ["title is text"]),
        ("momentum = 0.0", "momentun = 0.0", 15, ["'momentun'", "did you mean 'momentum'?"]),
        ("momentum = 0.0", "momentum = 'much'", 15, ["momentum is a number", "'much'"]),
        ('strategy = "bulk + dgc(0.1)"', "", 13, ["a run needs a strategy"]),
        ('strategy = "bulk + dgc(0.1)"', 'strategy = "local(2) + dgc(0.1)"', 14, ["dgc", "cannot carry weights"]),
        ("workers = 4\nlr", "workers = 8\nlr", 16, ["8", "not among the study's [2, 4]"]),
        ("[[run]]", "[run]", 13, ["[[run]]"]),
    ],
)
def test_a_wrong_file_is_refused_by_line(tmp_path: Path, old: str, new: str, line: int, words: list[str]) -> None:
    assert GOOD.count(old) == 1
    path = written(tmp_path, GOOD.replace(old, new))
    with pytest.raises(HocketError) as caught:
        expand(file.read(path), Data())
    said = str(caught.value)
    assert said.startswith(f"{path}, line {line}"), said
    assert "\n" not in said
    for word in words:
        assert word in said


@pytest.mark.parametrize("content", [b"\xff\xfe", b"title = 'nothing else'", b""])
def test_a_file_that_is_no_study_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(HocketError, match=r"mine\.toml"):
        file.read(path)
    with pytest.raises(HocketError, match="Cannot read the study"):
        file.read(tmp_path / "none.toml")


# --- carrying out, stopping, going on --------------------------------------------------------------------------------------

FOUR = ["bulk", "local(2)", "local(2) + gossip", "bulk + topk(0.1)"]


class StopAt(Watch):
    """Ctrl-C in the middle of a run."""

    def __init__(self, number: int, step: int = 3) -> None:
        self.number, self.at, self.now = number, step, -1

    def begin(self, number: int, planned: Planned, outcome: Outcome | None) -> None:
        self.now = number

    def step(self, where: Any) -> None:
        if self.now == self.number and where.step == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stopped", [0, 2])
@pytest.mark.parametrize("lr", [0.1, "auto"])
def test_going_on_equals_never_having_stopped(tmp_path: Path, stopped: int, lr: float | str) -> None:
    outline = small(FOUR, lr=lr, workers=(2,))
    carried(tmp_path / "whole", outline)
    with pytest.raises(KeyboardInterrupt):
        carried(tmp_path / "parts", outline, StopAt(stopped))
    before = files(tmp_path / "parts")
    assert len(figures(tmp_path / "parts")) == stopped, "what was broken off leaves nothing"
    carried(tmp_path / "parts", outline)
    after = files(tmp_path / "parts")
    assert {name: after[name] for name in before} == before, "finished runs are not touched"
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")
    assert not list(tmp_path.rglob("*.pt"))


def test_a_run_that_was_killed_starts_anew(tmp_path: Path) -> None:
    outline = small(FOUR)
    carried(tmp_path, outline)
    whole = figures(tmp_path)
    folder = next(p for p in sorted(tmp_path.glob("runs/*")))
    run = json.loads((folder / "run.json").read_text())
    del run["finished"]
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    others = {name: content for name, content in files(tmp_path).items() if not name.startswith(str(folder))}
    carried(tmp_path, outline)
    assert figures(tmp_path) == whole
    assert {name: files(tmp_path)[name] for name in others} == others


def test_the_data_set_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("hocket.study.carry_out.load", lambda *a: calls.append(a) or tiny())
    data = Data()
    folder, study = begun(tmp_path, small(FOUR), data)
    carry_out(folder, study, data, Virtual(data), refused)
    assert len(calls) == 1


def test_what_fails_is_recorded_and_the_rest_go_on(tmp_path: Path) -> None:
    strategies = ["bulk", "bulk + hierarchical(size=3)", "local(2)"]
    outcomes = carried(tmp_path, small(strategies, workers=(4,)))
    assert [bool(o.failure) for o in outcomes] == [False, True, False]
    run = json.loads((tmp_path / outcomes[1].planned.folder / "run.json").read_text())
    assert "4 workers do not divide into hosts of 3" in run["failure"]
    assert run["strategy"] == str(Strategy.parse(strategies[1]))
    before = files(tmp_path)
    again = carried(tmp_path, small(strategies, workers=(4,)))
    assert [bool(o.failure) for o in again] == [False, True, False]
    assert files(tmp_path) == before, "failures are kept, too"


def test_retry_tries_failures_again(tmp_path: Path) -> None:
    folder, study = begun(tmp_path, small(["bulk", "local(2)"]))
    folder.fail(study.runs[0], "the lights went out.", None)
    assert [o.failure for o in carry_out(folder, study, Data(), Virtual(Data()), refused)] == ["the lights went out.", None]
    assert [o.failure for o in carry_out(folder, study, Data(), Virtual(Data()), refused, retry=True)] == [None, None]


def test_a_run_that_diverges_has_failed_and_keeps_its_epochs(tmp_path: Path) -> None:
    outcomes = carried(tmp_path, small(["bulk", "local(2)"], lr=1e30, settings={"epochs": 4}))
    assert all(o.failure and "NaN or Inf" in o.failure for o in outcomes)


def test_any_error_is_a_sentence() -> None:
    assert sentence(ValueError("a\nb")) == "ValueError: a"
    assert sentence(MemoryError()) == "MemoryError"
    assert sentence(HocketError("So.")) == "So."


# --- the folder ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        (small(FOUR), small(FOUR, settings={"epochs": 3}), ["epochs is 2 there and 3 here"]),
        (small(FOUR), small(FOUR, lr="auto"), ["lr is 0.1 there and 'auto' here"]),
        (small(FOUR), small(FOUR[:2]), ["4 runs", "leaves out 2", "local(2) + gossip"]),
        (small(FOUR), small(FOUR, workers=(2,)), ["workers is 4 there and 2 here"]),
        (small(["bulk"]), small(["local(2)"]), ["strategy is 'bulk + allreduce' there and 'local(2) + allreduce' here"]),
    ],
)
def test_a_folder_with_another_study_is_refused(tmp_path: Path, there: Outline, here: Outline, words: list[str]) -> None:
    begun(tmp_path, there)
    before = (tmp_path / "study.json").read_bytes()
    with pytest.raises(HocketError) as caught:
        begun(tmp_path, here)
    for word in words:
        assert word in str(caught.value)
    assert (tmp_path / "study.json").read_bytes() == before


def test_a_study_may_grow(tmp_path: Path) -> None:
    carried(tmp_path, small(FOUR[:2], workers=(2,)))
    before = files(tmp_path)
    outcomes = carried(tmp_path, small(FOUR, workers=(2, 4), seeds=(0, 1)))
    assert len(outcomes) == 16
    after = files(tmp_path)
    assert {name: after[name] for name in before} == before
    assert len(json.loads((tmp_path / "study.json").read_text())["runs"]) == 16


def test_runs_that_differ_in_settings_alone_have_folders_of_their_own_and_keep_them(tmp_path: Path) -> None:
    def entries(*rates: float) -> Outline:
        return replace(small([]), entries=lambda *_: [Entry("bulk", {"lr": r}) for r in rates])

    carried(tmp_path, entries(0.1, 0.2))
    before = files(tmp_path)
    folder, study = begun(tmp_path, entries(0.3, 0.2, 0.1))
    assert len({r.folder for r in study.runs}) == 3
    carry_out(folder, study, Data(), Virtual(Data()), refused)
    assert {name: files(tmp_path)[name] for name in before} == before


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"runs": 3}'])
def test_a_damaged_study_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(HocketError, match="choose another folder"):
        begun(tmp_path, small(FOUR))


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(HocketError, match=r"letters\.txt"):
        begun(tmp_path, small(FOUR))
    assert os.listdir(tmp_path) == ["letters.txt"]


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with Folder(tmp_path).taken(), pytest.raises(HocketError, match="Another process"), Folder(tmp_path).taken():
        pass
    with Folder(tmp_path).taken():
        pass


def test_without_space_the_study_ends_and_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outline = small(FOUR)
    whole = tmp_path / "whole"
    carried(whole, outline)
    replaced, rename = [], os.replace

    def full(source: Any, target: Any) -> None:
        replaced.append(target)
        if len(replaced) == 8:  # there is room again afterwards: it must not go on as if nothing had been
            raise OSError(28, "No space left on device")
        rename(source, target)

    folder, study = begun(tmp_path / "parts", outline)
    with monkeypatch.context() as patch:
        patch.setattr(hocket_files.os, "replace", full)
        with pytest.raises(CannotWrite, match="No space left"):
            carry_out(folder, study, Data(), Virtual(Data()), refused)
    assert 0 < len(finished(folder, study)) < 4
    assert not list((tmp_path / "parts").rglob("*.tmp"))
    before = files(tmp_path / "parts")
    done = [o.planned.folder for o in finished(folder, study)]
    carried(tmp_path / "parts", outline)
    after = files(tmp_path / "parts")
    assert all(after[name] == content for name, content in before.items() if any(d in name for d in done))
    assert figures(tmp_path / "parts") == figures(whole)


# --- what cannot be, and what is not meant -----------------------------------------------------------------------------------


def test_a_study_of_which_nothing_is_possible_is_refused_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(
        HocketError, match=r"None of the 20 runs is possible: 1437 samples do not fill one round of 16 workers with batch_size 100"
    ):
        check(expand(preset("ten").changed((16, 32)), Data()), Data())
    check(expand(preset("ten").changed((4, 32)), Data()), Data())  # some are: the others are recorded as failed


@pytest.mark.parametrize(
    "model, said",
    [
        ("Narrow", "The model gives 3 logits, but the data set has 10 classes"),
        ("Flat", r"The model fails in training mode on a batch of inputs \\[100, 1, 8, 8\\]"),
        ("Sampled", "The loss fails on an output"),
    ],
)
def test_a_model_of_the_users_that_cannot_work_is_refused_before_the_first_run(
    model: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from torch import nn\n\ndef Narrow():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n\n"
    text += "def Flat():\n    return nn.Linear(64, 10)\n\ndef Sampled():\n    return nn.Flatten(0)\n"
    (tmp_path / "tried_models.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    outline = preset("ten").changed((4,), model=f"tried_models:{model}")
    with pytest.raises(HocketError, match=said.replace("\\\\", "\\")):
        check(expand(outline, Data()), Data())


def test_a_run_that_is_left_out_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('workers = [2, 4]\nstrategies = ["bulk"]\n[[run]]\nstrategy = "local(4)"\nworkers = 4\n')
    outline = file.read(path)
    assert len(expand(outline, Data()).runs) == 3
    study = expand(outline.changed((2,)), Data())
    assert len(study.runs) == 1
    assert any("line 4" in note and "left out" in note for note in study.notes)


@pytest.mark.parametrize(
    "folder", ["", ".", "..", "/", "/home", "runs", "runs/", "runs/..", "runs/a/../..", "runs/../../x", "runs/a b"]
)
def test_a_study_that_names_folders_it_would_not_make_is_refused(tmp_path: Path, folder: str) -> None:
    """Folders are emptied before their runs start anew."""
    place, study = begun(tmp_path / "study", small(["bulk"]))
    content = json.loads((place.path / "study.json").read_text())
    content["runs"][0]["folder"] = folder
    (place.path / "study.json").write_text(json.dumps(content))
    with pytest.raises(HocketError, match="that no study makes"):
        place.begin(study)


def test_a_folder_that_holds_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"")
    with pytest.raises(HocketError, match=r"holds no study, but photo\.jpg"), Folder(tmp_path).taken():
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["photo.jpg"]


def test_engines_that_are_kept_change_nothing() -> None:
    """Compiling takes seconds, so trainings of one model and size share an engine."""
    base = RunSettings.of(workers=4, virtual=True, model="mlp", batch_size=20, max_steps=4, engine="vmap")
    all_settings = [base.changed(strategy=s, seed=seed) for s in ("bulk", "local(2) + gossip") for seed in (0, 1)]

    def losses(engines: Any) -> list[Any]:
        runs = (run(settings, VirtualCluster(4), engines=engines).metrics[-1] for settings in all_settings)
        return [(metrics["loss"], metrics["accuracy"], metrics["bytes_sent"]) for metrics in runs]

    kept: Any = {}
    assert losses(kept) == losses(None)
    assert len(kept) == 1


def test_what_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_being_ended_twice_does_not_break_the_cleaning_up() -> None:
    before, cleaned = signal.getsignal(signal.SIGTERM), False

    def work() -> None:
        nonlocal cleaned
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned = True

    with pytest.raises(KeyboardInterrupt), interruptible():
        work()
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_training_holds_the_lock_of_its_study(tmp_path: Path) -> None:
    place, _ = begun(tmp_path / "study", small(["bulk"]))
    with place.taken() as lock:
        training = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    try:
        with pytest.raises(HocketError, match="Another process runs"), place.taken():
            pass
    finally:
        training.communicate(b"\n", timeout=60)
    with place.taken():
        pass


# --- rates -----------------------------------------------------------------------------------------------------------------


def searched(loss: Any, start: float = 0.1) -> dict[float, float]:
    losses: dict[float, float] = {}
    while (rate := next_lr(losses, start)) is not None:
        assert rate not in losses, "no rate is tried twice"
        losses[rate] = loss(rate)
    return losses


@given(st.floats(-5, 2), st.floats(-4, 3), st.sampled_from([0.1, 0.001, 1.0]))
def test_the_search_finds_the_best_rate_it_can_reach_and_never_one_that_diverges(best: float, limit: float, start: float) -> None:
    losses = searched(lambda rate: math.inf if math.log10(rate) > limit else abs(math.log10(rate) - best), start)
    chosen = best_lr(losses)
    assert 3 <= len(losses) <= MOST
    if chosen is None:
        assert all(math.isinf(loss) for loss in losses.values())
    else:
        assert losses[chosen] == min(losses.values()) < math.inf
        inside = min(losses) < chosen < max(losses)
        assert inside or len(losses) == MOST or chosen in (1e-6, 300.0)


@given(st.floats(-4, 0.5), st.floats(0.05, 1.0), st.floats(0.1, 3.0), st.sampled_from([0.1, 0.001, 1.0]))
def test_the_search_ends_near_the_best_rate_of_a_known_landscape(best: float, edge: float, slope: float, start: float) -> None:
    """The loss has a minimum at 10^best, is steeper on one side, and trainings diverge ``edge`` decades above it. Short tries bear
    higher rates than longer ones, as real ones do: their minimum is a little higher."""
    tries: dict[int, dict[float, float]] = {1: {}, LONGER: {}}
    while (planned := next_try(tries[1], tries[LONGER], start)) is not None:
        (rate, times), at = planned, best + (0.05 if planned[1] == 1 else 0.0)
        assert rate not in tries[times], "no rate is tried twice"
        far = math.log10(rate) - at
        tries[times][rate] = math.inf if far > edge else far**2 * (slope if far < 0 else 1.0)
    assert len(tries[1]) <= MOST + 2
    assert len(tries[LONGER]) <= 3
    found = found_lr(tries[1], tries[LONGER])
    if found is not None:
        limit = min((rate for losses in tries.values() for rate, loss in losses.items() if math.isinf(loss)), default=math.inf)
        assert found < limit
        assert found not in tries[LONGER] or tries[LONGER][found] == min(tries[LONGER].values())


@pytest.mark.parametrize("best", [0.1 * 10 ** (k / 10) for k in range(-10, 11)])
def test_on_a_smooth_landscape_the_rate_found_is_within_a_quarter_of_the_best(best: float) -> None:
    tries: dict[int, dict[float, float]] = {1: {}, LONGER: {}}
    while (planned := next_try(tries[1], tries[LONGER], 0.1)) is not None:
        tries[planned[1]][planned[0]] = math.log(planned[0] / best) ** 2
    found = found_lr(tries[1], tries[LONGER])
    assert found is not None
    assert max(found / best, best / found) < 1.25, "the coarse ladder alone is up to 1.8 times away"


@given(st.dictionaries(st.floats(-6, 2), st.none() | st.floats(0, 3), max_size=9))
def test_no_rate_above_one_that_diverged_is_taken(drawn: dict[float, float | None]) -> None:
    """By luck, or where nothing is learned, a rate comes through though a lower one did not."""
    losses = {10**power: math.inf if loss is None else loss for power, loss in drawn.items()}
    limit = min((rate for rate, loss in losses.items() if math.isinf(loss)), default=math.inf)
    sound = {loss for rate, loss in losses.items() if rate < limit}
    chosen = best_lr(losses)
    assert chosen is None if not sound else (chosen is not None and chosen < limit and losses[chosen] == min(sound))
    holes = searched(lambda rate: math.inf if (rate >= 0.03 and rate != 0.1) else abs(math.log10(rate) + 3))
    assert best_lr(holes) == 0.001, "the search goes on below a rate that diverged"


@given(st.integers(1, 500), st.integers(1, 300), st.booleans())
def test_a_try_is_a_short_training_with_the_same_shape(rounds: int, epochs: int, capped: bool) -> None:
    steps = rounds * epochs // 2 + 1 if capped else rounds * epochs
    settings = RunSettings.of(
        epochs=epochs, warmup=epochs / 10, lr_schedule="cosine", momentum=0.9, max_steps=steps if capped else None
    )
    tried = short(settings, 0.5, rounds, steps)
    wanted = search_steps(rounds, steps)
    assert wanted <= max(1, steps // 2), "a search must not cost more than what it searches for"
    assert wanted >= min(100, max(1, steps // 2)), "very short trainings bear rates that longer ones do not"
    assert 1 <= tried.epochs <= epochs
    before = settings.optimizer
    assert tried.optimizer.warmup / wanted == pytest.approx(before.warmup / steps)
    assert tried.changed(epochs=epochs, warmup=before.warmup, lr=before.lr, max_steps=settings.max_steps) == settings


class Scripted:
    """Trainings that end with a training loss by plan; None: they diverge."""

    def __init__(self, tries: dict[float, float], whole: dict[float, float | None], other: dict[float, float | None]) -> None:
        self.tries, self.whole, self.trained = tries, (whole, other), []
        self.virtual = Virtual(Data())

    def __call__(self, settings: RunSettings, out: Path | None, watch: Watch) -> Sequence[dict[str, Any]]:
        if out is None:
            return [{"loss": self.tries.get(settings.optimizer.lr, 9.0), "accuracy": 0.5}]
        self.trained.append((settings.seed, settings.optimizer.lr))
        loss = self.whole[settings.seed][settings.optimizer.lr]
        if loss is None:
            raise NonFiniteGradient("too fast: NaN or Inf.")
        return [{**line, "loss": loss} for line in self.virtual(settings, out, watch)]


@pytest.mark.parametrize("end", [None, 0.6])
def test_a_rate_that_does_not_hold_is_given_up_for_the_next_lower_one(tmp_path: Path, end: float | None) -> None:
    script = Scripted({0.03: 0.8, 0.1: 0.5, 0.3: 0.7, 0.01: 2.0}, {0.1: end, 0.03: 0.2}, {0.03: 0.3})
    folder, study = begun(tmp_path, small(["bulk"], lr="auto", seeds=(0, 1)))
    outcomes = carry_out(folder, study, Data(), script, refused)
    assert [o.failure for o in outcomes] == [None, None]
    assert script.trained == [(0, 0.1), (0, 0.03), (1, 0.03)]
    assert {o.lr for o in outcomes} == {0.03}
    assert outcomes[0].run["rate"]["given_up"] == {"0.1": end}


def test_the_last_rate_is_kept_and_other_seeds_do_not_decide(tmp_path: Path) -> None:
    script = Scripted({0.03: 0.5, 0.1: 0.6, 0.01: 0.7, 0.3: 0.8}, {0.03: 0.9, 0.01: 0.9}, {0.01: 0.9})
    folder, study = begun(tmp_path, small(["bulk"], lr="auto", seeds=(0, 1)))
    outcomes = carry_out(folder, study, Data(), script, refused)
    assert script.trained == [(0, 0.03), (0, 0.01), (1, 0.01)]
    assert [o.failure for o in outcomes] == [None, None]
    script = Scripted({0.03: 0.8, 0.1: 0.5, 0.3: 0.7, 0.01: 2.0}, {0.1: 0.2}, {0.1: 0.9})
    folder, study = begun(tmp_path / "other", small(["bulk"], lr="auto", seeds=(0, 1)))
    carry_out(folder, study, Data(), script, refused)
    assert script.trained == [(0, 0.1), (1, 0.1)]


def test_a_try_is_evaluated_once_and_a_run_after_every_epoch(tmp_path: Path) -> None:
    settings = expand(small(["local(2)"]), Data()).runs[0].settings
    settings = settings.changed(epochs=3, max_steps=None)
    tried, whole = (Virtual(Data())(settings, out, Watch()) for out in (None, tmp_path))
    assert [m["accuracy"] is None for m in tried] == [True, True, False]
    assert [m["accuracy"] is None for m in whole] == [False, False, False]
    assert tried[-1]["accuracy"] == whole[-1]["accuracy"]
    assert "accuracy_worst" in whole[-1]
    assert "accuracy_worst" not in tried[-1]


def test_the_search_is_recorded_shared_by_seeds_and_not_repeated(tmp_path: Path) -> None:
    tried: list[float] = []

    class Count(Watch):
        def trying(self, lr: float) -> None:
            tried.append(lr)

    outline = small(["bulk", "local(2)"], lr="auto", seeds=(0, 1))
    outcomes = carried(tmp_path, outline, Count())
    searches = json.loads((tmp_path / "rates.json").read_text()).values()
    assert len(searches) == 2
    assert len(tried) == sum(len(s["losses"]) + len(s["longer"]) for s in searches)
    for outcome in outcomes:
        rate = outcome.run["rate"]
        losses = {float(k): v for k, v in rate["longer"].items()}
        assert rate["chosen"] == outcome.run["lr"] == outcome.lr
        assert losses[rate["chosen"]] == min(v for v in losses.values() if v is not None)
        assert set(rate["tried"]) == {*rate["losses"], *rate["longer"]}
        assert rate["epochs"] == 1
    count = len(tried)
    carried(tmp_path, replace(outline, seeds=(0, 1, 2)), Count())
    assert len(tried) == count, "another seed needs no other search"
    study = json.loads((tmp_path / "study.json").read_text())
    assert any("training loss" in note for note in study["notes"])


def test_a_rate_that_diverges_is_never_chosen(tmp_path: Path) -> None:
    virtual = Virtual(Data())

    def fragile(settings: RunSettings, out: Path | None, watch: Watch) -> Sequence[dict[str, Any]]:
        if settings.optimizer.lr > 0.05:
            raise NonFiniteGradient("too fast.")
        return virtual(settings, out, watch)

    folder, study = begun(tmp_path, small(["bulk"], lr="auto"))
    (outcome,) = carry_out(folder, study, Data(), fragile, refused)
    assert outcome.failure is None
    assert outcome.lr is not None
    assert outcome.lr <= 0.05
    assert outcome.run["rate"]["losses"]["0.1"] is None


def test_a_described_cluster_changes_seconds_and_not_the_rate_that_is_found(tmp_path: Path) -> None:
    plain = carried(tmp_path / "plain", small(["local(2)"], lr="auto"))
    settings = {"cluster": "1gbit", "slowdown": "1,4"}
    timed = carried(tmp_path / "timed", small(["local(2)"], lr="auto", settings=settings))
    same = ("accuracy", "loss", "bytes_sent")
    assert [[m[n] for n in same] for o in plain for m in o.metrics] == [[m[n] for n in same] for o in timed for m in o.metrics]
    assert (tmp_path / "plain" / "rates.json").read_text() == (tmp_path / "timed" / "rates.json").read_text()
    assert all(m["seconds"] is None for o in plain for m in o.metrics)
    assert all(m["seconds"] > m["compute_s"] > 0 for o in timed for m in o.metrics)
    assert timed[0].run["spec"]["name"] == "1gbit"
    assert timed[0].run["spec"]["slowdown"] == [1, 4]
    assert "predicted for 1gbit with slowdown 1,4" in display._result(timed[0])
    assert "predicted" not in display._result(plain[0])


def test_shares_by_speed_are_a_field_of_a_study_and_leave_the_rate_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    clock = 'cluster = "1gbit"\nslowdown = "1,4"\n'
    base = f'data = "{DATA}"\nmodel = "{MODEL}"\nbatch_size = 3\nepochs = 3\nlr = "auto"\nworkers = 2\nstrategies = ["bulk"]\n'
    path.write_text(base + 'balance = "speed"\n' + clock)
    (outcome,) = carried(tmp_path / "speed", file.read(path))
    assert outcome.failure is None
    assert [m["shares"] for m in outcome.metrics] == [[3, 3], [5, 1], [5, 1]]
    path.write_text(base + clock)
    carried(tmp_path / "even", file.read(path))
    speed, even = (json.loads((tmp_path / name / "rates.json").read_text()) for name in ("speed", "even"))
    assert speed.keys() == even.keys()
    assert [(s["chosen"], s["losses"]) for s in speed.values()] == [(e["chosen"], e["losses"]) for e in even.values()]
    path.write_text(base + 'balance = "speed"\n')
    with pytest.raises(HocketError, match=r"mine\.toml, line 8: balance=speed: virtual workers have speeds only with cluster="):
        file.read(path)


def test_where_every_rate_diverges_the_run_has_failed(tmp_path: Path) -> None:
    def fragile(settings: RunSettings, out: Path | None, watch: Watch) -> Sequence[dict[str, Any]]:
        raise NonFiniteGradient("too fast.")

    folder, study = begun(tmp_path, small(["bulk"], lr="auto"))
    (outcome,) = carry_out(folder, study, Data(), fragile, refused)
    assert outcome.failure is not None
    assert "No learning rate" in outcome.failure


class Outer:
    """Trainings whose loss is a function of the outer rate and momentum; momentum 0.9 diverges."""

    def __init__(self) -> None:
        self.virtual = Virtual(Data())
        self.tried: list[tuple[float, float]] = []

    def __call__(self, settings: RunSettings, out: Path | None, watch: Watch) -> Sequence[dict[str, Any]]:
        pair = settings.strategy.sync.outer_settings
        if out is not None:
            return self.virtual(settings, out, watch)
        assert pair is not None
        self.tried.append(pair)
        if pair[1] == 0.9:
            raise NonFiniteGradient("too fast: NaN or Inf.")
        return [{"loss": (pair[0] - 0.5) ** 2 + (pair[1] - 0.3) ** 2, "accuracy": 0.5}]


def test_the_outer_optimiser_is_searched_momenta_first_then_rates(tmp_path: Path) -> None:
    script = Outer()
    outline = small(["diloco(2) + sign", "bulk"], outer="auto", seeds=(0, 1))
    folder, study = begun(tmp_path, outline)
    assert [run.described().get("outer") for run in study.runs] == ["auto", None, "auto", None]
    outcomes = carry_out(folder, study, Data(), script, refused)
    assert [o.failure for o in outcomes] == [None] * 4
    assert script.tried == [(0.7, 0.0), (0.7, 0.3), (0.7, 0.6), (0.7, 0.9), (0.3, 0.3), (0.5, 0.3), (1.0, 0.3)]
    assert [o.run["strategy"] for o in outcomes[::2]] == ["diloco(2, 0.5, 0.3) + allreduce + sign"] * 2
    found = outcomes[0].run["outer"]
    assert (found["chosen"], found["losses"]["0.7, 0.9"], found["losses"]["0.5, 0.3"]) == ([0.5, 0.3], None, 0.0)
    assert "outer" not in outcomes[1].run
    carried(tmp_path, outline)  # it goes on where it was: nothing is left to do
    (row, *_) = build([tmp_path], tmp_path).rows
    console = Console(width=100, file=io.StringIO())
    console.print(display.outer_table(row.label, found))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split() for line in said.splitlines() if line.strip()[:3] in ("0.3", "0.5", "0.7")] == [
        ["0.3", "0.04"], ["0.5", "0", "←"], ["0.7", "0.13", "0.04", "0.13", "diverged"]
    ]  # fmt: skip
    assert "Outer rates and momenta" in (tmp_path / "report.html").read_text()


def test_the_outer_search_follows_that_of_the_learning_rate(tmp_path: Path) -> None:
    lrs: list[float] = []
    steps: list[int | None] = []
    virtual = Virtual(Data())

    def train(settings: RunSettings, out: Path | None, watch: Watch) -> Sequence[dict[str, Any]]:
        if out is None:
            lrs.append(settings.optimizer.lr)
            steps.append(settings.max_steps)
            return [{"loss": abs(settings.optimizer.lr - 0.03), "accuracy": 0.5}]
        return [{**line, "loss": 0.0} for line in virtual(settings, out, watch)]

    folder, study = begun(tmp_path, small(["diloco(9)"], lr="auto", outer="auto", settings={"epochs": 150}))
    (outcome,) = carry_out(folder, study, Data(), train, refused)
    assert outcome.lr == outcome.run["lr"] == 0.03
    assert lrs[-7:] == [0.03] * 7
    assert steps == [100] * (len(lrs) - 10) + [200] * 3 + [12 * 9] * 7
    assert len(json.loads((tmp_path / "rates.json").read_text())) == 2


def test_tries_of_outer_optimisers_are_long_enough_for_some_exchanges() -> None:
    settings = RunSettings.of(epochs=100, strategy="diloco(30)")
    assert short(settings, 0.1, 10, 1000, least=360).max_steps == 360
    assert short(settings, 0.1, 10, 1000, least=3600).max_steps == 500
    assert short(settings, 0.1, 10, 1000).max_steps == 100


# --- the command line ------------------------------------------------------------------------------------------------------

OTHER: dict[str, Any] = {
    **{"strategy": "local(4) + gossip + topk(0.1) | qsgd(4)", "workers": 3, "virtual": True, "data": "mnist", "model": "cnn"},
    **{"pretrained": "model.safetensors", "lora": 4},
    **{
        "optimizer": "muon",
        "rest_lr": 2e-05,
        "freeze_step": 7,
        "refresh": 2,
        "lr": 1e-05,
        "momentum": 0.9,
        "weight_decay": 0.0005,
        "lr_schedule": "cosine",
        "warmup": 2.5,
    },
    **{
        "scale_lr": "sqrt",
        "decay": "all",
        "batch_size": 7,
        "epochs": 3,
        "max_steps": 11,
        "clip": 0.25,
        "autocast": "bf16",
        "augment": False,
    },
    **{"last": "drop", "seed": 5, "engine": "loop", "nonfinite": "skip", "exact": True, "host_size": 3},
    **{"cluster": "1gbit", "slowdown": "1,4", "balance": "speed", "partition": "label(2)"},
    **{"bucket_cap_bytes": 1000, "first_bucket_cap_bytes": 100},
    **{
        "mesh": "pipeline=2,tensor=2",
        "pipe": "interleaved",
        "num_microbatches": 4,
        "cut": "1, 2",
        "stages_per_rank": 3,
        "measure": "flops",
    },
    **{"plan_file": "plan.toml", "zero": 1, "fsdp": True},
}
KEYS = [
    *(
        "strategy",
        "workers",
        "virtual",
        "data",
        "model",
        "from",
        "lora",
        "optimizer",
        "lr",
        "momentum",
        "weight_decay",
        "schedule",
        "warmup",
    ),
    *(
        "scale_lr",
        "batch",
        "epochs",
        "max_steps",
        "clip",
        "rest_lr",
        "freeze_step",
        "refresh",
        "decay",
        "autocast",
        "augment",
        "last",
        "seed",
        "engine",
        "nonfinite",
        "exact",
    ),
    *(
        "host_size",
        "cluster",
        "slowdown",
        "share",
        "partition",
        "bucket_bytes",
        "first_bucket_bytes",
        "mesh",
        "pipe",
        "micro",
        "cut",
    ),
    *("virtual_stages", "measure", "plan_file", "shard"),
]
"""What records have, in their order: those of the first edition are read for ever."""
SPLIT = ("pipe", "num_microbatches", "cut", "measure", "plan_file")
REAL = (*SPLIT, "mesh", "stages_per_rank", "zero", "fsdp")
"""Real workers only."""
VARIANCE = ("freeze_step", "refresh")
"""Of onebit only."""
BESIDE = {  # what a setting needs to make sense
    **{"cluster": ("virtual",), "rest_lr": ("optimizer",), "stages_per_rank": ("mesh", "pipe")},
    **dict.fromkeys(SPLIT, ("mesh",)),
}


@pytest.mark.parametrize("changed", [*FIELDS, "all", "none"])
def test_settings_as_arguments_are_the_same_settings(changed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert set(OTHER) == set(FIELDS), "a new setting needs a value here"
    assert not any(OTHER[name] == value for name, value in defaults().items())
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text('1 = "columns"\n')
    chosen = {changed, *BESIDE.get(changed, ()), *(set(OTHER) - {*REAL, *VARIANCE, "partition"} if changed == "all" else ())}
    given = {name: value for name, value in OTHER.items() if name in chosen}
    settings = RunSettings.of(**{**given, **({"optimizer": "onebit"} if changed in VARIANCE else {})})
    got: list[RunSettings] = []
    monkeypatch.setattr(cli_train, "_start", lambda settings, *_: got.append(settings))
    ended = CliRunner().invoke(cli.app, ["train", *arguments(settings)])
    assert ended.exit_code == 0, ended.output
    assert got == [settings]


def test_records_keep_their_keys_whatever_the_settings_are_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text('1 = "columns"\n')
    whole, split = (
        RunSettings.of(**{name: OTHER[name] for name in names})
        for names in (set(OTHER) - {*REAL, *VARIANCE, "partition"}, {*REAL, "batch_size", "partition"} - {"fsdp"})
    )
    renamed = {"schedule": "lr_schedule", "batch": "batch_size", "share": "balance", "micro": "num_microbatches"}
    renamed |= {"bucket_bytes": "bucket_cap_bytes", "first_bucket_bytes": "first_bucket_cap_bytes"}
    renamed |= {"virtual_stages": "stages_per_rank"}
    for settings in (whole, split):
        recorded, given = settings.recorded(), settings.by_name()
        assert {key: recorded[key] for key in renamed} == {key: given[name] for key, name in renamed.items()}
        assert list(recorded) == KEYS
        assert RunSettings.from_recorded(json.loads(json.dumps(recorded))) == settings
    assert (whole.recorded()["shard"], split.recorded()["shard"]) == (None, "state")
    assert RunSettings.of(fsdp=True).recorded()["shard"] == "full"


def test_a_setting_is_an_option_and_errors_name_either() -> None:
    """A library's error names the field; the command line's the option, which there is."""
    written = {p.name: p.opts for p in loaded("train").params}
    for name in FIELDS:
        assert option(name) in written[name]
        error = SettingError(f"<{name}>: no.", **{name: "x"})
        assert str(error) == f"{name}=x: no."
        assert error.written(option) == f"{option(name)} x: no."
    with pytest.raises(SettingError, match=r"^slowdown=1,1,0: give numbers above 0"):
        RunSettings.of(slowdown="1,1,0")
    with pytest.raises(HocketError, match=r"^--slowdown 1,1,0: give numbers above 0"):
        cli.app(["train", "--slowdown", "1,1,0"], standalone_mode=False)


def study_command(*arguments: str) -> str:
    """What the command says when it is refused."""
    with pytest.raises(HocketError) as caught:
        cli.app(["study", *arguments], standalone_mode=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frontir"], ["frontir", "did you mean 'frontier'?"]),
        (["nothing-like-it"], ["ten, ten-modern, axes, frontier, llm, large-batch"]),
        (["none.toml"], ["none.toml"]),
        (["ten", "--workers", "4;8"], ["--workers 4;8", "such as 4,8"]),
        (["ten", "--workers", "0"], ["--workers 0", "at least one"]),
        (["ten", "--workers", "4,4"], ["--workers names 4 twice"]),
        (["ten", "--seeds", "x"], ["--seeds x"]),
        (["ten", "--lr", "fast"], ["--lr fast", "auto"]),
        (["ten", "--lr", "0"], ["--lr 0"]),
        (["ten", "--epochs", "0"], ["epochs", "at least 1"]),
        (["ten", "--data", "cifar11"], ["cifar11", "did you mean"]),
        (["ten", "--model", "cn"], ["cn", "did you mean 'cnn'"]),
        (["ten", "--lr-schedule", "cosin"], ["cosin", "did you mean 'cosine'"]),
        (["ten", "--last", "evn"], ["evn", "did you mean 'even'"]),
        (["ten", "--within", "-1"], ["--within -1"]),
        (["ten", "--device", "tpu"], ["tpu"]),
        (["ten", "--cluster", "1gbi"], ["1gbi", "did you mean '1gbit'"]),
        (["ten", "--cluster", "1gbit", "--real"], ["--cluster 1gbit", "virtual workers"]),
        (["ten", "--slowdown", "1,4"], ["--slowdown 1,4", "--cluster"]),
        (["ten", "--slowdown", "1,0.5", "--real"], ["--slowdown 1,0.5", "only be made slower"]),
        (["ten", "--cluster", "1gbit", "--slowdown", "a"], ["--slowdown a", "1,1,1,4"]),
    ],
)
def test_every_mistake_meets_one_sentence(
    arguments: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = study_command(*arguments)
    for word in words:
        assert word in said
    assert "\n" not in said
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_the_demo_replaces_an_earlier_demo_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "study.json").write_text('{"preset": "demo"}')
    (tmp_path / "mine").write_text("kept")
    demo._make_room(tmp_path)
    assert os.listdir(tmp_path) == ["mine"]
    (tmp_path / "virtual").mkdir()
    (tmp_path / "virtual" / "study.json").write_text('{"preset": "ten"}')
    with pytest.raises(HocketError, match="`hocket demo` did not make it"):
        demo._make_room(tmp_path)
    assert (tmp_path / "virtual" / "study.json").exists()


def test_what_a_failed_training_said_is_the_reason() -> None:
    with pytest.raises(HocketError, match=r"^Too few\.$"):
        fail(2, ["note: a", "hocket: Too few."])
    with pytest.raises(NonFiniteGradient):
        fail(2, ["hocket: The gradient of a holds NaN or Inf at step 3 on worker 0."])
    with pytest.raises(CannotWrite):
        fail(
            2,
            [f"hocket: {CannotWrite('write run.json', OSError(28, 'No space left on device'))}"],
        )
