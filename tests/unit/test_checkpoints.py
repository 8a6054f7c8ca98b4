"""Generations of checkpoints: whole or not at all, agreed, found damaged, and resumed from the newest that is whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

from hocket.cluster import VirtualCluster
from hocket.cluster.agreement import Agreement
from hocket.data import load
from hocket.errors import HocketError, SettingError
from hocket.files import safetensors, sealed_json, unsealed_json
from hocket.models import build
from hocket.strategy import Strategy
from hocket.train import leaving
from hocket.train.checkpoints import MANIFEST, Checkpoints, Generation, process_file
from hocket.train.checks import layout_for
from hocket.train.elastic_checkpoints import FolderAgreement
from hocket.train.loop import Progress
from hocket.train.run import run
from hocket.train.settings import RunSettings
from hocket.train.worker_states import StateFiles, begin_with

FACTS = {"epoch": 1, "workers": 1, "processes": 1, "run": {}}


class Kept:
    """The checkpoints in a folder, and what was said of them."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.said: list[str] = []
        self.checkpoints = Checkpoints(folder, VirtualCluster(1), keep, self.said.append)
        self.loaded: list[Any] = []

    def save(self, *steps: int) -> Kept:
        for step in steps:
            self.checkpoints.save({process_file(0): {"weights": torch.full((50,), float(step))}}, {**FACTS, "step": step})
            self.checkpoints.wait()
        return self

    def resume(self) -> float:
        load = lambda generation: self.loaded.append(generation.load(process_file(0))["weights"])  # noqa: E731
        self.checkpoints.resume(lambda _: [process_file(0)], load)
        return float(self.loaded[-1][0])


def flip(path: Path, place: int = 300) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 8
    path.write_bytes(content)


def test_workers_that_share_a_folder_seal_what_all_of_them_have_written(tmp_path: Path) -> None:
    both = [Kept(tmp_path), Kept(tmp_path)]
    for number, writers in enumerate((both, both, both[:1]), start=1):  # at last one is lost before it has written
        for place, kept in enumerate(writers):
            most_s = 30.0 if len(writers) == 2 else 0.1
            kept.checkpoints.meet(FolderAgreement(tmp_path, place, 2, lambda: False, most_s), number)
            state = {process_file(place): {"weights": torch.full((50,), float(number))}}
            kept.checkpoints.save(state, {**FACTS, "processes": 2, "step": number})
        for kept in writers:
            kept.checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdecimal()) == ["1", "2"]
    newest = both[1].checkpoints.newest()
    assert newest is not None
    assert sorted(newest.manifest["files"]) == [process_file(0), process_file(1)]
    assert [line for kept in both for line in kept.said] == [
        "Checkpoint 3 was not saved: process 1 has said nothing that can be read in the folder 'told': it is lost, or has another "
        "folder; checkpoint 2 is the newest, and training goes on."
    ]
    assert Kept(tmp_path).checkpoints.next == 3


def test_the_first_worker_hears_one_that_had_written_before_it_looked(tmp_path: Path) -> None:
    """What others left of an earlier checkpoint of the same number does not count."""
    left = FolderAgreement(tmp_path, 1, 2, lambda: False, mark=1)
    left.gather("written 7", "an earlier run", 1.0)
    first, second = (FolderAgreement(tmp_path, place, 2, lambda: False, 1.0, mark=2) for place in range(2))
    second.gather("written 7", "this run", 1.0)
    first.clear()
    assert first.gather("written 7", "the first", 1.0) == ["the first", "this run"]
    assert not list((tmp_path / "told").iterdir())


def test_a_worker_that_cannot_tell_is_one_that_has_said_nothing(tmp_path: Path) -> None:
    (tmp_path / "told").touch()  # a file, where a folder would be
    FolderAgreement(tmp_path, 1, 2, lambda: False).gather("written 1", "", 1.0)
    assert FolderAgreement(tmp_path, 0, 2, lambda: False, 0.1).gather("written 1", "", 1.0) == ["", None]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"[" * 5000, sealed_json({"said": "[]"}), sealed_json({"said": "[3, 3]"})])
