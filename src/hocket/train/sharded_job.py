"""``parallelize(…, fsdp=True)``: the loop stays, weights, gradients and optimiser state lie in parts (PyTorch's FSDP2).

FSDP2 makes all exchanges by itself, inside the forward and the backward pass. So the ledger knows the seconds of training as a
whole, not what of it was spent waiting; and bytes are computed by formula, not counted at each message. Each backward pass is
exchanged, also where several make a step: gradients are never whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hocket.cluster.base import Cluster
from hocket.cluster.ledger import Entry
from hocket.errors import HocketError, NonFiniteGradient
from hocket.split.sharded import FullShards, gathered, part_like, refuse_fsdp_on, refuse_sharding
from hocket.strategy import Strategy
from hocket.train.job import check_device, check_equal, check_job, check_optimizer, layout_for
from hocket.train.ledger_view import LedgerView


class FSDPJob:
    """A model in fully sharded training; made by :func:`hocket.parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        cluster: Cluster,
        accumulate: int = 1,
        nonfinite: str = "raise",
        check: bool = True,
        seed: int = 0,
        scaler: Any = None,
    ) -> None:
        refuse_sharding(strategy, zero=0, fsdp=True, scaler=scaler)
        refuse_fsdp_on(cluster)
        check_job(model, optimizer, strategy, accumulate, nonfinite)
        check_device(model, cluster)
        check_optimizer(model, optimizer)
        layout = layout_for(model, optimizer, strategy, None, None)
        check_equal(model, layout, cluster, [str(strategy), f"accumulate={accumulate}", f"check={check}", "fsdp=True"])
        self.model, self.optimizer, self.strategy, self.cluster = model, optimizer, strategy, cluster
        self.accumulate, self.check, self.nonfinite, self.seed = accumulate, check, nonfinite, seed
        self.weight = 1.0
        """This worker's share of the next exchange: its samples × N / all samples (set by :func:`hocket.distribute`)."""
        self.step = 0
        self._backwards = 0
        self.layout = layout
        self._skeleton = _without_values(model)
        self.shards = FullShards(model, optimizer, cluster)
        self.ledger = ComputedLedger(cluster)
        self._handles: list[Any] = [
            model.register_forward_hook(lambda _, __, out: self._after_forward(out)),
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        cluster.ledger.resume()

    # --- what users call -----------------------------------------------------------------------------------------------------

    def whole(self) -> nn.Module:
        """A copy of the model that lies in one piece, with mean float buffers, on every worker; all must call it."""
        model = copy.deepcopy(self._skeleton)
        with self.cluster.uncounted():
            own = self.model.state_dict()
            values = {name: gathered(value).detach().clone() for name, value in own.items()}
            for name, buffer in self.model.named_buffers():
                if name in values and buffer.is_floating_point():
                    rows = buffer.detach().reshape(1, -1).clone()
                    self.cluster.start(partial(self.cluster.mean, rows, self.cluster.world))()
                    values[name] = rows.view(buffer.shape)
        model.load_state_dict(values, assign=True)
        return model.train(self.model.training)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """:meth:`whole`, for evaluation. (Where it has no room, evaluate ``model`` itself on all workers at once.)"""
        yield self.whole()

    def finish(self) -> nn.Module:
        """End the training; the model in one piece on every worker. The one that was sharded stays so. All must call it."""
        model = self.whole()
        self.detach()
        return model

    def detach(self) -> None:
        """Remove all hooks; the model stays sharded."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.cluster.ledger.pause()

    def state_dict(self) -> dict[str, Any]:
        """On worker 0 all there is, in the form of unsharded training: ``model`` and ``optimizer`` as their ``state_dict`` would
        give them, and the number of steps; elsewhere only the last. All workers must call it."""
        state: dict[str, Any] = {"strategy": str(self.strategy), "step": self.step}
        first = self.cluster.workers.start == 0
        with self.cluster.uncounted():
            model = {name: _kept(value, first) for name, value in self.model.state_dict().items()}
            optimizer = self.optimizer.state_dict()
            optimizer["state"] = {
                index: {key: _kept(value, first) for key, value in entries.items()} for index, entries in optimizer["state"].items()
            }
        return {**state, "model": model, "optimizer": optimizer} if first else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from worker 0's :meth:`state_dict`, or from an unsharded training's, given to every worker; nothing is sent."""
        if "model" not in state or "optimizer" not in state:
            raise HocketError(
                "This checkpoint has no model or optimizer; give every worker what state_dict() returned on worker 0."
            )
        own = self.model.state_dict()
        parts = {
            name: part_like(v, own[name]) if hasattr(own.get(name), "full_tensor") else v for name, v in state["model"].items()
        }
        self.model.load_state_dict(parts)
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        optimizer = {**state["optimizer"], "state": {}}
        for index, entries in state["optimizer"]["state"].items():
            like = params[index]
            optimizer["state"][index] = {
                key: part_like(value, like) if isinstance(value, Tensor) and value.shape == like.shape else copy.deepcopy(value)
                for key, value in entries.items()
            }
        self.optimizer.load_state_dict(optimizer)
        self.step = state.get("step", 0)

    # --- hooks ---------------------------------------------------------------------------------------------------------------

    def _after_forward(self, out: Any) -> Any:
        if not torch.is_grad_enabled():
            return out
        self.ledger.computed_bytes += self.shards.gather_bytes[0]
        passed = [False]

        def weigh(gradient: Tensor) -> Tensor:
            if not passed[0]:
                passed[0] = True
                self._backwards += 1
                self.ledger.computed_bytes += self.shards.gather_bytes[1] + self.shards.scatter_bytes
            return gradient if self.weight == 1.0 else gradient * self.weight

        def hooked(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                tensor.register_hook(weigh)
            return tensor

        return tree_map_only(Tensor, hooked, out)

    def _before_step(self) -> None:
        if self._backwards and self._backwards != self.accumulate:
            raise HocketError(
                f"optimizer.step() after {self._backwards} backward passes, but accumulate={self.accumulate}; make them agree."
            )
        if self.check:
            self.look()

    def _after_step(self) -> None:
        self._backwards = 0
        self.step += 1

    def look(self) -> None:
        """NaN and Inf in parts of gradients: all workers raise, or leave that parameter's gradient out."""
        named = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        flags = [not bool(torch.isfinite(_local(grad)).all()) for _, grad in named]
        agreed = self.cluster.all_reduce_any(torch.tensor([flags or [False]], device=self.cluster.device)).tolist()
        bad = [(name, grad) for (name, grad), flag in zip(named, agreed, strict=False) if flag]
        if not bad:
            return
        self.cluster.ledger.nonfinite += self.cluster.workers.start == 0
        if self.nonfinite == "raise":
            raise NonFiniteGradient(
                f"The gradient of {', '.join(name for name, _ in bad[:3])} holds NaN or Inf at step {self.step + 1}; lower the "
                "rate, clip gradients, or use nonfinite='skip' to leave such gradients out."
            )
        for _, grad in bad:
            _local(grad).zero_()


class ComputedLedger(LedgerView):
    """Measured seconds, as a whole, and bytes by formula: FSDP2 sends by itself, so nobody counted them."""

    computed_bytes: int = 0

    def close_epoch(self) -> Entry:
        entry = super().close_epoch()
        everyone = self._cluster.all_gather_metrics(torch.tensor([[self.computed_bytes]]))
        self.computed_bytes = 0
        entry.bytes_sent += int(everyone.sum())
        entry.compute_s = entry.wait_s = entry.transfer_s = entry.transfer_hidden_s = None
        return entry

    def summary(self) -> dict[str, Any]:
        """As of any job; ``computed`` names the figures that are from a formula. All workers must call it."""
        return {**super().summary(), "computed": ["bytes_sent"]}


def _without_values(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters have shapes and no values."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _kept(value: Any, keep: bool) -> Any:
    whole = gathered(value)
    if not keep:
        return None
    return whole.detach().cpu().clone() if isinstance(whole, Tensor) else whole


def _local(grad: Any) -> Tensor:
    return grad.to_local() if hasattr(grad, "to_local") else grad
