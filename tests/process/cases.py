"""What four real workers do for tests/process/test_job.py: each case returns what its law is about, one dict per worker."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.cluster import point_to_point
from hocket.cluster.virtual import VirtualCluster
from hocket.data import load
from hocket.data.partition import Partition
from hocket.train.checks import check_device
from process.equality import digits

WORKERS = 4
CASES: dict[str, Callable[[int], dict[str, Any]]] = {}
SMALL: dict[str, Any] = {"buckets": hocket.Buckets(1, 1)}  # a bucket for each parameter


def case(function: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    CASES[function.__name__] = function
    return function


def main(rank: int, folder: str, names: list[str]) -> None:
    """Run the named cases one after another and save what they return."""
    hocket.init(device="cpu", exact=True)
    results = {}
    for name in names:
        torch.manual_seed(7)
        results[name] = CASES[name](rank)
    torch.save(results, f"{folder}/{rank}.pt")


# --- parts -----------------------------------------------------------------------------------------------------------------


def net(seed: int = 7) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=momentum)


def batch(step: int, rank: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """Worker ``rank``'s samples at a step."""
    x, y = digits()
    start = (step * WORKERS + rank) * size % (len(x) - WORKERS * size)
    return x[start : start + size], y[start : start + size]


def everyone(step: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """All workers' samples at a step."""
    parts = [batch(step, rank, size) for rank in range(WORKERS)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range, **zero: Any) -> None:
    for t in steps:
        optimizer.zero_grad(**zero)
        x, y = batch(t, rank)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def grads(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.detach().flatten().clone() for p in model.parameters() if p.grad is not None])


def own_gradient(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | None]:
    """The gradients of a copy that no job knows of."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    loss(alone).backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in alone.named_parameters()}


def refusal(function: Callable[[], Any]) -> str:
    """The sentence with which all workers are refused."""
    try:
        function()
    except hocket.HocketError as error:
        return str(error)
    return ""


# --- bulk equals what it should --------------------------------------------------------------------------------------------


@case
def ddp(rank: int) -> dict[str, Any]:
    theirs, ours = net(), net()
    wrapped = DistributedDataParallel(theirs)
    optimizers = sgd(theirs), sgd(ours)
    job = hocket.parallelize(ours, optimizers[1], "bulk + allreduce")
    train(wrapped, optimizers[0], rank, range(20))
    train(ours, optimizers[1], rank, range(20))
    job.detach()
    return {"ddp": flat(theirs), "hocket": flat(ours), "start": flat(net())}


class Mixed(nn.Module):
    """Two dtypes, a frozen layer, tied weights, a layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(64, 12), nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.wide = nn.Linear(12, 12).double()
        self.again, self.head = nn.Linear(12, 12, bias=False), nn.Linear(12, 10)
        self.tied = nn.Linear(12, 12)
        self.tied.weight = self.again.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.first(x.flatten(1)).relu())
        x = self.wide(x.double()).float().relu()
        return self.head(self.tied(self.again(x).relu()))


def mixed_optimizer(model: Mixed) -> tuple[torch.optim.Optimizer, Any]:
    head = {id(p) for p in model.head.parameters()}
    others = [p for p in model.parameters() if id(p) not in head]
    optimizer = torch.optim.Adam([{"params": others}, {"params": list(model.head.parameters()), "lr": 0.02}], 0.003)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


@case
def any_model(rank: int) -> dict[str, Any]:
    """Groups, schedule, frozen, tied and mixed dtypes, against plain training on everybody's samples."""
    torch.manual_seed(7)
    ours = Mixed()
    plain = copy.deepcopy(ours)
    start = flat(ours)
    optimizer, schedule = mixed_optimizer(ours)
    hocket.parallelize(ours, optimizer, "bulk", buckets=hocket.Buckets(500, 500))
    theirs, their_schedule = mixed_optimizer(plain)
    for t in range(10):
        optimizer.zero_grad()
        x, y = batch(t, rank)
        F.cross_entropy(ours(x), y).backward()
        optimizer.step()
        schedule.step()
        theirs.zero_grad()
        x, y = everyone(t)
        F.cross_entropy(plain(x), y).backward()
        theirs.step()
        their_schedule.step()
    rates = [g["lr"] for g in optimizer.param_groups]
    return {"ours": flat(ours), "plain": flat(plain), "start": start, "rates": rates, "tied": ours.tied.weight is ours.again.weight}


