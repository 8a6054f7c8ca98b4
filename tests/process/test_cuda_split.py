"""Split models on CUDA: what two processes train there is what they train on the CPU, within rounding."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.models import cross_entropy, gpt
from process.launch import Nursery
from process.meshes import build

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.process,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
MESHES = ("tensor=2", "pipeline=2", "data=2")
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((f"{name} {mesh}", "equal", {"name": name, "mesh": mesh}) for mesh in MESHES for name in ("mlp", "cnn", "vgg11", "gpt")),
    *((f"drop {mesh}", "equal", {"name": "drop", "mesh": mesh}) for mesh in ("tensor=2", "pipeline=2")),
    *((s, "equal", {"name": "gpt", "mesh": "pipeline=2", "schedule": s}) for s in ("naive", "gpipe", "interleaved", "zero-bubble")),
    *((f"dream {name}", "equal", {"name": name, "mesh": "pipeline=2", "schedule": "pipedream"}) for name in ("mlp", "gpt")),
    *((s, "equal", {"name": "gpt", "mesh": "data=2", "strategy": s}) for s in ("local(2) + gossip", "bulk + topk(0.2)")),
    ("two names", "equal", {"name": "tied", "mesh": "pipeline=2", "num_microbatches": 1, "schedule": "gpipe"}),
    ("state on a mesh", "equal", {"name": "mlp", "mesh": "data=2", "sharding": "zero1"}),
    ("sharded state", "sharded", {"sharding": "zero1"}),
    ("untouched", "untouched", {"mesh": "tensor=2"}),
    ("other", "checkpoints", {"name": "gpt", "first": "pipeline=2", "then": "tensor=2"}),
    ("resumed", "resumed", {"name": "gpt", "mesh": "pipeline=2"}),
    ("clipped", "clipped", {"name": "gpt", "mesh": "tensor=2"}),
    ("born pipeline", "born", {"mesh": "pipeline=2"}),
]


REFUSED: list[tuple[str, str, dict[str, Any]]] = [("full", "refused_sharding", {"sharding": "fsdp"})]


@pytest.fixture(scope="module")
def found(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What both processes returned, per case, on either device."""
    results = {}
    for device in ("cpu", "cuda:0"):
        folder = tmp_path_factory.mktemp("split")
        group = nursery.start("process.meshes:main", 2, folder, environ=GPU, wanted=[*CASES, *REFUSED], device=device)
        assert group.wait(300, together=True) == [0] * 2, group.said()
        results[device] = group.results()
    return results


@pytest.mark.parametrize("label", [label for label, _, _ in CASES])
def test_cuda_trains_what_the_cpu_trains(found: dict[str, list[dict[str, Any]]], label: str) -> None:
    for on_cpu, on_cuda in zip(found["cpu"], found["cuda:0"], strict=True):
        expected, got = on_cpu[label], on_cuda[label]
        assert got.keys() == expected.keys()
        whole = expected.get("whole")
        if whole is not None:
            assert all((got["whole"][n] - whole[n]).abs().max() < 1e-4 for n in whole)
        for figure in ("losses", "norm", "again"):
            assert got.get(figure) == pytest.approx(expected.get(figure), abs=1e-4)
        if "ledger" in expected:
            assert got["ledger"]["bytes_sent"] == expected["ledger"]["bytes_sent"]


def test_full_shards_of_cuda_tensors_are_refused_over_gloo(found: dict[str, list[dict[str, Any]]]) -> None:
    assert [worker["full"]["sentence"] for worker in found["cpu"]] == ["", ""]
    for worker in found["cuda:0"]:
        assert "needs NCCL" in worker["full"]["sentence"]
        assert "use ZeRO-1" in worker["full"]["sentence"]


def test_training_there_moves_the_weights(found: dict[str, list[dict[str, Any]]]) -> None:
    start = dict(build("gpt").state_dict())
    ended = found["cuda:0"][0]["gpt tensor=2"]["whole"]
    assert max(float((ended[n] - start[n]).abs().max()) for n in start) > 1e-3


@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_offloaded_weights_train_on_cuda_as_resident_ones_do(to: str, kind: str) -> None:
    def train(offloaded: bool) -> tuple[list[float], dict[str, Tensor], int]:
        torch.manual_seed(0)
        model: nn.Module = gpt(11, context=8, layers=4, heads=2, width=16).cuda()
        make = {"momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, 0.01)}[kind]
        optimizer = make(model.parameters())
        held = hocket.offload(model, optimizer, to=to) if offloaded else None
        losses = []
        for step in range(5):
            tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step)).cuda()
            optimizer.zero_grad()
            loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        peak = 0 if held is None else held.peak_bytes
        if held is not None:
            held.close()
        return losses, {n: t.detach().cpu() for n, t in model.state_dict().items()}, peak

    losses, state, _ = train(False)
    got, ended, peak = train(True)
    assert got == pytest.approx(losses, abs=1e-5)
    assert all((ended[n] - state[n]).abs().max() < 1e-4 for n in state)
    assert 0 < peak < sum(t.numel() * t.element_size() for t in state.values())
