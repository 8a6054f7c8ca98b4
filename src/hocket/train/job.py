"""``parallelize``: an ordinary loop on real workers, the strategy at work behind the optimiser's and autograd's own hooks.

- Parameters become views of contiguous rows, one per bucket; on exchange steps gradients do, too.
- A post-accumulate-grad hook per parameter fills the buckets; full ones are launched in bucket order, during the backward pass.
- Bulk exchanges end in the end-of-backward callback, before ``backward()`` returns, so that gradient clipping sees mixed values.
- Mixed weights land in the optimiser's step pre-hook; the next mix is launched in its post-hook.

A gradient stays None only if the parameter was unused by all workers. Reentrant checkpointing would fire the callback too early
and is refused.
"""

from __future__ import annotations

import hashlib
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Variable

from hocket.cluster.base import Cluster
from hocket.cluster.layout import BUCKET_CAP_BYTES, FIRST_BUCKET_CAP_BYTES, Layout, layout_of
from hocket.errors import HocketError
from hocket.programs.collective import CollectiveProgram
from hocket.split.offload import refuse_offloaded
from hocket.split.sharded import ShardedState, refuse_sharding
from hocket.strategy import Strategy
from hocket.train.ledger_view import LedgerView
from hocket.train.watch import NonFinite

_REENTRANT = torch.utils.checkpoint.CheckpointFunction.backward.__code__


