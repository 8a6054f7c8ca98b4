"""Floating point operations of a step, counted on the model itself: what a virtual clock needs to know about it.

Counted are matrix products, convolutions and attention, forward and backward (``torch.utils.flop_counter``), on a copy without
values or, where that does not run, on the CPU, so that every device gives the same number. They grow linearly with the samples, so
that two of them are enough (BatchNorm wants more than one). Where nothing can be counted: 6 operations per parameter and sample
(2 forward, 4 backward).
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hocket.train.engines.base import Loss

_SAMPLES = 2
_PER_PARAMETER = 6


def step_flops(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, samples: int) -> float:
    """Operations of one step of ``model`` on ``samples`` samples, of which ``inputs`` and ``targets`` hold some.

    >>> model, x, y = nn.Linear(5, 3), torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    >>> step_flops(model, nn.functional.cross_entropy, x, y, 10)  # 2·5·3 forward, as many for the weights
    600.0
    """
    few = min(_SAMPLES, len(inputs))
    for copied in (on_meta, _on_cpu):
        with contextlib.suppress(Exception):  # a model that cannot be copied, or that looks at values and does not run on a CPU
            twin = copied(model)
            device = next(twin.parameters()).device
            if counted := _counted(twin, loss, inputs[:few].to(device), targets[:few].to(device)):
                return float(counted) * samples / few
    return float(_PER_PARAMETER * sum(p.numel() for p in model.parameters()) * samples)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy without values; parameters that are tied stay so, which ``to("meta")`` would part."""
    memo: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo)


def _on_cpu(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).cpu()


def _counted(twin: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> int:
    # Attention as plain matrix products: its other kernels differ between devices, and not all of them are counted.
    with torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss(twin(inputs), targets).backward()
    return counter.get_total_flops()
