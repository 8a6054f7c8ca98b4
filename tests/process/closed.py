"""What runs in the processes of ``test_closed``."""

from __future__ import annotations

import psutil
import torch

import hocket


def listening(pid: int | None = None) -> set[str]:
    """The addresses at which a process (this one) listens."""
    return {c.laddr.ip for c in psutil.Process(pid).net_connections(kind="inet") if c.status == psutil.CONN_LISTEN}


def where(rank: int, folder: str) -> None:
    """Join, exchange something, and tell where this process listens."""
    cluster = hocket.init()
    everyone = cluster.all_gather_metrics(torch.tensor([[float(rank)]]))
    torch.save({"listens": sorted(listening()), "everyone": everyone.flatten().tolist()}, f"{folder}/{rank}.pt")
    hocket.shutdown()
