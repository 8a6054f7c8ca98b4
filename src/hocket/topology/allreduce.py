"""All-reduce: everyone gets the mean of everyone (ring: Patarasuk 2009; Gibiansky 2017).

Plain rows ride on the backend's all-reduce, ``2(N−1)/N · M`` bytes per worker. Coded rows go in two phases, so that a worker's
traffic does not grow with N: each row is cut into N slices; a worker sends each slice, coded, to its owner; the owner decodes and
averages what it got, codes the mean, and shares it with all. Where the code compares values (top-k), slices are interleaved: each
is a fair sample of all layers, or a layer with large gradients would be starved in a slice of its own. Slice owners keep an error
memory of their own where the code has feedback.

Compressed weights travel as displacement from the last common mean. What a code with feedback held back waits in a
memory or, with ``local(p, rest=weights)``, stays in the worker's own weights and so in its next displacement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import pad

from hocket.cluster.base import Cluster, Team
from hocket.cluster.message import Message, ordered_mean, there
from hocket.compression.base import Codec, Compressor, Context, Heard, Memory
from hocket.compression.feedback import mean_with_feedback
from hocket.compression.sign import Sign
from hocket.topology.base import Channel, Topology, plain, slice_keys, without_shapes


@dataclass(frozen=True)
class AllReduce(Topology):
    """``allreduce``."""

    name: ClassVar[str] = "allreduce"
    paper: ClassVar[str] = "Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 2009"

    @property
    def uniform(self) -> bool:
        return True

    def bind(self, cluster: Cluster, team: Team, seed: int) -> Channel:
        return AllReduceChannel(cluster, team)


class AllReduceChannel(Channel):
    """The mean of each group of the team."""

    uniform = True

    def mean(self, rows: Tensor, context: Context) -> Tensor:
        return self.cluster.mean(rows, self.team)

    def mean_later(self, rows: Tensor, context: Context) -> Any:
        later = getattr(self.cluster, "mean_later", None)
        pending = self.cluster.mean(rows, self.team) if later is None else later(rows, self.team)
        return rows if pending is None else pending

    def coded(self, codec: Codec, rows: Tensor, memory: Memory, context: Context) -> Heard:
        size = rows.shape[1]
        team, cluster = self.team, self.cluster
        width = -(-size // team.size)
        context = without_shapes(context)
        slices = _deal(pad(rows, (0, width * team.size - size)), team.size, codec.compares)
        keys = there(slice_keys(context.keys(1), team.size), rows)
        message, sender = codec.encode(slices, keys, memory.get("sender", {}), context)
        sent = _gather(codec.decode(message, width, context), team.size, codec.compares)[:, :size]
        owned = _combine(codec, cluster.scatter(message, team), team.size, width, context)
        if codec.remembers and "error" in memory:
            owned += memory["error"]
        again = codec.again
        message, owner = again.encode(owned, there(context.keys(2), rows), memory.get("owner", {}), context)
        remembered: Memory = {"sender": sender, "owner": owner}
        if codec.remembers:
            remembered["error"] = owned - again.decode(message, width, context)
        _, position = cluster.groups_here(team)
        shared = again.decode(cluster.share(message, team), width, context)
        return Heard(_gather(shared, team.size, codec.compares)[:, :size][there(position, shared)], sent, remembered)

    def weights(self, compressor: Compressor, rows: Tensor, memory: Memory, context: Context) -> tuple[Tensor, Memory]:
        if plain(compressor):
            return self.mean(rows, context), memory
        reference, inner = memory["reference"], memory.get("inner", {})
        if context.rest_stays:
            heard, sent, inner = compressor.mean(rows - reference, self, inner, context)
            return rows + (heard - sent), {"reference": reference + heard, "inner": inner}
        heard, _, inner = mean_with_feedback(compressor, rows - reference, self, inner, context)
        mixed = reference + heard
        return mixed, {"reference": mixed.clone(), "inner": inner}

    def start_memory(self, compressor: Compressor, rows: Tensor) -> Memory:
        return {} if plain(compressor) else {"reference": rows.clone()}

    def rebase(self, memory: Memory, rows: Tensor) -> Memory:
        return {**memory, "reference": rows.clone()} if "reference" in memory else memory


def _deal(rows: Tensor, slices: int, interleaved: bool) -> Tensor:
    """Rows cut into slices, ``[rows · slices, width]``: consecutive ones or, interleaved, every ``slices``-th value."""
    count, width = rows.shape[0], rows.shape[1] // slices
    if not interleaved:
        return rows.view(count * slices, width)
    return rows.view(count, width, slices).transpose(1, 2).reshape(count * slices, width)


def _gather(parts: Tensor, slices: int, interleaved: bool) -> Tensor:
    """The slices put together again, ``[rows, width · slices]``."""
    if not interleaved:
        return parts.reshape(-1, slices * parts.shape[1])
    return parts.reshape(-1, slices, parts.shape[1]).transpose(1, 2).reshape(-1, slices * parts.shape[1])


def _combine(codec: Codec, got: Message, senders: int, width: int, context: Context) -> Tensor:
    """The mean of what each owner got, ``[rows, width]``."""
    if isinstance(codec, Sign):
        return codec.combine(got, senders, width, context)
    return ordered_mean(codec.decode(got, width, context).reshape(-1, senders, width).transpose(0, 1))
