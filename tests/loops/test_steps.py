"""Loops that do more between two steps than the plain one: closures, replaced data, exceptions, and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hocket
from loops.harness import Loop, Start, flat, refusal
from process.launch import eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, **options)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 12, generator=torch.Generator().manual_seed(100 * step + rank))


# --- passes without a parameter --------------------------------------------------------------------------------------------------


def unused(rank: int, strategy: str, how: str, scaled: bool = False) -> Tensor:
    """Worker 1's third loss depends on no parameter (``how`` is ``nothing``: there is no backward pass at all) or on all by 0."""
    model = net()
    optimizer = sgd(model, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=4.0)
    job = hocket.parallelize(model, optimizer, strategy, scaler=scaler if scaled else None)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        if (rank, step) == (1, 2):
            loss = {"zeros": 0 * loss, "other": torch.ones(1, requires_grad=True).sum(), "nothing": None}[how]
        if loss is not None:
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return flat(job.finish())


@pytest.mark.parametrize(("strategy", "scaled"), [("bulk", False), ("bulk + topk(0.3)", False), ("bulk + sign", True)])
def test_a_worker_that_used_no_parameter_takes_part_with_zeros(loop: Loop, strategy: str, scaled: bool) -> None:
    zeros, other, nothing = (loop(unused, strategy=strategy, scaled=scaled, how=how) for how in ("zeros", "other", "nothing"))
    for worker in range(2):
        assert torch.equal(zeros[worker], zeros[0])
        assert torch.equal(zeros[worker], other[worker])
        assert torch.equal(zeros[worker], nothing[worker])


def clipping(rank: int, first: bool, asks: bool) -> tuple[str, Tensor]:
    """Worker 1 uses no parameter in one of two steps, the first or the second; ``asks``: the loop calls exchange() after it."""
    model = net()
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, "bulk")
    said = ""
    for step in range(2):
        optimizer.zero_grad()
        if rank == 0 or (step == 0) != first:
            model(batch(rank, step)).square().mean().backward()
        if asks:
            job.exchange()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        said += refusal(optimizer.step)
    job.detach()
    return said, flat(model)


@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_came_too_late_to_be_clipped_are_refused(loop: Loop, first: bool) -> None:
    (none, _), (said, _) = loop(clipping, first=first, asks=False)
    assert none == ""
    assert said.startswith("optimizer.step() after a backward pass that used no parameter of this job")
    (none, one), (said, other) = loop(clipping, first=first, asks=True)
    assert none == said == ""
    assert torch.equal(one, other)


# --- closures --------------------------------------------------------------------------------------------------------------------


def closures(rank: int, strategy: str) -> dict[str, Any]:
    """The same loop with ``optimizer.step()`` and with ``optimizer.step(closure)``, as Lightning calls it."""
    found: dict[str, Any] = {"start": flat(net())}
    for closed in (False, True):
        model = net()
        optimizer = sgd(model)
        job = hocket.parallelize(model, optimizer, strategy)
        losses = []
        for step in range(6):

            def closure(step: int = step, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = model(batch(rank, step)).square().mean()
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure) if closed else (closure(), optimizer.step())[0]))
        job.finish()
        found[str(closed)] = flat(model)
        found[f"{closed} losses"] = losses
    return found


@pytest.mark.parametrize("strategy", ["bulk", "local(2)", "diloco(2)", "bulk + server"])
def test_a_step_with_a_closure_is_the_same_step(loop: Loop, strategy: str) -> None:
    for worker in loop(closures, strategy=strategy):
        assert torch.allclose(worker["True"], worker["False"], atol=1e-7)
        assert worker["True losses"] == pytest.approx(worker["False losses"])
        assert float((worker["True"] - worker["start"]).norm()) > 0.01


@pytest.mark.parametrize("strategy", ["async + server", "downpour(2) + server"])
def test_a_closures_gradient_is_the_one_that_is_pushed(loop: Loop, strategy: str) -> None:
    """One worker, whose steps are then in an order of their own."""
    for worker in loop(closures, 1, strategy=f"{strategy}(optimizer=sgd)"):
        assert torch.allclose(worker["True"], worker["False"], atol=1e-7)
        assert float((worker["True"] - worker["start"]).norm()) > 0.01


# --- replaced data ---------------------------------------------------------------------------------------------------------------


