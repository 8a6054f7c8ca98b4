"""Models on CUDA: virtual workers equal those on the CPU within rounding; processes train over Gloo; NCCL's verbs work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hocket
from hocket import Strategy
from hocket.cluster.layout import layout_of
from hocket.cluster.virtual import VirtualCluster
from hocket.programs.two_stage import program_for
from hocket.train.watch import NonFinite

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

STRATEGIES = (
    "bulk",
    "local(3) + gossip",
    "bulk + topk(0.1) | qsgd(4)",
    "local(2) + gossip + topk(0.2)",
    "bulk + threshold(keep=0.1)",
    "bulk + lowrank(1)",
    "diloco(4) + sign",
    "bulk + dgc(0.1)",
    "hierarchical(allreduce, gossip(ring), size=2) + natural",
    "bulk + gossip(random) + ternary + exchange=gradients",
    "bulk + randomk(0.2) | cast(fp8)",
    "bulk + threshold(keep=0.1, indices=rice) | cast(e3m0)",
    "diloco(4, 1.0, 0) + topk(4/64, feedback=0.95) | bins(2)",
)


def rows_after(strategy: str, device: str, engine: str) -> torch.Tensor:
    x = torch.randn(160, 12, generator=torch.Generator().manual_seed(1))
    y = (x[:, :3].sum(1) > 0).long()
    run = hocket.simulate(
        lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 2)),
        nn.functional.cross_entropy,
        (x, y),
        strategy=strategy,
        workers=4,
        batch_size=8,
        epochs=2,
        device=device,
        engine=engine,
    )
    return torch.cat([w.cpu() for w in run.replicas.weights], 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_virtual_workers_on_cuda_equal_those_on_the_cpu(strategy: str) -> None:
    on_cpu = rows_after(strategy, "cpu", "loop")
    on_cuda = rows_after(strategy, "cuda", "loop")
    # Rounding moves a value over a code's boundary now and then, so a few values may differ by a code's step.
    assert (on_cpu - on_cuda).abs().median() < 1e-4


@pytest.mark.parametrize("strategy", ["bulk", "bulk + qsgd(4)", "bulk + sign", "bulk + topk(0.1) | qsgd(4)", "local(1) + qsgd(4)"])
def test_an_exchange_of_virtual_workers_does_not_wait_for_the_device(strategy: str) -> None:
    """Python starts the next operations while the device computes; each wait would add the time in which Python starts them."""
    size, workers = 4096, 4
    layout = layout_of(nn.Linear(size, 1, bias=False).to("cuda").named_parameters())
    cluster = VirtualCluster(workers, "cuda")
    weights, grads = ([b.empty(workers).normal_() for b in layout.buckets] for _ in range(2))
    program = program_for(Strategy.parse(strategy), layout, cluster, weights)
    used = torch.ones(workers, 1, dtype=torch.bool)

    def step() -> None:
        for b, rows in enumerate(grads):
            program.gradient_ready(b, rows)
        if program.mixes_gradients:
            program.flags_ready(used)
        program.gradients_done()
        program.before_update(weights)
        program.after_update(weights)

    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_looking_for_nan_does_not_wait_for_the_device() -> None:
    """It is done in the middle of the backward pass, whose operations Python starts meanwhile."""
    layout = layout_of(nn.Linear(64, 64).to("cuda").named_parameters())
    watch = NonFinite("skip", layout, VirtualCluster(2, "cuda"))
    rows = torch.zeros(2, 64 * 64 + 64, device="cuda")
    rows[1, 7] = float("nan")
    torch.cuda.set_sync_debug_mode("error")
    try:
        watch.look(0, rows, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.found
    assert not rows.any()


WORKER = """
import sys, torch, hocket
from torch import nn
backend, strategy = sys.argv[1:]
hocket.init(backend=backend, device="cuda:0")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 2)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
job = hocket.parallelize(model, optimizer, strategy)
x = torch.randn(64, 12, device="cuda"); y = (x.sum(1) > 0).long()
first = last = None
for _ in range(20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    first, last = first or loss.item(), loss.item()
job.finish()
assert last < first, (first, last)
total = torch.cat([p.detach().flatten() for p in model.parameters()]).double().cpu().view(1, -1)
everyone = job.cluster.all_gather_metrics(total)
assert torch.equal(everyone, everyone[:1].expand_as(everyone))
mean = torch.ones(1, 4, device="cuda")
assert torch.equal(job.cluster.mean(mean, job.cluster.world), torch.ones(1, 4, device="cuda"))
assert job.cluster.all_reduce_any(torch.tensor([[True, False]], device="cuda")).tolist() == [True, False]
print("fine", job.summary(all_workers=True)["bytes_sent"])
"""


@pytest.mark.parametrize(
    ("backend", "processes", "strategy"),
    [
        ("gloo", 2, "bulk"),
        ("gloo", 2, "local(2) + gossip + topk(0.2)"),
        ("gloo", 2, "bulk + threshold(keep=0.2)"),
        ("nccl", 1, "bulk"),
    ],
)
@pytest.mark.timeout(180)
def test_processes_train_a_model_on_cuda(tmp_path: Path, backend: str, processes: int, strategy: str) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([*command, backend, strategy], env=environment, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.count("fine") == processes
