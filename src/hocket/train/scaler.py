"""A ``GradScaler`` of a job: workers skip a step together."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hocket.train.runtimes.base import Runtime


class StepSkipper(Protocol):
    """What a GradScaler needs of a job."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def attached(self) -> bool: ...

    @property
    def runtime(self) -> Runtime: ...

    @property
    def overflow(self) -> bool: ...

    def take_part(self) -> None: ...

    def skip_step(self) -> None: ...


def share_overflow(job: StepSkipper, scaler: Any) -> None:
    """GradScaler finds overflow per process; all must skip together, or their exchanges no longer meet."""
    unscale = scaler._unscale_grads_

    def agreed(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        ours = job.attached and optimizer is job.optimizer  # an ended job may have no optimiser any more
        if ours:
            job.take_part()
        found = unscale(optimizer, *args, **kwargs)
        if not ours:
            return found
        own = job.overflow or any(bool(overflow > 0) for overflow in found.values())
        skips = job.runtime.any_worker(own)
        for overflow in found.values():
            overflow.fill_(float(skips))
        if skips and not getattr(optimizer, "_step_supports_amp_scaling", False):  # those are called, and skip by themselves
            job.skip_step()
        return found

    scaler._unscale_grads_ = agreed
