"""PyTorch's FSDP2 (Zhao et al., "PyTorch FSDP", VLDB 2023): weights, gradients and optimiser state lie in ``N`` parts, a block's
weights are gathered when it computes, and FSDP2 makes all exchanges by itself.

They happen inside the forward and the backward pass. So the ledger knows the seconds of training as a whole, not what of it was
spent waiting; and bytes are computed by formula, not counted at each message. Each backward pass is exchanged, also where several
make a step: gradients are never whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hocket.cluster.base import Cluster
from hocket.cluster.dtensor import is_distributed, local
from hocket.cluster.message import framed
from hocket.errors import HocketError, NonFiniteGradient
from hocket.split.parts import blocks_of, broadcast_tensors
from hocket.split.sharded import SEES_WHOLE, refuse_sharding
from hocket.strategy import Strategy
from hocket.train.ledger_view import ClusterLedger
from hocket.train.runtimes.base import Binding, FixedWorkers
from hocket.train.watch import Where

_NOT_IN_PARTS = {
    **dict.fromkeys(SEES_WHOLE, "looks at whole matrices, of which FSDP2 leaves each worker a part"),
    "Adagrad": "has state before its first step, which FSDP2 does not cut",
    "Rprop": "writes into places of a gradient, which PyTorch does not do in parts",
}


class FsdpRuntime(FixedWorkers):
    """The workers of ``cluster``, each with a part of everything."""

    synchronous = True
    in_rows = False
    alone = False
    takes_gradients = False
    mixes_gradients = True
    weighs_gradients = True
    linear = True
    keeps_residuals = False
    steps_locally = True
    sharded = None

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.step = 0
        self._handles: list[Any] = []

    @property
    def where(self) -> Where:
        return self.cluster

    def terms(self) -> list[str]:
        return ["FSDP2"]

    def refuse(self, strategy: Strategy, scaler: Any) -> None:
        refuse_sharding(strategy, zero=0, fsdp=True, scaler=scaler)
        refuse_fsdp_on(self.cluster)

    def join(self, binding: Binding) -> None:
        self.binding, model = binding, binding.model
        self._skeleton = _without_values(model)
        self._shard(model, binding.optimizer)
        self.ledger = ClusterLedger(self.cluster, computed=True)
        self._handles = [model.register_forward_hook(lambda _, __, out: self._after_forward(out))]

    def _shard(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Shard the model block by block; the optimiser steps the parts of its parameters."""
        from torch.distributed.device_mesh import DeviceMesh  # these take a second to load
        from torch.distributed.fsdp import fully_shard

        if reason := _NOT_IN_PARTS.get(type(optimizer).__name__):
            raise HocketError(f"{type(optimizer).__name__} {reason}; use AdamW or SGD, or ZeRO-1.")
        if any(optimizer.state.values()):
            raise HocketError(
                "FSDP2 cuts the optimiser's state, too, and this one has some; call hocket.parallelize before the first step."
            )
        broadcast_tensors((*model.parameters(), *model.buffers()), self.cluster)
        assert self.cluster.group is not None
        mesh = DeviceMesh.from_group(self.cluster.group, self.cluster.device.type)
        names = {id(p): name for name, p in model.named_parameters()}
        held = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        blocks = list(blocks_of(model).values())
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        named = dict(model.named_parameters())
        for group, own in zip(optimizer.param_groups, held, strict=True):
            group["params"] = [named[name] for name in own]
        inside = {id(p) for block in blocks for p in block.parameters()}
        units = [list(block.parameters()) for block in blocks]
        rest = [p for p in model.parameters() if id(p) not in inside]
        # Bytes that this worker sends, by formula. Weights of no block are kept from the forward to the backward pass.
        self._backward_bytes = sum(self._ring(unit) for unit in units)
        self._forward_bytes = self._backward_bytes + self._ring(rest)
        self._backward_bytes += sum(self._ring([p for p in unit if p.requires_grad]) for unit in (*units, rest))

    def _ring(self, params: Sequence[nn.Parameter]) -> int:
        """What a worker sends where it forwards ``N − 1`` parts of these parameters, or of their gradients."""
        parts = self.cluster.size
        part = sum(-(-p.shape[0] // parts) * (p.numel() // max(p.shape[0], 1)) * p.element_size() for p in params)
        return (parts - 1) * framed(part) if part else 0

    def hooked(self) -> None:
        self.cluster.ledger.resume()

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _after_forward(self, out: Any) -> Any:
        if not torch.is_grad_enabled():
            return out
        self.ledger.computed_bytes += self._forward_bytes
        passed = [False]

        def weigh(gradient: Tensor) -> Tensor:
            if not passed[0]:
                passed[0] = True
                self.binding.backwards += 1
                self.ledger.computed_bytes += self._backward_bytes
            return gradient if self.binding.weight == 1.0 else gradient * self.binding.weight

        def hooked(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                tensor.register_hook(weigh)
            return tensor

        return tree_map_only(Tensor, hooked, out)

    def gradient_ready(self, bucket: int, rows: Tensor) -> None:
        raise AssertionError("FSDP2 exchanges gradients")

    def flags_ready(self, flags: list[bool]) -> None:
        raise AssertionError("FSDP2 exchanges gradients itself")

    def gradients_done(self) -> list[bool]:
        raise AssertionError("FSDP2 exchanges gradients")

    def discard_gradients(self) -> None:
        raise AssertionError("FSDP2 exchanges gradients")

    def any_worker(self, flag: bool) -> bool:
        return bool(self.cluster.all_reduce_any(torch.tensor([[flag]], device=self.cluster.device)))

    def before_update(self, gradients: Sequence[Tensor]) -> None:
        binding = self.binding
        if binding.backwards > binding.accumulate:
            raise HocketError(
                f"optimizer.step() after {binding.backwards} backward passes, but accumulate={binding.accumulate}; make them agree."
            )
        if binding.check:
            self.check_gradients()

    def after_update(self) -> None:
        self.step += 1
        self.cluster.end_step(self.step)

    def drain(self) -> None:
        """Nothing is under way between two passes."""

    def check_gradients(self) -> None:
        """NaN and Inf in parts of gradients: all workers raise, or leave that parameter's gradient out."""
        named = [(name, p.grad) for name, p in self.binding.model.named_parameters() if p.grad is not None]
        flags = [not bool(torch.isfinite(local(grad)).all()) for _, grad in named]
        agreed = self.cluster.all_reduce_any(torch.tensor([flags or [False]], device=self.cluster.device)).tolist()
        bad = [(name, grad) for (name, grad), flag in zip(named, agreed, strict=False) if flag]
        if not bad:
            return
        self.cluster.ledger.nonfinite += self.cluster.workers.start == 0
        if self.binding.nonfinite == "raise":
            raise NonFiniteGradient(
                f"The gradient of {', '.join(name for name, _ in bad[:3])} holds NaN or Inf at step {self.step + 1}; lower the "
                "rate, clip gradients, or leave such gradients out (hocket.Checks(nonfinite='skip'), or --nonfinite skip)."
            )
        for _, grad in bad:
            local(grad).zero_()

    # --- the mean model ------------------------------------------------------------------------------------------------------

    def whole(self) -> nn.Module:
        """A copy of the model that lies in one piece, with mean float buffers, on every worker; all must call it."""
        own = self.binding.model
        model = copy.deepcopy(self._skeleton)
        with self.cluster.uncounted():
            values = {name: _gathered(value).detach().clone() for name, value in own.state_dict().items()}
            for name, buffer in own.named_buffers():
                if name in values and buffer.is_floating_point():
                    rows = buffer.detach().reshape(1, -1).clone()
                    self.cluster.start(partial(self.cluster.mean, rows, self.cluster.world))()
                    values[name] = rows.view(buffer.shape)
        model.load_state_dict(values, assign=True)
        return model.train(own.training)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """:meth:`whole`. (Where it has no room, evaluate ``model`` itself on all workers at once.)"""
        self.cluster.wait_for_all("job.averaged()")
        yield self.whole()

    def finish(self) -> nn.Module:
        """The model in one piece on every worker; the one that was sharded stays so. All must call it."""
        self.cluster.wait_for_all("job.finish()")
        model = self.whole()
        self.ledger.close_epoch()
        return model

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.cluster.ledger.pause()

    # --- state ---------------------------------------------------------------------------------------------------------------

    def full_state(self) -> dict[str, Any] | None:
        with self.cluster.uncounted():
            return full_state(self.binding.model, self.binding.optimizer, self.cluster.workers.start == 0)

    def load_full_state(self, state: dict[str, Any]) -> None:
        load_full_state(self.binding.model, self.binding.optimizer, state)

    def state_dict(self) -> dict[str, Any]:
        return {"strategy": str(self.binding.strategy), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def refuse_fsdp_on(cluster: Cluster) -> None:
    """Refuse FSDP2 on CUDA over Gloo: its exchanges of CUDA tensors end the process without an error."""
    if cluster.device.type == "cuda" and "nccl" not in (cluster.backend or ""):
        raise HocketError(
            f"FSDP2 on CUDA needs NCCL, which needs a GPU for each process, but the job exchanges over {cluster.backend}; use "
            "ZeRO-1, or hocket.init(backend='nccl')."
        )


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any] | None:
    """Model and optimiser as if they had never been sharded, where ``keep`` says so; None elsewhere. All processes that hold a part
    must call it."""
    whole = {name: _kept(value, keep) for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    state["state"] = {i: {key: _kept(value, keep) for key, value in entries.items()} for i, entries in state["state"].items()}
    return {"model": whole, "optimizer": state} if keep else None


def load_full_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take this process's parts of :func:`full_state`, which every process is given; nothing is sent."""
    if "model" not in state or "optimizer" not in state:
        raise HocketError("This checkpoint has no model or optimizer; give every worker what full_state() returned on worker 0.")
    own = model.state_dict()
    model.load_state_dict(
        {name: _part_like(v, own[name]) if is_distributed(own.get(name)) else v for name, v in state["model"].items()}
    )
    params = [p for group in optimizer.param_groups for p in group["params"]]
    taken = {**state["optimizer"], "state": {}}
    for index, entries in state["optimizer"]["state"].items():
        like = params[index]
        taken["state"][index] = {
            key: _part_like(value, like) if isinstance(value, Tensor) and value.shape == like.shape else copy.deepcopy(value)
            for key, value in entries.items()
        }
    optimizer.load_state_dict(taken)


def _gathered(value: Any) -> Any:
    """A tensor that may be distributed, gathered whole on every worker (a collective)."""
    return value.full_tensor() if is_distributed(value) else value


def _part_like(whole: Tensor, like: Any) -> Tensor:
    """This worker's part of ``whole``, cut like the distributed tensor ``like``, as a tensor of its own; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None).clone()


def _without_values(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters have shapes and no values."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _kept(value: Any, keep: bool) -> Any:
    whole = _gathered(value)
    if not keep:
        return None
    return whole.detach().cpu().clone() if isinstance(whole, Tensor) else whole
