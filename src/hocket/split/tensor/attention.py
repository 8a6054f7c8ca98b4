"""Attention by heads: each process has ``heads / P`` of them, whole from query to value, and the rows of the last matrix that read
them. One sum forward, one backward. With ``Draws`` the dropout of its probabilities is independent of the split, too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.errors import HocketError
from hocket.models.gpt import Attention
from hocket.split.axis import Axis
from hocket.split.draws import Draws, Dropout
from hocket.split.functions import copied, gathered, summed
from hocket.split.tensor.layers import ColumnLinear, ParameterSlicer, RowLinear


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, drop: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Softmax attention of ``[N, heads, L, d]`` with explicit probabilities, to which ``drop`` is applied."""
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if causal:
        later = scores.new_ones(scores.shape[-2:]).triu(1).bool()
        scores = scores.masked_fill(later, float("-inf"))
    weights = drop((scores if mask is None else scores + mask).softmax(-1))
    return weights @ value, weights


class DrawnAttention(Attention):
    """gpt's attention with dropout from ``Draws``."""

    def __init__(self, attention: Attention, layer: str, draws: Draws) -> None:
        nn.Module.__init__(self)
        self.heads, self.dropout, self.into, self.out = attention.heads, attention.dropout, attention.into, attention.out
        self.drop = Dropout(attention.dropout, layer, draws, dim=1)
        self.drop.lies = getattr(attention, "lies", (0, 1))
        self.train(attention.training)

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not self.training or self.drop.p == 0:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attend(query, key, value, None, True, self.drop)[0]


def split_heads(attention: Attention, cut: ParameterSlicer) -> None:
    """Reduce gpt's attention, in place, to this process's heads."""
    axis = cut.axis
    attention.into, attention.out = ColumnLinear(attention.into, cut, blocks=3), RowLinear(attention.out, cut)
    attention.heads //= axis.size
    for module in (attention, getattr(attention, "drop", attention)):
        module.lies = (axis.place, axis.size)


class SplitMultihead(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with this process's heads; on an axis of one process, all of them."""

    whole = True

    def __init__(self, attention: nn.MultiheadAttention, cut: ParameterSlicer) -> None:
        bias = attention.in_proj_bias is not None
        super().__init__(attention.embed_dim, attention.num_heads, bias=bias, batch_first=attention.batch_first, device="meta")
        self.axis, self.dropout, self.heads = cut.axis, attention.dropout, attention.num_heads // cut.axis.size
        self.lies = (cut.axis.place, cut.axis.size)
        self.drop: Dropout | None = None
        alone = cut.axis.size == 1
        self.in_proj_weight = attention.in_proj_weight if alone else cut(attention.in_proj_weight, 0, blocks=3)
        if bias:
            self.in_proj_bias = attention.in_proj_bias if alone else cut(attention.in_proj_bias, 0, blocks=3)
        self.out_proj = attention.out_proj if alone else RowLinear(attention.out_proj, cut)  # type: ignore[assignment]
        if isinstance(attention, SplitMultihead) and attention.drop is not None:
            self.draw(attention.drop.layer, attention.drop.draws)
        self.train(attention.training)

    def draw(self, layer: str, draws: Draws) -> None:
        """Make its dropout draw from ``draws``."""
        self.drop = Dropout(self.dropout, layer, draws, dim=1)
        self.drop.lies = self.lies
        self.drop.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise HocketError("nn.MultiheadAttention got is_causal=True, which is a hint, without attn_mask: give the mask too.")
        batched = query.dim() == 3
        # Each distinct input enters once, so that its gradient is summed once.
        entered = {id(t): copied(self._samples_first(t, batched), self.axis) for t in (query, key, value)}
        weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(entered[id(t)], w, b).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        mixed, looked = self._mix(q, k, v, self._mask(attn_mask, key_padding_mask, q), need_weights)
        out = self.out_proj(mixed.transpose(1, 2).flatten(-2))
        if not batched:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, self._shown(looked, average_attn_weights, batched) if looked is not None else None

    def _samples_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        if need_weights or (self.training and self.dropout > 0):
            return attend(q, k, v, mask, False, self.drop or self._drop_by_torch)
        return F.scaled_dot_product_attention(q, k, v, mask), None

    def _drop_by_torch(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.dropout, self.training)

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
        """One additive mask that fits ``[N, heads, L, S]``."""
        masks = []
        if attn_mask is not None:
            mask = _additive(attn_mask, query)
            if mask.dim() == 3:  # one for each sample and head, of all processes
                mask = mask.unflatten(0, (query.shape[0], -1)).narrow(1, self.axis.place * self.heads, self.heads)
            masks.append(mask)
        if padding is not None:
            masks.append(_additive(padding, query).view(-1, 1, 1, padding.shape[-1]))
        return sum(masks[1:], masks[0]) if masks else None

    def _shown(self, weights: Tensor, average: bool, batched: bool) -> Tensor:
        shown = summed(weights.sum(1), self.axis) / self.num_heads if average else gathered(weights, self.axis, 1)
        return shown if batched else shown.squeeze(0)


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill_(mask, float("-inf"))


def common(attention: nn.MultiheadAttention) -> bool:
    """Whether it has the usual form: one matrix for query, key and value, nothing added to the sequence."""
    return attention._qkv_same_embed_dim and attention.bias_k is None and attention.bias_v is None and not attention.add_zero_attn


def drawn_multihead(attention: nn.MultiheadAttention, layer: str, draws: Draws) -> SplitMultihead:
    """The same attention, not split (unless it is already), drawing from ``draws``."""
    drawn = attention if isinstance(attention, SplitMultihead) else SplitMultihead(attention, ParameterSlicer(Axis("tensor")))
    drawn.draw(layer, draws)
    return drawn
