"""Laws of small messages by way of others: everything arrives, what it costs, and that the choice is the cheapest."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hocket import ClusterSpec, Strategy
from hocket.cluster import Message, Subgroups, VirtualCluster, layout_of
from hocket.cluster.clock import Clock
from hocket.cluster.message import framed
from hocket.cluster.one_row import OneRowCluster
from hocket.cluster.relay import MESSAGE_BYTES, TRIP_BYTES, gather_trips, radix_for, scatter_trips, sources
from hocket.cluster.virtual import ClockedCluster
from hocket.programs.collective import CollectiveProgram

SIZES = [*range(2, 18), 25, 31, 32, 100]


@pytest.mark.parametrize("members", SIZES)
def test_everything_arrives_once(members: int) -> None:
    for radix in {2, 3, 4, 7, members}:
        held = [{0} for _ in range(members)]  # by how many places further on a block comes from
        for trip in gather_trips(members, radix):
            got = [[{(b - s) % members for b in blocks} for s, blocks in zip(*trip, strict=True)] for _ in range(members)]
            assert all(set(blocks) <= held[0] for blocks in trip.blocks)
            for own, slots in zip(held, got, strict=True):
                for blocks in slots:
                    assert not own & blocks
                    own |= blocks
        assert held == [set(range(members))] * members
        gone = [0] * members  # how far each block of an all-to-all has gone
        for trip in scatter_trips(members, radix):
            for shift, blocks in zip(*trip, strict=True):
                for block in blocks:
                    gone[block] += shift
        assert gone == list(range(members))


def test_lengths_may_be_on_another_device_than_what_they_are_of() -> None:
    """On NCCL the blocks of a relayed message are on the GPU, and their lengths are not."""
    message = Message((torch.zeros(2, 3, device="meta"),), torch.tensor([[1], [2]]))
    lengths = message.select(torch.tensor([1, 0])).lengths
    assert lengths is not None
    assert lengths.tolist() == [[2], [1]]


@pytest.mark.parametrize("members", [3, 6, 11, 32, 256, 1000])
@pytest.mark.parametrize("gather", [True, False])
def test_the_choice_is_the_cheapest_and_never_worse_than_directly(members: int, gather: bool) -> None:
    def cost(radix: int, size: int) -> int:
        trips = (gather_trips if gather else scatter_trips)(members, radix)
        return sum(TRIP_BYTES + len(t.shifts) * (MESSAGE_BYTES + t.most * size) for t in trips)

    for size in (0, 1, 30, 1000, 30_000):
        chosen = cost(radix_for(members, size, gather), size)
        roots = {min(members, math.ceil(members ** (1 / k) - 1e-9)) for k in range(1, members.bit_length() + 1)}
        assert chosen <= min(cost(max(2, radix), size) for radix in roots)
    assert radix_for(members, 100_000, False) == members  # what is large goes once


def test_messages_grow_with_a_root_of_the_number_of_workers() -> None:
    def messages(members: int) -> int:
        return sum(len(t.shifts) for t in gather_trips(members, radix_for(members, 8, True)))

    assert [messages(n) for n in (6, 32, 256, 1024)] == [5, 10, 12, 15]


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("members, radix", [(32, 6), (11, 4), (5, 2)])
def test_the_clock_takes_trips_messages_and_bytes(members: int, radix: int, gather: bool) -> None:
    """``Σ over trips: α + slots·(o + bytes/B)``."""
    spec = ClusterSpec(bandwidth=1e6, latency_s=0.01, message_s=0.001)
    cluster = _fixed(VirtualCluster(members, spec=spec), radix)
    assert cluster.clock is not None
    cluster.clock.launch()
    verb = cluster.all_gather if gather else cluster.all_to_all
    verb(Message((torch.zeros(members if gather else members**2, 10),)), cluster.world)
    trips = (gather_trips if gather else scatter_trips)(members, radix)
    seconds = sum(0.01 + len(t.shifts) * (0.001 + framed(40 * t.most) / 1e6) for t in trips)
    assert cluster.clock.net.tolist() == pytest.approx([seconds] * members, rel=1e-12)
    assert cluster.ledger.bytes_sent.tolist() == [sum(len(t.shifts) * framed(40 * t.most) for t in trips)] * members


def test_messages_of_varying_size_are_not_filled_up() -> None:
    """Of the second trip's two messages one has four blocks, the other three; each is announced, and begins with its length."""
    cluster = _fixed(VirtualCluster(11), 4)
    cluster.all_gather(Message((torch.zeros(11, 10),), torch.full((11, 1), 10)), cluster.world)
    payloads = [44 * len(blocks) + 4 for trip in gather_trips(11, 4) for blocks in trip.blocks]
    assert sorted(payloads) == [48, 48, 48, 136, 180]
    assert cluster.ledger.bytes_sent.tolist() == [sum(framed(size) + framed(4) for size in payloads)] * 11


