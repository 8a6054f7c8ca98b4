"""Lightning: ``Trainer(strategy=HocketStrategy("local(16) + gossip"))``, or ``strategy="hocket"`` once this module is imported.

Lightning starts the processes (or torchrun does) and injects its sampler as under DDP; the model is not wrapped. Closures, gradient
accumulation and clipping work. During validation the model is the mean of all workers. A checkpoint's ``state_dict`` is the mean
model; the states of all workers (own weights, optimiser, residuals) are beside it in the same file, written by Lightning's
``CheckpointIO``, and ``fit(ckpt_path=…)`` goes on from them, with as many workers or others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from hocket import session
from hocket.errors import HocketError
from hocket.extras import require
from hocket.integrations.workers import KEY, Replicas, together
from hocket.strategy import Strategy
from hocket.train.checks import refuse_clip

require("lightning.pytorch", "lightning")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402 - after the sentence about the extra
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

_STATEMENTS = {
    BaseFinetuning: "unfreezes parameters during the training, which a job cannot take in; unfreeze them before fit",
    GradientAccumulationScheduler: "changes the number of passes per step, which a job fixes; use accumulate_grad_batches=",
}
"""Callbacks that cannot work, and why."""
_OF_DDP = (
    "ddp_comm_hook",
    "ddp_comm_state",
    "ddp_comm_wrapper",
    "model_averaging_period",
    "find_unused_parameters",
    "static_graph",
)


class HocketStrategy(DDPStrategy):
    """Any strategy of Hocket whose workers step together, as a strategy of Lightning's ``Trainer``.

    ``options`` go to :func:`hocket.parallelize` (``buckets``, ``check``; ``accumulate`` under manual optimisation
    alone), or to Lightning's ``DDPStrategy`` (``process_group_backend``, ``start_method``, ``timeout``, ``checkpoint_io``, …).
    """

    strategy_name = "hocket"

    def __init__(self, strategy: str | Strategy = "bulk + allreduce", seed: int = 0, **options: Any) -> None:
        self.hocket = together(strategy, "Lightning", options)
        self.seed = seed
        self._options = {name: options.pop(name) for name in ("buckets", "check", "accumulate") if name in options}
        if named := [name for name in _OF_DDP if name in options]:
            raise HocketError(f"{named[0]}= is for models wrapped in DDP, and Hocket wraps none; leave it out.")
        super().__init__(**options)
        self.replicas = Replicas([])
        self._summary: list[dict[str, Any]] = []

    def summary(self) -> dict[str, Any]:
        """Seconds and bytes of this worker (:meth:`hocket.Job.summary`); with several optimisers, of the first."""
        found = [job.summary() for job in self.replicas.jobs] or self._summary
        if not found:
            raise HocketError("summary() has no figures yet; call it after trainer.fit(…).")
        return found[0]

    # --- set-up --------------------------------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        super().setup_distributed()
        session.init(device=self.root_device, seed=self.seed)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return model  # the job's hooks are on the model itself

    def _register_ddp_hooks(self) -> None:
        """There is no wrapped model."""

    def setup(self, trainer: Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            _refuse(trainer, self.hocket)
        super().setup(trainer)
        if fitting:
            self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert isinstance(module, LightningModule)
        options = {"accumulate": trainer.accumulate_grad_batches, **self._options}
        scaler = getattr(self.precision_plugin, "scaler", None)
        steps = None if trainer.max_steps < 0 else trainer.max_steps
        make = [(optimizer, {"scaler": scaler, "steps": steps, **options}) for optimizer in self.optimizers]
        self.replicas = Replicas([session.parallelize(module, optimizer, self.hocket, **given) for optimizer, given in make])

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def post_backward(self, closure_loss: Any) -> None:
        """The last passes of an epoch may be fewer than make a step: they are exchanged before Lightning clips them."""
        module = self.lightning_module
        assert module is not None
        if module.automatic_optimization and not module.trainer.fit_loop.epoch_loop._should_accumulate():
            for job in self.replicas.jobs:
                job.exchange()

    def on_validation_start(self) -> None:
        self.replicas.average()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        self.replicas.restore()
        super().on_validation_end()

    def on_train_end(self) -> None:
        self.replicas.finish()
        self._close()
        super().on_train_end()

    def teardown(self) -> None:
        self.replicas.detach()
        self._close()
        super().teardown()

    def _close(self) -> None:
        if self.replicas.jobs:
            self._summary = [job.summary() for job in self.replicas.jobs]
        self.replicas = Replicas([])

    # --- checkpoints ---------------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # jobs must be there

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.replicas.mean_state(self.lightning_module)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.replicas.jobs and "optimizer_states" in checkpoint:
            workers = self.replicas.gather()
            checkpoint = {**checkpoint, KEY: {"strategy": str(self.hocket), "workers": workers}}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if KEY not in checkpoint:  # of another strategy, or of a training that has ended: all workers begin with what it has
            super().load_optimizer_state_dict(checkpoint)
            return
        self.replicas.load(checkpoint[KEY]["workers"])

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Lightning registers its own; this one is registered below."""


def register(name: str, strategy: str | Strategy, **options: Any) -> None:
    """Give a strategy with options a name for ``Trainer(strategy=name)``.

    >>> register("slow_links", "local(16) + gossip + qsgd(4)")
    >>> str(Trainer(strategy="slow_links", accelerator="cpu", devices=1, logger=False).strategy.hocket)
    'local(16) + gossip + qsgd(4)'
    """
    parsed = together(strategy, "Lightning", options)
    StrategyRegistry.register(name, partial(HocketStrategy, parsed, **options), f"Hocket: {parsed}", override=True)


def _refuse(trainer: Trainer, strategy: Strategy) -> None:
    refuse_clip(strategy, trainer.gradient_clip_val)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, why in _STATEMENTS.items():
            default = kind is GradientAccumulationScheduler and getattr(callback, "scheduling", {0: 1}).keys() == {0}
            if isinstance(callback, kind) and not default:
                raise HocketError(f"{type(callback).__name__} {why}.")


register("hocket", "bulk + allreduce")
