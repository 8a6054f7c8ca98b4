"""Hugging Face Accelerate: ``hocket`` beside an ``Accelerator`` in a plain loop.

    accelerator = Accelerator(gradient_accumulation_steps=4)
    parallel = HocketAccelerator(accelerator, "local(16) + gossip")     # before prepare: models stay unwrapped
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume: accelerator.load_state(folder)
    job = parallel.begin(model, optimizer)
    …                                                                   # the loop as it was
    job.finish()

``accelerator.save_state`` saves the mean model and the states of all workers, from which ``load_state`` goes on. The loader that
Accelerate prepares gives every worker its part.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from hocket import session
from hocket.errors import HocketError
from hocket.extras import require
from hocket.integrations.workers import Replicas, together
from hocket.strategy import Strategy
from hocket.train.job import Job

require("accelerate", "hf")

from accelerate import Accelerator, DistributedType  # noqa: E402 - after the sentence about the extra

_ALLOWED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class HocketAccelerator:
    """Makes ``accelerator`` leave models unwrapped, and begins jobs with its settings."""

    def __init__(
        self, accelerator: Accelerator, strategy: str | Strategy = "bulk + allreduce", seed: int = 0, **options: Any
    ) -> None:
        """``options`` go to :func:`hocket.parallelize` (``buckets``, ``check``, ``steps``)."""
        if accelerator.distributed_type not in _ALLOWED:
            raise HocketError(
                f"The Accelerator is set up for {accelerator.distributed_type.value}, which exchanges by itself; start plain "
                "processes with torchrun, or with accelerate launch --multi_cpu or --multi_gpu."
            )
        if getattr(accelerator, "_models", None):
            raise HocketError(
                "Models were prepared already, and wrapped in DDP; make HocketAccelerator before accelerator.prepare(…)."
            )
        self.accelerator, self.strategy, self.options = accelerator, together(strategy, "Accelerate", options), options
        self.replicas = Replicas([])
        self._loaded: Any = None
        session.init(device=accelerator.device, seed=seed)
        # As models for evaluation alone: autocast and compilation are set up, and nothing is wrapped.
        accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
        backward = accelerator.backward

        def exchanged(*args: Any, **kwargs: Any) -> None:
            if self._loaded is not None:
                self._go_on()  # refuses fewer optimisers than were saved
            backward(*args, **kwargs)
            if accelerator.sync_gradients:  # an epoch's last passes may be fewer than make a step
                for job in self.replicas.jobs:
                    job.exchange()

        accelerator.backward = exchanged
        accelerator.register_for_checkpointing(self)
        accelerator.register_save_state_pre_hook(self._save_mean)
        accelerator.register_load_state_pre_hook(self._refuse_late)

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Job:
        """The job of a prepared model and optimiser; it goes on from what ``accelerator.load_state`` has loaded. With several
        optimisers call it once for each, always in the same order, before the first step."""
        inner = getattr(optimizer, "optimizer", optimizer)
        options = {"accumulate": self.accelerator.gradient_accumulation_steps, "scaler": self.accelerator.scaler, **self.options}
        job = session.parallelize(self.accelerator.unwrap_model(model), inner, self.strategy, **options)
        self.replicas.jobs.append(job)
        if self._loaded is not None and len(self.replicas.jobs) == len(self._loaded[0]):  # with the last optimiser
            self._go_on()
        return job

    def _go_on(self) -> None:
        loaded, self._loaded = self._loaded, None
        self.replicas.load(loaded)

    def state_dict(self) -> dict[str, Any]:
        """The states of all workers, on the first process; all processes call it together, as ``save_state`` does."""
        return {"strategy": str(self.strategy), "workers": self.replicas.gather()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; every process is given all of it, as ``load_state`` does."""
        if self.replicas.jobs:
            self.replicas.load(state["workers"])
        else:
            self._loaded = state["workers"]

    def _save_mean(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        for number, model in enumerate(models[: len(weights)]):
            weights[number] = self.replicas.mean_state(model)

    def _refuse_late(self, models: list[nn.Module], folder: str) -> None:
        if self.replicas.jobs:
            raise HocketError(
                "accelerator.load_state(…) comes before HocketAccelerator.begin(…), which goes on from what it loaded."
            )
