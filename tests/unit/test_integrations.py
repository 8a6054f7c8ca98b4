"""Loggers, and models that start from files; the frameworks are in tests/process/test_integrations.py."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import hocket
from hocket.cluster.virtual import VirtualCluster
from hocket.data import load
from hocket.errors import HocketError
from hocket.files import read_safetensors, safetensors
from hocket.integrations.loggers import Logger, Loggers, check_loggers, open_loggers, scalars
from hocket.integrations.workers import together
from hocket.train.run import run
from hocket.train.settings import RunSettings

LINES = [
    {"epoch": 1, "loss": 2.0, "accuracy": 0.5, "bytes_sent": 100, "wait_s": None, "staleness": {"1": 4}},
    {"epoch": 2, "loss": 1.0, "accuracy": 0.7, "bytes_sent": 120, "step_times": {"p50_s": [0.1, 0.4], "slowest": 1}},
]


def write(folder: Path, *names: str, mode: str | None = None) -> None:
    with open_loggers(names, {"strategy": "local(4)", "seed": 0}, folder, mode) as log:
        for line in LINES:
            log.epoch(line)


def test_an_option_that_is_now_a_part_of_check_is_refused_by_name() -> None:
    with pytest.raises(HocketError, match=r"nonfinite='skip' is a part of check=; use check=hocket\.Checks"):
        together("bulk", "Lightning", {"nonfinite": "skip"})


def test_lines_and_tensorboard_hold_every_figure(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, "jsonl", f"tensorboard:{tmp_path / 'tb'}")
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [{"run": {"strategy": "local(4)", "seed": 0}}, *LINES]
    found = EventAccumulator(str(tmp_path / "tb"))
    found.Reload()
    for name in {name for line in LINES for name in scalars(line)}:
        lines = [line for line in LINES if name in scalars(line)]
        assert [event.step for event in found.Scalars(name)] == [line["epoch"] for line in lines]
        assert [event.value for event in found.Scalars(name)] == pytest.approx([scalars(line)[name] for line in lines])


def test_weights_and_biases_writes_a_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    write(tmp_path, "wandb:project", mode="offline")
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_mlflow_has_the_figures_in_its_store(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    write(tmp_path, "mlflow")
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        assert store.execute("select step, value from metrics where key = 'loss' order by step").fetchall() == [(1, 2.0), (2, 1.0)]
        assert store.execute("select status from runs").fetchall() == [("FINISHED",)]


def test_a_logger_that_fails_is_left_out_and_the_others_go_on() -> None:
    class Broken(Logger):
        def epoch(self, metrics: Any) -> None:
            raise OSError("no space left")

        def close(self, failed: bool = False) -> None:
            raise OSError("no space left")

    class Kept(Logger):
        seen: ClassVar[list[Any]] = []

        def epoch(self, metrics: Any) -> None:
            self.seen.append(metrics["epoch"])

        def close(self, failed: bool = False) -> None:
            self.seen.append("closed")

    with Loggers([Broken(), Kept()]) as loggers:
        with pytest.warns(UserWarning, match="Broken failed .OSError: no space left. and gets no more figures"):
            loggers.epoch({"epoch": 1})
        loggers.epoch({"epoch": 2})
    assert Kept.seen == [1, 2, "closed"]


def test_a_logger_that_cannot_be_meets_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hocket.HocketError, match="did you mean 'tensorboard'"):
        check_loggers(["tensorbord"])
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(hocket.HocketError, match=r"pip install 'hocket\[tensorboard\]'"):
        check_loggers(["jsonl", "tensorboard"])
    monkeypatch.setitem(sys.modules, "wandb", nn)  # any module: the mode is judged without it
    with pytest.raises(hocket.HocketError, match=r"WANDB_MODE=ofline.*did you mean 'offline'"):
        check_loggers(["wandb"], "ofline")
    (tmp_path / "file").write_text("")
    with pytest.raises(hocket.HocketError, match="Cannot write"):
        open_loggers([f"jsonl:{tmp_path / 'file' / 'log'}"])


def test_a_folder_that_tensorboard_cannot_write_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(hocket.HocketError, match="Cannot write into"):
        open_loggers([f"tensorboard:{tmp_path / 'file' / 'log'}"])


# --- models that start from files --------------------------------------------------------------------------------------------


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_run_starts_from_the_weights_that_another_left(tmp_path: Path) -> None:
    settings = RunSettings.of(strategy="local(2)", workers=2, virtual=True, max_steps=2, batch_size=50)
    run(settings, VirtualCluster(2), out=tmp_path / "first")
    file = tmp_path / "first" / "model.safetensors"
    saved, data = read_safetensors(file.read_bytes()), load("digits")
    for source in (file, file.parent):
        built = settings.changed(pretrained=str(source), seed=5).build(data)
        assert all(torch.equal(tensor, saved[name]) for name, tensor in built.state_dict().items())
    record = settings.changed(pretrained=str(file)).recorded()
    assert RunSettings.from_recorded(record).pretrained == str(file)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    data = load("digits")

    def said(pretrained: Path, model: str = "mlp") -> str:
        with pytest.raises(hocket.HocketError) as error:
            RunSettings.of(pretrained=str(pretrained), model=model).build(data)
        return str(error.value)

    state = RunSettings.of().build(data).state_dict()
    name = next(iter(state))
    for case, tensors in {
        "odd": {**state, "head": torch.zeros(1)},
        "wrong": {**state, name: torch.zeros(3)},
        "missing": {n: t for n, t in state.items() if n != name},
    }.items():
        (tmp_path / case).write_bytes(safetensors(tensors))
    assert "has 'head', which the model lacks" in said(tmp_path / "odd")
    assert f"'{name}' has the shape (3,)" in said(tmp_path / "wrong")
    assert f"lacks '{name}'" in said(tmp_path / "missing")
    assert "Cannot read" in said(tmp_path / "nowhere.safetensors")
    (tmp_path / "empty").mkdir()
    assert "holds no *.safetensors" in said(tmp_path / "empty")
    (tmp_path / "damaged").write_bytes(b"no weights")
    assert "damaged" in said(tmp_path / "damaged")


def test_of_adapters_only_these_travel(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=256, n_positions=256, n_embd=32, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("One melody shared out among several voices. " * 400)
    sent = {}
    for rank in (None, 2):
        given = {"data": f"text:{tmp_path / 'text.txt'}", "model": f"hf:{tmp_path / 'model'}", "lora": rank}
        settings = RunSettings.of(workers=2, virtual=True, max_steps=2, batch_size=4, **given)
        training = run(settings, VirtualCluster(2))
        sent[rank] = training.metrics[-1]["bytes_sent"]
    assert all("lora_" in slot.name for bucket in training.replicas.layout.buckets for slot in bucket.slots)
    assert sent[2] < sent[None] / 15
    with pytest.raises(hocket.HocketError, match="LoRA adapts language models of transformers"):
        RunSettings.of(lora=4).build(load("digits"))