class Job:
    """A model in parallel training; made by :func:`hocket.parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        cluster: Cluster,
        accumulate: int = 1,
        nonfinite: str = "raise",
        check: bool = True,
        steps: int | None = None,
        seed: int = 0,
        scaler: Any = None,
        bucket_cap_bytes: int | None = None,
        first_bucket_cap_bytes: int | None = None,
        apart: Mapping[str, str] | None = None,
        hooked: bool = True,
        zero: int = 0,
    ) -> None:
        """``apart``: kinds of parameters that share no bucket with others. ``hooked=False``: gradients are computed in a way that
        autograd's hooks do not see; whoever computes them calls :meth:`exchange` when all are there. ``zero=1``: every
        worker keeps a part of the optimiser's state (``self.sharded``)."""
        if cluster.rows != 1:
            raise HocketError(
                f"parallelize trains one worker per process, but {cluster.rows} are hosted here; use hocket.simulate."
            )
        check_job(model, optimizer, strategy, accumulate, nonfinite)
        refuse_sharding(strategy, zero, fsdp=False, scaler=scaler)
        self.model, self.optimizer, self.strategy, self.cluster = model, optimizer, strategy, cluster
        self.accumulate, self.check = accumulate, check
        self.weight = 1.0
        """This worker's share of the next exchange: its samples × N / all samples (set by :func:`hocket.distribute`)."""
        check_device(model, cluster)
        self.layout = layout_for(model, optimizer, strategy, bucket_cap_bytes, first_bucket_cap_bytes, apart)
        if not self.layout.buckets and hooked:  # a stage of a pipeline may have none
            raise HocketError("The optimiser holds no trainable parameter of this model; build it from model.parameters().")
        check_optimizer(model, optimizer)
        check_equal(
            model,
            self.layout,
            cluster,
            [
                str(strategy),
                f"accumulate={accumulate}",
                f"check={check}",
                f"seed={seed}",
                f"scaler={scaler is not None}",
                f"zero={zero}",
            ],
        )
        # With a scaler overflow is expected: it leads to a skipped step, not to an end.
        self._nonfinite = NonFinite(nonfinite if scaler is None else "skip", self.layout, cluster)
        self._overflow = False
        named = dict(model.named_parameters())
        self._params = [[named[s.name] for s in b.slots] for b in self.layout.buckets]
        self.weights = [b.empty(1) for b in self.layout.buckets]
        self.grads = [b.empty(1) for b in self.layout.buckets]
        self._grad_views = [b.views(g, 0) for b, g in zip(self.layout.buckets, self.grads, strict=True)]
        self._ours = adopt(model, self.layout, self._params, self.weights, cluster)
        if strategy.topology.sums_on_servers:
            from hocket.server.summing import serve_sums  # its sockets are loaded only where they are needed

            serve_sums(strategy, cluster)
        self.program = CollectiveProgram(strategy, self.layout, cluster, self.weights, seed)
        self.ledger = LedgerView(cluster)
        self._ready: list[set[int]] = [set() for _ in self.layout.buckets]
        self._launched = 0
        self._backwards = 0
        self._called_back = False
        self.gradients_at = 0.0
        """When the last backward pass had computed all gradients (``time.perf_counter``); exchanges may go on after it."""
        self._handles = self._hook(hooked)
        self.sharded: ShardedState | None = None
        if zero and cluster.size > 1:
            self.sharded = ShardedState(model, optimizer, cluster, self.layout, self.weights)
        if scaler is not None:
            self._share_overflow(scaler)
        if cluster.workers.start == 0:
            mention_period(strategy, steps, cluster.size)
        cluster.ledger.resume()

    # --- what users call ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All strategy state of this worker (save it beside the model's and the optimiser's)."""
        return self.program.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.program.load_state_dict(state)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The mean model, for evaluation and checkpoints: mean weights and mean float buffers; all workers must enter together."""
        self.program.drain()
        with self.cluster.uncounted():
            buffers = [b for b in self.model.buffers() if b.is_floating_point()]
            kept = [t.clone() for t in (*self.weights, *buffers)]
            self._average(buffers)
            try:
                yield self.model
            finally:
                for tensor, old in zip((*self.weights, *buffers), kept, strict=True):
                    tensor.data.copy_(old)

    def finish(self) -> nn.Module:
        """End the training: every worker's model becomes the mean model, hooks go; all workers must call it."""
        self.program.drain()
        with self.cluster.uncounted():
            self._average([b for b in self.model.buffers() if b.is_floating_point()])
        self.detach()
        return self.model

    def detach(self) -> None:
        """Remove all hooks; the model goes on alone, from the weights it has."""
        self.program.drain()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.sharded is not None:
            self.sharded.detach()
        self.cluster.ledger.pause()

    # --- set-up --------------------------------------------------------------------------------------------------------------

    def _hook(self, hooked: bool) -> list[Any]:
        handles: list[Any] = []
        if self.cluster.size > 1 and hooked:
            for b, params in enumerate(self._params):
                for s, p in enumerate(params):
                    handles.append(p.register_post_accumulate_grad_hook(lambda p, b=b, s=s: self._on_gradient(b, s, p)))
                    if self.accumulate > 1:
                        handles.append(p.register_hook(self._weighed))
        handles.append(self.optimizer.register_step_pre_hook(lambda *_: self._before_step()))
        handles.append(self.optimizer.register_step_post_hook(lambda *_: self._after_step()))
        return handles

    def _share_overflow(self, scaler: Any) -> None:
        """GradScaler finds overflow per process; all must skip together, or their exchanges no longer meet.

        A skipped step counts as one whose update is zero, so that a mix under way lands and the next one is launched.
        """
        unscale = scaler._unscale_grads_

        def agreed(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            found = unscale(optimizer, *args, **kwargs)
            if optimizer is not self.optimizer or not self._handles:
                return found
            own = self._overflow or any(bool(overflow > 0) for overflow in found.values())
            self._overflow = False
            skips = bool(self.cluster.all_reduce_any(torch.tensor([[own]], device=self.cluster.device)))
            for overflow in found.values():
                overflow.fill_(float(skips))
            if skips and not getattr(optimizer, "_step_supports_amp_scaling", False):  # those are called, and skip by themselves
                self.program.before_update(self.weights)
                self._after_step()
            return found

        scaler._unscale_grads_ = agreed

    # --- gradients -----------------------------------------------------------------------------------------------------------

    def _on_gradient(self, bucket: int, slot: int, p: nn.Parameter) -> None:
        if not self._called_back:
            self._called_back = True
            Variable._execution_engine.queue_callback(self._end_of_backward)
        if self._backwards + 1 < self.accumulate or not self.program.mixes_gradients:
            return
        self._take(bucket, slot, p)

    def _take(self, bucket: int, slot: int, p: nn.Parameter) -> None:
        view = self._grad_views[bucket][slot]
        assert p.grad is not None
        if p.grad.is_sparse:
            raise HocketError("A gradient is sparse; exchanges are dense, so build the embedding with sparse=False.")
        if slot in self._ready[bucket]:
            raise HocketError(
                f"The gradient of {self.layout.buckets[bucket].slots[slot].name} came twice in one backward pass, as under "
                "reentrant checkpointing of a module that is used twice; use checkpoint(…, use_reentrant=False)."
            )
        if p.grad.data_ptr() != view.data_ptr():
            view.copy_(p.grad)
            p.grad = view
        self._ready[bucket].add(slot)
        while self._launched < len(self._ready) and len(self._ready[self._launched]) == len(self._params[self._launched]):
            self._launch()

    def exchange(self) -> None:
        """Exchange gradients that came without hooks, where this step exchanges any; they are whole, so ``accumulate`` is 1."""
        if self.cluster.size == 1 or not self.program.mixes_gradients:
            self._backwards += 1
            return
        for b, params in enumerate(self._params):
            for s, p in enumerate(params):
                if p.grad is not None:
                    self._take(b, s, p)
        self._end_of_backward()

    def _weighed(self, gradient: Tensor) -> Tensor:
        """One pass of several: each has its own share of samples, so it is weighed before it is added to the others."""
        return gradient * self.weight if self.weight != 1.0 and self.program.mixes_gradients else gradient

    def _launch(self) -> None:
        rows = self.grads[self._launched]
        if self.check:
            self._nonfinite.look(self._launched, rows, self.program.step + 1)
        if self.weight != 1.0 and self.accumulate == 1:
            rows.mul_(self.weight)
        self.program.gradient_ready(self._launched, rows)
        self._launched += 1

    def _end_of_backward(self) -> None:
        self._called_back = False
        self.gradients_at = time.perf_counter()
        _refuse_reentrant(sys._getframe())
        self._backwards += 1
        if self._backwards < self.accumulate:
            return
        if not self.program.mixes_gradients:
            return
        used = [[p.grad is not None for p in params] for params in self._params]
        while self._launched < len(self._ready):
            for slot, (view, p) in enumerate(zip(self._grad_views[self._launched], self._params[self._launched], strict=True)):
                if slot in self._ready[self._launched]:
                    continue
                # Unused in this pass; an earlier one of the same step may have left something.
                if p.grad is None:
                    view.zero_()
                elif p.grad.data_ptr() != view.data_ptr():
                    view.copy_(p.grad)
                    p.grad = view
            self._launch()
        self._ready = [set() for _ in self._ready]
        self._launched = 0
        if self.check:
            # Which parameters anybody used, and whether anybody's gradient was not finite: agreed in one small message.
            flat = [f for row in used for f in row]
            self.program.flags_ready(torch.tensor([[*flat, self._nonfinite.found]], device=self.cluster.device))
            agreed = self.program.gradients_done()[-1].tolist()
            self._overflow = agreed.pop()
            self._nonfinite.judge(self._overflow)
            used = [[agreed.pop(0) for _ in row] for row in used]
        else:
            self.program.gradients_done()
        for views, params, flags in zip(self._grad_views, self._params, used, strict=True):
            for view, p, flag in zip(views, params, flags, strict=True):
                if p.grad is None and flag:
                    p.grad = view

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _before_step(self) -> None:
        if self._backwards and self._backwards < self.accumulate:
            raise HocketError(
                f"optimizer.step() after {self._backwards} backward passes, but accumulate={self.accumulate}; make them agree."
            )
        if self._backwards > self.accumulate and self.program.mixes_gradients and not self.program.linear:
            raise HocketError(
                f"optimizer.step() after {self._backwards} backward passes, but accumulate={self.accumulate}: each was exchanged, "
                f"and {self.strategy} mixes what it mixed before; say accumulate={self._backwards}."
            )
        if self.cluster.size > 1:
            refuse_newcomers(self.optimizer, self._ours)
        if self.check and not self.program.mixes_gradients:
            self._nonfinite.check_local(self._params, self.program.step + 1)
        self.program.before_update(self.weights)

    def _after_step(self) -> None:
        self._backwards = 0
        self.program.after_update(self.weights)

    def _average(self, buffers: list[Tensor]) -> None:
        if self.cluster.size == 1:
            return
        if not (self.strategy.sync.keeps_replicas_equal and self.strategy.topology.uniform and not self.strategy.weights):
            for rows in self.weights:
                self._mean(rows)
        for buffer in buffers:
            rows = buffer.data.reshape(1, -1).clone()
            self._mean(rows)
            buffer.data.copy_(rows.view(buffer.shape))

    def _mean(self, rows: Tensor) -> None:
        exchange = self.cluster.exchange()
        exchange.submit(lambda: self.cluster.mean(rows, self.cluster.world))
        exchange.wait()


def layout_for(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    bucket_cap_bytes: int | None,
    first_bucket_cap_bytes: int | None,
    apart: Mapping[str, str] | None = None,
) -> Layout:
    """The buckets of a job: a few large ones, or a single one where the compression wants all values at once."""
    unlimited = sys.maxsize if strategy.compression.single_bucket else None
    cap = bucket_cap_bytes or unlimited or BUCKET_CAP_BYTES
    first = first_bucket_cap_bytes or unlimited or FIRST_BUCKET_CAP_BYTES
    layout = layout_of(model.named_parameters(), [g["params"] for g in optimizer.param_groups], cap, first, apart)
    return replace(layout, buffer_bytes=4 * sum(b.numel() for b in model.buffers() if b.is_floating_point()))


def adopt(
    model: nn.Module, layout: Layout, params: Sequence[Sequence[nn.Parameter]], weights: Sequence[Tensor], cluster: Cluster
) -> set[int]:
    """Move parameters into rows and make all replicas equal to worker 0's; the ids of the parameters moved."""
    for bucket, rows, own in zip(layout.buckets, weights, params, strict=True):
        for view, p in zip(bucket.views(rows, 0), own, strict=True):
            view.copy_(p.data)
            p.data = view
        cluster.synchronize(rows)
    ours = {id(p) for own in params for p in own}
    for tensor in (*(p for p in model.parameters() if id(p) not in ours), *model.buffers()):
        rows = tensor.data.reshape(1, -1).clone()
        cluster.synchronize(rows)
        tensor.data.copy_(rows.view(tensor.shape))
    return ours


def refuse_newcomers(optimizer: torch.optim.Optimizer, ours: set[int]) -> None:
    """Refuse gradients of parameters that were not there when the job was made."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and id(p) not in ours:
                raise HocketError(
                    "The optimiser got a parameter, or one was unfrozen, after hocket.parallelize(…), so it is not exchanged; "
                    "call job.detach() and parallelize again."
                )


def check_job(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, accumulate: int, nonfinite: str) -> None:
    """Refuse what cannot work, in one sentence each."""
    if not isinstance(model, nn.Module):
        raise HocketError(f"parallelize needs an nn.Module, got {type(model).__name__}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise HocketError(f"parallelize needs a torch.optim optimiser, got {type(optimizer).__name__}.")
    refuse_offloaded(model)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise HocketError(
            "LBFGS calls its closure a different number of times on each worker, which would hang; use a first-order optimiser."
        )
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise HocketError(
            f"accumulate={accumulate!r}: the number of backward passes per step must be a whole number of at least 1."
        )
    if nonfinite not in ("raise", "skip"):
        raise HocketError(
            f"nonfinite={nonfinite!r}: use 'raise' (end with the parameter's name) or 'skip' (leave that gradient out)."
        )
    if strategy.compression.carries_momentum and any(g.get("momentum", 0) for g in optimizer.param_groups):
        raise HocketError("dgc carries the momentum itself: use SGD(momentum=0) and dgc(…, momentum=0.9).")


def mention_period(strategy: Strategy, steps: int | None, workers: int) -> None:
    """Mention once the period up to which convergence is proven, where there are local steps and their number is known."""
    period = strategy.sync.period
    if steps is None or workers == 1:
        return
    proven = strategy.sync.proven_period(steps, workers)
    if proven is not None and period > 1:
        warnings.warn(
            f"{strategy.sync.name} with a period of {period}: convergence is proven up to T^(1/4)/N^(3/4) = "
            f"{proven:.2f} steps for T = {steps} and N = {workers}; that is sufficient, not necessary.",
            stacklevel=3,
        )


def _refuse_reentrant(frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code is _REENTRANT:
            raise HocketError("Reentrant checkpointing ends the backward pass early; use checkpoint(…, use_reentrant=False).")
        frame = frame.f_back


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
