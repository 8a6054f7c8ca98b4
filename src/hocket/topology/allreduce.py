"""All-reduce: every worker receives the mean over all workers (ring: Patarasuk 2009; Gibiansky 2017).

Uncompressed rows use the backend's all-reduce, ``2(N−1)/N · M`` bytes per worker. Compressed rows go in two phases, so that a
worker's traffic does not grow with N: each row is cut into N slices; a worker sends each slice, encoded, to its owner; the owner
decodes and averages the slices, encodes the mean, and sends it to all. Where the codec compares values (top-k), slices are
interleaved, so that each is a sample of all layers; otherwise a slice that holds one layer with large gradients would send too
little of it. Slice owners keep a residual of their own where the codec uses error feedback. Small slices go by way of other workers
(:mod:`hocket.cluster.relay`), which changes the number of messages and no result.

Compressed weights are sent as displacement from the last common mean. The residual of error feedback is kept in the state or, with
``local(p, residual=weights)``, in the worker's own weights and so in its next displacement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hocket.cluster.base import Cluster, Subgroups
from hocket.cluster.message import Message, ordered_mean, there
from hocket.compression.base import Codec, Compressor, Context, Mixed, State
from hocket.compression.feedback import mean_with_feedback, with_feedback, with_residual
from hocket.compression.kernels import native_kernels
from hocket.compression.sign import Sign
from hocket.topology.base import Channel, Topology, narrowed, without_shapes

LARGE = 1 << 20
"""The number of values that are decoded at once on a CPU."""


@dataclass(frozen=True)
class AllReduce(Topology):
    """``allreduce``: all workers receive the mean over all workers."""

    name: ClassVar[str] = "allreduce"
    paper: ClassVar[str] = "Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 2009"

    one_mean: ClassVar[bool] = True

    @property
    def uniform(self) -> bool:
        return True

    def bind(self, cluster: Cluster, subgroups: Subgroups, seed: int) -> Channel:
        return AllReduceChannel(cluster, subgroups)


class AllReduceChannel(Channel):
    """The mean of each group of the subgroups."""

    uniform = True

    def __init__(self, cluster: Cluster, subgroups: Subgroups) -> None:
        super().__init__(cluster, subgroups)
        self._members = subgroups.size
        self._usual: dict[tuple[Codec, int], int] = {}
        self._places = subgroups.place_of[cluster.workers.start : cluster.workers.stop]

    def mean(self, rows: Tensor, context: Context) -> Tensor:
        return self.cluster.mean(rows, self.subgroups)

    def mean_later(self, rows: Tensor, context: Context) -> Any:
        return self.cluster.mean_later(rows, self.subgroups)

    def coded(self, codec: Codec, rows: Tensor, state: State, context: Context, wants_sent: bool = True) -> Mixed:
        size = rows.shape[1]
        subgroups, cluster = self.subgroups, self.cluster
        width = -(-size // subgroups.size)
        context = without_shapes(context)
        over = width * subgroups.size - size
        slices = _deal(pad(rows, (0, over)) if over else rows, subgroups.size, codec.global_selection)
        keys = context.keys(1, subgroups.size, rows.device)
        message, sender = codec.encode(slices, keys, state.get("sender", {}), context)
        sent = rows[:0]
        if wants_sent:
            sent = _gather(codec.decode(message, width, context), subgroups.size, codec.global_selection)[:, :size]
        usual = message.fixed_bytes if message.lengths is None else self._usual_bytes(codec, width, context)
        owned = _combine(codec, cluster.all_to_all(message, subgroups, usual), subgroups.size, width, context)
        second, second_keys = codec.second_phase, context.keys(2, device=rows.device)

        def send(wanted: Tensor) -> tuple[tuple[Message, State], Tensor]:
            coded = second.encode(wanted, second_keys, state.get("owner", {}), context)
            return coded, second.decode(coded[0], width, context)

        remembered: State = {"sender": sender}
        if codec.uses_error_feedback:
            found = with_feedback(owned, state.get("error"), codec.feedback_decay, send)
            (message, remembered["owner"]), remembered["error"] = found
        else:
            message, remembered["owner"] = second.encode(owned, second_keys, state.get("owner", {}), context)
        _, position = cluster.groups_here(subgroups)
        shared = second.decode(cluster.all_gather_flagged(message, subgroups, usual), width, context)
        mixed = _gather(shared, subgroups.size, codec.global_selection)[:, :size]
        # Of one group all rows are the same: no copies of a whole model.
        return Mixed(mixed.expand(len(rows), -1) if len(mixed) == 1 else mixed[there(position, shared)], sent, remembered)

    def _usual_bytes(self, codec: Codec, width: int, context: Context) -> int:
        """The bytes to be expected of a slice whose message varies in size: the same on all workers."""
        if (codec, width) not in self._usual:
            row, key = torch.empty(1, width, device="meta"), torch.zeros(1, dtype=torch.int64, device="meta")
            self._usual[codec, width] = codec.encode(row, key, {}, context)[0].fixed_bytes
        return self._usual[codec, width]

    def whole_gradients(self, compressor: Compressor, rows: Tensor, state: State, context: Context) -> Tensor:
        owned = state.get("inner", {}).get("error")
        if owned is not None and not compressor.sends_differences:
            held = self._held_by_owners(compressor, owned, rows.shape[1], self.subgroups.size)
            rows = with_residual(rows, held, compressor.feedback_decay)
        return super().whole_gradients(compressor, rows, state, context)

    def _held_by_owners(self, compressor: Compressor, owned: Tensor, size: int, workers: int) -> Tensor:
        """The residuals of the slices that workers here own, as rows of ``size``: they are of a mean, so each counts for all."""
        count, members = owned.shape[0], self._members
        cells = owned.new_zeros(count, members, owned.shape[1])
        cells[torch.arange(count, device=owned.device), there(self._places, owned)] = owned * workers
        return _gather(cells.flatten(0, 1), members, compressor.global_selection)[:, :size]

    def without_slices(self, compressor: Compressor, state: State, size: int, workers: int) -> State:
        """The residual of a slice's owner becomes the worker's own, with the weight of all workers: their mean is the same."""
        if compressor.sends_differences:  # the mean of other workers is another one: all begin anew
            return {}
        if "sender" in state or "inner" not in state:  # no residual of the worker's own beside it
            return {} if "sender" in state else state
        kept, owned = {**state, "inner": {}}, state["inner"].get("error")
        own = next((name for name in ("error", "v") if name in state), None)
        if owned is not None and own is not None and owned.shape[1] * self._members >= size:
            kept[own] = state[own] + self._held_by_owners(compressor, owned, size, workers)
        return kept

    def residuals(self, compressor: Compressor, state: State, size: int, context: Context) -> dict[str, Tensor]:
        found = super().residuals(compressor, state, size, context)
        owned, name, members = state.get("inner", {}).get("error"), compressor.sums[0], self.subgroups.size
        if owned is not None and name in found:
            coded = self._held_by_owners(compressor, owned, owned.shape[1] * members, members)
            found[name] = found[name] + compressor.decoded(coded, size, context)
        return found

    def weight_residuals(self, compressor: Compressor, state: State, size: int, context: Context) -> Tensor | None:
        inner = state.get("inner", {})
        if context.residual_stays:  # in the weights; only owners of slices hold something back of the mean
            return None if "error" not in inner else self._held_by_owners(compressor, inner["error"], size, self.subgroups.size)
        return self.residuals(compressor, inner, size, context).get("error")

    def weights(self, compressor: Compressor, rows: Tensor, state: State, context: Context) -> tuple[Tensor, State]:
        if not compressor.compresses:
            return self.mean(rows, context), state
        self.price(compressor, rows)
        reference, inner = state["reference"], state.get("inner", {})
        if context.residual_stays:
            mixed, sent, inner = compressor.mean(narrowed(rows - reference), self, inner, context)
            return rows + (mixed - sent), {"reference": reference + mixed, "inner": inner}
        change, _, inner = mean_with_feedback(compressor, narrowed(rows - reference), self, inner, context)
        # The sum that EF21 keeps is also its state; elsewhere it is new, and nobody else reads it, but several rows may be one.
        new = compressor.codec is not None and not compressor.sends_differences and change.dtype == reference.dtype
        mixed = change.add_(reference) if new and len(change) == 1 else reference + change
        return mixed, {"reference": mixed, "inner": inner}  # shared: nobody writes into either

    def init_state(self, compressor: Compressor, rows: Tensor) -> State:
        return {} if not compressor.compresses else {"reference": rows.clone()}

    def rebase(self, state: State, rows: Tensor, own: bool = False) -> State:
        return {**state, "reference": rows if own else rows.clone()} if "reference" in state else state


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
    """The mean of the slices that each owner received, ``[rows, width]``."""
    if isinstance(codec, Sign):
        return codec.combine(got, senders, width, context)
    owners = got.rows // senders
    if owners == 1 or got.parts[0].device.type != "cpu" or got.rows * width < LARGE:
        return _means(codec.decode(got, width, context), senders)
    means = torch.empty(owners, width, dtype=torch.float32)
    for k in range(owners):  # all decoded messages together would not fit into a cache
        means[k] = _means(codec.decode(got.part(k * senders, (k + 1) * senders), width, context), senders)[0]
    return means


def _means(rows: Tensor, senders: int) -> Tensor:
    """The mean of each ``senders`` consecutive rows."""
    if rows.dtype == torch.float32 and (kernels := native_kernels(rows, rows.shape[1])):
        found: Tensor = kernels.ordered_mean(rows, senders)
        return found
    return ordered_mean(rows.reshape(-1, senders, rows.shape[1]).transpose(0, 1))
