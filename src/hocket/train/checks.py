"""Checks before a job begins: each refuses what cannot work in one sentence; and the layout of a model's parameters in rows."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hocket.cluster.base import Cluster
from hocket.cluster.dtensor import local
from hocket.cluster.layout import BUCKET_CAP_BYTES, FIRST_BUCKET_CAP_BYTES, Layout, layout_of
from hocket.errors import HocketError, bytes_text, is_whole
from hocket.notation import write
from hocket.optim import moment_name
from hocket.split.offload import refuse_offloaded
from hocket.strategy import Strategy
from hocket.sync import Moment
from hocket.train.watch import check_nonfinite

SPARSE = "A gradient is sparse; exchanges are dense, so build the embedding with sparse=False."
Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimiser of parameters."""


_BUCKETS_PER_PART = 3


def layout_for(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    bucket_cap_bytes: int | None = None,
    first_bucket_cap_bytes: int | None = None,
    apart: Mapping[str, str] | None = None,
) -> Layout:
    """The buckets of a job: a few large ones, or a single one where the compression wants all values at once.

    Where parts of the model are exchanged in turn, each has a single one or, from all over the model, several smaller ones.
    """
    single, groups = strategy.compression.single_bucket, [g["params"] for g in optimizer.param_groups]
    cap, first = (sys.maxsize, sys.maxsize) if single else (BUCKET_CAP_BYTES, FIRST_BUCKET_CAP_BYTES)
    if (parts := strategy.sync.parts) > 1:
        size = sum(p.numel() * p.element_size() for group in groups for p in group if p.requires_grad)
        cap = first = min(cap, -(-size // (parts if single else parts * _BUCKETS_PER_PART)))
    cap, first = bucket_cap_bytes or cap, first_bucket_cap_bytes or first
    layout = layout_of(model.named_parameters(), groups, cap, first, apart)
    return replace(layout, buffer_bytes=4 * sum(b.numel() for b in model.buffers() if b.is_floating_point()))


def check_job(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    accumulate: int,
    nonfinite: str,
    clip: float | None = None,
) -> None:
    """Refuse jobs that cannot work, each with a sentence."""
    if not isinstance(model, nn.Module):
        raise HocketError(f"parallelize needs an nn.Module, got {type(model).__name__}.")
    if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        raise HocketError(f"The model is wrapped in {type(model).__name__}, which exchanges gradients itself; give its .module.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise HocketError(f"parallelize needs a torch.optim optimiser, got {type(optimizer).__name__}.")
    refuse_offloaded(model)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise HocketError(
            "LBFGS calls its closure a different number of times on each worker, which would hang; use a first-order optimiser."
        )
    if not is_whole(accumulate):
        raise HocketError(
            f"accumulate={accumulate!r}: the number of backward passes per step must be a whole number of at least 1."
        )
    check_nonfinite(nonfinite)
    refuse_momentum(optimizer, strategy)
    refuse_clip(strategy, clip)
    groups = range(len(optimizer.param_groups))
    if strategy.sync.averages_moments(0, second=False) and all(moment_name(optimizer, group, False) is None for group in groups):
        raise HocketError(f"{strategy}: {type(optimizer).__name__} has no moments that could be averaged; leave moments= out.")


def refuse_prediction(strategy: Strategy, *, split: bool, scaled: bool, elastic: bool) -> None:
    """Refuse a strategy that undoes updates where that cannot work."""
    if not strategy.sync.predicts:
        return
    name = strategy.sync.name
    if split:
        raise HocketError(
            f"{strategy}: {name} keeps a copy of whole weights and optimiser state, and this model is split; use bulk."
        )
    if scaled:
        raise HocketError(f"{strategy}: a GradScaler skips updates that {name} takes back; use bfloat16, or bulk.")
    if elastic:
        raise HocketError(f"{strategy}: gradients of a lost worker would still be in flight; use bulk in an elastic run.")


def refuse_clip(strategy: Strategy, clip: float | None) -> None:
    """Refuse clipping where the optimiser receives signs."""
    if clip is not None and strategy.compression.gives_signs:
        raise HocketError(
            f"clip={clip:g}: {strategy.compression.name} gives the optimiser signs, whose norm is not the gradient's; "
            "leave clip out."
        )


def refuse_momentum(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Refuse an optimiser with a momentum of its own (Adam's is its first beta) where the compression carries one."""
    if strategy.compression.carries_momentum and any(g.get("momentum", 0) or "betas" in g for g in optimizer.param_groups):
        raise HocketError(
            f"{strategy.compression.name} includes the momentum, and {type(optimizer).__name__} has one, too: use SGD(momentum=0)."
        )


def needs_servers(strategy: Strategy) -> bool:
    """Whether even a single worker needs its servers: they have an optimiser or a learning rate of their own."""
    return strategy.topology.server_optimizer is not None or strategy.topology.lr_factor != 1


FEWEST_SENDS = 2.0
"""Where a sparse code with feedback sends each value less often, accuracy is lost (measured: docs/methods/feedback.md)."""


def mention_steps(strategy: Strategy, steps: int | None, workers: int) -> None:
    """Warn where the known number of steps is too low for the density, and where a single worker would train without momentum."""
    if workers == 1 and strategy.compression.carries_momentum:
        code = strategy.compression.name
        warnings.warn(
            f"{code} acts in exchanges, and one worker has none: it trains without momentum; leave {code} out.",
            stacklevel=3,
        )
    if steps is None or workers == 1:
        return
    exchanges = _exchanges(strategy, steps)
    sends = strategy.compression.sends_per_value(exchanges)
    if sends is not None and sends < FEWEST_SENDS and exchanges > 0:
        code = " | ".join(write(link) for link in strategy.compression.links)
        enough = (
            f"a density of {min(1.0, FEWEST_SENDS / exchanges):.2g} or more, or {math.ceil(FEWEST_SENDS / sends * steps):,} steps"
        )
        warnings.warn(
            f"{code} sends each value {sends:.2g} times on average in {steps:,} steps, the rest stays in the residual, and the "
            f"model may learn little; use {enough}.",
            stacklevel=3,
        )


def _exchanges(strategy: Strategy, steps: int) -> int:
    """How many of the steps have an exchange, extrapolated from the first ones."""
    if strategy.runtime != "collective":
        return steps // strategy.sync.period
    seen = min(steps, 10_000)
    exchanges = sum(strategy.moment(t) is not Moment.NEVER for t in range(1, seen + 1))
    return steps * exchanges // (max(1, seen) * strategy.sync.parts)


class Trained(Protocol):
    """What has parameters that it trains: a job."""

    strategy: Strategy

    @property
    def attached(self) -> bool: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


def refuse_twice(model: nn.Module, optimizer: torch.optim.Optimizer, jobs: Sequence[Trained]) -> None:
    """Refuse parameters of another job. (Several jobs may share a model if their optimisers share no parameter.)"""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        return  # the job refuses these
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for job in jobs:
        taken = {id(p) for group in job.optimizer.param_groups for p in group["params"]} if job.attached else set()
        name = next((name for name, p in model.named_parameters() if id(p) in own & taken), None)
        if name is not None:
            raise HocketError(
                f"Parameter {name} is trained by another job ({job.strategy}); call detach() of that job first, or give each job "
                "an optimiser of other parameters."
            )


def refuse_newcomers(optimizer: torch.optim.Optimizer, ours: set[int]) -> None:
    """Refuse gradients of parameters that were added or unfrozen after the job was made."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and id(p) not in ours and local(p).numel():
                raise HocketError(
                    "The optimiser got a parameter, or one was unfrozen, after hocket.parallelize(…), so it is not exchanged; "
                    "call job.detach() and parallelize again."
                )


def check_device(model: nn.Module, cluster: Cluster) -> None:
    for name, p in model.named_parameters():
        if p.device.type != cluster.device.type:
            raise HocketError(
                f"Parameter {name} is on {p.device}, but this job exchanges on {cluster.device}; "
                f"move the model there before building the optimiser, or call hocket.init(device='{p.device.type}')."
            )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    known = {id(p) for p in model.parameters()}
    strange = next((p for g in optimizer.param_groups for p in g["params"] if id(p) not in known), None)
    if strange is not None:
        raise HocketError(
            f"The optimiser holds a parameter of shape {tuple(strange.shape)} that this model lacks, so it would not be exchanged; "
            "build the optimiser from model.parameters(), after the model is complete."
        )


def optimizer_for(factory: Factory, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser that ``factory`` makes of ``params``; one of other parameters would train nothing."""
    optimizer = factory(params)
    given, groups = {id(p) for p in params}, getattr(optimizer, "param_groups", [])
    if any(id(p) not in given for group in groups for p in group["params"]):
        raise HocketError(
            "The function that makes the optimiser did not use the parameters that it was given, so nothing would be trained; use "
            "them: optimizer=lambda params: torch.optim.SGD(params, 0.1)."
        )
    return optimizer


def check_equal(model: nn.Module, layout: Layout, cluster: Cluster, terms: Sequence[str] = ()) -> None:
    """All workers must have the same parameters and buffers in the same order, and the same ``terms``; a collective."""
    trained = {s.name: b for b in layout.buckets for s in b.slots}
    lines = [f"the terms {term}" for term in terms]
    lines += [
        _line("parameter", n, p) + (f" in group {trained[n].group}" if n in trained else " (frozen)")
        for n, p in model.named_parameters()
    ]
    lines += [_line("buffer", n, b) for n, b in model.named_buffers()]
    text = "\n".join(lines).encode()
    digest = torch.tensor([list(hashlib.sha256(text + layout.digest().encode()).digest())], dtype=torch.uint8)
    everyone = cluster.all_gather_metrics(digest.expand(cluster.rows, -1))
    odd = (everyone != everyone[0]).any(1).nonzero().flatten().tolist()
    if not odd:
        return
    sizes = cluster.all_gather_metrics(torch.full((cluster.rows, 1), len(text)))
    padded = torch.tensor([list(text.ljust(int(sizes.max()), b"\n"))], dtype=torch.uint8)
    texts = [
        bytes(row.tolist()).decode().rstrip("\n").split("\n") for row in cluster.all_gather_metrics(padded.expand(cluster.rows, -1))
    ]
    pairs = zip_longest(texts[0], texts[odd[0]], fillvalue="nothing")
    first, other = next(((a, b) for a, b in pairs if a != b), ("other buckets", "other buckets"))
    raise HocketError(
        f"Worker {odd[0]}'s model or job differs from worker 0's: {other} against {first}; build the same everywhere."
    )


def _line(kind: str, name: str, tensor: Tensor) -> str:
    return f"{kind} {name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def check_memory(layout: Layout, cluster: Cluster) -> None:
    """Weights, gradients and one optimiser state must fit; the system would otherwise kill the process without an error."""
    needed = 3 * cluster.rows * layout.bytes
    if cluster.device.type == "cuda":
        total = torch.cuda.get_device_properties(cluster.device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise HocketError(
            f"{cluster.rows} workers of {bytes_text(layout.bytes)} each need {bytes_text(needed)} for weights, gradients and "
            f"momentum, but {cluster.device} has {bytes_text(total)}; use fewer workers, a smaller model, or several processes."
        )
