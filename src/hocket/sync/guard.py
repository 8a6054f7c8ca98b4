"""EDiT's guard of a mean of displacements (Cheng 2024, arXiv:2412.07210): unusual displacements are left out.

Of each worker's norm ``G`` running means of ``G`` and ``G²`` are kept (new share 0.02). A norm above ``mean + z·deviation`` is
unusual: its worker has weight 0, and the running means stay as they are. The others have weights ``softmax(−G)``; if none is left,
no worker moves. The mean displacement is cut to the norm 10.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHARE, LEAST, LIMIT = 0.02, 10, 10.0
"""The share of a new norm in the running means; exchanges before any norm is judged; the largest norm of a mean displacement."""


def init_guard(norms: Tensor) -> dict[str, Tensor]:
    """The state before the first norm; rows are equal, since every worker knows the norms of all."""
    return {"seen": torch.zeros_like(norms), "mean": torch.zeros_like(norms), "square": torch.zeros_like(norms)}


def guarded(norms: Tensor, state: dict[str, Tensor], z: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Factors ``[rows, workers]`` whose mean with the displacements is the weighted mean, and the new state.

    >>> norms = torch.tensor([[1.0, 1.0, float("inf")]])
    >>> guarded(norms, init_guard(norms), 3.0)[0].tolist()
    [[1.5, 1.5, 0.0]]
    """
    seen, mean, square = state["seen"], state["mean"], state["square"]
    deviation = (square - mean * mean).clamp(min=0).sqrt()
    usual = norms.isfinite() & ((seen < LEAST) | (norms <= mean + z * deviation))
    weights = torch.where(usual, -norms, -torch.inf).softmax(1).nan_to_num(0.0)
    share = torch.maximum(1 / (seen + 1), torch.full_like(seen, SHARE))  # at first the plain mean of what was seen
    finite = torch.where(usual, norms, mean)
    new = {
        "seen": seen + usual,
        "mean": torch.where(usual, mean + share * (finite - mean), mean),
        "square": torch.where(usual, square + share * (finite * finite - square), square),
    }
    return weights * norms.shape[1], new


def limited(delta: Tensor) -> Tensor:
    """A mean displacement with a norm of at most ``LIMIT``."""
    norm = delta.norm(dim=1, keepdim=True)
    return delta * (LIMIT / norm.clamp(min=LIMIT))
