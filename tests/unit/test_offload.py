"""Laws of offload: training with weights in slow memory is training, bit for bit, with few blocks in fast memory at any time."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hocket.errors import HocketError
from hocket.models import cross_entropy, gpt, mlp
from hocket.split.materialize import deferred, materialize
from hocket.split.offload import Offload, offload, refuse_offloaded
from hocket.split.parts import blocks_of

STEPS = 5
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(20, 10, (64, 48, 64)),
    "gpt": lambda: gpt(11, context=8, layers=4, heads=2, width=16),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
}


def batch(kind: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if kind == "mlp":
        return torch.randn(6, 20, generator=generator), torch.randint(10, (6,), generator=generator)
    tokens = torch.randint(11, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, steps: range) -> Iterator[float]:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for t in steps:
        optimizer.zero_grad()
        x, y = batch(kind, t)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.item()


def largest(model: nn.Module, count: int) -> int:
    """Bytes of the weights of the largest blocks."""
    sizes = [sum(p.numel() * p.element_size() for p in b.parameters()) for b in blocks_of(model).values()]
    return sum(sorted(sizes)[-count:])


def pair(kind: str, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    model = MODELS[kind]()
    other = copy.deepcopy(model)
    return model, OPTIMIZERS[optimizer](model.parameters()), other, OPTIMIZERS[optimizer](other.parameters())


@pytest.mark.parametrize("keep", [0, 1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_training_is_the_same_bit_for_bit_with_few_blocks_in_memory(kind: str, optimizer: str, keep: int, tmp_path: Path) -> None:
    plain, plain_optimizer, model, own_optimizer = pair(kind, optimizer)
    losses = list(train(plain, plain_optimizer, kind, range(STEPS)))
    most = largest(model, keep + 1)
    assert most < largest(model, 100)
    seen: list[int] = []
    offloaded = offload(model, own_optimizer, folder=tmp_path, keep=keep)
    for block in blocks_of(model).values():
        for module in block.modules():
            module.register_forward_hook(lambda *_: seen.append(offloaded.resident_bytes))
        for p in block.parameters():
            p.register_hook(lambda _: seen.append(offloaded.resident_bytes))
    assert list(train(model, own_optimizer, kind, range(STEPS))) == losses
    assert 0 < max(seen) <= most
    assert 0 < offloaded.peak_bytes <= most
    assert all(p.isnan().all() for block in offloaded.blocks for p in block.params)
    values = {name: value.clone() for name, value in offloaded.named_values()}
    assert all(torch.equal(value, p) for (name, value), p in zip(values.items(), plain.parameters(), strict=True))
    offloaded.close()
    assert not list(tmp_path.iterdir())
    more = list(train(plain, plain_optimizer, kind, range(STEPS, STEPS + 2)))
    assert list(train(model, own_optimizer, kind, range(STEPS, STEPS + 2))) == more
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_step_need_not_be_called_and_evaluation_changes_nothing() -> None:
    plain, plain_optimizer, model, optimizer = pair("gpt", "adamw")
    offloaded = offload(model, optimizer)
    for t in range(3):
        x, y = batch("gpt", t)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        assert offloaded.resident_bytes == 0
        plain_optimizer.zero_grad()
        cross_entropy(plain(x), y).backward()
        plain_optimizer.step()
        cross_entropy(model(x), y).backward()
    offloaded.close()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


class Half(nn.Module):
    """A block of which a part is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).relu_()


class Odd(nn.Module):
    """A block that is used twice, one that is computed again in the backward pass, one that is unused in part, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(5))
        self.blocks[2] = Half()
        self.blocks[4].requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x) * self.gain
        x = self.blocks[3](self.blocks[4](self.blocks[0](x)))
        x = checkpoint(self.blocks[1], x, use_reentrant=False) + x
        return x + self.blocks[2](x)


@pytest.mark.parametrize("keep", [0, 1])
def test_blocks_in_any_order_used_twice_recomputed_or_in_part(keep: int) -> None:
    model = Odd()
    plain = copy.deepcopy(model)
    optimizers = [OPTIMIZERS["adamw"]([p for p in m.parameters() if p.requires_grad]) for m in (model, plain)]
    offloaded = offload(model, optimizers[0], keep=keep)
    assert [block.name for block in offloaded.blocks] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    for t in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(t))
        losses = [m(x).square().sum() for m in (model, plain)]
        assert losses[0].equal(losses[1])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    offloaded.close()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_model_without_values_is_born_block_by_block() -> None:
    with deferred():
        model, whole = MODELS["gpt"](), MODELS["gpt"]()
    materialize(whole, seed=4)
    offloaded = offload(model, OPTIMIZERS["momentum"](model.parameters()), seed=4)
    x, y = batch("gpt", 0)
    with torch.no_grad():
        assert torch.equal(model(x), whole(x))
    optimizer = OPTIMIZERS["momentum"](whole.parameters())
    cross_entropy(whole(x), y).backward()
    optimizer.step()
    cross_entropy(model(x), y).backward()
    assert all(torch.equal(v, whole.get_parameter(n)) for n, v in offloaded.named_values())
    offloaded.load(dict(MODELS["gpt"]().named_parameters()))
    assert not any(torch.equal(v, whole.get_parameter(n)) for n, v in offloaded.named_values() if v.dim() > 1)
    offloaded.close()


def test_files_go_with_the_offload(tmp_path: Path) -> None:
    model = MODELS["mlp"]()
    offloaded: Offload | None = offload(model, OPTIMIZERS["momentum"](model.parameters()), folder=tmp_path)
    assert len(list(tmp_path.glob("*/*"))) == len(offloaded.blocks)  # type: ignore[union-attr]
    del offloaded, model
    gc.collect()
    assert not list(tmp_path.iterdir())


INTERRUPTED = """
import sys, torch
from hocket.models import mlp
from hocket.split.offload import offload
model = mlp(64, 10, (256,) * 6)
offloaded = offload(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), folder=sys.argv[1])
step = 0
while True:
    model(torch.randn(4, 64)).sum().backward()
    step += 1
    if step == 3:
        print("ready", flush=True)
"""


def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert list(tmp_path.iterdir())
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"to": "moon"}, "slow memory is 'disk'"),
        ({"to": "cpu"}, "in the CPU's memory already"),
        ({"keep": -1}, "a whole number, at least 0"),
        ({"folder": "/nowhere/at/all"}, "there is no such folder"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, object], words: str) -> None:
    model = MODELS["mlp"]()
    with pytest.raises(HocketError, match=words):
        offload(model, OPTIMIZERS["momentum"](model.parameters()), **options)  # type: ignore[arg-type]


def test_models_and_optimisers_that_cannot_be_offloaded_are_refused() -> None:
    model = MODELS["mlp"]()
    with pytest.raises(HocketError, match="has no blocks"):
        offload(nn.Linear(2, 2), OPTIMIZERS["momentum"](nn.Linear(2, 2).parameters()))
    with pytest.raises(HocketError, match="LBFGS"):
        offload(model, torch.optim.LBFGS(model.parameters()))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(HocketError, match="without them"):
        offload(model, optimizer)
    with offload(model, OPTIMIZERS["momentum"](model.parameters())), pytest.raises(HocketError, match="offloaded"):
        refuse_offloaded(model)
    refuse_offloaded(model)