def clamped(rank: int, strategy: str, replaced: bool) -> dict[str, Any]:
    """WGAN's clamping, in place or by a new tensor."""
    model = net()
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, strategy)
    for step in range(8):
        optimizer.zero_grad()
        (model(batch(rank, step)) - rank).square().mean().backward()
        optimizer.step()
        for p in model.parameters():
            if replaced:
                p.data = p.data.clamp(-0.2, 0.2)
            else:
                p.data.clamp_(-0.2, 0.2)
    with job.averaged() as mean:
        averaged = flat(mean)
    own = flat(model)
    model.to(torch.float64)
    return {"own": own, "averaged": averaged, "sentence": refusal(optimizer.step)}


@pytest.mark.parametrize("strategy", ["bulk", "local(2)", "local(1) + gossip", "diloco(2)"])
def test_replaced_data_is_exchanged(loop: Loop, strategy: str) -> None:
    in_place = loop(clamped, strategy=strategy, replaced=False)
    replaced = loop(clamped, strategy=strategy, replaced=True)
    for one, other in zip(in_place, replaced, strict=True):
        assert torch.equal(one["own"], other["own"])
        assert torch.equal(one["averaged"], other["averaged"])
        assert one["sentence"].startswith(
            "Parameter 2.bias is float64 (4,) on cpu now, but was float32 (4,) on cpu when the job began"
        )
    assert torch.equal(replaced[0]["averaged"], replaced[1]["averaged"])


# --- an exception in a backward pass ---------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Raises in its backward pass, when told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, now: bool) -> Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.now:
            raise torch.OutOfMemoryError("out of memory")
        return gradient, None


def skipping(rank: int, strategy: str, failing: list[int]) -> dict[str, Any]:
    """In the fourth step some workers run out of memory in the backward pass, before the first layer, and take another batch."""
    model = net()
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, strategy, buckets=hocket.Buckets(1, 1))
    caught = 0
    for step in range(6):
        for attempt in range(2):
            optimizer.zero_grad()
            try:
                x = batch(rank, 10 * attempt + step)
                for k, layer in enumerate(model):
                    x = Fails.apply(layer(x), step == 3 and rank in failing and attempt == 0 and k == 0)
                x.square().mean().backward()
            except torch.OutOfMemoryError:
                caught += 1
                continue
            break
        optimizer.step()
    with job.averaged() as mean:
        averaged = flat(mean)
    steps = job.step
    job.detach()
    return {"own": flat(model), "averaged": averaged, "caught": caught, "steps": steps}


@pytest.mark.parametrize("strategy", ["bulk", "bulk + topk(0.5)", "local(2)", "local(2) + gossip"])
@pytest.mark.parametrize("failing", [[0], [0, 1]])
def test_a_batch_whose_backward_pass_fails_can_be_skipped(loop: Loop, strategy: str, failing: list[int]) -> None:
    workers = loop(skipping, strategy=strategy, failing=failing)
    assert [worker["caught"] for worker in workers] == [int(rank in failing) for rank in (0, 1)]
    assert [worker["steps"] for worker in workers] == [6, 6]
    assert torch.equal(workers[0]["averaged"], workers[1]["averaged"])
    if strategy.startswith("bulk"):
        assert torch.equal(workers[0]["own"], workers[1]["own"])


# --- refused ---------------------------------------------------------------------------------------------------------------------


def refused(rank: int) -> dict[str, str]:
    found = {}
    model = net()
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, "bulk")
    found["twice"] = refusal(hocket.parallelize, model, sgd(model), "bulk")
    model(batch(rank, 0)).sum().backward()
    optimizer.step()
    found["step"] = refusal(optimizer.step)
    job.detach()
    found["again"] = refusal(hocket.parallelize, model, sgd(model), "bulk")

    periodic = net()
    optimizer = sgd(periodic)
    hocket.parallelize(periodic, optimizer, "local(2) + exchange=gradients")
    periodic(batch(rank, 0)).sum().backward()
    found["first"] = refusal(optimizer.step)
    found["second"] = refusal(optimizer.step)

    for name, make in (("adam", torch.optim.Adam), ("rmsprop", torch.optim.RMSprop)):
        other = net()
        found[name] = refusal(hocket.parallelize, other, make(other.parameters(), 1e-3), "bulk + dgc(0.1)")
    other = net()
    wrapped = DistributedDataParallel(other)
    found["ddp"] = refusal(hocket.parallelize, wrapped, sgd(wrapped), "bulk")
    return found


