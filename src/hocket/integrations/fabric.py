"""Lightning Fabric: ``Fabric(strategy=FabricHocketStrategy("local(16) + gossip"))``; the loop stays the user's.

``fabric.setup(model, optimizer)`` begins the job. ``fabric.save`` writes the mean model under the model's name, and the states of
all workers beside it; ``fabric.load`` goes on from them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hocket import session
from hocket.errors import HocketError
from hocket.extras import require
from hocket.integrations.workers import KEY, Replicas, together
from hocket.strategy import Strategy

require("lightning.fabric", "lightning")

from lightning.fabric.strategies import DDPStrategy  # noqa: E402 - after the sentence about the extra
from lightning.fabric.strategies.strategy import _BackwardSyncControl  # noqa: E402


class FabricHocketStrategy(DDPStrategy):
    """Any strategy of Hocket whose workers step together, for Lightning Fabric.

    ``options`` go to :func:`hocket.parallelize` (``accumulate``, ``buckets``, ``check``, ``steps``), or to Fabric's
    ``DDPStrategy``.
    """

    def __init__(self, strategy: str | Strategy = "bulk + allreduce", seed: int = 0, **options: Any) -> None:
        self.hocket, self.seed = together(strategy, "Fabric", options), seed
        known = ("accumulate", "buckets", "check", "steps")
        self._options = {name: options.pop(name) for name in known if name in options}
        super().__init__(**options)
        self._backward_sync_control = _Accumulation(self._options.get("accumulate", 1))
        self.replicas = Replicas([])

    def summary(self) -> dict[str, Any]:
        """Seconds and bytes of this worker (:meth:`hocket.Job.summary`)."""
        if not self.replicas.jobs:
            raise HocketError("summary() has no figures yet; call it after fabric.setup(model, optimizer).")
        return self.replicas.jobs[0].summary()

    def finish(self) -> None:
        """Every worker's model becomes the mean model; all workers call it after the last step."""
        self.replicas.finish()

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        session.init(device=self.root_device, seed=self.seed)

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        return module  # one that is only evaluated: nothing is exchanged

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        scaler = getattr(self.precision, "scaler", None)
        jobs = [session.parallelize(module, one, self.hocket, scaler=scaler, **self._options) for one in optimizers]
        self.replicas = Replicas([*self.replicas.jobs, *jobs])
        return module, optimizers, scheduler

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return self.replicas.mean_state(module)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if self.replicas.jobs and any(job.attached for job in self.replicas.jobs):
            state = {**state, KEY: {"strategy": str(self.hocket), "workers": self.replicas.gather()}}
        super().save_checkpoint(path, state, storage_options, filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        left = super().load_checkpoint(path, state, strict, weights_only)
        saved = left.pop(KEY, None) if state else None
        if saved is not None and self.replicas.jobs:
            self.replicas.load(saved["workers"])
        return left


class _Accumulation(_BackwardSyncControl):
    """``fabric.no_backward_sync``: the job counts the backward passes itself, if it knows how many make a step."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if enabled and self.accumulate == 1:
            raise HocketError(
                "fabric.no_backward_sync(…): Hocket counts backward passes itself; say how many make a step with "
                "FabricHocketStrategy(…, accumulate=4), for example."
            )
        return nullcontext()
