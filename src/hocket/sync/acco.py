"""ACCO: gradients accumulate while they communicate (Nabli 2025, arXiv:2406.02613).

A mini-batch has two halves, and each step is one of them. While the mean gradient of one half travels, the other half is computed,
so that an exchange has a whole step to end in. From the weights ``θ`` and the optimiser's state:

- the first half is computed at the predicted weights ``θ̃``; meanwhile the second half of the last mini-batch arrives, and
  ``θ ← Opt(θ, (N_A·ḡ_A + N_B·ḡ_B) / (N_A + N_B))`` is the *real* update, of both halves weighed by their samples;
- the second half is computed at ``θ``; meanwhile the first one arrives, and ``θ̃ = Opt(θ, ḡ_A)`` is the *predicted* update.

The predicted update is taken back, weights and optimiser state, before the real one: no gradient is applied late, and none twice.
Two steps make one update, as with ``accumulate=2`` under ``bulk``. It hides bytes and saves none. A training that ends after a
predicted update keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.compression.base import Compressor
from hocket.sync.base import Moment, Sync
from hocket.topology.base import Topology


@dataclass(frozen=True)
class ACCO(Sync):
    """``acco``: the gradients of half a mini-batch are exchanged while the other half is computed."""

    name: ClassVar[str] = "acco"
    default_weights: ClassVar[bool] = False
    keeps_replicas_equal: ClassVar[bool] = True
    predicts: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Nabli et al., ACCO: Accumulate While You Communicate for Communication-Overlapped Sharded LLM Training, 2025"
    )

    def moment(self, step: int, weights: bool, uniform: bool = True) -> Moment:
        return Moment.GRADIENTS

    def refusal(self, topology: Topology, compressor: Compressor, exchange: str | None, weights: bool) -> str | None:
        if exchange not in (None, "gradients"):
            return f"acco exchanges gradients by definition; leave exchange={exchange} out"
        if topology.has_servers and not topology.sums_on_servers:
            return "under acco the workers take updates back, and with servers they make none; use allreduce, or async + server"
        if not topology.uniform:
            return "acco makes one update of the gradients of all workers; use allreduce, or hierarchical with it"
        if compressor.carries_momentum:
            return f"{compressor.name} holds back momentum, and acco takes every second update back; use topk, or bulk"
        return super().refusal(topology, compressor, exchange, weights)
