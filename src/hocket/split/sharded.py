"""Sharded state: equal replicas each keep a part of the state instead of all of it.

**Optimiser state** (ZeRO-1: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020):
every worker holds all weights and all mixed gradients, but steps only the parameters that it owns, so it keeps their state alone;
then it sends the new weights to all workers. ``N`` workers keep ``1/N`` of the state each and at most one parameter more. The
result is that of unsharded training bit for bit, since the update of one parameter does not depend on another.

**Everything** (FSDP2: :mod:`hocket.train.runtimes.fsdp`): weights and gradients, too.

Both need replicas that are equal after every step.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.cluster.message import Message
from hocket.errors import HocketError
from hocket.split.parts import only
from hocket.strategy import Strategy

SEES_WHOLE = ("Adafactor", "LAMB", "LARS", "Muon")
"""Optimisers that need a whole matrix to update a part of it."""


def refuse_sharding(strategy: Strategy, zero: int, fsdp: bool, scaler: Any = None) -> None:
    """Refuse ZeRO-1 (``zero=1``) or FSDP2 (``fsdp=True``) where the strategy does not allow it, in one sentence.

    >>> refuse_sharding(Strategy.parse("bulk + topk(0.01)"), zero=1, fsdp=False)
    >>> refuse_sharding(Strategy.parse("local(4)"), zero=1, fsdp=False)
    Traceback (most recent call last):
    hocket.errors.HocketError: ZeRO-1 needs equal replicas after every step, but under local(4) + allreduce each worker's
    optimiser state is its own; use bulk + allreduce.
    """
    if zero not in (0, 1) or isinstance(zero, bool):
        raise HocketError(f"zero={zero!r}: zero=1 shards the optimiser's state; use FSDP2 to shard weights and gradients, too.")
    if zero and fsdp:
        raise HocketError("ZeRO-1 with FSDP2: FSDP2 shards the optimiser's state, too; leave ZeRO-1 out.")
    if not zero and not fsdp:
        return
    if reason := _differs(strategy):
        raise HocketError(
            f"{'FSDP2' if fsdp else 'ZeRO-1'} needs equal replicas after every step, but under {strategy} {reason}; "
            "use bulk + allreduce."
        )
    if not fsdp:
        return
    if strategy.compression.compresses or not strategy.topology.one_mean:
        raise HocketError(
            f"PyTorch's FSDP2 averages gradients itself and does not support {strategy}; use bulk + allreduce, or ZeRO-1."
        )
    if scaler is not None:
        raise HocketError("FSDP2 shards gradients, which a GradScaler judges one by one; use bfloat16, or ZeRO-1.")


def _differs(strategy: Strategy) -> str | None:
    """Why replicas are not equal after every step, or None."""
    if strategy.runtime != "collective":
        return "workers are asynchronous"
    if not strategy.sync.keeps_replicas_equal:
        return "each worker's optimiser state is its own"
    if not strategy.topology.uniform:
        return "each worker averages with other partners"
    if strategy.sync.predicts:
        return "every second update is taken back"
    return f"{strategy.exchanged} are exchanged, not gradients" if strategy.exchanged != "gradients" else None


def owners_of(sizes: Sequence[int], workers: int) -> list[int]:
    """The owner of each of a sequence of parameters: consecutive runs, the largest of which is as small as possible.

    >>> owners_of([1, 4, 12, 3], 2), owners_of([5], 3)
    ([0, 0, 1, 1], [0])
    """
    low, high = max(max(sizes), -(-sum(sizes) // workers)), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _runs(sizes, middle)[-1] < workers else (middle + 1, high)
    return _runs(sizes, low)


def _runs(sizes: Sequence[int], cap: int) -> list[int]:
    owners, owner, load = [], 0, 0
    for size in sizes:
        if load + size > cap:
            owner, load = owner + 1, 0
        load += size
        owners.append(owner)
    return owners


class ShardedState:
    """The state of ``optimizer`` in as many parts as there are workers; ``weights`` are the rows in which the parameters lie.

    Groups of the optimiser stay whole, with their hyperparameters: only during a step do they hold the owned parameters alone. So
    schedulers, ``zero_grad``, ``unscale_`` and clipping see all parameters.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, cluster: Cluster, layout: Layout, weights: Sequence[Tensor]
    ) -> None:
        self.optimizer, self.cluster = optimizer, cluster
        named = dict(model.named_parameters())
        slots = [(b, s) for b in layout.buckets for s in b.slots]
        owners = owners_of([s.size * b.dtype.itemsize for b, s in slots], cluster.size)
        self.owners = {s.name: owner for (_, s), owner in zip(slots, owners, strict=True)}
        """Which worker owns each parameter."""
        self._others = {id(named[name]) for name, owner in self.owners.items() if owner not in cluster.workers}
        self._pieces = list(_pieces(layout, weights, self.owners))
        self._step = ExitStack()
        self._gathering = False
        for p in list(optimizer.state):
            if id(p) in self._others:
                del optimizer.state[p]
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
            optimizer.register_state_dict_pre_hook(lambda _: self._refuse_part()),
            optimizer.register_load_state_dict_pre_hook(self._own_part),
        ]

    @property
    def owned_bytes(self) -> int:
        """Bytes of the parameters that this worker steps."""
        return sum(rows.nbytes for owner, rows in self._pieces if owner in self.cluster.workers)

    def consolidate(self) -> dict[str, Any] | None:
        """All state on worker 0, in the form of the unsharded optimiser's ``state_dict``; None elsewhere. All must call it.

        To resume from it, sharded or not, every worker passes it to ``optimizer.load_state_dict``.
        """
        packed = self._packed()
        with self.cluster.uncounted():
            own = _blob(packed["state"])
            sizes = self.cluster.all_gather_metrics(torch.tensor([[own.numel()]])).flatten().tolist()
            for owner in range(1, self.cluster.size):
                heard = self._heard_by_first(own, owner, sizes[owner])
                if heard is not None:
                    packed["state"].update(torch.load(io.BytesIO(heard.cpu().numpy().tobytes()), weights_only=True))
        if self.cluster.workers.start != 0:
            return None
        packed["state"] = dict(sorted(packed["state"].items()))
        return packed

    def saved(self) -> dict[str, Any]:
        """The state for this worker's checkpoint: all of it on worker 0, its part on others. All workers must call it.

        A worker's own part resumes with the same number of workers; worker 0's state resumes with any number.
        """
        return self.consolidate() or self._packed()

    def detach(self) -> None:
        """Remove all hooks. The optimiser keeps the state of its own part alone: call consolidate() first to keep all of it."""
        self._step.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
            raise HocketError(
                "Under ZeRO-1 each worker steps a part of the parameters, so closures are not supported; call optimizer.step() "
                "without one."
            )
        self._step.close()  # of a step that ended with an error
        self._step.enter_context(only(optimizer, lambda p: id(p) not in self._others))

    def _after_step(self) -> None:
        self._step.close()
        if self.cluster.size == 1:
            return
        exchange = self.cluster.exchange()
        for owner, rows in self._pieces:
            exchange.submit(partial(self.cluster.broadcast, rows, owner), name=f"updates of worker {owner}")
        exchange.wait()

    # --- checkpoints ---------------------------------------------------------------------------------------------------------

    def _packed(self) -> dict[str, Any]:
        """The optimiser's ``state_dict()``, of which the state is this worker's part."""
        self._gathering = True
        try:
            return self.optimizer.state_dict()
        finally:
            self._gathering = False

    def _refuse_part(self) -> None:
        if not self._gathering and self.cluster.size > 1:
            raise HocketError(
                "The optimiser's state is sharded, and this worker has only a part; save the result of consolidate()."
            )

    def _own_part(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        own = {k for k, p in enumerate(params) if id(p) not in self._others}
        return {**state, "state": {k: v for k, v in state["state"].items() if k in own}}

    def _heard_by_first(self, own: Tensor, owner: int, size: int) -> Tensor | None:
        """Worker ``owner``'s bytes, on worker 0."""
        worker = self.cluster.workers.start
        sources = torch.full((1, self.cluster.size), -1)
        sources[0, 0] = owner
        rows = own if worker == owner else torch.empty(size if worker == 0 else 0, dtype=torch.uint8)
        heard = self.cluster.start(lambda: self.cluster.neighbor_exchange(Message((rows.unsqueeze(0),)), sources))()
        return heard.parts[0][0] if worker == 0 else None


def _pieces(layout: Layout, weights: Sequence[Tensor], owners: dict[str, int]) -> Iterator[tuple[int, Tensor]]:
    """What is sent after a step: the owner, and the rows of one run of its parameters."""
    for bucket, rows in zip(layout.buckets, weights, strict=True):
        for owner, run in groupby(bucket.slots, key=lambda s: owners[s.name]):
            slots = list(run)
            yield owner, rows[:, slots[0].offset : slots[-1].offset + slots[-1].size]


def _blob(state: dict[int, dict[str, Any]]) -> Tensor:
    for key, value in (item for entries in state.values() for item in entries.items()):
        if not isinstance(value, Tensor | bool | int | float | str | None):
            raise HocketError(f"The optimiser keeps a {type(value).__name__} as '{key}', which cannot be sent; leave zero=1 out.")
    file = io.BytesIO()
    torch.save(tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), state), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
