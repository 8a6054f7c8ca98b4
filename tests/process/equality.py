"""The trainings whose outcome must not depend on who hosts whom: a table, and the worker functions that run it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hocket
from hocket.cluster.base import Cluster
from hocket.cluster.join import join
from hocket.cluster.layout import Buckets
from hocket.cluster.processes import ProcessCluster
from hocket.cluster.virtual import VirtualCluster
from hocket.data import load
from hocket.data.partition import Partition
from hocket.models import cross_entropy
from hocket.noise import fold
from hocket.strategy import Strategy
from hocket.train.replicas import LiveReplica, StackedReplicas
from hocket.train.runtimes.collective import CollectiveRuntime
from hocket.train.simulate import seeded

WORKERS, STEPS, BATCH = 4, 8, 5
SAMPLES = (STEPS - 1) * WORKERS * BATCH + 17  # the last round is uneven: 5, 4, 4, 4
MATRIX = "[[0.5, 0.25, 0, 0.25], [0.25, 0.5, 0.25, 0], [0, 0.25, 0.5, 0.25], [0.25, 0, 0.25, 0.5]]"
FULL = "[[0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]]"


@dataclass(frozen=True)
class Case:
    """One training; dgc has its own momentum, so it takes plain SGD."""

    strategy: str
    optimizer: str = "momentum"
    model: str = "mlp"
    clip: float | None = None

    @property
    def name(self) -> str:
        extras = [self.optimizer, self.model if self.model != "mlp" else "", f"clip={self.clip}" if self.clip else ""]
        return " ".join([self.strategy, *filter(None, extras)])


CASES = [
    # every compressor under the two-phase all-reduce
    Case("bulk"),
    Case("bulk", "adam"),
    Case("bulk + cast(fp16)"),
    Case("bulk + cast(bf16)", "adam"),
    Case("bulk + cast(fp8)"),
    Case("bulk + qsgd(4)", "adam"),
    Case("bulk + qsgd(2)"),
    Case("bulk + ternary", "adam"),
    Case("bulk + sign"),
    Case("bulk + natural", "adam"),
    Case("bulk + threshold(0.01)"),
    Case("bulk + threshold(keep=0.05)", "adam"),
    Case("bulk + topk(0.05)"),
    Case("bulk + topk(0.05, feedback=False)", "adam"),
    Case("bulk + randomk(0.1)"),
    Case("bulk + lowrank(2) + exchange=gradients", "adam"),
    Case("bulk + topk(0.05) | qsgd(4)"),
    Case("bulk + threshold(keep=0.1) | cast(fp16)", "adam"),
    Case("bulk + randomk(0.1) | natural"),
    Case("bulk + topk(0.05) | sign"),
    Case("bulk + topk(4/64, feedback=0.95) | bins(2)"),
    Case("bulk + cast(e3m0)", "adam"),
    Case("bulk + topk(0.05, feedback=ef21) | qsgd(8)"),
    Case("bulk + dgc(0.05, warmup=4)", "sgd"),
    Case("bulk + dgc(0.05, clip=1.0) | qsgd(4)", "sgd"),
    Case("bulk + demo(16, 0.9)", "sgd"),
    Case("bulk + demo(64, sign=False) | qsgd(8)", "sgd"),
    # updates: named, or chosen under Adam (as under threshold(keep=…) above)
    Case("bulk + exchange=updates"),
    Case("bulk + sign", "adam"),
    Case("bulk + sign(feedback=ef21)", "adam"),
    Case("bulk + hierarchical(size=2) + topk(0.05) + exchange=updates"),
    # momentum, chosen under 1-bit Adam after five steps
    Case("bulk + sign", "onebit"),
    Case("bulk + topk(0.05) + exchange=momentum", "onebit", "norm", clip=0.5),
    Case("local(3) + sign + exchange=momentum", "zeroone"),
    # gossip: weights plainly, weights the CHOCO way, gradients
    Case("bulk + gossip"),
    Case("bulk + gossip(ring)", "adam"),
    Case("bulk + gossip(exponential)"),
    Case("bulk + gossip(random)", "adam"),
    Case(f"bulk + gossip(matrix={MATRIX})"),
    Case(f"bulk + gossip(matrix={FULL}) + exchange=gradients"),
    Case("bulk + gossip + topk(0.05)", "adam"),
    Case("bulk + gossip(ring) + sign"),
    Case("bulk + gossip + threshold(keep=0.05)"),
    Case("bulk + gossip + topk(0.05) | qsgd(4)", "adam"),
    Case("bulk + gossip + lowrank(1)"),
    Case("bulk + gossip + exchange=gradients"),
    Case("bulk + gossip + threshold(0.01, feedback=False) + exchange=gradients", "adam"),
    Case("bulk + gossip(random) + topk(0.05) + exchange=gradients"),
    Case("bulk + gossip + dgc(0.05) + exchange=gradients", "sgd"),
    # local steps
    Case("local(1)"),
    Case("local(4)"),
    Case("local(3, mean=after)", "adam"),
    Case("local(3, moments=1) + topk(0.05)", "adam"),
    Case("local(4) + topk(0.05)", "adam"),
    Case("local(4, residual=weights) + topk(0.05) | qsgd(4)"),
    Case("local(4) + lowrank(1)"),
    Case("local(4) + gossip"),
    Case("local(4) + gossip + topk(0.05)"),
    Case("local(2) + gossip(exponential) + qsgd(4)", "adam"),
    Case("local(4) + gossip + threshold(0.01, feedback=False) + exchange=gradients"),
    Case("local(4) + topk(0.05) + exchange=gradients"),
    Case("postlocal(2, after=3)"),
    Case("postlocal(3, after=2) + topk(0.05)", "adam"),
    Case("postlocal(2, after=4) + gossip"),
    Case("diloco(3)"),
    Case("diloco(3) + topk(0.1)", "adam"),
    Case("diloco(3) + gossip", "adam"),
    Case("diloco(4) + cast(bf16)"),
    Case("diloco(6, fragments=3, overlap=2)", "adam"),
    Case("diloco(4, fragments=2, overlap=2, mix=0.5) + cast(e3m0)"),
    Case("diloco(4, overlap=3, keep=eager) + sign(block=16)", "adam"),
    Case("diloco(3, guard=3) + qsgd(4)"),
    Case("diloco(4, fragments=2, overlap=1, outer=heavyball) + gossip(random)"),
    Case("acco"),
    Case("acco + qsgd(4)", "adam"),
    Case("acco + topk(0.1)", "momentum", "norm", clip=0.5),
    # two hosts of two workers
    Case("bulk + hierarchical(allreduce, allreduce, size=2)"),
    Case("bulk + hierarchical(allreduce, gossip, size=2) + topk(0.05)", "adam"),
    Case("bulk + hierarchical(allreduce, allreduce, size=2, every=2) + qsgd(4)"),
    Case("bulk + hierarchical(gossip, allreduce, size=2)"),
    Case("local(2) + hierarchical(allreduce, gossip, size=2, every=2)"),
    # BatchNorm and dropout; clipping
    Case("bulk", "momentum", "norm"),
    Case("local(4)", "adam", "norm"),
    Case("bulk + gossip + topk(0.05)", "momentum", "norm"),
    Case("diloco(3)", "momentum", "norm"),
    Case("bulk + topk(0.05) + exchange=gradients", "adam", clip=0.5),
    Case("bulk + topk(0.05)", "adam", clip=0.5),  # of updates
    Case("local(4) + gossip", "momentum", clip=0.5),
]


def build(case: Case, cluster: Cluster, live: bool) -> Any:
    """The workers of a case that a cluster hosts here."""
    strategy = Strategy.parse(case.strategy)
    given = seeded({"mlp": _mlp, "norm": _norm}[case.model], 3), cross_entropy, OPTIMIZERS[case.optimizer], strategy
    options: Any = {"seed": 3, "clip": case.clip, "buckets": Buckets(4096, 900)}  # several buckets
    replicas: LiveReplica | StackedReplicas
    if live:
        replicas = LiveReplica(*given, CollectiveRuntime(cluster), **options)
    else:
        replicas = StackedReplicas(*given, cluster, **options)
    assert len(replicas.layout.buckets) > 1
    return replicas


def steps(replicas: Any, cluster: Cluster) -> None:
    """Some rounds of a few digits each; the seeds of dropout are a function of worker and step."""
    x, y = digits()
    rounds = Partition(SAMPLES, WORKERS, BATCH, seed=3).rounds(epoch=0)
    assert len(rounds) == STEPS
    for t, round_ in enumerate(rounds):
        here = [(i, round_.indices[i]) for i in cluster.workers]
        keys = torch.tensor([fold(t, i) & 0x7FFFFFFF for i, _ in here])
        replicas.samples = float(sum(round_.sizes))
        replicas.step([x[k] for _, k in here], [y[k] for _, k in here], keys, [round_.weights[i] for i, _ in here])


def outcome(case: Case, cluster: Cluster, live: bool) -> dict[str, Tensor]:
    """Rows of weights and of float buffers after all steps, the mean model, and bytes sent by each worker hosted here."""
    cluster.ledger.sent.zero_()
    cluster.ledger.sent_varying.zero_()
    replicas = build(case, cluster, live)
    steps(replicas, cluster)
    owner = replicas.job if live else replicas
    (owner.runtime if live else owner).program.drain()
    found = {"weights": torch.cat(owner.weights, 1).clone(), "sent": cluster.ledger.bytes_sent.clone()}
    if live:
        buffers = [b.reshape(1, -1) for b in replicas.model.buffers() if b.is_floating_point()]
    else:
        buffers = [b.flatten(1) for b in replicas.buffers.values() if b.is_floating_point()]
    found["buffers"] = torch.cat(buffers, 1).clone() if buffers else torch.zeros(cluster.rows, 0)
    with replicas.averaged() as model:
        tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
        found["mean"] = torch.cat([t.detach().flatten() for t in tensors]).expand(cluster.rows, -1).clone()
    assert torch.equal(cluster.ledger.bytes_sent, found["sent"]), "evaluation must not count"
    if live:
        owner.detach()
    return found


def real(rank: int, folder: str, workers: int, kinds: list[str]) -> None:
    """All cases on this process, for each way of hosting: live or rows, exact or the backend's own ring."""
    results: dict[str, dict[str, dict[str, Tensor]]] = {}
    join(device="cpu").close()  # starts the process group
    for kind in kinds:
        cluster = ProcessCluster(workers, exact="ring" not in kind)
        results[kind] = {case.name: outcome(case, cluster, "live" in kind) for case in CASES}
        cluster.close()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()


def virtual(rank: int, folder: str) -> None:
    """All cases on virtual workers, and where they started."""
    results = {case.name: outcome(case, VirtualCluster(WORKERS), live=False) for case in CASES}
    starts = {case.name: torch.cat(build(case, VirtualCluster(WORKERS), live=False).weights, 1) for case in CASES}
    torch.save({"virtual": results, "start": starts}, f"{folder}/{rank}.pt")


@lru_cache
def digits() -> tuple[Tensor, Tensor]:
    """A few hundred digits, as models read them."""
    data = load("digits")
    return data.prepare(data.train[0][:SAMPLES]), data.train[1][:SAMPLES]


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05),
    "momentum": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, 0.003),
    "onebit": lambda params: hocket.OneBitAdam(params, 0.003, freeze_step=5),
    "zeroone": lambda params: hocket.OneBitAdam(params, 0.01, freeze_step=1, refresh=1),
}


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def _norm() -> nn.Module:
    convolution = nn.Sequential(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3), nn.Flatten())
    return nn.Sequential(*convolution, nn.Linear(216, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
