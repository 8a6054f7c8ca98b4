"""A small GPT: a decoder-only transformer that predicts the next token at every position.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2), in the form of Karpathy's nanoGPT: LayerNorm
before attention and before the perceptron, learnt positions, no biases, the embedding is also the head. 804,096 parameters for Tiny
Shakespeare.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from hocket.errors import HocketError


def gpt(vocabulary: int, context: int = 64, layers: int = 4, heads: int = 4, width: int = 128, dropout: float = 0.0) -> GPT:
    """A transformer from tokens ``[B, T]``, ``T ≤ context``, to logits ``[B, T, vocabulary]``.

    >>> import torch
    >>> gpt(65)(torch.zeros(2, 10, dtype=torch.int64)).shape
    torch.Size([2, 10, 65])
    """
    return GPT(vocabulary, context, layers, heads, width, dropout)


class GPT(nn.Module):
    """Embeddings, ``layers`` blocks, and the logits of the next token."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise HocketError(
                f"gpt's width must be a multiple of its heads; got width {width} and {heads} heads: use {heads * 32}."
            )
        self.token, self.position, self.logits = nn.Embedding(vocabulary, width), Positions(context, width), Logits()
        self.blocks = nn.Sequential(*(Block(heads, width, dropout) for _ in range(layers)))
        self.dropout, self.norm = nn.Dropout(dropout), nn.LayerNorm(width, bias=False)
        self.layers = layers
        for name, weight in self.named_parameters():
            self.init_parameter(name, weight)

    def init_parameter(self, name: str, weight: Tensor) -> bool:
        """Initialise ``weight`` if it is a matrix; whether it is one."""
        if weight.dim() == 2:
            # Layers that write into the residual stream start smaller, so that its variance does not grow with depth.
            nn.init.normal_(weight, std=0.02 * ((2 * self.layers) ** -0.5 if name.endswith("out.weight") else 1.0))
        return weight.dim() == 2

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(tokens)
        # One parameter under one name: tied weights under two names can become two copies.
        logits: Tensor = self.logits(self.norm(self.blocks(self.dropout(x))), self.token.weight)
        return logits


class Positions(nn.Embedding):
    """The embedding of each position of a text."""

    whole = True

    def forward(self, tokens: Tensor) -> Tensor:
        length, context = tokens.shape[-1], self.num_embeddings
        if length > context:
            raise HocketError(f"gpt has {context} positions; got a text of {length} tokens: build it with context={length}.")
        return self.weight[:length]


class Logits(nn.Module):
    """The logits: the product with each token's embedding."""

    whole = True

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(x, embedding)


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + perceptron(norm(x))``."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, bias=False), Attention(heads, width, dropout)
        self.norm2, self.perceptron = nn.LayerNorm(width, bias=False), Perceptron(width)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x)))
        x = x + self.dropout2(self.perceptron(self.norm2(x)))
        return x


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    whole = True

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.into, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        out: Tensor = self.out(self.mix(query, key, value).transpose(1, 2).flatten(-2))
        return out

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention-weighted values ``[B, heads, T, d]`` of every head and position."""
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


class Perceptron(nn.Module):
    """Two layers with GELU between them, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.gelu(self.into(x)))
        return out
