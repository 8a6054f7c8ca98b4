"""Gradient engines: the gradients of all workers hosted here, each at its own weights, on its own mini-batch.

Weights and gradients are rows: one contiguous tensor ``[rows, values]`` per bucket of the layout. For worker i an engine computes

    grads[b][i] = d loss(model_i(inputs[i]), targets[i]) / d weights[b][i]

``LoopEngine`` re-points one template module to row after row; ``VmapEngine`` computes all rows at once. On a CPU the loop wins,
on CUDA the compiled vmap, by a factor of ten and more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

Loss = Callable[[Any, Tensor], Tensor]
Batches = Tensor | Sequence[Tensor]  # [rows, batch, ...], or one batch per row
Rows = list[Tensor]  # one tensor [rows, values] per bucket
Buffers = dict[str, Tensor]  # one tensor [rows, ...] per name


class Engine(Protocol):
    """Computes the gradients of every row."""

    def gradients(
        self, weights: Rows, buffers: Buffers, inputs: Batches, targets: Batches, grads: Rows, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fills ``grads`` and updates ``buffers`` in place; returns the losses ``[rows]`` and the used slots ``[rows, slots]``.

        ``inputs`` and ``targets`` are tensors ``[rows, batch, ...]``, or lists with one batch per row when their sizes differ.
        ``keys`` holds one seed per row, for dropout. A slot that a row did not use (its gradient is None) is filled with zeros;
        slots are counted through the buckets in the layout's order. Losses stay on the device, ``used`` is on the CPU.
        """
        ...


def stack_buffers(model: nn.Module, rows: int) -> Buffers:
    """The model's buffers (BatchNorm statistics and the like), one copy per row: ``{name: [rows, ...]}``."""
    return {name: b.detach().expand(rows, *b.shape).clone() for name, b in model.named_buffers()}