@case
def replicas_start_equal(rank: int) -> dict[str, Any]:
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    model[1].running_mean.normal_()
    job = hocket.parallelize(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1), "local(4)")
    job.detach()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@case
def uneven(rank: int) -> dict[str, Any]:
    """1,797 samples in batches of 64 for four workers leave a last round of 2, 1, 1, 1."""
    data = load("digits")
    x = torch.cat([data.prepare(data.train[0]), data.prepare(data.test[0])])
    y = torch.cat([data.train[1], data.test[1]])
    ours, plain = net(), net()
    optimizers = sgd(ours), sgd(plain)
    job = hocket.parallelize(ours, optimizers[0], "bulk")
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    sizes = []
    for epoch in range(2):
        for xs, ys in hocket.distribute(loader):
            sizes.append(len(xs))
            optimizers[0].zero_grad()
            F.cross_entropy(ours(xs), ys).backward()
            optimizers[0].step()
        for round_ in Partition(len(x), WORKERS, 64, seed=0).rounds(epoch):
            index = torch.cat(round_.indices)
            optimizers[1].zero_grad()
            F.cross_entropy(plain(x[index]), y[index]).backward()
            optimizers[1].step()
    return {"ours": flat(ours), "plain": flat(plain), "start": flat(net()), "sizes": sizes, "weight": job.weight}


@case
def uneven_accumulated(rank: int) -> dict[str, Any]:
    """Two passes a step; those of the last step hold 64 and 2 or 1 samples, and each weighs by its own."""
    data = load("digits")
    x = torch.cat([data.prepare(data.train[0]), data.prepare(data.test[0])])
    y = torch.cat([data.train[1], data.test[1]])
    ours, plain = net(), net()
    optimizers = sgd(ours), sgd(plain)
    job = hocket.parallelize(ours, optimizers[0], "bulk", accumulate=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    for passes, (xs, ys) in enumerate(hocket.distribute(loader, epoch=0)):
        (F.cross_entropy(ours(xs), ys) / 2).backward()
        if passes % 2:
            optimizers[0].step()
            optimizers[0].zero_grad()
    for passes, round_ in enumerate(Partition(len(x), WORKERS, 64, seed=0).rounds(0)):
        index = torch.cat(round_.indices)
        (F.cross_entropy(plain(x[index]), y[index]) / 2).backward()
        if passes % 2:
            optimizers[1].step()
            optimizers[1].zero_grad()
    job.detach()
    return {"ours": flat(ours), "plain": flat(plain), "start": flat(net())}


# --- order and use of parameters -------------------------------------------------------------------------------------------


class Paths(nn.Module):
    """Layers in an order that depends on the worker: gradients become ready in another order on another worker."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        for k in range(4):
            x = self.layers[(k + self.rank) % 4](x).tanh()
        return x


@case
def order(rank: int) -> dict[str, Any]:
    """Every parameter is a bucket, and buckets have different sizes in pairs (weights and biases)."""
    model = Paths(rank)
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(rank))
    own = own_gradient(model, lambda m: m(x).square().sum())
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, "bulk", **SMALL)
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    job.detach()
    return {"own": own, "mixed": found}


class Parts(nn.Module):
    """Worker r uses part r; nobody uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(WORKERS + 1))

    def forward(self, x: Tensor, part: int) -> Tensor:
        return self.parts[part](x)