def test_what_a_worker_tells_costs_that_checkpoint_where_it_is_damaged(tmp_path: Path, content: bytes) -> None:
    both = [Kept(tmp_path), Kept(tmp_path)]
    for place in (1, 0):
        kept = both[place].checkpoints
        kept.meet(agreement := FolderAgreement(tmp_path, place, 2, lambda: False, 30.0), 1)
        if place == 0:
            (told,) = (tmp_path / "told").iterdir()
            told.write_bytes(content)
            (tmp_path / "told" / "a folder").mkdir()
            agreement.clear()
        kept.save({process_file(place): {"weights": torch.zeros(5)}}, {**FACTS, "processes": 2, "step": 1})
        kept.wait()
    assert both[0].checkpoints.newest() is None
    assert both[0].said == [
        f"Checkpoint 1 was not saved: process 1 {agreement.silent}; there is none before it, and training goes on."
    ]


def test_facts_that_do_not_fit_are_those_of_a_damaged_generation(tmp_path: Path) -> None:
    """A manifest may be of another version, and its checksum right."""
    Kept(tmp_path).save(1, 2)
    path = tmp_path / "2" / MANIFEST
    manifest = unsealed_json(path.read_bytes())
    for wrong in ({"run": None}, {"workers": 0}, {"processes": 1 << 60}, {"step": -1}):
        path.write_bytes(sealed_json({**manifest, "facts": {**manifest["facts"], **wrong}}))
        assert Kept(tmp_path).resume() == 1.0

    def needed(generation: Generation) -> list[str]:
        return [process_file(0)] if generation.number == 1 else [str(generation.facts["run"]["mesh"])]

    path.write_bytes(sealed_json(manifest))
    again = Kept(tmp_path)
    assert again.checkpoints.resume(needed, lambda _: None).number == 1
    assert "has facts that do not fit (KeyError)" in again.said[0]


def test_the_last_generations_are_kept_and_the_newest_is_taken(tmp_path: Path) -> None:
    for keep, left in ((2, ["4", "5"]), (3, ["3", "4", "5"])):
        Kept(tmp_path / str(keep), keep).save(1, 2, 3, 4, 5)
        assert sorted(os.listdir(tmp_path / str(keep))) == left
        again = Kept(tmp_path / str(keep), keep)
        assert again.resume() == 5.0
        assert again.said == ["Goes on from checkpoint 5 (epoch 1, step 5), the newest that is whole."]
        again.save(6)
        assert sorted(os.listdir(tmp_path / str(keep)))[-1] == "6"
    with pytest.raises(SettingError, match="at least 2 checkpoints are kept"):
        Kept(tmp_path, 1)


