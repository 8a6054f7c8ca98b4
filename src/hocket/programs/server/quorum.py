"""The mean of the pushes of a quorum (Decoupled DiLoCo, arXiv:2604.21428).

With weights ``k_i`` and shares ``s_i = k_i / Σ k`` it is ``Σ s_i Δ_i``, or of directions ``Σ s_i Δ_i/‖Δ_i‖ · Σ s_i ‖Δ_i‖``, in
which a worker that has moved far counts no more than the others for where to go. Norms are those of a shard's slices of buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def quorum_mean(pushes: Sequence[Sequence[Tensor]], weights: Sequence[int], direction: bool) -> list[Tensor]:
    """The mean of ``pushes``, of which each has a tensor per bucket.

    >>> [quorum_mean([[torch.tensor([4.0, 0.0])], [torch.tensor([0.0, 4.0])]], [1, 3], way) for way in (False, True)]
    [[tensor([1., 3.])], [tensor([1., 3.])]]
    >>> quorum_mean([[torch.tensor([4.0, 0.0])], [torch.tensor([0.0, 1.0])]], [1, 1], True)
    [tensor([1.2500, 1.2500])]
    """
    shares, means = [weight / sum(weights) for weight in weights], []
    for parts in zip(*pushes, strict=True):
        norms = [part.norm() for part in parts] if direction else [torch.ones_like(part.sum()) for part in parts]
        mean = torch.zeros_like(parts[0])
        for part, norm, share in zip(parts, norms, shares, strict=True):
            if norm > 0:
                mean += part * (share / norm)
        means.append(mean * sum(share * norm for share, norm in zip(shares, norms, strict=True)))
    return means
