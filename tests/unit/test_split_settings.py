"""Options of ``hocket train`` that say how a model is split or sharded: what they mean, and the one sentence a bad one meets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hocket.cli import main as cli
from hocket.cluster.layout import Layout
from hocket.errors import HocketError
from hocket.train.plan_file import read_plan
from hocket.train.run import describe_run
from hocket.train.runtimes.fsdp import refuse_fsdp_on
from hocket.train.settings import RunSettings

STAGED, SPLIT = ["--mesh", "pipeline=2"], ["--mesh", "tensor=2"]
FILES = {
    "good.toml": 'blocks.0.attention = "heads"\n"blocks.*.mlp" = "whole"\n[head]\n1 = "columns"\n',
    "broken.toml": "1 = columns\n",
    "kind.toml": '1 = "colums"\n',
    "number.toml": "1 = 2\n",
    "empty.toml": "# nothing\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cut", "3"], "--cut is for a model cut into stages; add --mesh pipeline=2"),
        (["--pipe", "gpipe", "--measure", "flops"], "--pipe, --measure are for"),
        ([*SPLIT, "--stages-per-rank", "2"], "the mesh tensor=2 has one stage; add pipeline=2"),
        ([*STAGED, "--stages-per-rank", "2"], "use interleaved"),
        ([*STAGED, "--pipe", "interleaved", "--stages-per-rank", "0"], "at least 1; got 0"),
        ([*STAGED, "--num-microbatches", "1"], "give it at least 2"),
        ([*STAGED, "--measure", "minutes"], "use seconds"),
        ([*STAGED, "--cut", "1,,2"], "with commas between them"),
        (["--plan", "good.toml"], "add --mesh tensor=2"),
        ([*STAGED, "--plan", "good.toml"], "add tensor=2"),
        ([*SPLIT, "--plan", "none.toml"], "cannot be read (No such file or directory)"),
        ([*SPLIT, "--plan", "broken.toml"], "broken.toml is not a TOML file"),
        ([*SPLIT, "--plan", "kind.toml"], "did you mean 'columns'?"),
        ([*SPLIT, "--plan", "number.toml"], "has 2 for '1'. Kinds are columns, rows"),
        ([*SPLIT, "--plan", "empty.toml"], "names no module"),
        (["--zero", "2"], "shards the optimiser's state"),
        (["--zero", "1", "--strategy", "local(4)"], "needs equal replicas"),
        (["--zero", "1", "--strategy", "async + server"], "workers are asynchronous"),
        (["--fsdp", "--strategy", "bulk + topk(0.1)"], "or ZeRO-1"),
        (["--zero", "1", "--virtual"], "leave it or --virtual out"),
        (["--fsdp", "--mesh", "data=2"], "leave --mesh out"),
        (["--fsdp", "--workers", "2", "--exact"], "FSDP2; leave --balance"),
        (["--zero", "1", "--optimizer", "sandblaster"], "--zero: sandblaster"),
        ([*SPLIT, "--plan", "good.toml", "--optimizer", "sandblaster"], "--plan: sandblaster"),
    ],
)
def test_a_bad_option_meets_one_sentence(arguments: list[str], words: str) -> None:
    with pytest.raises(HocketError) as caught:
        cli.app(["train", "--max-steps", "1", *arguments], standalone_mode=False)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_is_names_or_patterns_and_kinds() -> None:
    assert read_plan("good.toml") == {"blocks.0.attention": "heads", "blocks.*.mlp": "whole", "head.1": "columns"}


def test_a_run_is_described_by_what_its_plan_says_not_by_the_file() -> None:
    settings = RunSettings.of(mesh="tensor=2,pipeline=2", plan_file="good.toml", cut="3, 4", measure="flops")
    described = describe_run(settings, {}, 1, Layout(()))
    assert described["plan"] == read_plan("good.toml")
    assert "plan_file" not in described
    assert (described["cut"], described["measure"], described["shard"]) == ("3, 4", "flops", None)
    assert settings.split.points == ["3", "4"]


@pytest.mark.parametrize(
    ("device", "backend", "refused"), [("cuda", "gloo", True), ("cuda", "nccl", False), ("cpu", "gloo", False)]
)
def test_full_shards_of_cuda_tensors_need_nccl(device: str, backend: str, refused: bool) -> None:
    where = SimpleNamespace(device=torch.device(device), backend=backend)
    if not refused:
        refuse_fsdp_on(where)
        return
    with pytest.raises(HocketError, match=r"FSDP2 on CUDA needs NCCL.* over gloo; use ZeRO-1, or hocket\.init"):
        refuse_fsdp_on(where)
