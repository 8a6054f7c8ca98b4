"""Chains: first *what*, then *how precisely* — ``topk(0.01) | qsgd(4)``.

The selection chooses values and indices; the precision codes the chosen values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hocket.cluster.message import Message
from hocket.compression.base import Codec, Compressor, Context, Precision, Selection, State
from hocket.compression.indices import put_sent, with_indices
from hocket.compression.randomk import RandomK
from hocket.compression.sign import Sign
from hocket.errors import HocketError


@dataclass(frozen=True)
class Chain(Codec):
    """``topk(0.01) | qsgd(4)``: a selection of values, and the precision in which they are sent."""

    first: Selection
    second: Precision
    name: ClassVar[str] = "chain"

    def __post_init__(self) -> None:
        if not isinstance(self.first, Selection) or not isinstance(self.second, Precision):
            raise HocketError(
                f"{_name(self.first)} | {_name(self.second)}: a chain goes from what is sent (topk, randomk, threshold, dgc) "
                "to how precisely (cast, qsgd, bins, ternary, sign, natural), for example topk(0.01) | qsgd(4)."
            )
        if isinstance(self.second, Sign) and self.second.vote:
            raise HocketError(
                f"{self.first.name} | sign(vote=True): workers send different indices, so there is no vote; use sign."
            )
        if getattr(self.second, "feedback", None) is not None:
            first = self.first.name
            raise HocketError(f"{first} | {self.second.name}(feedback=…): feedback covers the whole chain; set it in {first}(…).")

    @property
    def links(self) -> tuple[Compressor, ...]:
        return self.first, self.second

    @property
    def global_selection(self) -> bool:
        return self.first.global_selection

    @property
    def uses_error_feedback(self) -> bool:
        # Feedback covers the loss of both links; it is off where the selection has it off, or where the chain is unbiased.
        if isinstance(self.first, RandomK) and self.first.unbiased:
            return False
        if self.first.lossless:
            return self.second.uses_error_feedback
        return getattr(self.first, "feedback", None) is not False

    @property
    def feedback_decay(self) -> float:
        return self.first.feedback_decay

    @property
    def sends_differences(self) -> bool:
        return self.first.sends_differences

    def sends_per_value(self, exchanges: int) -> float | None:
        return self.first.sends_per_value(exchanges)

    @property
    def second_phase(self) -> Chain:
        return Chain(self.first.second_phase, self.second)  # type: ignore[arg-type]

    @property
    def contracts(self) -> bool:
        return self.first.contracts and self.second.contracts

    def consensus_step(self, size: int, context: Context) -> float:
        return self.first.consensus_step(size, context) * self.second.consensus_step(self.first.max_selected(size), context)

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        chosen, state = self.first.select(rows, keys, state, context)
        coded = self.second.encode_some(chosen.values, chosen.counts, keys, context)
        if isinstance(self.first, RandomK):
            return coded, state
        if chosen.counts is not None:
            coded = Message(coded.parts, self.second.lengths(chosen.counts))
        return with_indices(chosen, coded, rows.shape[1], self.first.rice), state

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        if isinstance(self.first, RandomK):
            return self.first.put_values(self.second.decode(message, self.first.max_selected(size), context), size, context)
        if message.parts[0].is_meta:
            return torch.empty(message.rows, size, device="meta")

        def values(width: int, counts: Tensor | None) -> Tensor:
            found = self.second.decode(Message(message.parts[2:]), width, context)
            if counts is None:
                return found
            # A precision may decode padding to values other than 0.
            return found * (torch.arange(width, device=found.device) < counts.unsqueeze(1))

        return put_sent(message, size, self.first.rice, values)


def chained(links: Sequence[Compressor]) -> Compressor:
    """The compressor that the notation ``first | second`` names (one link: that link)."""
    if len(links) == 1:
        return links[0]
    if len(links) > 2:
        raise HocketError("A chain has two links, what is sent and how precisely, for example topk(0.01) | qsgd(4).")
    first, second = links
    merged = first.with_precision(second) if isinstance(first, Compressor) else None
    return merged or Chain(first, second)  # type: ignore[arg-type]  # Chain refuses other kinds with a sentence


def _name(compressor: Compressor) -> str:
    return getattr(compressor, "name", type(compressor).__name__)