def test_what_would_train_wrongly_is_refused(loop: Loop) -> None:
    first, second = loop(refused)
    assert first == second
    assert first["twice"].startswith("Parameter 0.weight is trained by another job (bulk + allreduce); call detach()")
    assert first["step"].startswith("optimizer.step() without a backward pass since the last step")
    assert first["second"] == first["step"]
    assert first["adam"].startswith("dgc includes the momentum, and Adam has one, too")
    assert first["ddp"].startswith("The model is wrapped in DistributedDataParallel")
    assert first["ddp"].endswith("give its .module.")
    assert first["again"] == first["first"] == first["rmsprop"] == ""


@pytest.mark.parametrize("strategy", ["bulk", "async + server", "local(2) + gossip"])
def test_an_optimiser_of_other_parameters_is_refused_by_simulate(strategy: str) -> None:
    model = nn.Linear(3, 2)
    data = torch.randn(8, 3), torch.randint(2, (8,))
    sentence = refusal(
        hocket.simulate,
        lambda: model,
        nn.functional.cross_entropy,
        data,
        strategy=strategy,
        workers=2,
        batch_size=2,
        optimizer=lambda _: torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1),
    )
    assert sentence.startswith("The function that makes the optimiser did not use the parameters that it was given")


def test_an_optimiser_of_the_models_own_parameters_is_refused_by_simulate() -> None:
    model = nn.Linear(3, 2)
    data = torch.randn(8, 3), torch.randint(2, (8,))
    sentence = refusal(
        hocket.simulate,
        lambda: model,
        nn.functional.cross_entropy,
        data,
        workers=2,
        batch_size=2,
        optimizer=lambda _: torch.optim.SGD(model.parameters(), 0.1),
    )
    assert sentence.startswith("The function that makes the optimiser did not use the parameters that it was given")


# --- an early end ----------------------------------------------------------------------------------------------------------------


def uneven(rank: int, strategy: str, early: int) -> int:
    model = net()
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, strategy)
    for step in range(4 if rank == early else 8):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return job.step


@pytest.mark.parametrize("strategy", ["bulk", "local(1)", "bulk + topk(0.5)"])
@pytest.mark.parametrize("early", [0, 1])
def test_a_loop_that_ends_early_ends_the_others(start: Start, strategy: str, early: int) -> None:
    group = start(uneven, 3, strategy=strategy, early=early)
    codes = group.wait(60)
    assert codes[early] == 0
    for rank in {0, 1, 2} - {early}:
        assert codes[rank] != 0
    assert f"Worker {early} (process {early}) died, ended early" in group.said()


# --- hints -----------------------------------------------------------------------------------------------------------------------


def hints(rank: int, steps: int | None) -> list[str]:
    model = net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hocket.parallelize(model, sgd(model), "bulk + topk(0.01)", steps=steps).finish()
    return [str(w.message) for w in caught]


def test_few_steps_for_a_density_are_mentioned_once(loop: Loop) -> None:
    (sentence,), others = loop(hints, steps=90)
    assert "topk(0.01) sends each value 0.9 times on average in 90 steps" in sentence
    assert others == []
    assert loop(hints, steps=None) == [[], []]


def ahead(rank: int, overlap: int, place: str) -> dict[str, Any]:
    """Both exchange after worker 1's fourth step, which it makes only after worker 0's seventh: worker 0 cannot wait for it."""
    model, flag = torch.nn.Linear(8, 8), Path(place, "ahead")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    job = hocket.parallelize(model, optimizer, f"diloco(4, overlap={overlap})")
    for step in range(1, 9):
        if rank == 1 and step == 4:
            assert eventually(flag.exists, 20), "worker 0 waits for the exchange that should travel"
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        if rank == 0 and step == 4 + overlap - 1:
            flag.touch()
    found = job.summary(all_workers=True)
    job.finish()
    return found


def test_an_exchange_travels_while_a_worker_steps_and_the_ledger_shows_it_hidden(loop: Loop, tmp_path: Path) -> None:
    found = loop(ahead, overlap=4, place=str(tmp_path))[0]
    assert found["exchanges"] == 1  # the second one still travels
    assert found["transfer_hidden_s"] > 0
