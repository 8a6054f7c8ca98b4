"""What optimisers call their moments."""

from __future__ import annotations

from torch.optim import Optimizer


def moment_name(optimizer: Optimizer, group: int, second: bool) -> str | None:
    """What the optimiser calls the first or the second moment of a group's parameters; None where it has none.

    >>> import torch
    >>> kinds = (torch.optim.AdamW, lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), torch.optim.SGD)
    >>> [[moment_name(kind([torch.ones(1)]), 0, second) for second in (False, True)] for kind in kinds]
    [['exp_avg', 'exp_avg_sq'], ['momentum_buffer', None], [None, None]]
    """
    options = optimizer.param_groups[group]
    if "betas" in options and not options.get("matrices"):
        return "exp_avg_sq" if second else "exp_avg"
    return "momentum_buffer" if options.get("momentum") and not second else None