DAMAGE = {
    "a flipped bit": (lambda folder: flip(folder / process_file(0)), "has a damaged process-0.pt (its checksum does not match)"),
    "a short file": (lambda folder: os.truncate(folder / process_file(0), 20), "has a damaged process-0.pt (20 bytes, not"),
    "a lost file": (lambda folder: (folder / process_file(0)).unlink(), "lacks process-0.pt (No such file or directory)"),
    "a lost manifest": (lambda folder: (folder / MANIFEST).unlink(), "was not finished"),
    "a flipped manifest": (lambda folder: flip(folder / MANIFEST, 40), "has a damaged manifest.json"),
    "another manifest": (lambda folder: (folder / MANIFEST).write_bytes(sealed_json({"files": 3})), "has a damaged manifest.json"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_generation_is_named_and_the_one_before_it_is_taken(tmp_path: Path, name: str) -> None:
    damage, clause = DAMAGE[name]
    Kept(tmp_path).save(1, 2)
    damage(tmp_path / "2")
    again = Kept(tmp_path)
    assert again.resume() == 1.0
    assert again.said[0].startswith("Goes on from checkpoint 1 (epoch 1, step 1)")
    assert f"Checkpoint 2 is passed over: process 0 {clause}" in again.said[0]
    again.save(3)
    assert sorted(os.listdir(tmp_path)) == ["1", "3"], "the damaged one does not count among those that are kept"
    damage(tmp_path / "1")
    damage(tmp_path / "3")
    with pytest.raises(HocketError, match=r"No checkpoint .* can be used\. Checkpoint 3 is passed over: .* Checkpoint 1 is"):
        Kept(tmp_path).resume()


def test_a_state_that_does_not_fit_gives_way_to_the_one_before_it(tmp_path: Path) -> None:
    Kept(tmp_path).save(1, 2)
    again = Kept(tmp_path)

    def load(generation: Generation) -> None:
        if generation.number == 2:
            raise KeyError("replicas")
        again.loaded.append(generation)

    again.checkpoints.resume(lambda _: [process_file(0)], load)
    assert [g.number for g in again.loaded] == [1]
    assert "Checkpoint 2 is passed over: process 0 does not fit (KeyError: 'replicas')." in again.said[0]
    with pytest.raises(SettingError, match="There is no checkpoint"):
        Kept(tmp_path / "none").resume()


def test_a_full_disk_leaves_the_old_generation_and_the_next_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path).save(1)
    fsync = os.fsync

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for stage in range(4):  # the folder, the state, its name, the manifest
        calls = iter(range(100))
        monkeypatch.setattr(os, "fsync", lambda handle, s=stage, c=calls: full(handle) if next(c) == s else fsync(handle))
        kept.save(2)
        monkeypatch.undo()
        assert "was not saved: process 0 cannot write" in kept.said[-1]
        assert kept.said[-1].endswith("(No space left on device); checkpoint 1 is the newest, and training goes on.")
        assert os.listdir(tmp_path) == ["1"]
    kept.save(3)
    assert Kept(tmp_path).resume() == 3.0


def test_what_is_written_is_what_was_there_when_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training changes the tensors while they are written."""
    kept, weights = Kept(tmp_path), torch.zeros(1000)
    kept.checkpoints.save({process_file(0): {"weights": weights}}, {**FACTS, "step": 1})
    weights.fill_(1.0)
    kept.checkpoints.wait()
    assert Kept(tmp_path).resume() == 0.0


@given(st.integers(0, 2**30), st.integers(1, 255))
@settings(max_examples=60)
def test_no_changed_byte_of_plain_data_goes_unnoticed(place: int, change: int) -> None:
    """What is read is what was written, or nothing; a changed byte may leave the meaning as it was (1.0 as 1.00)."""
    content = {"facts": {"step": 3, "loss": 0.1234567}, "files": {"process-0.pt": [17, 42]}}
    changed = bytearray(sealed_json(content))
    changed[place % len(changed)] ^= change
    with contextlib.suppress(ValueError):
        assert unsealed_json(bytes(changed)) == content


def test_weights_are_read_by_the_library_of_their_format() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
    tensors = {str(kind): torch.arange(7).to(kind).view(7, 1)[::2] for kind in kinds}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "tied": tensors["torch.float32"]}
    found = load_safetensors(safetensors(tensors, {"format": "pt"}))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with pytest.raises(ValueError, match="complex128"):
        safetensors({"z": torch.zeros(1, dtype=torch.complex128)})


SMALL = {"workers": 3, "virtual": True, "batch_size": 100, "strategy": "local(4) + topk(0.1)", "seed": 1}


def test_a_run_goes_on_without_its_run_json_and_from_the_generation_before_a_damaged_one(tmp_path: Path) -> None:
    base = RunSettings.of(**SMALL)
    whole = run(base.changed(epochs=3), VirtualCluster(3), out=tmp_path / "whole")
    run(base.changed(epochs=2), VirtualCluster(3), out=tmp_path / "parts")
    flip(tmp_path / "parts" / "checkpoints" / "2" / process_file(0), 5000)
    (tmp_path / "parts" / "run.json").write_text("{")
    said: list[str] = []
    again = run(base.changed(epochs=3), VirtualCluster(3), out=tmp_path / "parts", resume=True, note=said.append)
    assert said[0].endswith("run.json is missing or damaged; its copy in checkpoint 2 is used.")
    assert "Goes on from checkpoint 1" in said[1]
    assert "Checkpoint 2 is passed over: process 0 has a damaged process-0.pt" in said[1]
    assert all(torch.equal(a, b) for a, b in zip(again.replicas.weights, whole.replicas.weights, strict=True))
    assert [m["loss"] for m in again.metrics] == [m["loss"] for m in whole.metrics]
    assert json.loads((tmp_path / "parts" / "run.json").read_text())["workers"] == 3
    with again.averaged() as model:
        for place in (tmp_path / "parts", tmp_path / "parts" / "checkpoints" / "4"):
            found = load_safetensors((place / "model.safetensors").read_bytes())
            assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    with pytest.raises(HocketError, match="There is no run in"):
        run(base, VirtualCluster(3), out=tmp_path / "nothing", resume=True)
    with pytest.raises(HocketError, match="has batch 100, not 50"):
        run(base.changed(batch_size=50), VirtualCluster(3), out=tmp_path / "parts", resume=True)


def test_a_run_loads_in_plain_pytorch_as_the_page_says(tmp_path: Path) -> None:
    trained = run(RunSettings.of(model="cnn", momentum=0.9, batch_size=100), VirtualCluster(1, timed=True), out=tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "guide" / "plain-pytorch.md").read_text()
    given = {"Net": lambda: build("cnn", load("digits")), "Path": Path}
    for block in page.split("```python\n")[1:]:
        exec(block.split("```")[0].replace("OUT/", f"{tmp_path}/"), given)
    own = given["model"].state_dict()
    with trained.averaged() as model:
        assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
    momenta = [entry["momentum_buffer"] for entry in given["optimizer"].state.values()]
    assert len(momenta) == len(list(model.parameters()))


@pytest.mark.parametrize("signalled", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_told_to_leave_goes_on_in_the_middle_of_the_epoch(signalled: int, tmp_path: Path) -> None:
    def told(progress: Progress) -> None:
        if progress.step == 34:
            os.kill(os.getpid(), signalled)
        time.sleep(0.002 * (progress.step >= 34))

    given = RunSettings.of(strategy="local(3) + topk(0.2)", workers=2, virtual=True, epochs=3, batch_size=24, lr=0.05)
    data = load("digits")
    before = [signal.getsignal(signalled), signal.set_wakeup_fd(-1)]
    with pytest.raises(SystemExit) as end:
        run(given, VirtualCluster(2), out=tmp_path, data=data, watch=told, leaves=True)
    assert end.value.code == 0
    assert [signal.getsignal(signalled), signal.set_wakeup_fd(-1)] == before
    newest = Checkpoints(tmp_path / "checkpoints", VirtualCluster(2)).newest()
    assert newest is not None
    assert newest.facts["epoch"] == 1
    assert newest.facts["step"] == 30 + newest.facts["taken"] >= 34
    other, number = tmp_path / "other", str(newest.number)
    shutil.copytree(tmp_path / "checkpoints" / number, other / "checkpoints" / number)
    shutil.copy(tmp_path / "run.json", other)
    with pytest.raises(HocketError, match="only as many workers"):
        run(given.changed(workers=3), VirtualCluster(3), out=other, data=data, resume=True)
    resumed, whole = run(given, VirtualCluster(2), out=tmp_path, data=data, resume=True), run(given, VirtualCluster(2), data=data)
    pairs = zip(resumed.replicas.weights, whole.replicas.weights, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert [line["accuracy"] for line in resumed.metrics] == [line["accuracy"] for line in whole.metrics]


def test_what_workers_that_send_messages_owe_is_added_up_and_what_they_hold_becomes_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    layout = layout_for(model, optimizer, Strategy.parse("async + server + topk(0.5)"))
    files, others = StateFiles(tmp_path, "this"), StateFiles(tmp_path, "another")
    for worker in range(4):
        rows: list[torch.Tensor | None] = [torch.full((8,), 2.0**worker) if worker else None]
        moments = {"weight": {"momentum_buffer": torch.full((2, 3), float(worker))}}
        (others if worker == 3 else files).write(worker, 7, layout, rows, moments)
    merged = files.merge(7, 4, layout)
    assert [total.tolist() for total in merged.residuals if total is not None] == [[6.0] * 8]
    assert merged.moments["weight"]["momentum_buffer"].tolist() == [[1.0] * 3] * 2
    assert merged.missing == [3]
    assert merged.describe(5) == (
        "each begins with one part of 5 of the sum of the residuals and with the mean of the optimiser states; "
        "what worker 3 had is not there and begins anew"
    )
    merged.write_part(tmp_path / "begins.pt", 5)
    (part,) = begin_with(tmp_path / "begins.pt", model, optimizer)
    assert part is not None
    torch.testing.assert_close(5 * part, torch.full((8,), 6.0))
    assert optimizer.state[model.weight]["momentum_buffer"].unique().tolist() == [1.0]
    flip(files.path(2, 7))
    assert files.merge(7, 4, layout).missing == [2, 3], "a damaged file does not count"
    assert files.merge(6, 2, layout).describe(2) == "what workers 0, 1 had is not there and begins anew"
    StateFiles(tmp_path / "elsewhere", "this").write(1, 7, layout, [None], {})
    assert "worker 1: Cannot write" in capsys.readouterr().err
    files.remove_before(8)
    assert [path.name for path in tmp_path.iterdir()] == ["begins.pt"]


@pytest.mark.parametrize("at_last_step", [True, False])
def test_an_evaluation_does_not_count_to_the_time_in_which_a_step_must_end(
    at_last_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered, killed, gather = threading.Event(), threading.Event(), Agreement.gather

    def gathers(self: Agreement, name: str, *given: Any) -> list[str | None]:
        if name == "leave after":
            gathered.set()
        return gather(self, name, *given)

    def tell() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert gathered.wait(60)

    monkeypatch.setattr(Agreement, "gather", gathers)
    monkeypatch.setattr(leaving, "_LOOK_S", 0.01)
    monkeypatch.setattr(leaving.os, "_exit", lambda _: killed.set())
    given = RunSettings.of(workers=2, virtual=True, epochs=3, batch_size=24)

    def watch(progress: Progress) -> None:
        if at_last_step and progress.step == 30:
            tell()

    def on_epoch(line: dict[str, Any]) -> None:
        if not at_last_step:
            tell()
        with monkeypatch.context() as patch:
            patch.setattr(leaving, "_MOST_S", 0.05)
            assert not killed.wait(0.5)

    with pytest.raises(SystemExit) as end:
        run(given, VirtualCluster(2), out=tmp_path, data=load("digits"), watch=watch, on_epoch=on_epoch, leaves=True)
    assert end.value.code == 0
    newest = Checkpoints(tmp_path / "checkpoints", VirtualCluster(2)).newest()
    assert newest is not None
    assert (newest.facts["epoch"], newest.facts["step"]) == (1, 30 if at_last_step else 31)


def test_a_process_whose_others_do_not_tell_their_step_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(leaving.os, "_exit", codes.put)
    others = SimpleNamespace(announce=lambda _: None, announced=lambda _: True, gather=lambda *_: ["1", None])
    cluster: Any = SimpleNamespace(agreement=lambda: others)
    found = leaving.Leaving(cluster)
    try:
        found.start(0)
        assert codes.get(timeout=60) == 143
        assert "other processes have not reported their step" in capsys.readouterr().err
    finally:
        found.close()
