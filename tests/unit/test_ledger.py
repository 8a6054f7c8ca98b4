"""Laws of the ledger: seconds add up, bytes are those of the messages, and what is uncounted leaves no trace."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hocket
from hocket.cluster import Entry, Message, Subgroups, VirtualCluster
from hocket.cluster.ledger import MOST_SPANS, Ledger, Span, split
from hocket.cluster.message import FRAME_BYTES, HEADER_SHARE, framed, ring_bytes
from hocket.cluster.spec import ClusterSpec

_times = st.lists(st.floats(0, 100), min_size=4, max_size=4).map(sorted)


@given(_times, st.floats(0, 120))
def test_wait_and_transfer_are_the_blocked_time_and_hidden_is_the_rest(times: list[float], late: float) -> None:
    span = Span(*times)
    wait, transfer, hidden = split([span], torch.tensor([late], dtype=torch.float64))
    assert min(wait, transfer, hidden) >= 0
    assert wait + transfer == pytest.approx(span.end - span.blocked)
    assert transfer + hidden <= max(span.end - span.first_launch, transfer) + 1e-9


@pytest.mark.parametrize("span, late, expected", [
    (Span(0, 1, 2, 5), 3, (1, 2, 0)),  # the last worker came at 3, we stood from 2 to 5
    (Span(0, 1, 5, 5), 1, (0, 0, 4)),  # all hidden behind computing
    (Span(0, 1, 2, 5), 0, (0, 3, 2)),  # we were the last
    (Span(0, 1, 2, 5), 9, (3, 0, 0)),  # clocks that disagree never give negative seconds
])  # fmt: skip
def test_the_parts_of_one_exchange(span: Span, late: float, expected: tuple[float, ...]) -> None:
    assert split([span], torch.tensor([float(late)])) == expected


@given(st.lists(st.tuples(_times, st.floats(0, 120)), max_size=4))
def test_several_exchanges_take_what_each_of_them_takes(exchanges: list[tuple[list[float], float]]) -> None:
    spans, latest = [Span(*times) for times, _ in exchanges], torch.tensor([late for _, late in exchanges], dtype=torch.float64)
    each = [split([span], late) for span, late in zip(spans, latest.split(1), strict=False)]
    assert split(spans, latest) == pytest.approx([sum(parts) for parts in zip(*each, strict=True)] or [0, 0, 0])


def test_closing_an_epoch_adds_up_and_starts_anew() -> None:
    ledger = VirtualCluster(2, timed=True).ledger
    ledger.sent += torch.tensor([10, 30])
    ledger.record(Span(0.0, 0.0, 0.0, 0.0))
    ledger.nonfinite = 2
    entry = ledger.close(lambda values: values)
    assert (entry.bytes_sent, entry.exchanges, entry.nonfinite) == (40, 1, 2)
    assert entry.seconds == pytest.approx(entry.compute_s + entry.wait_s + entry.transfer_s)
    assert ledger.bytes_sent.tolist() == [0, 0]
    assert ledger.spans == []
    assert not ledger.nonfinite
    assert not ledger.exchanges
    ledger.sent += 5
    assert ledger.close(lambda values: values).bytes_sent == 10
    assert ledger.total().bytes_sent == 50


def test_virtual_workers_have_no_seconds_and_totals_keep_none() -> None:
    ledger = VirtualCluster(2).ledger
    ledger.close(lambda values: values)
    assert ledger.total().seconds is None
    assert ledger.total().compute_s is None
    assert (Entry(seconds=1.0) + Entry()).seconds == 1.0


@pytest.mark.parametrize("workers", [2, 3, 8, 32])
def test_a_plain_mean_costs_the_ring(workers: int) -> None:
    cluster = VirtualCluster(workers)
    cluster.mean(torch.zeros(workers, 1000), cluster.world)
    assert cluster.ledger.bytes_sent.tolist() == [ring_bytes(4000, workers)] * workers
    payload = 2 * (workers - 1) / workers * 4000
    assert ring_bytes(4000, workers) == pytest.approx(payload * (1 + HEADER_SHARE) + 2 * (workers - 1) * FRAME_BYTES, rel=0.01)
    assert ring_bytes(4000, 1) == 0


def test_messages_are_paid_by_who_sends_them() -> None:
    cluster = VirtualCluster(3)
    message = Message((torch.zeros(3, 10),))
    one = 40 + int(40 * HEADER_SHARE) + FRAME_BYTES
    cluster.neighbor_exchange(message, torch.tensor([[1, -1, 1], [2, -1, -1]]))  # 0 hears 1 and 2, 2 hears 1
    assert cluster.ledger.bytes_sent.tolist() == [0, 2 * one, one]
    cluster.ledger.sent.zero_()
    cluster.all_gather(message, cluster.world)
    assert cluster.ledger.bytes_sent.tolist() == [2 * one] * 3
    cluster.ledger.sent.zero_()
    cluster.all_to_all(Message((torch.zeros(9, 10),)), cluster.world)
    assert cluster.ledger.bytes_sent.tolist() == [2 * one] * 3  # what stays with its worker costs nothing


def test_the_verbs_carry_rows_to_whom_they_say() -> None:
    cluster, subgroups = VirtualCluster(4), Subgroups.across(4, 2)
    rows = torch.arange(4.0).unsqueeze(1)
    heard = cluster.neighbor_exchange(Message((rows,)), torch.tensor([[3, -1, 0, 1]])).parts[0].flatten().tolist()
    assert heard == [3.0, 1.0, 0.0, 1.0]
    assert cluster.all_gather(Message((rows,)), subgroups).parts[0].flatten().tolist() == [0.0, 2.0, 1.0, 3.0]
    slices = torch.arange(8.0).unsqueeze(1)  # worker i's slice for its group's k-th member: 2i + k
    assert cluster.all_to_all(Message((slices,)), subgroups).parts[0].flatten().tolist() == [0.0, 4.0, 2.0, 6.0, 1.0, 5.0, 3.0, 7.0]
    assert cluster.mean(rows.clone(), subgroups).flatten().tolist() == [1.0, 2.0, 1.0, 2.0]


def test_what_is_uncounted_leaves_no_trace() -> None:
    cluster = VirtualCluster(2)
    with cluster.uncounted():
        exchange = cluster.exchange()
        exchange.submit(lambda: cluster.mean(torch.zeros(2, 5), cluster.world))
        exchange.wait()
    assert cluster.ledger.bytes_sent.sum() == 0
    assert cluster.ledger.exchanges == 0


@pytest.mark.parametrize("strategy", ["bulk", "local(2)", "gossip", "bulk + topk(0.1)"])
def test_on_a_described_cluster_the_parts_of_an_epoch_add_up(strategy: str) -> None:
    spec = ClusterSpec(step_s=0.01, slowdown=(1, 3), bandwidth=1e5, latency_s=1e-4)
    data = torch.randn(16, 3), torch.randint(0, 2, (16,))
    run = hocket.simulate(
        lambda: nn.Linear(3, 2), nn.functional.cross_entropy, data, strategy=strategy, workers=2, batch_size=2, cluster=spec
    )
    for m in run.metrics:
        assert m["compute_s"] + m["wait_s"] + m["transfer_s"] == pytest.approx(m["seconds"])
        assert m["compute_s"] == pytest.approx(4 * 0.01 * (1 + 3) / 2)


def test_a_broadcast_takes_its_message_over_the_senders_link_once_for_each_receiver() -> None:
    cluster = VirtualCluster(3, spec=ClusterSpec(step_s=1.0, bandwidth=1e4))
    assert cluster.clock is not None
    cluster.broadcast(torch.randn(3, 1000), source=1)
    assert cluster.clock.net.tolist() == pytest.approx([framed(4000) / 1e4 * n for n in (1, 2, 1)])


# --- a ledger does not grow ----------------------------------------------------------------------------------------------------


def spans(count: int, own: float, seed: int = 0) -> list[Span]:
    """Exchanges of one worker that launches ``own`` seconds after the earliest, and blocks from then on for a random time."""
    took = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    return [Span(k + own, k + own, k + own, k + 1.0 + took[k]) for k in range(count)]


def filled(count: int, own: float = 0.0) -> Ledger:
    ledger = VirtualCluster(1, timed=True).ledger
    for span in spans(count, own):
        ledger.record(span)
        ledger.end_step()
    return ledger


def test_the_memory_of_a_ledger_does_not_grow_with_exchanges_and_steps() -> None:
    sizes = [len(pickle.dumps(filled(count))) for count in (2 * MOST_SPANS, 10 * MOST_SPANS)]
    assert max(sizes) < 200 * MOST_SPANS
    assert sizes[1] < 1.5 * sizes[0]


def test_of_many_exchanges_all_workers_keep_the_same_sample_and_the_sum_stays_exact() -> None:
    count = 3 * MOST_SPANS
    early, late = filled(count), filled(count, own=0.5)
    assert len(early.spans) == len(late.spans) <= MOST_SPANS
    assert [s.blocked + 0.5 for s in early.spans] == pytest.approx([s.blocked for s in late.spans])
    exposed = sum(s.end - s.blocked for s in spans(count, 0.0))
    starts = torch.tensor([s.last_launch for s in late.spans], dtype=torch.float64)
    early._seconds = 4.0 * count
    entry = early.close(lambda values: torch.maximum(values, starts) if values.shape[1:] == starts.shape else values)
    assert entry.wait_s + entry.transfer_s == pytest.approx(exposed)
    assert entry.wait_s == pytest.approx(0.5 * count, rel=0.05), "early waits half a second in each exchange"
    assert entry.exchanges == count


def test_a_step_takes_what_was_not_waited_and_a_pause_ends_no_step() -> None:
    ledger = VirtualCluster(1, timed=True).ledger
    stamps = iter([10.0, 12.0, 20.0, 21.0])
    ledger.clock.stamp = lambda: next(stamps)  # type: ignore[method-assign]
    ledger.resume()
    ledger.end_step()
    ledger.record(Span(10.0, 10.0, 10.5, 12.0))  # 1.5 of 2 seconds
    ledger.end_step()
    ledger.pause()
    ledger.resume()
    ledger.end_step()  # the pause was before it
    ledger.end_step()
    ledger.close(lambda values: values)
    assert ledger.step_s[0].tolist() == pytest.approx([0.5, 1.0], rel=0.05)


def test_virtual_stragglers_are_named_by_what_their_steps_take() -> None:
    spec = ClusterSpec(step_s=0.01, slowdown=(1, 1, 4), bandwidth=1e5)
    data = torch.randn(48, 3), torch.randint(0, 2, (48,))
    for strategy in ("bulk", "async + server"):
        run = hocket.simulate(
            lambda: nn.Linear(3, 2), nn.functional.cross_entropy, data, strategy=strategy, workers=3, batch_size=2, cluster=spec
        )
        found = run.metrics[-1]["step_times"]
        assert found["slowest"] == 2
        assert found["p50_s"] == pytest.approx([0.01, 0.01, 0.04], rel=0.05)
