"""Muon for the matrices inside a network, AdamW for the rest, in one optimiser (Jordan 2024; rates as Liu 2025, arXiv:2502.16982).

A matrix ``W`` with gradient ``G``: ``B ← μB + (1−μ)G``, ``U = μB + (1−μ)G``, ``W ← (1 − ηλ)W − η·0.2·√max(rows, columns)·O(U)``.
``O`` replaces all singular values by about 1, with five steps of Newton and Schulz; the factor makes an update about as large as
AdamW's, so that one rate suits both. ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`` does the same, one matrix at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from hocket.errors import HocketError
from hocket.optim.layers import RowOptimizer, check_options

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(RowOptimizer):
    """``Muon(model)`` is all that a training needs: hidden matrices get Muon, embeddings, heads and vectors AdamW.

    ``params`` is a model or its parameters. ``matrices`` says of each parameter, in the same order, how many matrices it holds one
    above the other: 0 is for AdamW; queries, keys and values in one weight are 3. It is :func:`hidden_matrices` of the model; with
    parameters alone, all that have two dimensions or more are taken for matrices. ``rest_lr`` is AdamW's rate (None: ``lr``).

    >>> net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7))
    >>> [(group["matrices"], len(group["params"])) for group in Muon(net, lr=0.006, rest_lr=0.004).param_groups]
    [(1, 1), (0, 4)]
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 0.006,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        *,
        nesterov: bool = True,
        rest_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        matrices: Iterable[int] | None = None,
    ) -> None:
        rates = {"lr": lr, "rest_lr": lr if rest_lr is None else rest_lr, "weight_decay": weight_decay}
        check_options("Muon", rates, {"momentum": momentum})
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, "betas": betas, "eps": eps}
        if isinstance(params, nn.Module):
            matrices = hidden_matrices(params) if matrices is None else matrices
            params = [p for p in params.parameters() if p.requires_grad]
        groups = [p[1] if isinstance(p, tuple) else p for p in params]
        if not (groups and isinstance(groups[0], dict)):
            groups = _groups(groups, matrices, lr if rest_lr is None else rest_lr)
        super().__init__(groups, {**defaults, "matrices": 1})
        for p in (p for group in self.param_groups if group["matrices"] for p in group["params"]):
            if p.dim() < 2:
                raise HocketError(f"Muon: a parameter of shape {tuple(p.shape)} is no matrix; put it into a group with matrices=0.")

    def _update(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        if pairs:
            self._muon(group, pairs) if group["matrices"] else self._adamw(group, pairs)

    def _muon(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        alike: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for p, gradient in pairs:
            mean = self.state[p].setdefault("momentum_buffer", torch.zeros_like(gradient))
            mean.lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
            count = group["matrices"] * (len(p) if self.rows else 1)
            several = update.reshape(count, p.shape[self.rows] // group["matrices"], -1)
            alike[several.shape[1:], p.device, p.dtype].append((p, several))
        for (shape, _, _), found in alike.items():
            parts = orthogonal(torch.cat([several for _, several in found])).split([len(several) for _, several in found])
            for (p, _), part in zip(found, parts, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(part.reshape(p.shape), alpha=-group["lr"] * 0.2 * sqrt(max(shape)))

    def _adamw(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        params, grads = [p for p, _ in pairs], [gradient for _, gradient in pairs]
        for p in params:
            if not self.state[p]:
                self.state[p] |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        first, second, steps = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step"))
        (beta1, beta2), own = group["betas"], {name: group[name] for name in ("lr", "weight_decay", "eps")}
        adamw(params, grads, first, second, [], steps, amsgrad=False, beta1=beta1, beta2=beta2, maximize=False, **own)


def orthogonal(matrices: Tensor) -> Tensor:
    """``[n, rows, columns]`` matrices with all singular values about 1 (0.7 to 1.2), and the singular vectors they had."""
    if not matrices.is_cuda:
        # One product at a time: a result does not depend on how many workers this process hosts.
        return torch.stack([_newton_schulz(m, m.dtype) for m in matrices])
    return _newton_schulz(matrices, torch.bfloat16).to(matrices.dtype)


def _newton_schulz(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def hidden_matrices(model: nn.Module) -> list[int]:
    """Of each of the model's parameters that are trained: 1 for a matrix (or convolution) inside the network, 0 for the rest.

    It is 3 for the queries, keys and values of an attention in one weight, three times as tall as wide. The rest are vectors,
    embeddings, and heads: matrices of an embedding's shape or, without embeddings, the last one.

    >>> hidden_matrices(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)))
    [1, 0, 1, 0, 0, 0]
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    params = [p for _, p in named]
    embeddings = [m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    shapes = {frozenset(weight.shape) for weight in embeddings if len(set(weight.shape)) > 1}  # a square one says nothing
    heads = {id(p) for p in embeddings} | {id(p) for p in params if frozenset(p.shape) in shapes and p.dim() == 2}
    if not embeddings:
        heads |= {id(p) for p in [p for p in params if p.dim() > 1][-1:]}
    return [0 if p.dim() < 2 or id(p) in heads else 3 if _fused(name, p) else 1 for name, p in named]


def _fused(name: str, weight: Tensor) -> bool:
    own = any(word in name.lower() for word in ("attention", "attn", "qkv", "in_proj"))
    return own and weight.dim() == 2 and weight.shape[0] == 3 * weight.shape[1]


def _groups(params: list[Any], matrices: Iterable[int] | None, rest_lr: float) -> list[dict[str, Any]]:
    counts = [int(p.dim() > 1) for p in params] if matrices is None else list(matrices)
    if len(counts) != len(params):
        raise HocketError(f"Muon: matrices has {len(counts)} numbers for {len(params)} parameters; give one for each.")
    for p, count in zip(params, counts, strict=True):
        if count and p.shape[0] % count:
            raise HocketError(f"Muon: a parameter of shape {tuple(p.shape)} does not hold {count} matrices.")
    return [
        {"params": [p for p, own in zip(params, counts, strict=True) if own == n], "matrices": n, **({} if n else {"lr": rest_lr})}
        for n in sorted(set(counts), reverse=True)
    ]
