"""Gossip: each worker mixes with a few partners, ``x_i ← Σ_j K_ij x_j`` with a doubly stochastic ``K`` (D-PSGD, Lian 2017).

Partners are data: ``Gossip.partners(N, e)`` gives, for exchange number ``e``, from whom each worker receives, and with what weight.

- *rotating* (default, GossipGraD-like, Daily 2018): distance ``s`` runs 1, 2, …, ⌊N/2⌋, 1, …, once per exchange; partners at ±s,
  a third each; when both partners are one worker, a half each.
- *ring*: distance 1 always. *exponential*: one partner at distance 2^e mod N (Ying 2021). *random*: a fresh perfect matching.
- ``matrix=``: any doubly stochastic matrix, or a list of them taken in turn.
- *pushsum*: for asynchronous workers (``async``), on a directed graph; see :mod:`hocket.programs.gossip`.

Compressed gossip of weights is CHOCO (Koloskova 2019): worker ``i`` and its partners keep a public copy ``x̂_i``; only
``q_i = C(x_i − x̂_i)`` is sent; then ``x̂_i ← x̂_i + q_i`` everywhere and ``x_i ← x_i + γ Σ_j K_ij (x̂_j − x̂_i)``. Copies belong
to a fixed set of partners, so there is one set per entry of the schedule; rotating gossip then uses at most four distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hocket.cluster.base import Cluster, Subgroups
from hocket.cluster.message import Message
from hocket.compression.base import Codec, Compressor, Context, Mixed, State
from hocket.compression.damped import Damped
from hocket.compression.sign import Sign
from hocket.errors import HocketError, is_number, nearest
from hocket.noise import bits, fold
from hocket.topology.base import Channel, Topology, narrowed

KINDS = ("rotating", "ring", "exponential", "random")
_ALL = (*KINDS, "pushsum")
CHOCO_DISTANCES = 4
Matrix = tuple[tuple[float, ...], ...]


class Partners(NamedTuple):
    """Worker ``i`` weighs the rows of ``sources[slot, i]`` (−1: none) by ``shares[slot, i]``, and its own row by ``own[i]``."""

    sources: Tensor
    shares: Tensor
    own: Tensor


@dataclass(frozen=True)
class Gossip(Topology):
    """``gossip``, ``gossip(ring | exponential | random | pushsum)``, ``gossip(matrix=[[…], …])``."""

    kind: str = "rotating"
    matrix: Matrix | tuple[Matrix, ...] | None = None
    step: float | None = None
    """CHOCO's γ for compressed weights; by default as large as the compressor allows, at most 0.4 (1 if it is lossless)."""
    name: ClassVar[str] = "gossip"
    peer_to_peer: ClassVar[bool] = True
    paper: ClassVar[str] = "Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017"

    def __post_init__(self) -> None:
        if self.kind not in _ALL:
            raise HocketError(
                f"gossip({self.kind}): unknown kind{nearest(str(self.kind), _ALL) or '.'} Use one of {', '.join(_ALL)}."
            )
        if self.step is not None and (not is_number(self.step) or not 0 < self.step <= 1):
            raise HocketError(f"gossip(step={self.step!r}): the step must lie in (0, 1], such as 0.4.")
        if self.matrix is not None:
            object.__setattr__(self, "matrix", _frozen(self.matrix))
            if self.kind != "rotating":
                raise HocketError(f"gossip({self.kind}, matrix=…): give either a kind or a matrix.")
            for matrix in self._matrices():
                _check_matrix(matrix)
            if len({len(matrix) for matrix in self._matrices()}) > 1:
                raise HocketError("gossip(matrix=…): the matrices have different sizes; give all of them one size.")

    @property
    def partner_rule(self) -> str:
        return self.kind

    @property
    def asynchronous_only(self) -> bool:
        return self.kind == "pushsum"

    @property
    def pairs_workers(self) -> bool:
        return self.matrix is None and self.kind != "exponential"

    def _matrices(self) -> list[Matrix]:
        first = self.matrix[0] if isinstance(self.matrix, tuple) and self.matrix else None
        if not isinstance(first, tuple) or not first:
            raise HocketError("gossip(matrix=…): the matrix must be square rows of numbers, such as [[0.5, 0.5], [0.5, 0.5]].")
        deep = isinstance(first[0], tuple)
        return list(self.matrix) if deep else [self.matrix]  # type: ignore[list-item, arg-type]

    def distances(self, workers: int, few: bool = False) -> list[int]:
        """Rotating gossip's distances in order; with ``few`` at most four of them, spread evenly on a log scale.

        >>> Gossip().distances(10), Gossip().distances(210, few=True)
        ([1, 2, 3, 4, 5], [1, 5, 22, 105])
        """
        far = max(1, workers // 2)
        if not few or far <= CHOCO_DISTANCES:
            return list(range(1, far + 1))
        return sorted({round(far ** (k / (CHOCO_DISTANCES - 1))) for k in range(CHOCO_DISTANCES)})

    def period(self, workers: int, few: bool = False) -> int | None:
        """After how many exchanges the partners repeat; None: never."""
        if self.matrix is not None:
            return len(self._matrices())
        if self.kind == "rotating":
            return len(self.distances(workers, few))
        if self.kind == "exponential":
            return max(1, (workers - 1).bit_length())
        return 1 if self.kind == "ring" else None

    def partners(self, workers: int, exchange: int, seed: int = 0, few: bool = False) -> Partners:
        """From whom each of ``workers`` receives at an exchange (they count from 0)."""
        if workers == 1:
            return Partners(torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1), torch.ones(1))
        if self.matrix is not None:
            matrices = self._matrices()
            return _from_matrix(matrices[exchange % len(matrices)], workers)
        if self.kind == "random":
            return _matching(workers, fold(seed, exchange))
        period = self.period(workers, few) or 1
        if self.kind == "exponential":
            return _circulant(workers, [2 ** (exchange % period)])
        distance = self.distances(workers, few)[exchange % period] if self.kind == "rotating" else 1
        return _circulant(workers, [-distance] if 2 * distance == workers else [-distance, distance])

    def for_workers(self, workers: int, host_size: int) -> Gossip:
        return self if self.matrix is None or len(self._matrices()[0]) == workers else Gossip()

    def bind(self, cluster: Cluster, subgroups: Subgroups, seed: int) -> Channel:
        if self.matrix is not None and (size := len(self._matrices()[0])) != subgroups.size:
            raise HocketError(
                f"gossip(matrix=…): the matrix is for {size} workers, but {subgroups.size} take part; give one of that size."
            )
        return GossipChannel(self, cluster, subgroups, seed)

    def refusal(self, compressor: Compressor, weights: bool) -> str | None:
        if isinstance(compressor, Sign) and compressor.vote:
            return "a majority vote needs all workers; use allreduce, or sign without vote"
        if weights and self.kind == "random" and compressor.compresses:
            return (
                "gossip(random) with compressed weights: public copies (CHOCO) need partners that repeat; "
                "use gossip, gossip(ring) or gossip(exponential), or exchange=gradients"
            )
        return None


