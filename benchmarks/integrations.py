"""What each integration adds to a step: the same training in a plain loop, and inside other people's loops.

    torchrun --nproc-per-node 2 benchmarks/integrations.py

Every line trains a small CNN (32×32×3, batch 100 per worker) with the same strategy; medians of steps, in turns. ``overhead`` is
relative to the plain loop with ``hocket.parallelize``; it holds the framework's own loop as well, so the last column has the same
loop with the framework's DDP in place of Hocket, where it has one. (Needs the extras lightning and hf.)
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.models import cnn

STEPS, SKIPPED, BATCH = 24, 4, 100
STRATEGY = "bulk + allreduce"


class Clock:
    """Seconds between the steps of an optimiser."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_post_hook(lambda *_: self.stamps.append(time.perf_counter()))
        return optimizer

    @property
    def steps(self) -> list[float]:
        return [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)][SKIPPED:]


def made() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(dist.get_rank())
    x, y = torch.randn(BATCH * STEPS, 3, 32, 32, generator=draw), torch.randint(10, (BATCH * STEPS,), generator=draw)
    return cnn((3, 32, 32), 10), TensorDataset(x, y)


def sgd(model: nn.Module, clock: Clock) -> torch.optim.Optimizer:
    return clock.on(torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))


def batches(data: TensorDataset) -> Iterator[tuple[Tensor, Tensor]]:
    yield from DataLoader(data, BATCH)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset) -> None:
    for x, y in batches(data):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def plain(strategy: str, clock: Clock) -> None:
    model, data = made()
    hocket.init(device="cpu")
    optimizer = sgd(model, clock)
    job = hocket.parallelize(model, optimizer, strategy)
    loop(model, optimizer, data)
    job.finish()


def ddp(strategy: str, clock: Clock, hook: bool) -> None:
    model, data = made()
    wrapped = DistributedDataParallel(model)
    if hook:
        wrapped.register_comm_hook(*hocket.ddp_hook(strategy))
    loop(wrapped, sgd(wrapped, clock), data)


def on_lightning(strategy: str, clock: Clock, ours: bool) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    from hocket.integrations.lightning import HocketStrategy

    inner, data = made()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = inner

        def training_step(self, batch: Any, _: int) -> Tensor:
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self, clock)

    trainer = lightning.Trainer(
        strategy=HocketStrategy(strategy) if ours else DDPStrategy(),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        use_distributed_sampler=False,
        barebones=True,
    )
    trainer.fit(Module(), DataLoader(data, BATCH))


def on_fabric(strategy: str, clock: Clock, ours: bool) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from hocket.integrations.fabric import FabricHocketStrategy

    fabric = Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=FabricHocketStrategy(strategy) if ours else DDPStrategy()
    )
    fabric.launch()
    model, data = made()
    model, optimizer = fabric.setup(model, sgd(model, clock))
    for x, y in batches(data):
        optimizer.zero_grad()
        fabric.backward(cross_entropy(model(x), y))
        optimizer.step()
    if ours:
        fabric.strategy.finish()


def on_accelerate(strategy: str, clock: Clock, ours: bool) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hocket.integrations.accelerate import HocketAccelerator

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    parallel = HocketAccelerator(accelerator, strategy) if ours else None
    model, data = made()
    model, optimizer = accelerator.prepare(model, sgd(model, clock))
    job = None if parallel is None else parallel.begin(model, optimizer)
    for x, y in batches(data):
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(x), y))
        optimizer.step()
    if job is not None:
        job.finish()


class Labelled(nn.Module):
    """As models of transformers are called."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.net(x), labels)}


def on_trainer(strategy: str, clock: Clock, ours: bool) -> None:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    from hocket.integrations.transformers import attach

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    model, data = made()
    model = Labelled(model)
    rows = [{"x": x, "labels": y} for x, y in data] * dist.get_world_size()
    options: dict[str, Any] = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "use_cpu": True, "disable_tqdm": True}
    options |= {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "max_grad_norm": 0.0}
    given = TrainingArguments("/tmp/hocket-trainer", **options)
    trainer = Trainer(model, given, train_dataset=rows, optimizers=(sgd(model, clock), None))
    if ours:
        attach(trainer, strategy)
    trainer.train()


Row = tuple[Callable[..., None], tuple[Any, ...]]
ROWS: dict[str, Row] = {
    "plain loop": (plain, ()),
    "DDP": (ddp, (False,)),
    "DDP with hocket.ddp_hook": (ddp, (True,)),
    "Lightning Trainer": (on_lightning, (True,)),
    "Lightning Trainer, its DDP": (on_lightning, (False,)),
    "Lightning Fabric": (on_fabric, (True,)),
    "Lightning Fabric, its DDP": (on_fabric, (False,)),
    "Accelerate": (on_accelerate, (True,)),
    "Accelerate, its DDP": (on_accelerate, (False,)),
    "Hugging Face Trainer": (on_trainer, (True,)),
    "Hugging Face Trainer, its DDP": (on_trainer, (False,)),
}
BESIDE = {"DDP with hocket.ddp_hook": "DDP"} | {name: f"{name}, its DDP" for name in ROWS if f"{name}, its DDP" in ROWS}


def measure(rounds: int, strategy: str) -> dict[str, list[float]]:
    """Seconds of the steps of every row."""
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in range(rounds):
        for name, (function, options) in ROWS.items():
            clock = Clock()
            function(strategy, clock, *options)
            found[name] += clock.steps
            hocket.shutdown()
            gc.collect()
            dist.barrier()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategy", default=STRATEGY)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    found = measure(arguments.rounds, arguments.strategy)
    if dist.get_rank() == 0:
        medians = {name: statistics.median(steps) for name, steps in found.items()}
        print(f"{arguments.strategy}, {dist.get_world_size()} workers, {arguments.rounds} rounds of {STEPS - 1 - SKIPPED} steps")
        print(f"{'':30} {'ms a step':>10} {'overhead':>10} {'over its DDP':>13}")
        for name, median in medians.items():
            over = f"{median / medians['plain loop'] - 1:+.1%}"
            own = f"{median / medians[BESIDE[name]] - 1:+.1%}" if name in BESIDE else ""
            print(f"{name:30} {1e3 * median:10.2f} {over:>10} {own:>13}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
