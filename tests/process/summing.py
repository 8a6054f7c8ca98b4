"""Workers whose means are summed on spare processes, for tests/process/test_summing.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.cluster.join import join
from hocket.cluster.processes import ProcessCluster
from hocket.cluster.virtual import VirtualCluster
from process.equality import WORKERS, Case, outcome

CASES = [Case("bulk + server(2, role=sum)"), Case("local(3) + server(4, role=sum)", "adam"), Case("diloco(4) + server(role=sum)")]


def real(rank: int, folder: str) -> None:
    join(device="cpu").close()
    cluster = ProcessCluster(WORKERS, exact=True)
    results: dict[str, dict[str, Tensor]] = {case.name: outcome(case, cluster, live=True) for case in CASES}
    # More values than a piece holds, on CPU float64 too.
    rows = torch.arange(200_000, dtype=torch.float64).unsqueeze(0) + rank
    large = cluster.reduce_on_servers(2, rows.clone())
    results["large"] = {"right": torch.equal(large, rows - rank + 1.5).__int__() * torch.ones(1)}
    cluster.close()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()


def virtual() -> dict[str, dict[str, Tensor]]:
    return {case.name: outcome(case, VirtualCluster(WORKERS), live=False) for case in CASES}