class GossipChannel(Channel):
    """Gossip inside each group of the subgroups."""

    def __init__(self, spec: Gossip, cluster: Cluster, subgroups: Subgroups, seed: int) -> None:
        super().__init__(cluster, subgroups)
        self.spec, self.seed = spec, seed
        self._tables: dict[tuple[int, bool], Partners] = {}

    def partners(self, exchange: int, few: bool = False) -> Partners:
        """The table for all workers of the cluster: sources by id; shares and own for the rows hosted here."""
        period = self.spec.period(self.subgroups.size, few)
        key = (exchange if period is None else exchange % period, few)
        if period is None:
            self._tables.clear()
        if key not in self._tables:
            local = self.spec.partners(self.subgroups.size, exchange, self.seed, few)
            place, group = self.subgroups.place_of, self.subgroups.group_of
            sources = local.sources[:, place]
            sources = torch.where(sources < 0, -1, self.subgroups.members[group, sources.clamp(min=0)])
            here = slice(self.cluster.workers.start, self.cluster.workers.stop)
            device = self.cluster.device
            shares = local.shares[:, place][:, here].to(device).unsqueeze(-1)
            self._tables[key] = Partners(sources, shares, local.own[place][here].to(device).unsqueeze(-1))
        return self._tables[key]

    def methods(self, compressor: Compressor) -> list[str]:
        own = super().methods(compressor)
        return [f"gossip + {name}" for name in own] + own

    def mean(self, rows: Tensor, context: Context) -> Tensor:
        if self.cluster.clock is not None:
            self.cluster.code(["gossip"], rows.shape[1])
        table = self.partners(context.exchange)
        received = self.cluster.neighbor_exchange(Message((rows,)), table.sources).parts[0]
        return _mixed(rows, received.view(-1, *rows.shape), table).to(rows.dtype)

    def coded(self, codec: Codec, rows: Tensor, state: State, context: Context, wants_sent: bool = True) -> Mixed:
        size = rows.shape[1]
        table = self.partners(context.exchange)
        message, state = codec.encode(rows, context.keys(1, device=rows.device), state, context)
        sent = codec.decode(message, size, context)
        received = codec.decode(self.cluster.neighbor_exchange(message, table.sources), size, context)
        return Mixed(_mixed(sent, received.view(-1, *rows.shape), table), sent, state)

    def weights(self, compressor: Compressor, rows: Tensor, state: State, context: Context) -> tuple[Tensor, State]:
        if not compressor.compresses:
            return self.mean(rows, context), state  # prices itself
        assert isinstance(compressor, Codec)
        self.price(compressor, rows)
        period = self.spec.period(self.subgroups.size, few=True)
        assert period is not None
        entry = str(context.exchange % period)
        table = self.partners(context.exchange, few=True)
        slots, (count, size) = table.sources.shape[0], rows.shape
        codec = compressor if compressor.contracts else Damped(compressor)
        old = state.get(entry) or {"own": state["start"], "heard": state["start"].expand(slots, -1, -1), "codec": {}}
        keys = context.keys(1, device=rows.device)
        message, codec_memory = codec.encode(narrowed(rows - old["own"]), keys, old["codec"], context)
        own = old["own"] + codec.decode(message, size, context)
        news = self.cluster.neighbor_exchange(message, table.sources)
        received = old["heard"] + codec.decode(news, size, context).view(slots, count, size)
        step = self.spec.step or compressor.consensus_step(size, context)
        mixed = rows.clone()
        for slot in range(slots):
            mixed += step * table.shares[slot] * (received[slot] - own)
        return mixed, {**state, entry: {"own": own, "heard": received, "codec": codec_memory}}

    def init_state(self, compressor: Compressor, rows: Tensor) -> State:
        return {} if not compressor.compresses else {"start": rows.clone()}


