"""What the tests of small messages by way of others run in several processes, and on virtual workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.cluster import Message, Subgroups, VirtualCluster, layout_of
from hocket.cluster.base import Cluster
from hocket.cluster.join import join
from hocket.cluster.processes import ProcessCluster
from hocket.programs.two_stage import program_for
from hocket.strategy import Strategy

WORKERS = 12
STRATEGIES = [
    "bulk + dgc(0.01)",
    "bulk + threshold(keep=0.05)",
    "bulk + topk(0.01, indices=rice)",
    "acco + sign",
    "local(2) + qsgd(4)",
]


def verbs(cluster: Cluster) -> dict[str, list[Tensor]]:
    """Both verbs in all workers, and in groups of those three apart, for messages of fixed and of varying size."""
    found = {}
    for name, subgroups in (("all", cluster.world), ("groups", Subgroups.across(WORKERS, 3))):
        for varying in (False, True):
            own = torch.arange(cluster.workers.start, cluster.workers.stop)
            got = cluster.all_gather(_message(WORKERS, varying).select(own), subgroups, 20)
            mine = (own.unsqueeze(1) * subgroups.size + torch.arange(subgroups.size)).flatten()
            sent = cluster.all_to_all(_message(WORKERS * subgroups.size, varying).select(mine), subgroups, 20)
            at = torch.tensor(cluster.groups_here(subgroups)[0])
            rows = (at.unsqueeze(1) * subgroups.size + torch.arange(subgroups.size)).flatten()
            found[f"{name} {varying}"] = [rows, mine, *_plain(got), *_plain(sent)]
    return found


def training(strategy: str, cluster: Cluster) -> dict[str, Tensor]:
    """Five steps down a quadratic of a worker's own, the flags that were agreed on, and what was sent."""
    cluster.ledger.sent.zero_()
    cluster.ledger.sent_varying.zero_()
    generator = torch.Generator().manual_seed(0)
    layout = layout_of(nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 9)).named_parameters(), None, 4096, 900)
    targets = [
        torch.randn(WORKERS, b.size, generator=generator)[cluster.workers.start : cluster.workers.stop] for b in layout.buckets
    ]
    weights = [b.empty(cluster.rows).zero_() for b in layout.buckets]
    program, agreed = program_for(Strategy.parse(strategy), layout, cluster, weights), []
    flags = (torch.arange(WORKERS * 11).view(WORKERS, 11) % 29 == 3)[cluster.workers.start : cluster.workers.stop]
    for _ in range(5):
        gradients, mixing = [0.1 * (w - t) for w, t in zip(weights, targets, strict=True)], program.mixes_gradients
        for bucket, rows in enumerate(gradients):
            program.gradient_ready(bucket, rows)
        if mixing:
            program.flags_ready(flags)
            agreed.append(program.gradients_done()[-1])
        program.before_update(weights)
        for w, g in zip(weights, gradients, strict=True):
            w -= g
        program.after_update(weights)
    program.drain()
    told = torch.stack(agreed) if agreed else torch.zeros(0)
    return {"weights": torch.cat(weights, 1), "sent": cluster.ledger.bytes_sent.clone(), "agreed": told}


def everything(cluster: Cluster) -> dict[str, Any]:
    """All of it."""
    return {"verbs": verbs(cluster), **{strategy: training(strategy, cluster) for strategy in STRATEGIES}}


def real(rank: int, folder: str) -> None:
    """On processes that host several workers each."""
    join(device="cpu").close()  # starts the process group
    cluster = ProcessCluster(WORKERS, exact=True)
    torch.save(everything(cluster), f"{folder}/{rank}.pt")
    dist.barrier()
    cluster.close()


def virtual() -> dict[str, Any]:
    """On virtual workers."""
    return everything(VirtualCluster(WORKERS))


def _message(rows: int, varying: bool) -> Message:
    """Rows of bytes and of floats, padded with zeros where they vary."""
    generator = torch.Generator().manual_seed(rows)
    parts = (torch.randint(0, 255, (rows, 5), generator=generator, dtype=torch.uint8), torch.randn(rows, 3, generator=generator))
    if not varying:
        return Message(parts)
    lengths = torch.stack([torch.randint(0, p.shape[1] + 1, (rows,), generator=generator) for p in parts], 1)
    real = [torch.arange(p.shape[1]) < n.unsqueeze(1) for p, n in zip(parts, lengths.unbind(1), strict=True)]
    return Message((parts[0] * real[0], parts[1] * real[1]), lengths)


def _plain(message: Message) -> list[Tensor]:
    """All parts, padded to one width."""
    widths = (5, 3)
    parts = [nn.functional.pad(p, (0, w - p.shape[1])) for p, w in zip(message.parts, widths, strict=True)]
    return parts if message.lengths is None else [*parts, message.lengths]
