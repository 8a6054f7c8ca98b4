"""Parameter servers: the parameters split over ``shards``; workers push gradients and fetch weights (Li 2014).

The shards hold the global weights and run the optimiser: the worker's, or ``optimizer`` (one of torch.optim's elementwise ones by
name, such as adagrad) with the worker's learning rate times ``lr``. Under ``bulk`` and ``ssp(0)`` a step is one update with the
mean of all pushes, the classical centralised scheme; otherwise every push is an update.

``role=sum`` (BytePS, Jiang 2020): ``n ≤ N`` spare CPU machines only *sum*; the workers run the optimiser and sum a part themselves.
With ``d = N² + nN − 2n`` each CPU machine sums ``2(N−1)M/d`` and each worker machine ``(N−n)M/d``, which loads all links equally:
an exchange takes ``2N(N−1)M/(d·B)``, and ring all-reduce is the case ``n = 0``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hocket.cluster.base import Cluster, Subgroups
from hocket.compression.base import Codec, Compressor, Context, Mixed, State
from hocket.compression.lowrank import LowRank
from hocket.errors import HocketError, is_number, is_whole, nearest
from hocket.topology.base import Channel, Topology

ROLES = ("optimize", "sum")
OPTIMIZERS = ("sgd", "adam", "adamw", "adamax", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "rprop", "asgd")
FETCHES = ("fp32", "bf16", "fp16")


class SumChannel(Channel):
    """The mean over all workers, summed on spare machines and on the workers' own."""

    uniform = True

    def __init__(self, cluster: Cluster, subgroups: Subgroups, servers: int) -> None:
        super().__init__(cluster, subgroups)
        self.servers = servers

    def mean(self, rows: Tensor, context: Context) -> Tensor:
        return self.cluster.reduce_on_servers(self.servers, rows)

    def coded(self, codec: Codec, rows: Tensor, state: State, context: Context, wants_sent: bool = True) -> Mixed:
        raise HocketError("Servers with role=sum cannot sum compressed rows; leave the compression out.")  # refused by refusal()

    def weights(self, compressor: Compressor, rows: Tensor, state: State, context: Context) -> tuple[Tensor, State]:
        return self.mean(rows, context), state


@dataclass(frozen=True)
class Server(Topology):
    """``server(shards=1)``, ``server(shards=2, optimizer=adagrad, lr=10)``, ``server(shards=2, role=sum)``."""

    shards: int = 1
    role: str = "optimize"
    optimizer: str | None = None
    lr: float = 1.0
    fetch: str = "fp32"
    """The dtype in which weights travel to the workers."""
    name: ClassVar[str] = "server"
    paper: ClassVar[str] = "Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014"

    def __post_init__(self) -> None:
        if not is_whole(self.shards):
            raise HocketError(f"server(shards={self.shards!r}): shards must be a whole number, at least one shard.")
        for value, known, what in ((self.role, ROLES, "role"), (self.fetch, FETCHES, "fetch")):
            if value not in known:
                hint = nearest(str(value), known) or "."
                raise HocketError(f"server({what}={value!r}): unknown{hint} Use {' or '.join(known)}.")
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            hint = nearest(str(self.optimizer), OPTIMIZERS) or "."
            raise HocketError(f"server(optimizer={self.optimizer!r}): unknown{hint} Use one of {', '.join(OPTIMIZERS)}.")
        if not is_number(self.lr) or not 0 < self.lr < float("inf"):
            raise HocketError(f"server(lr={self.lr!r}): the factor on the worker's learning rate must be a number above 0.")
        if self.role == "sum" and (self.optimizer is not None or self.lr != 1 or self.fetch != "fp32"):
            raise HocketError("server(role=sum): such servers have no optimiser and no weights; leave optimizer=, lr=, fetch= out.")

    @property
    def uniform(self) -> bool:
        return True

    def num_shards(self, workers: int) -> int:
        return self.shards

    @property
    def lr_factor(self) -> float:
        return self.lr

    @property
    def server_optimizer(self) -> str | None:
        return self.optimizer

    @property
    def fetch_dtype(self) -> str:
        return self.fetch

    @property
    def has_servers(self) -> bool:
        return not self.sums_on_servers

    @property
    def sums_on_servers(self) -> bool:
        return self.role == "sum"

    @property
    def has_server_settings(self) -> bool:
        return self != Server(self.shards, self.role)

    def bind(self, cluster: Cluster, subgroups: Subgroups, seed: int) -> Channel:
        if not self.sums_on_servers or not subgroups.whole:
            raise HocketError("server(…) serves all workers at once; it cannot be part of a hierarchical topology.")
        if self.shards > cluster.size:
            raise HocketError(
                f"server({self.shards}, role=sum): some servers would have nothing to sum; "
                f"use at most one per worker, {cluster.size}."
            )
        return SumChannel(cluster, subgroups, self.shards)

    def refusal(self, compressor: Compressor, weights: bool) -> str | None:
        if self.sums_on_servers and compressor.compresses:
            return "servers with role=sum cannot sum compressed rows; leave the compression out, or use allreduce"
        if compressor.compresses and (not isinstance(compressor, Codec) or isinstance(compressor, LowRank)):
            return f"a shard cannot decode {compressor.name}, which needs more than one message per slice; use topk or sign"
        return None