def _mixed(own: Tensor, received: Tensor, table: Partners) -> Tensor:
    """The weighted sum of a worker's own value and the received ones, in slot order."""
    total = own * table.own
    for slot in range(received.shape[0]):
        total += received[slot] * table.shares[slot]
    return total


def _circulant(workers: int, offsets: list[int]) -> Partners:
    index = torch.arange(workers)
    sources = torch.stack([(index + o) % workers for o in offsets])
    shares = torch.full(sources.shape, 1 / (len(offsets) + 1))
    # The remainder, not another third: in float32 three thirds add up to more than 1, and the mean would grow.
    return Partners(sources, shares, 1 - shares.sum(0))


def _matching(workers: int, key: int) -> Partners:
    order = bits(torch.tensor([key]), workers)[0].argsort()
    partner = torch.full((workers,), -1)
    paired = order[: workers // 2 * 2].view(-1, 2)
    partner[paired[:, 0]], partner[paired[:, 1]] = paired[:, 1], paired[:, 0]
    alone = partner < 0
    half = torch.full((1, workers), 0.5)
    half[0, alone] = 0.0
    return Partners(partner.unsqueeze(0), half, torch.where(alone, 1.0, 0.5))


def _from_matrix(matrix: Matrix, workers: int) -> Partners:
    k = torch.tensor(matrix)
    off = k.clone().fill_diagonal_(0)
    slots = int((off != 0).sum(1).max())
    sources = torch.full((slots, workers), -1)
    shares = torch.zeros(slots, workers)
    for i in range(workers):
        partners = off[i].nonzero().flatten()
        sources[: len(partners), i] = partners
        shares[: len(partners), i] = off[i, partners]
    return Partners(sources, shares, 1 - shares.sum(0))


def _frozen(matrix: object) -> object:
    if isinstance(matrix, Tensor):
        matrix = matrix.tolist()
    return tuple(_frozen(row) for row in matrix) if isinstance(matrix, (list, tuple)) else matrix


def _check_matrix(matrix: Matrix) -> None:
    try:
        k = torch.tensor(matrix, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise HocketError(
            "gossip(matrix=…): the matrix must be square rows of numbers, such as [[0.5, 0.5], [0.5, 0.5]]."
        ) from None
    if k.ndim != 2 or k.shape[0] != k.shape[1]:
        raise HocketError(f"gossip(matrix=…): the matrix must be square, not of shape {tuple(k.shape)}.")
    if not torch.isfinite(k).all() or (k < 0).any() or (k.sum(0) - 1).abs().max() > 1e-6 or (k.sum(1) - 1).abs().max() > 1e-6:
        raise HocketError(
            "gossip(matrix=…): rows and columns must add up to 1 without negative entries (doubly stochastic), or the mean drifts."
        )
