"""``parallelize``: an ordinary loop on real workers, the strategy at work behind the optimiser's and autograd's own hooks.

- Parameters become views of contiguous rows, one per bucket; where gradients are exchanged during the backward pass, they do, too
  (:class:`~hocket.train.gradients.BucketedGradients`).
- The runtime (:mod:`hocket.train.runtimes`) carries out all exchanges: in the optimiser's step pre-hook, after it, and meanwhile.
- Where the optimiser is on servers, gradients are hidden from the worker's own while it steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.dtensor import is_distributed, is_sharded, local
from hocket.cluster.layout import Buckets, Layout
from hocket.errors import HocketError
from hocket.split.inputs import Inputs
from hocket.split.parts import broadcast_tensors
from hocket.strategy import Strategy
from hocket.train.adaptive import with_exchange
from hocket.train.audit import audited, refuse_audit
from hocket.train.checks import (
    check_device,
    check_equal,
    check_job,
    check_optimizer,
    layout_for,
    mention_steps,
    refuse_newcomers,
    refuse_prediction,
)
from hocket.train.gradients import BucketedGradients, call_closure, check_passes, gradients_for
from hocket.train.job_state import JobState
from hocket.train.runtimes.base import Binding, Runtime
from hocket.train.scaler import share_overflow
from hocket.train.watch import NonFinite

if TYPE_CHECKING:  # what splits a model is loaded only where a model is split
    from hocket.split.pipeline import Timeline
    from hocket.split.split_model import SplitModel


class Job(JobState):
    """A model in parallel training; made by :func:`hocket.parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        runtime: Runtime,
        *,
        accumulate: int = 1,
        nonfinite: str = "raise",
        check: bool | str = True,
        steps: int | None = None,
        seed: int = 0,
        scaler: Any = None,
        buckets: Buckets = Buckets(),  # noqa: B008 - frozen
        split: SplitModel | None = None,
    ) -> None:
        """``split``: the model of which ``model`` is what this process holds; it says when gradients are there, where it runs
        passes itself (:meth:`exchange`)."""
        check_job(model, optimizer, strategy, accumulate, nonfinite)
        tell = runtime.cluster.workers.start == 0 and not runtime.alone
        strategy = with_exchange(strategy, optimizer, bool(runtime.zero), tell)
        runtime.refuse(strategy, scaler)
        refuse_prediction(strategy, split=split is not None, scaled=scaler is not None, elastic=runtime.cluster.elastic)
        refuse_audit(check, runtime, whole=split is None and not is_sharded(model))
        self.strategy, self.runtime, self.split = strategy, runtime, split
        self.on_detach: Callable[[Job], None] | None = None
        if runtime.synchronous:
            check_device(model, runtime.cluster)
        apart = {} if split is None else split.apart
        self.layout = layout_for(model, optimizer, strategy, buckets.cap_bytes, buckets.first_cap_bytes, apart)
        passes_hooked = split is None or split.hooks_passes
        if not self.layout.buckets and passes_hooked:  # a stage of a pipeline may have none
            raise HocketError("The optimiser holds no trainable parameter of this model; build it from model.parameters().")
        check_optimizer(model, optimizer)
        together = [f"accumulate={accumulate}", f"check={check}", f"scaler={scaler is not None}"] if runtime.synchronous else []
        check_equal(model, self.layout, runtime.cluster, [str(strategy), f"seed={seed}", *together, *runtime.terms()])
        # With a scaler overflow is expected: it leads to a skipped step, not to an end.
        policy = nonfinite if scaler is None else "skip"
        self._binding = Binding(model, optimizer, strategy, self.layout, [], [], accumulate, policy, check, seed)
        self._ours = _adopt(self._binding, runtime.cluster) if runtime.in_rows else set()
        runtime.join(self._binding)
        self._nonfinite = NonFinite(policy, self.layout, runtime.where)
        self._gradients = gradients_for(self._binding, runtime, self._nonfinite, scaler) if self._binding.params else None
        self._handles = audited(self._binding, runtime, lambda: self._hook(passes_hooked))
        if scaler is not None:
            share_overflow(self, scaler)
        if runtime.cluster.workers.start == 0:
            mention_steps(strategy, steps, runtime.cluster.size)
        if split is not None:
            split.attach(self)

    # --- what users call ---------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the job is still on the model."""
        return bool(self._handles)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The mean model, for evaluation and checkpoints: mean weights and mean float buffers.

        All workers must enter together; with servers or peers any worker may enter alone.
        """
        if not self._handles:
            raise HocketError("This job has ended and cannot make a mean; use the model that job.finish() returned.")
        if self.split is not None:
            self.split.drain()
        self._binding.reclaim()
        with self.runtime.averaged() as model:
            yield model if self.split is None else self.split.averaged()

    def finish(self) -> nn.Module:
        """End the training: every worker's model becomes the mean model, hooks are removed; all workers must call it.

        Afterwards the job keeps no model alive, except a split one, whose parts only the job can call.
        """
        if not self._handles:
            return self.model
        if self.split is not None:
            self.split.world.wait_for_all("job.finish()")
            self.split.drain()
        self._binding.reclaim()
        model = self.runtime.finish()
        if self.split is not None:
            self.split.averaged()
        self.detach()
        return model

    def detach(self) -> None:
        """Remove all hooks; from here on the model is trained by this worker alone, from the weights that it has."""
        if not self._handles:
            return
        self.runtime.leave()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.split is not None:
            self.split.close()
        else:
            self._gradients = None
            self._binding.release()
        if self.on_detach is not None:
            self.on_detach(self)

    def summary(self, all_workers: bool = False) -> dict[str, Any]:
        """The figures so far: ``seconds``, ``compute_s``, ``wait_s``, ``transfer_s``, ``transfer_hidden_s``, ``bytes_sent``,
        ``exchanges``, ``nonfinite``, ``step_times``, ``late``; with servers or peers also ``staleness`` and ``lost``, on a mesh
        also ``axes``.

        The figures are those of this worker; it waits for no other, so one worker may call it alone. Which part of
        ``synchronisation_s`` was wait and which was transfer is known after :meth:`finish` (until then both are None).
        ``all_workers=True``: means of seconds and sums of bytes over all workers; a collective, which all must call together. An
        elastic run also has ``workers``, ``lost`` (of all the run, as the rendezvous counts), ``left``, ``joined``, ``regroup_s``,
        ``dealt_again`` and ``skipped``; a job that :meth:`reads` a stream has ``data_wait_s``, ``data_bytes`` and ``data_skipped``.
        """
        return {**self.runtime.ledger.summary(all_workers), **self.runtime.figures()}

    # --- a model that is split -----------------------------------------------------------------------------------------------

    def train(self, x: Inputs, y: Any = None) -> Tensor | None:
        """One whole step of a split model; its loss. Under ``pipedream`` that of the mini-batch which has just left the pipe.

        ``x`` is a tensor, a mapping of keyword arguments, or a tuple of positional ones.
        """
        return self._split.train(x, y)

    def backward(self, x: Inputs, y: Any = None) -> Tensor:
        """Forward and backward passes of this replica's mini-batch, gradients exchanged; the mean loss."""
        return self._split.backward(x, y)

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients of this replica so that their norm is at most ``max_norm``; the norm before."""
        return self._split.clip(max_norm)

    def predict(self, x: Inputs) -> Any:
        """The split model's output, on all processes of the replica; all of them must call it together."""
        return self._split.predict(x)

    def drain(self) -> list[Tensor]:
        """Compute the mini-batches that are still in the pipe (``pipedream``) to their end; returns their losses."""
        return self._split.drain()

    def picture(self) -> str:
        """The mesh as text: what each process holds, and its bytes. All processes must call it together."""
        return self._split.picture()

    def timeline(self) -> Timeline | None:
        """What each stage did when in the latest mini-batch; None without stages. All processes must call it together."""
        return self._split.timeline()

    def explain(self) -> list[str]:
        """Tables that say how the model was split, and why."""
        return self._split.explain()

    @property
    def _split(self) -> SplitModel:
        if self.split is None:
            raise HocketError("This model is not split; give hocket.parallelize(…) a mesh=, such as hocket.Mesh(pipeline=2).")
        return self.split

    # --- for whoever computes gradients and checkpoints ------------------------------------------------------------------------

    def exchange(self) -> None:
        """Exchange the gradients that are there, where this step exchanges any during the backward pass: those that autograd's
        hooks did not see, or those of fewer passes than ``accumulate`` (to clip an epoch's last step); zeros, after a pass that
        used no parameter of this job."""
        if self._gradients is not None:
            self._gradients.exchange()

    def begin_step(self) -> None:
        """Forget what was exchanged in the step under way, which was interrupted."""
        if isinstance(self._gradients, BucketedGradients):
            self._gradients.begin_step()

    def take_part(self) -> None:
        """Exchange zeros, where this step has made no exchange and the others wait for one."""
        if isinstance(self._gradients, BucketedGradients):
            self._gradients.take_part()

    # --- set-up --------------------------------------------------------------------------------------------------------------

    def _hook(self, passes_hooked: bool) -> list[Any]:
        handles: list[Any] = []
        if passes_hooked and self._gradients is not None and not self.runtime.alone:
            handles += self._gradients.hook()
        handles.append(self.optimizer.register_step_pre_hook(self._before_step))
        handles.append(self.optimizer.register_step_post_hook(lambda *_: self._after_step()))
        return handles

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _before_step(self, _: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        runtime, binding = self.runtime, self._binding
        closure, replaced = call_closure(runtime, args, kwargs)
        binding.reclaim()
        if self._gradients is not None:
            self._gradients.exchange_late(closure)
        check_passes(binding, runtime, closure)
        if self._ours and not runtime.alone:
            refuse_newcomers(self.optimizer, self._ours)
        if binding.check and runtime.steps_locally and not runtime.mixes_gradients:  # the worker's own optimiser will read them
            self._nonfinite.check_local(binding.params, runtime.step + 1)
        runtime.before_update(self._gradients.rows() if runtime.takes_gradients and self._gradients is not None else [])
        if not runtime.steps_locally and self._gradients is not None:
            self._gradients.hide()
        return replaced

    def skip_step(self) -> None:
        """Count a step whose update is zero; a mix under way is applied, and the next one is launched."""
        self._binding.reclaim()
        self.runtime.before_update([])
        self._after_step()

    def _after_step(self) -> None:
        if self._gradients is not None:
            self._gradients.show()
        self._binding.backwards = 0
        self.runtime.ledger.tell_reading()
        self.runtime.after_update()
        if self.split is not None and self.split.world is not self.runtime.cluster:
            self.split.world.end_step(self.step)  # the cluster of the data axis may be this process alone


def _adopt(binding: Binding, cluster: Cluster) -> set[int]:
    """Move parameters into rows and make all replicas equal to worker 0's; the ids of the parameters moved."""
    model, layout = binding.model, binding.layout
    named = dict(model.named_parameters())
    binding.params = [[named[s.name] for s in b.slots] for b in layout.buckets]
    binding.weights = [b.empty(1) for b in layout.buckets]
    ours = adopt(model, layout, binding.params, binding.weights, cluster)
    binding.publish()
    return ours


def adopt(
    model: nn.Module, layout: Layout, params: Sequence[Sequence[nn.Parameter]], weights: Sequence[Tensor], cluster: Cluster
) -> set[int]:
    """Move parameters into rows and make all replicas equal to worker 0's; the ids of the parameters moved."""
    for bucket, rows, own in zip(layout.buckets, weights, params, strict=True):
        for view, p in zip(bucket.views(rows, 0), own, strict=True):
            view.copy_(local(p.data))
            if not is_distributed(p):
                p.data = view
        cluster.synchronize(rows)
    ours = {id(p) for own in params for p in own}
    broadcast_tensors((*(p for p in model.parameters() if id(p) not in ours), *model.buffers()), cluster)
    return ours
