"""Offload: weights are kept in slow memory and loaded block by block, for a model larger than fast memory.

The weights and the optimiser state of each block (``parts.blocks_of``) are in a file, or in the CPU's memory if the model is
on a GPU. A block's weights are loaded before its forward and its backward pass, while the block before it computes, and dropped
afterwards. As soon as all gradients of a block are computed, the block is updated, written back and dropped: gradients of different
blocks are never in memory together. So at most ``keep + 1`` blocks are in fast memory; parameters of no block, and frozen ones,
stay there.

Every backward pass is a step. Nothing that looks at all gradients at once (clipping by the global norm, accumulation, a GradScaler)
is possible. It is always slower than training in memory: each step reads every weight twice and writes it once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_map_only

from hocket.errors import HocketError, is_whole
from hocket.split.materialize import materialize
from hocket.split.parts import blocks_of, only
from hocket.split.slow import Block, Disk, Pinned, return_memory_at_once

_OFFLOADED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    to: str = "disk",
    folder: str | Path | None = None,
    keep: int = 1,
    seed: int = 0,
) -> Offload:
    """Keep the weights and the optimiser state of ``model``'s blocks in slow memory, ``"disk"`` or ``"cpu"``.

    The training loop does not change; ``optimizer.step()`` does nothing, since every ``backward()`` has made the step. ``keep``
    blocks are in memory beside the one that computes. A model built under ``hocket.deferred()`` gets its weights block by block,
    from ``seed``.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with offload(model, torch.optim.SGD(model.parameters(), 0.1)) as offloaded:
    ...     model(torch.ones(3, 4)).sum().backward()
    ...     [name for name, _ in offloaded.named_values()]
    ['0.weight', '0.bias', '2.weight', '2.bias']
    >>> model[0].weight.untyped_storage().nbytes()  # back in memory
    128
    """
    return Offload(model, optimizer, to, folder, keep, seed)


def refuse_offloaded(model: nn.Module) -> None:
    """Refuse a model whose weights are offloaded."""
    if model in _OFFLOADED:
        raise HocketError(
            "The model is offloaded, so its weights are not in memory; call close() of the object that hocket.offload(…) returned."
        )


class Offload:
    """An offloaded model; made by :func:`hocket.offload`."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, to: str, folder: str | Path | None, keep: int, seed: int
    ) -> None:
        device = _check(model, optimizer, to, folder, keep)
        refuse_offloaded(model)
        self.model, self.optimizer, self.keep = model, optimizer, keep
        self.peak_bytes = 0
        """The most bytes of blocks' weights that were in fast memory at once."""
        self._slow = Disk(folder) if to == "disk" else Pinned()
        return_memory_at_once()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hocket-offload")
        self._here: list[Block] = []
        self._backward = False
        self._handles: list[Any] = []
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = {n: b for n, b in blocks_of(model).items() if all(p.requires_grad and id(p) in held for p in b.parameters())}
        if not found:
            raise HocketError(
                f"{type(model).__name__} has no blocks to offload: they are the children of nn.Sequential or nn.ModuleList "
                "that the optimiser trains."
            )
        self.blocks: list[Block] = []
        for name, module in found.items():
            materialize(module, seed=seed, model=model, device=device, prefix=name)
            block = Block(len(self.blocks), name, module, optimizer)
            self.blocks.append(block)
            block.hide()
            block.store(self._slow)
        self._rest = [p for p in model.parameters() if id(p) not in {id(q) for b in self.blocks for q in b.params}]
        materialize(model, seed=seed, device=device)
        for block in self.blocks:
            self._hook(block)
        _OFFLOADED.add(model)

    # --- what users call -----------------------------------------------------------------------------------------------------

    @property
    def resident_bytes(self) -> int:
        """Bytes of blocks' weights that are in fast memory now."""
        return sum(w.untyped_storage().nbytes() for b in self.blocks for w in b.weights)

    def named_values(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and value, one block in memory at a time; copy what you keep."""
        blocks = {id(p): block for block in self.blocks for p in block.params}
        for name, p in self.model.named_parameters():
            if (block := blocks.get(id(p))) is not None:
                self._need(block, state=False)
            yield name, p.detach()
        self._drop_all()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Give parameters these values (a checkpoint opened with ``torch.load(…, mmap=True)``, say), one block at a time."""
        named = dict(self.model.named_parameters())
        if foreign := values.keys() - named.keys():
            raise HocketError(f"There is no parameter '{min(foreign)}' in this model: the values are of another one.")
        for block in self.blocks:
            self._need(block, state=True)
            for name, p in block.module.named_parameters(prefix=block.name):
                p.data.copy_(values.get(name, p.data))
            self._store(block)
        for name, value in values.items():
            if any(named[name] is p for p in self._rest):
                named[name].data.copy_(value)

    def close(self, bring_back: bool = True) -> None:
        """Remove hooks and files; by default, all weights and states are loaded back into memory."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.model not in _OFFLOADED:
            return
        _OFFLOADED.discard(self.model)
        self._thread.shutdown()
        for block in self.blocks:
            block.settle()
        if bring_back:
            for block in self.blocks:
                block.fetch(self._slow, state=True)
                block.show()
        self._slow.close()

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(bring_back=kind is None)

    # --- hooks ---------------------------------------------------------------------------------------------------------------

    def _hook(self, block: Block) -> None:
        # A weak reference: the garbage collector does not see cycles through a parameter's hooks.
        own, index = weakref.ref(self), block.index

        def on_gradient(p: Tensor) -> None:
            if (offloaded := own()) is not None:
                block = offloaded.blocks[index]
                block.waiting.discard(id(p))
                if not block.waiting:
                    offloaded._finish(block)

        self._handles += [
            block.module.register_forward_pre_hook(lambda *_: self._before_forward(block)),
            block.module.register_forward_hook(lambda _, __, out: self._after_forward(block, out)),
            *(p.register_post_accumulate_grad_hook(on_gradient) for p in block.params),
        ]

    def _before_forward(self, block: Block) -> None:
        self._need(block, state=self._backward)  # inside a backward pass: a checkpointed block is computed again
        if not self._backward:
            self._ahead(self.blocks[block.index + 1 :], state=False)

    def _after_forward(self, block: Block, out: Any) -> Any:
        if self._backward:
            return out
        turns_back = torch.is_grad_enabled() and block is self.blocks[-1]
        if not turns_back:
            self._drop(block)

        def hooked(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._before_backward(block))
            return tensor

        return tree_map_only(Tensor, hooked, out) if torch.is_grad_enabled() else out

    def _before_backward(self, block: Block) -> None:
        if not self._backward:
            self._backward = True
            Variable._execution_engine.queue_callback(self._end_of_backward)
        if not block.busy:
            block.busy, block.waiting = True, {id(p) for p in block.params}
        self._need(block, state=True)
        self._ahead(self.blocks[: block.index][::-1], state=True)

    def _finish(self, block: Block) -> None:
        """Update a block whose gradients are complete, and drop it."""
        self._step(block.params)
        block.busy = False
        self._store(block)

    def _end_of_backward(self) -> None:
        self._backward = False
        for block in self.blocks:
            if block.busy:  # with parameters that this pass did not use
                self._finish(block)
        self._step([p for p in self._rest if p.grad is not None])
        self._drop_all()

    def _step(self, params: list[nn.Parameter]) -> None:
        own = {id(p) for p in params}
        with only(self.optimizer, lambda p: id(p) in own):
            self.optimizer.step()
        for p in params:
            p.grad = None

    # --- loading and dropping ------------------------------------------------------------------------------------------------

    def _need(self, block: Block, state: bool) -> None:
        """Wait until ``block`` is in fast memory."""
        if block not in self._here:
            for other in [b for b in self._here if not b.busy][: max(len(self._here) - self.keep, 0)]:
                self._drop(other)
        self._fetch(block, state)
        block.settle()
        block.show()

    def _ahead(self, blocks: list[Block], state: bool) -> None:
        """Load the next ``keep`` blocks while this one computes, if there is room."""
        for block in blocks[: self.keep]:
            if block in self._here or len(self._here) <= self.keep:
                self._fetch(block, state)

    def _fetch(self, block: Block, state: bool) -> None:
        def come() -> None:
            block.fetch(self._slow, state)
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

        if block not in self._here:
            self._here.append(block)
        block.coming.append(self._thread.submit(come))

    def _store(self, block: Block) -> None:
        """Write a block back and drop it. One thread does all of this in order, so the next block finds room."""
        block.hide()
        self._here.remove(block)
        block.coming.append(self._thread.submit(block.store, self._slow))

    def _drop(self, block: Block) -> None:
        block.settle()
        self._here.remove(block)
        block.hide()
        block.empty()

    def _drop_all(self) -> None:
        for block in list(self._here):
            self._drop(block)


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, to: str, folder: object, keep: object) -> torch.device:
    """Refuse what cannot work; the device of the model."""
    if to not in ("disk", "cpu"):
        raise HocketError(f"offload(to={to!r}): slow memory is 'disk' or, for a model on a GPU, 'cpu'.")
    if not is_whole(keep, 0):
        raise HocketError(
            f"offload(keep={keep!r}): the number of blocks kept beside the one that computes must be a whole number, at least 0."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise HocketError("LBFGS needs all gradients at once, which offload never has; use a first-order optimiser.")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise HocketError(
            "The optimiser has hooks of hocket.parallelize(…) or others, which need all gradients; use offload without them."
        )
    devices = {p.device for p in model.parameters() if not p.is_meta} or {torch.device("cpu")}
    if len(devices) > 1:
        raise HocketError("The model is on several devices; offload supports one device, so move the model to one.")
    device = devices.pop()
    if to == "cpu" and device.type == "cpu":
        raise HocketError("offload(to='cpu'): the model is in the CPU's memory already; use to='disk', or put the model on a GPU.")
    if to == "cpu" and folder is not None:
        raise HocketError("offload(to='cpu', folder=…): folder= is for to='disk'; leave it out.")
    return device
