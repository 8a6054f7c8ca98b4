"""Attention by heads: each process has ``heads / P`` of them, whole from query to value, and the rows of the last matrix that read
them. One sum forward, one backward. With ``Draws`` the dropout of its probabilities is independent of the split, too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.errors import HocketError
from hocket.models.gpt import Attention
from hocket.split.axis import copied, gathered, summed
from hocket.split.draws import Draws, Dropout
from hocket.split.tensor.layers import ColumnLinear, ParameterSlicer, RowLinear, SplitLayer


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
        self.drop = Dropout(attention.dropout, layer, draws, dim=1, lies=getattr(attention, "lies", (0, 1)))
        self.train(attention.training)

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not self.training or self.drop.p == 0:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attend(query, key, value, None, True, self.drop)[0]


def split_heads(attention: Attention, cut: ParameterSlicer) -> None:
    """Reduce gpt's attention, in place, to this process's heads."""
    attention.into, attention.out = ColumnLinear(attention.into, cut, blocks=3), RowLinear(attention.out, cut)
    attention.heads //= cut.axis.size
    for module in (attention, getattr(attention, "drop", attention)):
        module.lies = (cut.axis.place, cut.axis.size)


class SplitMultihead(SplitLayer, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with this process's heads; on an axis of one process, all of them."""

    def __init__(self, attention: nn.MultiheadAttention, cut: ParameterSlicer) -> None:
        super().__init__(attention, cut, {"in_proj_weight": 0, "in_proj_bias": 0}, blocks=3)
        self.heads, self.lies = attention.num_heads // cut.axis.size, (cut.axis.place, cut.axis.size)
        if cut.axis.size > 1:
            self.out_proj = RowLinear(attention.out_proj, cut)  # type: ignore[assignment]
        self.drop: Dropout | None = getattr(attention, "drop", None)
        if self.drop is not None:
            self.draw(self.drop.layer, self.drop.draws)

    def draw(self, layer: str, draws: Draws) -> None:
        self.drop = Dropout(self.dropout, layer, draws, dim=1, lies=self.lies).train(self.training)

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
        mask, looked = self._mask(attn_mask, key_padding_mask, q), None
        if need_weights or (self.training and self.dropout > 0):
            drop = self.drop or (lambda weights: F.dropout(weights, self.dropout, self.training))
            mixed, looked = attend(q, k, v, mask, False, drop)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask)
        out = self.out_proj(mixed.transpose(1, 2).flatten(-2))
        if not batched:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        if looked is None or not need_weights:
            return out, None
        shown = summed(looked.sum(1), self.axis) / self.num_heads if average_attn_weights else gathered(looked, self.axis, 1)
        return out, shown if batched else shown.squeeze(0)

    def _samples_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

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


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill_(mask, float("-inf"))


def common(attention: nn.MultiheadAttention) -> bool:
    """Whether it has the usual form: one matrix for query, key and value, nothing added to the sequence."""
    return attention._qkv_same_embed_dim and attention.bias_k is None and attention.bias_v is None and not attention.add_zero_attn


def without_fast_path(model: nn.Module) -> None:
    """Let transformer layers call their attention: in evaluation, torch would else compute a layer directly from its weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.self_attn, SplitMultihead):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