def test_each_slot_of_a_trip_has_a_size_of_its_own() -> None:
    clock, world = Clock(ClusterSpec(bandwidth=1.0), 4), Subgroups.world(4)
    clock.launch()
    clock.neighbor_exchange(torch.tensor([[1, 1, 1, 1], [10, 10, 10, 10]]), sources(scatter_trips(4, 4)[0], world)[:2], False)
    assert clock.net.tolist() == [11.0] * 4


@pytest.mark.parametrize("compression", ["dgc(0.01)", "threshold(keep=0.01)", "qsgd(4)", "topk(0.01, indices=rice)"])
def test_results_do_not_depend_on_the_way(compression: str) -> None:
    strategy = f"bulk + {compression}"
    direct, relayed = _exchanged(strategy, _fixed(VirtualCluster(11), 11)), _exchanged(strategy, _fixed(VirtualCluster(11), 3))
    for one, other in zip(direct[0], relayed[0], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(direct[1], relayed[1])
    assert direct[2] != relayed[2]


@pytest.mark.parametrize("workers", [1, 2, 3, 11, 32])
@pytest.mark.parametrize("strategy", ["bulk", "bulk + dgc(0.01)", "bulk + threshold(0.01)", "acco + qsgd(4)"])
def test_flags_of_all_workers_are_combined(strategy: str, workers: int) -> None:
    for flagged in {0, workers // 2, workers - 1}:
        flags = torch.zeros(workers, 19, dtype=torch.bool)
        flags[flagged, 17] = flags[0, 3] = True
        program, rows = _program(strategy, VirtualCluster(workers))
        if workers == 1:
            continue
        for _ in range(2):  # under acco they come a step later
            program.gradient_ready(0, rows.clone())
            program.flags_ready(flags)
            agreed = program.gradients_done()[-1]
        assert agreed.nonzero().flatten().tolist() == [3, 17]


@pytest.mark.parametrize("strategy, own", [("bulk + qsgd(4)", 0), ("bulk + topk(0.2)", 0), ("bulk", 10)])
def test_flags_travel_inside_coded_messages(strategy: str, own: int) -> None:
    """A bit each in every block; alone they take messages of their own."""
    sent = []
    for flags in (False, True):
        program, rows = _program(strategy, cluster := VirtualCluster(32))
        program.gradient_ready(0, rows)
        if flags:
            program.flags_ready(torch.zeros(32, 16, dtype=torch.bool))
        program.gradients_done()
        sent.append(cluster.ledger.bytes_sent)
    more = int((sent[1] - sent[0]).max())
    assert more == own * framed(16) if own else 0 < more <= 2 * 36 * 1.04


@pytest.mark.parametrize("workers", [11, 32, 100])
@pytest.mark.parametrize("compression", ["dgc(0.001)", "qsgd(2)", "sign"])
def test_predicted_bytes_are_those_of_virtual_workers(compression: str, workers: int) -> None:
    assert _exchanged(f"bulk + {compression}", VirtualCluster(workers))[2][0] == _sent_by_one(f"bulk + {compression}", workers)


def test_most_of_a_tiny_message_is_no_longer_framing() -> None:
    """32 workers, ``dgc(0.001)``, three exchanges: directly, with flags in a ring of their own, each took 44 kB of a worker."""
    assert max(_exchanged("bulk + dgc(0.001)", VirtualCluster(32))[2]) < 3 * 8_000


def _fixed(cluster: VirtualCluster, radix: int) -> VirtualCluster:
    """A cluster whose messages all go by one radix."""
    cluster._radix = lambda *_: None if radix == cluster.size else radix  # type: ignore[method-assign]
    return cluster


def _program(strategy: str, cluster: ClockedCluster, size: int = 12_000) -> tuple[CollectiveProgram, torch.Tensor]:
    from hocket.programs.two_stage import program_for

    layout = layout_of(nn.Linear(size - 1, 1).named_parameters())
    weights = [b.empty(cluster.rows).zero_() for b in layout.buckets]
    rows = torch.randn(cluster.rows, layout.buckets[0].size, generator=torch.Generator().manual_seed(0))
    return program_for(Strategy.parse(strategy), layout, cluster, weights), rows


def _exchanged(strategy: str, cluster: VirtualCluster) -> tuple[list[torch.Tensor], torch.Tensor, list[int]]:
    """Mixed gradients of three steps, agreed flags, and bytes sent by each worker."""
    program, rows = _program(strategy, cluster)
    flags, mixed = torch.arange(cluster.size * 5).view(-1, 5) == 7, []
    for _ in range(3):
        mixed.append(rows.clone())
        program.gradient_ready(0, mixed[-1])
        program.flags_ready(flags)
        agreed = program.gradients_done()[-1]
    return mixed, agreed, cluster.ledger.bytes_sent.tolist()


def _sent_by_one(strategy: str, workers: int) -> int:
    cluster = OneRowCluster(workers)
    program, _ = _program(strategy, cluster, 12_000)
    for _ in range(3):
        program.gradient_ready(0, torch.empty(1, 12_000, device="meta"))
        program.flags_ready(torch.empty(1, 5, dtype=torch.bool, device="meta"))
        program.gradients_done()
    return int(cluster.ledger.bytes_sent[0])