@case
def unused(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, caps in {"one bucket": {}, "many": SMALL}.items():
        for to_none in (True, False):
            model = Parts()
            optimizer = sgd(model)
            job = hocket.parallelize(model, optimizer, "bulk", **caps)
            x = torch.ones(2, 3) * (rank + 1)
            seen = []
            for part in (rank, (rank + 1) % WORKERS):  # the other way round the second time: nothing stale may travel
                optimizer.zero_grad(set_to_none=to_none)
                own = own_gradient(model, lambda m, x=x, part=part: m(x, part).sum())
                model(x, part).sum().backward()
                seen.append((own, {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}))
            optimizer.step()
            found[f"{name} {to_none}"] = {"seen": seen, "weights": flat(model)}
            job.detach()
    return found


@case
def used_early(rank: int) -> dict[str, Any]:
    """Accumulation: a part used in the first pass only must not be lost at the last one."""
    found: dict[str, Any] = {}
    for to_none in (True, False):
        model = Parts()
        optimizer = sgd(model)
        job = hocket.parallelize(model, optimizer, "bulk", accumulate=2, **SMALL)
        x = torch.ones(2, 3) * (rank + 1)
        for t in range(2):
            optimizer.zero_grad(set_to_none=to_none)
            own = own_gradient(model, lambda m, x=x, t=t: m(x, (rank + t) % WORKERS).sum() + m(x, (rank + t + 1) % WORKERS).sum())
            model(x, (rank + t) % WORKERS).sum().backward()
            model(x, (rank + t + 1) % WORKERS).sum().backward()
            mixed = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            optimizer.step()
        found[str(to_none)] = {"own": own, "mixed": mixed, "weights": flat(model)}
        job.detach()
    return found


# --- the moment of an exchange ---------------------------------------------------------------------------------------------


@case
def clipping(rank: int) -> dict[str, Any]:
    """Bulk ends before backward() returns: clipping sees what the optimiser will use."""
    model = net()
    optimizer = sgd(model)
    hocket.parallelize(model, optimizer, "bulk", **SMALL)
    found = []
    for t in range(4):
        x, y = batch(t, rank)
        own = own_gradient(model, lambda m, x=x, y=y: F.cross_entropy(m(x), y))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        found.append({"norm": norm, "own": own, "weights": flat(model)})
    return {"steps": found}


@case
def local_formula(rank: int) -> dict[str, Any]:
    """local(3): what is launched after step 2 lands in step 3's pre-hook, and whatever happens meanwhile does not touch it."""
    model = net()
    optimizer = sgd(model, momentum=0.0)
    job = hocket.parallelize(model, optimizer, "local(3)")
    train(model, optimizer, rank, range(2))
    launched, before = job.runtime.program._in_flight, flat(model)
    optimizer.zero_grad()
    x, y = batch(2, rank)
    F.cross_entropy(model(x), y).backward()
    waiting, gradient = torch.equal(flat(model), before), grads(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(100.0 * (rank + 1))  # the weights in flight are a copy
    optimizer.step()
    after = flat(model)
    train(model, optimizer, rank, range(3, 4))
    job.detach()
    return {"launched": launched, "waiting": waiting, "before": before, "gradient": gradient.double(), "after": after}


@case
def gradients_are_not_in_flight(rank: int) -> dict[str, Any]:
    """What a worker does to its gradients after backward() reaches nobody else, and zeroing works either way."""
    found: dict[str, Any] = {}
    for strategy in ("bulk", "bulk + topk(0.1)", "local(2) + exchange=gradients", "bulk + gossip + exchange=gradients"):
        for to_none in (True, False):
            model = net()
            optimizer = sgd(model)
            job = hocket.parallelize(model, optimizer, strategy, **SMALL)
            train(model, optimizer, rank, range(6), set_to_none=to_none)
            found[f"{strategy} {to_none}"] = flat(model)
            job.detach()
    model = net()
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, "bulk", **SMALL)
    x, y = batch(0, rank)
    F.cross_entropy(model(x), y).backward()
    if rank == 0:
        for p in model.parameters():
            p.grad.fill_(float("nan"))
    dist.barrier()
    found["others"] = torch.isfinite(grads(model)).all().item()
    job.detach()
    return found


@case
def pieces(rank: int) -> dict[str, Any]:
    """Large messages travel in pieces, distance by distance; 1,000 bytes stand for half a megabyte."""
    found: dict[str, Any] = {}
    whole = point_to_point.PIECE_BYTES
    try:
        for strategy in (
            "bulk + gossip + exchange=gradients",
            "bulk + gossip",
            "bulk + topk(0.3)",
            "bulk + gossip(exponential) + qsgd(4)",
        ):
            for size in (whole, 1000):
                point_to_point.PIECE_BYTES = size
                model = net()
                optimizer = sgd(model)
                job = hocket.parallelize(model, optimizer, strategy, **SMALL)
                for t in range(3):
                    optimizer.zero_grad()
                    x, y = batch(t, rank)
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                found[f"{strategy} {size}"] = flat(model)
                job.detach()
    finally:
        point_to_point.PIECE_BYTES = whole
    return found


@case
def accumulation(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"start": flat(net())}
    for strategy in ("bulk", "bulk + gossip + exchange=gradients", "local(2)"):
        for n in (1, 3):
            model = net()
            optimizer = sgd(model)
            job = hocket.parallelize(model, optimizer, strategy, accumulate=n, **SMALL)
            for t in range(6):
                optimizer.zero_grad()
                x, y = batch(t, rank)
                for xs, ys in zip(x.chunk(n), y.chunk(n), strict=True):
                    (F.cross_entropy(model(xs), ys) / n).backward()
                optimizer.step()
            found[f"{strategy} {n}"] = flat(model)
            found[f"{strategy} {n} bytes"] = job.summary(all_workers=True)["bytes_sent"]
            job.detach()
    return found


@case
def accumulation_cut_short(rank: int) -> dict[str, Any]:
    """One backward pass, where ``accumulate`` asks for three."""
    found: dict[str, Any] = {"start": flat(net())}
    for n in (1, 3):
        model = net()
        optimizer = sgd(model)
        job = hocket.parallelize(model, optimizer, "bulk", accumulate=n)
        x, y = batch(0, rank)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        found[f"1 of {n}"] = flat(job.finish())
    return found


class Checkpointed(nn.Module):
    """Layers under activation checkpointing; ``twice`` uses the middle one two times; ``head`` stays outside."""

    def __init__(self, reentrant: bool | None, twice: bool, head: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.into, self.middle, self.out = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.reentrant, self.twice, self.head = reentrant, twice, head

    def body(self, x: Tensor) -> Tensor:
        x = self.middle(self.into(x.flatten(1)).relu()).relu()
        return x if self.head else self.out(x)

    def run(self, function: Any, x: Tensor) -> Tensor:
        return function(x) if self.reentrant is None else checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.body, x)
        if self.twice:
            x = self.run(self.middle, x)
        return self.out(x) if self.head else x


@case
def checkpointing(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, reentrant, twice, head in (
        ("plain", None, False, True),
        ("non-reentrant", False, False, True),
        ("plain twice", None, True, True),
        ("non-reentrant twice", False, True, True),
        ("reentrant with a head", True, False, True),
        ("reentrant", True, False, False),
        ("reentrant twice", True, True, True),
    ):
        model = Checkpointed(reentrant, twice, head)
        optimizer = sgd(model)
        job = hocket.parallelize(model, optimizer, "bulk", **SMALL)

        def steps(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for t in range(3):
                optimizer.zero_grad()
                x, y = batch(t, rank)
                F.cross_entropy(model(x.clone().requires_grad_()), y).backward()
                optimizer.step()

        found[name] = {"refused": refusal(steps), "weights": flat(model)}
        job.detach()
    return found


# --- precision -------------------------------------------------------------------------------------------------------------


@case
def autocast(rank: int) -> dict[str, Any]:
    model = net()
    optimizer = sgd(model)
    hocket.parallelize(model, optimizer, "bulk")
    losses = []
    for t in range(15):
        optimizer.zero_grad()
        x, y = batch(t, rank)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"weights": flat(model), "losses": losses}


@case
def scaler(rank: int) -> dict[str, Any]:
    """Overflow on one worker at one step: all skip it together and go on."""
    found: dict[str, Any] = {}
    for strategy in ("bulk", "bulk + topk(0.2)", "local(2)", "local(3) + gossip", "diloco(2)"):
        for unscaled in (False, True):
            model = net()
            optimizer = sgd(model)
            amp = torch.amp.GradScaler("cpu", init_scale=1024.0)
            job = hocket.parallelize(model, optimizer, strategy, scaler=amp, accumulate=2, **SMALL)
            moved, scales, counted = [], [], []
            for t in range(6):
                optimizer.zero_grad()
                x, y = batch(t, rank)
                for _ in range(2):
                    loss = F.cross_entropy(model(x), y) / 2
                    if t == 3 and rank == 1:
                        loss = loss * float("inf")
                    amp.scale(loss).backward()
                if unscaled:
                    amp.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                momentum = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
                momentum = [m.clone() for m in momentum if m is not None]
                amp.step(optimizer)
                amp.update()
                now = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
                moved.append(not momentum or not all(torch.equal(a, b) for a, b in zip(momentum, now, strict=True)))
                scales.append(amp.get_scale())
                counted.append(job.step)
            with job.averaged() as mean:
                average = flat(mean)
            found[f"{strategy} {unscaled}"] = {
                "weights": flat(model),
                "mean": average,
                "moved": moved,
                "scales": scales,
                "counted": counted,
            }
            job.detach()
    return found


# --- state -----------------------------------------------------------------------------------------------------------------

RESUMED = [
    "bulk",
    "local(4)",
    "local(4) + topk(0.1)",
    "bulk + gossip + topk(0.1)",
    "local(2) + gossip(exponential) + qsgd(4)",
    "diloco(5)",
    "diloco(4) + topk(0.1)",
    "bulk + dgc(0.1, warmup=8)",
    "bulk + lowrank(2)",
    "bulk + threshold(keep=0.1) | cast(fp16)",
    "postlocal(3, after=10) + topk(0.1)",
    "bulk + hierarchical(allreduce, gossip, size=2) + topk(0.1)",
]


@case
def resume(rank: int) -> dict[str, Any]:
    """Stop after 11 steps (a mix of local(4) is under way) and go on in a fresh model, against never stopping."""
    found: dict[str, Any] = {}
    for strategy in RESUMED:
        momentum = 0.0 if "dgc" in strategy else 0.9
        straight = net()
        optimizer = sgd(straight, momentum=momentum)
        job = hocket.parallelize(straight, optimizer, strategy, **SMALL)
        train(straight, optimizer, rank, range(20))
        job.detach()
        first = net()
        optimizer = sgd(first, momentum=momentum)
        job = hocket.parallelize(first, optimizer, strategy, **SMALL)
        train(first, optimizer, rank, range(11))
        file = io.BytesIO()
        torch.save([first.state_dict(), optimizer.state_dict(), job.state_dict()], file)
        train(first, optimizer, rank, range(11, 13))  # saving must not disturb, and the saved must not move with us
        job.detach()
        file.seek(0)
        states = torch.load(file)
        second = net(seed=8)
        optimizer = sgd(second, momentum=momentum)
        job = hocket.parallelize(second, optimizer, strategy, **SMALL)
        second.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        job.load_state_dict(states[2])
        train(second, optimizer, rank, range(11, 20))
        found[strategy] = {"straight": flat(straight), "resumed": flat(second)}
        job.detach()
    return found


@case
def resume_refused(rank: int) -> dict[str, Any]:
    model = net()
    job = hocket.parallelize(model, sgd(model), "local(4)")
    state = job.state_dict()
    job.detach()
    other = hocket.parallelize(model, sgd(model), "local(5)")
    sentence = refusal(lambda: other.load_state_dict(state))
    other.detach()
    return {"sentence": sentence}


@case
def averaged(rank: int) -> dict[str, Any]:
    """BatchNorm statistics and weights: mean inside, restored outside; finish() makes the mean model for good."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, "local(4)")
    train(model, optimizer, rank, range(7))  # the mean of step 8 is under way
    own = {n: t.clone() for n, t in model.state_dict().items()}
    sent = job.cluster.ledger.bytes_sent.clone()
    with job.averaged() as mean:
        inside = {n: t.clone() for n, t in mean.state_dict().items()}
    restored = {n: t.clone() for n, t in model.state_dict().items()}
    again = job.cluster.ledger.bytes_sent.clone()
    finished = {n: t.clone() for n, t in job.finish().state_dict().items()}
    train(model, optimizer, rank, range(7, 9))  # the job is over: nothing is exchanged any more
    return {"own": own, "inside": inside, "restored": restored, "sent": [sent, again], "finished": finished, "after": flat(model)}


# --- bad input -------------------------------------------------------------------------------------------------------------


@case
def refused(rank: int) -> dict[str, Any]:
    """Everybody is refused with the same sentence, and nobody hangs: the next one is asked right away."""

    def odd(normal: nn.Module, other: nn.Module, at: int = 2, **options: Any) -> str:
        model = other if rank == at else normal
        return refusal(lambda: hocket.parallelize(model, sgd(model), **options))

    def pair(width: int = 5, dtype: torch.dtype = torch.float32) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, width).to(dtype))

    def with_buffer(size: int) -> nn.Module:
        model = pair()
        model.register_buffer("table", torch.zeros(size))
        return model

    frozen = pair()
    frozen[0].requires_grad_(False)
    other_frozen = pair()
    other_frozen[0] = nn.Linear(4, 3, bias=False)
    other_frozen[0].requires_grad_(False)
    model, stranger = pair(), pair()
    found = {
        "shape": odd(pair(), pair(6)),
        "dtype": odd(pair(), pair(5, torch.float64), at=3),
        "fewer": odd(pair(), nn.Sequential(nn.Linear(4, 3))),
        "more": odd(nn.Sequential(nn.Linear(4, 3)), pair(), at=1),
        "buffer": odd(with_buffer(3), with_buffer(4), at=1),
        "frozen": odd(frozen, other_frozen, at=1),
        "frozen on one": odd(pair(), frozen, at=1),
        "strategy": refusal(lambda: hocket.parallelize(model, sgd(model), "local(2)" if rank == 1 else "local(3)")),
        "accumulate": refusal(lambda: hocket.parallelize(model, sgd(model), accumulate=1 + (rank == 3))),
        "groups": refusal(
            lambda: hocket.parallelize(
                model,
                torch.optim.SGD([{"params": [*model[rank != 1].parameters()]}, {"params": [*model[rank == 1].parameters()]}], 0.1),
            )
        ),
        "lbfgs": refusal(lambda: hocket.parallelize(model, torch.optim.LBFGS(model.parameters()))),
        # There is no other device here; parallelize itself would bring such a model to life.
        "device": refusal(lambda: check_device(pair().to("meta"), VirtualCluster(1, "cpu"))),
        "another model": refusal(lambda: hocket.parallelize(model, sgd(stranger))),
        "partly another": refusal(lambda: hocket.parallelize(model, sgd(nn.ModuleList([model, stranger])))),
        "not a model": refusal(lambda: hocket.parallelize(model.parameters(), sgd(model))),  # type: ignore[arg-type]
        "not an optimiser": refusal(lambda: hocket.parallelize(model, model)),  # type: ignore[arg-type]
        "nonfinite": refusal(lambda: hocket.parallelize(model, sgd(model), check=hocket.Checks(nonfinite="ignore"))),
        "dgc": refusal(lambda: hocket.parallelize(model, sgd(model), "bulk + dgc(0.01)")),
        "strategy name": refusal(lambda: hocket.parallelize(model, sgd(model), "bulk + gosip")),
        "hosts": refusal(lambda: hocket.parallelize(model, sgd(model), "bulk + hierarchical(allreduce, gossip, size=3)")),
    }
    embedding = nn.Embedding(5, 3, sparse=True)
    job = hocket.parallelize(embedding, torch.optim.SGD(embedding.parameters(), 0.1))
    found["sparse"] = refusal(lambda: embedding(torch.tensor([1])).sum().backward())
    job.detach()
    late = pair()
    late[0].requires_grad_(False)
    optimizer = sgd(late)
    job = hocket.parallelize(late, optimizer)
    late[0].requires_grad_(True)
    late(torch.ones(1, 4)).sum().backward()
    found["unfrozen"] = refusal(optimizer.step)
    job.detach()
    return found


@case
def nonfinite_skipped(rank: int) -> dict[str, Any]:
    """NaN in one bucket of one worker at one step: that bucket's gradient is left out, as if it had been zero."""
    found: dict[str, Any] = {}
    for strategy in ("bulk", "bulk + topk(0.2)", "local(3)", "bulk + gossip"):
        for name in ("nan", "zero"):
            model = net()
            optimizer = sgd(model)
            job = hocket.parallelize(
                model, optimizer, strategy, check=hocket.Checks(nonfinite="skip"), buckets=hocket.Buckets(1000, 500)
            )
            spoil = {"nan": float("nan"), "zero": 0.0}[name]

            def spoilt(g: Tensor, by: float = spoil, job: hocket.Job = job) -> Tensor:
                return g * by if job.step == 2 and rank == 1 else g

            handle = model[3].weight.register_hook(spoilt)
            rest = {"nan": 1.0, "zero": 0.0}[name]  # its bucket goes with it
            other = model[3].bias.register_hook(lambda g, spoilt=spoilt, rest=rest: spoilt(g, rest))
            train(model, optimizer, rank, range(6))
            found[f"{strategy} {name}"] = flat(model)
            found[f"{strategy} {name} count"] = job.summary(all_workers=True)["nonfinite"]
            found["buckets"] = [[s.name for s in b.slots] for b in job.layout.buckets]
            handle.remove()
            other.remove()
            job.detach()
    return found


# --- the ledger ------------------------------------------------------------------------------------------------------------


@case
def waiting(rank: int) -> dict[str, Any]:
    """Worker 2 computes longer than the others: they wait for it, it hardly waits."""
    model = net()
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, "bulk")
    for t in range(12):
        optimizer.zero_grad()
        x, y = batch(t, rank)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        end = time.monotonic() + 0.03
        while rank == 2 and time.monotonic() < end:
            x @ x.transpose(-1, -2)
    spans = [[s.first_launch, s.last_launch, s.blocked, s.end] for s in job.cluster.ledger.spans]
    summary = job.summary(all_workers=True)
    job.detach()
    return {"spans": spans, "summary": summary}
