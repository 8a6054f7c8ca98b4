"""Hugging Face ``Trainer``: any strategy whose workers step together, by one call before ``train()``.

    trainer = Trainer(model, TrainingArguments(…), train_dataset=…)
    attach(trainer, "local(16) + gossip")
    trainer.train()                                  # under torchrun or accelerate launch

The model is not wrapped in DDP. Gradient accumulation, clipping, schedules and evaluation work; evaluation and saved models are
those of the mean model. Each checkpoint holds the states of all workers in ``hocket.pt``, from which
``train(resume_from_checkpoint=…)`` goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hocket.errors import HocketError
from hocket.extras import require
from hocket.integrations.accelerate import HocketAccelerator
from hocket.strategy import Strategy

require("transformers", "hf")

from transformers import Trainer, TrainerCallback  # noqa: E402 - after the sentence about the extra

FILE = "hocket.pt"
"""In each checkpoint's folder."""


def attach(trainer: Trainer, strategy: str | Strategy = "bulk + allreduce", seed: int = 0, **options: Any) -> HocketCallback:
    """Train with ``strategy``; the callback has the ``job`` while ``train()`` runs and its ``summary()`` afterwards.

    ``options`` go to :func:`hocket.parallelize` (``buckets``, ``check``).
    """
    args = trainer.args
    for name, on in {"DeepSpeed": trainer.is_deepspeed_enabled, "FSDP": trainer.is_fsdp_enabled}.items():
        if on:
            raise HocketError(f"The Trainer uses {name}, which exchanges by itself; leave it out to train with {strategy}.")
    if args.n_gpu > 1:
        raise HocketError(
            f"One process has {args.n_gpu} GPUs, over which the Trainer splits batches; start one per GPU by torchrun."
        )
    parallel = HocketAccelerator(trainer.accelerator, strategy, seed, **options)
    if args.max_grad_norm and parallel.strategy.compression.gives_signs:
        raise HocketError(
            f"max_grad_norm={args.max_grad_norm}: {strategy} gives signs, which cannot be clipped; use max_grad_norm=0."
        )
    callback = HocketCallback(trainer, parallel)
    trainer.add_callback(callback)
    return callback


class HocketCallback(TrainerCallback):
    """Begins the job when training begins, saves the states of all workers, and ends it with the mean model."""

    def __init__(self, trainer: Trainer, parallel: HocketAccelerator) -> None:
        self.trainer, self.parallel, self._from, self._summary = trainer, parallel, "", dict[str, Any]()
        for name in ("evaluate", "predict", "save_model"):
            setattr(trainer, name, self._of_mean(getattr(trainer, name)))
        load = trainer._load_optimizer_and_scheduler

        def loaded(checkpoint: str | None) -> None:
            self._from = checkpoint or ""
            load(checkpoint)

        trainer._load_optimizer_and_scheduler = loaded  # type: ignore[method-assign]

    @property
    def job(self) -> Any:
        """The job, while ``train()`` runs."""
        return self.parallel.replicas.jobs[0] if self.parallel.replicas.jobs else None

    def summary(self) -> dict[str, Any]:
        """Seconds and bytes of this worker (:meth:`hocket.Job.summary`)."""
        return self._summary if self.job is None else self.job.summary()

    def _of_mean(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same with the mean model in place of this worker's."""

        def called(*args: Any, **kwargs: Any) -> Any:
            replicas = self.parallel.replicas
            replicas.average()
            try:
                return function(*args, **kwargs)
            finally:
                replicas.restore()

        return called

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.parallel.options = {**self.parallel.options, "steps": state.max_steps}
        self.parallel.begin(given["model"], given["optimizer"])
        if self._from and (file := Path(self._from, FILE)).exists():
            self.parallel.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        saved = self.parallel.state_dict()
        folder = Path(self.trainer._get_output_dir(trial=None), f"checkpoint-{state.global_step}")
        if state.is_world_process_zero:
            torch.save(saved, folder / FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        replicas = self.parallel.replicas
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            replicas.detach()  # all workers have loaded it: it was saved as a mean
        else:
            replicas.finish()
        self._summary = replicas.jobs[0].summary()
        replicas.jobs.clear()
