"""Floating point operations of a step, counted on the model itself: what a virtual clock needs to know about it.

Counted are matrix products, convolutions and attention, forward and backward (``torch.utils.flop_counter``), on a copy on the CPU,
so that every device gives the same number. They grow linearly with the samples, so that two of them are enough (BatchNorm wants
more than one). Where nothing can be counted: 6 operations per parameter and sample (2 forward, 4 backward).
"""

from __future__ import annotations

import copy

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
    try:
        counted = _counted(model, loss, inputs[:few].cpu(), targets[:few].cpu())
    except Exception:  # a model that cannot be copied or does not run on a CPU
        counted = 0
    if counted:
        return float(counted) * samples / few
    return float(_PER_PARAMETER * sum(p.numel() for p in model.parameters()) * samples)


def _counted(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> int:
    twin = copy.deepcopy(model).cpu()
    # Attention as plain matrix products: its other kernels differ between devices, and not all of them are counted.
    with torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss(twin(inputs), targets).backward()
    return counter.get_total_flops()
