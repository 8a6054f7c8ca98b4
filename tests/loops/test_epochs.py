"""The order of data over epochs and checkpoints, steps of fewer passes, and models that nobody needs any more."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from loops.harness import Loop, flat, refusal
from loops.test_steps import batch, net, sgd

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]
GUIDE = Path(__file__).parents[2] / "docs/guide"


def digits(samples: int = 23) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 12, generator=torch.Generator().manual_seed(3)), torch.arange(samples))


# --- epochs ----------------------------------------------------------------------------------------------------------------------


def rebuilt(rank: int) -> list[list[int]]:
    """The samples of each epoch; the loader, and in the end its data set, are built anew for each."""
    data, found = digits(), []
    for epoch in range(4):
        loader = DataLoader(data if epoch < 2 else digits(), batch_size=5, shuffle=True)
        found.append([int(k) for _, numbers in hocket.distribute(loader) for k in numbers])
    return found


def test_a_loader_built_anew_for_each_epoch_gets_another_order_each_time(loop: Loop) -> None:
    first, second = loop(rebuilt)
    assert len({tuple(epoch) for epoch in first}) == 4
    for one, other in zip(first, second, strict=True):
        assert len({*one, *other}) == len(one) + len(other) >= 22


def left_alone(rank: int) -> dict[str, bool]:
    """Whether a model, and a loader's data set, are freed though the job that has ended is not."""
    found = {}
    for strategy in ("bulk + topk(0.5)", "local(2) + gossip", "async + server", "zero1"):
        model, data, x = net(), digits(), None
        optimizer = sgd(model, momentum=0.9)
        sharded = strategy == "zero1"
        job = hocket.parallelize(model, optimizer, "bulk" if sharded else strategy, sharding="zero1" if sharded else None)
        for x, _ in hocket.distribute(DataLoader(data, batch_size=5, shuffle=True)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        with job.averaged():
            pass
        job.finish()
        refs = [weakref.ref(held) for held in (model, model[0].weight, optimizer, data)]
        del model, data, optimizer, x
        gc.collect()
        found[strategy] = [ref() is None for ref in refs]
        assert job.summary()["seconds"] > 0
        assert refusal(lambda job=job: job.model).startswith("The job has ended, and its model or optimiser was freed")
        assert refusal(job.averaged().__enter__).startswith("This job has ended")
    return found


def test_a_job_that_has_ended_keeps_no_model_alive(loop: Loop) -> None:
    for worker in loop(left_alone):
        assert {name: all(freed) for name, freed in worker.items()} == dict.fromkeys(worker, True)


def split_left_alone(rank: int) -> list[bool]:
    """Whether the parts of a model that a job had split are freed with the job, of which nothing else knows."""
    found = []
    for mesh, pipeline in (("tensor=2", hocket.Pipeline()), ("pipeline=2", hocket.Pipeline(loss=nn.MSELoss(), sample=batch(0, 0)))):
        model = net()
        optimizer = sgd(model, momentum=0.9)
        job = hocket.parallelize(model, optimizer, mesh=mesh, pipeline=pipeline)
        if mesh == "tensor=2":
            model(batch(0, 0)).square().mean().backward()
            optimizer.step()
        else:
            job.train(batch(0, 0), torch.zeros(5, 4))
        job.finish()
        refs = [weakref.ref(held) for held in (job.model, optimizer, *job.model.parameters())]
        del model, optimizer, job
        gc.collect()
        found.append(all(ref() is None for ref in refs))
    return found


def test_a_split_model_lives_as_long_as_its_job(loop: Loop) -> None:
    assert loop(split_left_alone) == [[True, True], [True, True]]


# --- checkpoints -----------------------------------------------------------------------------------------------------------------


def resumed(rank: int, strategy: str, recipe: str, where: str, stop: int, rebuilds: bool) -> dict[str, Any]:
    """Three epochs, once without a stop and once stopped after ``stop`` steps, saved and resumed by the guide's functions."""
    data, found = digits(), {}
    for name in ("straight", "first", "second"):
        hocket.init(device="cpu", liveness_timeout_s=5.0)
        torch.manual_seed(11)
        model = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        optimizer = sgd(model, momentum=0.9)
        job = hocket.parallelize(model, optimizer, strategy)
        scope: dict[str, Any] = {"os": __import__("os"), "torch": torch, "model": model, "optimizer": optimizer, "job": job}
        exec(recipe, scope)
        if name == "second":
            torch.manual_seed(99)
            scope["resume"](f"{where}/checkpoint")
        loader = hocket.distribute(DataLoader(data, batch_size=5, shuffle=True))
        samples = found.setdefault(name, [])
        while job.step < 9 and not (name == "first" and job.step == stop):
            if rebuilds:
                loader = hocket.distribute(DataLoader(data, batch_size=5, shuffle=True))
            for x, numbers in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                samples += numbers.tolist()
                if name == "first" and job.step == stop:
                    scope["save"](f"{where}/checkpoint")
                    break
        found[f"{name} weights"] = flat(job.finish())
    return found


@pytest.mark.parametrize(("stop", "rebuilds"), [(3, False), (4, False), (8, True)])
@pytest.mark.parametrize("strategy", ["bulk + topk(0.2)", "local(2)"])
def test_the_guides_recipe_resumes_as_if_there_had_been_no_stop(
    loop: Loop, tmp_path: Path, strategy: str, stop: int, rebuilds: bool
) -> None:
    recipe = re.findall(r"```python\n(.*?)```", (GUIDE / "checkpoints.md").read_text(), re.DOTALL)[0]
    workers = loop(resumed, strategy=strategy, recipe=recipe, where=str(tmp_path), stop=stop, rebuilds=rebuilds)
    for worker in workers:
        assert worker["first"] + worker["second"] == worker["straight"]
        assert torch.equal(worker["second weights"], worker["straight weights"])


# --- by demand -------------------------------------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def dealt(rank: int, strategies: list[str], even: bool) -> dict[str, list[list[int]]]:
    """Two epochs; worker 1 keeps its first batch of each until worker 0 has ended that epoch, which begins once it has it."""
    found: dict[str, list[list[int]]] = {}
    for strategy in strategies:
        model = net()
        optimizer = sgd(model)
        job = hocket.parallelize(model, optimizer, strategy)
        store = dist.PrefixStore(f"{strategy}/{even}", dist.distributed_c10d._get_default_store())
        loader = hocket.distribute(DataLoader(digits(), batch_size=3, shuffle=True), even=even)
        for epoch in range(2):
            if rank == 0:
                store.get(f"held {epoch}")
            samples = []
            for number, (x, numbers) in enumerate(loader):
                samples += numbers.tolist()
                if rank == 1 and number == 0:
                    store.set(f"held {epoch}", "")
                    store.get(f"over {epoch}")
                train(model, optimizer, x)
            if rank == 0:
                store.set(f"over {epoch}", "")
            found.setdefault(strategy, []).append(samples)
        assert len(loader) == 4
        job.finish()
    return found


def test_without_waiting_a_fast_worker_gets_more_and_every_sample_is_given_once(loop: Loop) -> None:
    strategies = ["async + server", "async + gossip"]
    fast, slow = loop(dealt, strategies=strategies, even=False)
    for strategy in strategies:
        for many, few in zip(fast[strategy], slow[strategy], strict=True):
            assert sorted([*many, *few]) == list(range(23))
            assert len(few) == 3
        assert fast[strategy][0] != fast[strategy][1]


def test_a_loop_may_have_even_parts(loop: Loop) -> None:
    strategy = "async + gossip"
    first, second = ([len(samples) for samples in worker[strategy]] for worker in loop(dealt, strategies=[strategy], even=True))
    assert (first, second) == ([12, 12], [11, 11])


def stopped(rank: int) -> list[int]:
    """Samples of an epoch that is saved when worker 0 has had two batches and worker 1 one, and then resumed."""
    samples, state = [], None
    for _ in range(2):
        hocket.init(device="cpu", liveness_timeout_s=5.0)
        model = net()
        optimizer = sgd(model)
        job = hocket.parallelize(model, optimizer, "async + gossip")
        if state is not None:
            job.load_state_dict(state)
        for number, (x, numbers) in enumerate(hocket.distribute(DataLoader(digits(), batch_size=3, shuffle=True))):
            samples += numbers.tolist()
            train(model, optimizer, x)
            if state is None and number == 1 - rank:
                dist.barrier()
                state = job.state_dict()
                break
        dist.barrier()
        job.finish()
    return samples


def test_an_epoch_dealt_by_demand_is_resumed_where_all_workers_were(loop: Loop) -> None:
    first, second = loop(stopped)
    assert sorted([*first, *second]) == list(range(23))


# --- accumulation ----------------------------------------------------------------------------------------------------------------


def accumulating(rank: int, strategy: str, recipe: str) -> dict[str, Any]:
    """Two epochs of the guide's loop, with 6 batches and 4 passes per step; and all passes of a step as one mini-batch."""
    found: dict[str, Any] = {}
    data = TensorDataset(digits(60)[:][0], torch.zeros(60, dtype=torch.long))
    loader, loss_fn = DataLoader(data, batch_size=5), nn.CrossEntropyLoss()
    setup, epoch = recipe.replace('"bulk"', f'"{strategy}"').split("\n", 1)
    for name in ("passes", "whole"):
        model = net()
        optimizer = sgd(model)
        if name == "passes":
            scope = {"hocket": hocket, "model": model, "optimizer": optimizer, "loader": loader, "loss_fn": loss_fn}
            exec(setup, scope)
            job, steps = scope["job"], []
            for _ in range(2):
                exec(epoch, scope)
                steps.append(job.step)
        else:
            job, steps = hocket.parallelize(model, optimizer, strategy), []
            for _ in range(2):
                batches = list(hocket.distribute(loader))
                for part in (batches[:4], batches[4:]):
                    sum(loss_fn(model(x), y) / 4 for x, y in part).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                steps.append(job.step)
        found[name], found[f"{name} steps"] = flat(job.finish()), steps
    return found


@pytest.mark.parametrize("strategy", ["bulk", "bulk + topk(0.3)", "local(2)", "bulk + server"])
def test_an_epochs_last_step_may_have_fewer_passes(loop: Loop, strategy: str) -> None:
    text = (GUIDE / "batches-and-precision.md").read_text()
    recipe = next(code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "accumulate=4" in code)
    first, second = loop(accumulating, strategy=strategy, recipe=recipe)
    assert torch.equal(first["passes"], second["passes"])
    for worker in (first, second):
        assert worker["passes steps"] == worker["whole steps"] == [2, 4]
        assert torch.allclose(worker["passes"], worker["whole"], atol=1e-6)


def clipping(rank: int) -> dict[str, Any]:
    """A step of two passes of four, exchanged before it is clipped; and one with a scaler that is not."""
    found = {}
    for accumulate in (1, 4):
        model = net()
        optimizer = sgd(model)
        job = hocket.parallelize(model, optimizer, "bulk", accumulate=accumulate)
        losses = [model(batch(rank, step)).square().mean() for step in range(2)]
        for loss in losses if accumulate == 4 else [sum(losses)]:
            loss.backward()
        if accumulate == 4:
            job.exchange()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        found[accumulate] = flat(job.finish())
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, "bulk", accumulate=4, scaler=scaler)
    scaler.scale(model(batch(rank, 0)).square().mean()).backward()
    found["scaled"] = refusal(scaler.step, optimizer)
    return found


def test_a_shorter_step_can_be_exchanged_before_it_is_clipped(loop: Loop) -> None:
    for worker in loop(clipping):
        assert torch.allclose(worker[1], worker[4], atol=1e-7)
        assert "call job.exchange() before scaler.step" in worker["scaled"]


def clipped(rank: int, asks: bool) -> Tensor:
    """Two passes make a step; ``asks``: the loop calls exchange() before each clip, as if some steps were shorter."""
    torch.manual_seed(7)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = hocket.parallelize(model, optimizer, "bulk + topk(0.2)", accumulate=2)
    own = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(5, 6, generator=own)).square().mean().backward()
        if asks:
            job.exchange()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    job.finish()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_what_was_exchanged_is_not_exchanged_again(loop: Loop) -> None:
    for plain, asked in zip(loop(clipped, asks=False), loop(clipped, asks=True), strict=True):
        assert torch.equal(plain, asked)
