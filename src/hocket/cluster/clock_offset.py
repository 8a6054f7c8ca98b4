"""The offset between the monotonic clocks of processes on different machines, measured by round trips to process 0."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from hocket.cluster.heartbeat import boot_id

_ROUNDS = 10


def clock_offset(rank: int, ranks: list[int], group: dist.ProcessGroup | None, device: torch.device) -> float:
    """What to add to this process's monotonic clock to get process 0's: 0 if both run on one kernel."""
    boots: list[str] = [""] * len(ranks)
    dist.all_gather_object(boots, boot_id(), group=group)
    offset = 0.0
    for peer in range(1, len(ranks)):
        if boots[peer] != boots[0]:
            offset = _measured(rank, peer, ranks, device, offset)
    return offset


def _measured(rank: int, peer: int, ranks: list[int], device: torch.device, own: float) -> float:
    """Process 0 and ``peer`` measure the offset between their clocks, from the shortest round trip; others keep ``own``."""
    best = (float("inf"), own)
    for _ in range(_ROUNDS):
        stamp = torch.zeros(1, dtype=torch.float64, device=device)
        if rank == 0:
            dist.recv(stamp, ranks[peer])
            stamp[0] = time.monotonic()
            dist.send(stamp, ranks[peer])
        elif rank == peer:
            start = time.monotonic()
            dist.send(stamp, ranks[0])
            dist.recv(stamp, ranks[0])
            end = time.monotonic()
            best = min(best, (end - start, float(stamp) - (start + end) / 2))
    return best[1] if rank == peer else own
