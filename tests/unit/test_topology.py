"""Laws of topologies: partners are data, mixing keeps the mean, compression and consensus go together."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.cluster import Message, VirtualCluster, point_to_point
from hocket.cluster.message import PIECE_BYTES
from hocket.cluster.point_to_point import Incoming, Outgoing, PointToPoint
from hocket.compression.base import Context
from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.topology import AllReduce, Gossip, Hierarchical, Server, Topology
from hocket.topology.gossip import KINDS, Partners

_THIRDS = ((0.5, 0.5, 0.0, 0.0), (0.5, 0.0, 0.5, 0.0), (0.0, 0.5, 0.0, 0.5), (0.0, 0.0, 0.5, 0.5))


def matrix(partners: Partners, workers: int) -> Tensor:
    """The mixing matrix that a table of partners stands for."""
    k = torch.diag(partners.own.double())
    for sources, shares in zip(partners.sources, partners.shares.double(), strict=True):
        for i in range(workers):
            if sources[i] >= 0:
                k[i, sources[i]] += shares[i]
    return k


def context(workers: int, exchange: int = 0, step: int | None = None) -> Context:
    return Context(0, exchange if step is None else step, exchange, 0, torch.arange(workers), world=workers)


def rows_of(workers: int, size: int = 23, seed: int = 0) -> Tensor:
    return torch.randn(workers, size, generator=torch.Generator().manual_seed(seed))


def mixing(topology: Topology, workers: int, exchange: int = 0) -> Tensor:
    """The matrix a bound channel applies, read off its action on the identity."""
    cluster = VirtualCluster(workers)
    return topology.bind(cluster, cluster.world, 0).mean(torch.eye(workers), context(workers, exchange)).double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("few", [False, True])
def test_partners_are_doubly_stochastic(kind: str, few: bool) -> None:
    for workers in range(2, 34):
        for exchange in range(2 * workers):
            k = matrix(Gossip(kind).partners(workers, exchange, seed=3, few=few), workers)
            ones = torch.ones(workers, dtype=torch.float64)
            assert bool((k >= 0).all())
            torch.testing.assert_close(k.sum(0), ones, rtol=0, atol=1e-7)
            torch.testing.assert_close(k.sum(1), ones, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [*KINDS, "matrix"])
def test_nobody_is_its_own_partner_and_the_channel_does_what_the_table_says(kind: str) -> None:
    for workers in (4,) if kind == "matrix" else (2, 3, 4, 7, 8):
        spec = Gossip(matrix=_THIRDS) if kind == "matrix" else Gossip(kind)
        for exchange in range(workers + 2):
            table = spec.partners(workers, exchange)
            assert bool((table.sources != torch.arange(workers)).all())
            assert torch.equal(mixing(spec, workers, exchange), matrix(table, workers))


def test_rotating_distances_advance_once_per_exchange() -> None:
    for workers in range(2, 20):
        for exchange in range(3 * workers):
            s = exchange % (workers // 2) + 1
            expected = torch.zeros(workers, workers, dtype=torch.float64)
            for i in range(workers):
                around = {i, (i + s) % workers, (i - s) % workers}
                expected[i, list(around)] = 1 / len(around)
            table = Gossip().partners(workers, exchange)
            torch.testing.assert_close(matrix(table, workers), expected, rtol=0, atol=1e-7)


def test_a_partner_met_on_both_sides_counts_half() -> None:
    assert matrix(Gossip().partners(2, 0), 2).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert matrix(Gossip().partners(6, 2), 6)[0].tolist() == [0.5, 0, 0, 0.5, 0, 0]


def test_a_ring_never_turns_and_few_distances_come_back() -> None:
    tables = [matrix(Gossip("ring").partners(7, e), 7) for e in range(5)]
    assert all(torch.equal(t, tables[0]) for t in tables)
    assert len(Gossip().distances(210, few=True)) == 4
    assert Gossip().distances(8, few=True) == [1, 2, 3, 4]


@pytest.mark.parametrize("workers", [2, 4, 8, 16, 32])
def test_exponential_gossip_mixes_completely_after_log2_exchanges(workers: int) -> None:
    rounds = int(math.log2(workers))
    product = torch.eye(workers, dtype=torch.float64)
    for exchange in range(rounds):
        product = matrix(Gossip("exponential").partners(workers, exchange), workers) @ product
    assert torch.equal(product, torch.full_like(product, 1 / workers))


def test_random_partners_are_a_fresh_perfect_matching() -> None:
    seen = set()
    for exchange in range(30):
        partner = Gossip("random").partners(8, exchange, seed=1).sources[0]
        assert torch.equal(partner[partner], torch.arange(8))
        seen.add(tuple(partner.tolist()))
    assert len(seen) > 20
    assert (Gossip("random").partners(7, 0).sources[0] < 0).sum() == 1


TOPOLOGIES = [
    AllReduce(), *map(Gossip, KINDS), Gossip(matrix=_THIRDS), Hierarchical(size=2), Hierarchical(AllReduce(), Gossip(), 2),
    Hierarchical(Gossip(), AllReduce(), 4), Hierarchical(Gossip("ring"), Gossip("exponential"), 2, every=2), Hierarchical(),
    Hierarchical(AllReduce(), Gossip()), Hierarchical(Gossip(), Gossip(), 1),
]  # fmt: skip


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: str(Strategy(topology=t)).removeprefix("bulk + "))
def test_mixing_keeps_the_mean(topology: Topology) -> None:
    workers = 4 if isinstance(topology, Gossip) and topology.matrix else 8
    cluster = VirtualCluster(workers)
    channel = topology.bind(cluster, cluster.world, 0)
    rows = rows_of(workers).double()
    mean, spread = rows.mean(0), (rows - rows.mean(0)).norm()
    for exchange in range(60):
        rows = channel.mean(rows.clone(), context(workers, exchange))
    torch.testing.assert_close(rows.mean(0), mean, rtol=0, atol=1e-6)
    assert (rows - mean).norm() < 0.2 * spread


def test_thirds_do_not_make_the_mean_grow() -> None:
    """Three times float32's third is more than 1."""
    cluster = VirtualCluster(5)
    channel = Gossip().bind(cluster, cluster.world, 0)
    rows = torch.ones(5, 3, dtype=torch.float64)
    for exchange in range(500):
        rows = channel.mean(rows, context(5, exchange))
    assert (rows - 1).abs().max() < 1e-9


def test_the_full_matrix_equals_allreduce() -> None:
    full = Gossip(matrix=torch.full((4, 4), 0.25))
    torch.testing.assert_close(mixing(full, 4), mixing(AllReduce(), 4))


@pytest.mark.parametrize("inner", [AllReduce(), Gossip("ring"), Gossip()], ids=["allreduce", "ring", "rotating"])
@pytest.mark.parametrize("outer", [AllReduce(), Gossip(), Gossip("exponential")], ids=["allreduce", "rotating", "exponential"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_hierarchical_is_the_kronecker_product(inner: Topology, outer: Topology, size: int) -> None:
    hosts = 8 // size
    for exchange in range(4):
        expected = torch.kron(mixing(outer, hosts, exchange), mixing(inner, size, exchange))
        torch.testing.assert_close(mixing(Hierarchical(inner, outer, size), 8, exchange), expected, rtol=0, atol=1e-6)


def test_the_outer_topology_advances_with_its_own_exchanges() -> None:
    spec = Hierarchical(AllReduce(), Gossip(), size=2, every=2)
    for exchange in range(9):
        inner_only = torch.kron(torch.eye(4).double(), mixing(AllReduce(), 2))
        expected = inner_only if (exchange + 1) % 2 else torch.kron(mixing(Gossip(), 4, exchange // 2), mixing(AllReduce(), 2))
        torch.testing.assert_close(mixing(spec, 8, exchange), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("topology, workers, fragment", [
    (Gossip(matrix=_THIRDS), 8, "for 4 workers, but 8"), (Hierarchical(size=3), 8, "do not divide"),
    (Hierarchical(AllReduce(), Gossip(matrix=_THIRDS), 4), 8, "for 4 workers, but 2"), (Hierarchical(size=16), 8, "do not divide"),
])  # fmt: skip
def test_what_does_not_fit_the_workers_is_refused(topology: Topology, workers: int, fragment: str) -> None:
    cluster = VirtualCluster(workers)
    with pytest.raises(HocketError, match=fragment):
        topology.bind(cluster, cluster.world, 0)


# --- gradients -------------------------------------------------------------------------------------------------------------


def test_gossip_mixes_a_workers_own_message_as_sent() -> None:
    """Under feedback a worker's own value counts as others heard it, or what it keeps is counted twice."""
    cluster = VirtualCluster(4)
    channel = Gossip("ring").bind(cluster, cluster.world, 0)
    top = Strategy.parse("topk(0.1)").compression
    rows, state = rows_of(4, 40), {}
    heard, state = channel.gradients(top, rows, state, context(4))
    sent = rows - state["error"]
    torch.testing.assert_close(heard, (matrix(Gossip("ring").partners(4, 0), 4) @ sent.double()).float())


@pytest.mark.parametrize("code", [
    "topk(0.1)", "sign", "cast(fp8)", "threshold(keep=0.1)", "randomk(0.2)", "topk(0.2) | sign", "bins(2)", "cast(e3m0)",
    "topk(3/12) | bins(2)",
])  # fmt: skip
def test_slice_owners_remember_what_their_second_encoding_lost(code: str) -> None:
    """In the long run everybody hears the sum of the means; without the owners' memory the difference grows with every exchange."""
    workers, exchanges = 4, 300
    cluster = VirtualCluster(workers)
    channel = AllReduce().bind(cluster, cluster.world, 0)
    compressor, state = Strategy.parse(code).compression, {}
    generator = torch.Generator().manual_seed(0)
    fixed = torch.randn(workers, 64, generator=generator)
    given, heard = torch.zeros(64), torch.zeros(workers, 64)
    for t in range(exchanges):
        rows = fixed + 0.3 * torch.randn(workers, 64, generator=generator)
        given += rows.mean(0)
        out, state = channel.gradients(compressor, rows, state, context(workers, t))
        heard += out
    assert all(torch.equal(heard[0], h) for h in heard)
    held = state["error"].mean(0).sum() + state["inner"].get("error", torch.zeros(1)).sum()  # by senders and by owners
    assert float(heard[0].sum() + held) == pytest.approx(float(given.sum()), rel=1e-3, abs=0.05)
    assert (heard[0] - given).norm() < 0.2 * given.norm()


# --- weights: CHOCO --------------------------------------------------------------------------------------------------------

CODES = [
    "topk(0.1)", "topk(0.02)", "sign", "qsgd(4)", "qsgd(2)", "ternary", "natural", "cast(bf16)", "randomk(0.2)", "lowrank(1)",
    "randomk(0.2, unbiased=True)", "threshold(keep=0.1)", "topk(0.2) | ternary", "threshold(keep=0.1) | qsgd(4)", "bins(2)",
    "cast(e3m0)", "topk(3/32)", "topk(3/32) | bins(2)",
]  # fmt: skip


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("kind", ["rotating", "ring", "exponential"])
def test_compressed_gossip_reaches_consensus_at_the_mean(code: str, kind: str) -> None:
    workers, size = 4, 200
    cluster = VirtualCluster(workers)
    channel = Gossip(kind).bind(cluster, cluster.world, 0)
    compressor = Strategy.parse(f"gossip + {code}").compression
    start = rows_of(1, size).expand(workers, -1).contiguous()
    state = channel.init_state(compressor, start)
    rows = start + rows_of(workers, size, seed=1)
    mean, distances = rows.mean(0), []
    for exchange in range(500):
        distances.append((rows - mean).norm().item())
        rows, state = channel.weights(compressor, rows, state, context(workers, exchange))
    torch.testing.assert_close(rows.mean(0), mean, rtol=0, atol=1e-4)
    assert max(distances) < 1.5 * distances[0]
    assert distances[-1] < 0.1 * distances[0]
    assert distances[-1] < max(0.75 * distances[100], 1e-4)  # and it goes on falling


@pytest.mark.parametrize(
    "code", ["topk(0.1)", "qsgd(4)", "ternary", "threshold(keep=0.2) | cast(fp8)", "lowrank(1)", "topk(3/12) | bins(2)"]
)
@pytest.mark.parametrize("kind", ["rotating", "exponential", "matrix"])
def test_public_copies_agree(code: str, kind: str) -> None:
    """What worker i holds of j is what j holds of itself, at all times."""
    workers = 4
    cluster = VirtualCluster(workers)
    spec = Gossip(matrix=_THIRDS) if kind == "matrix" else Gossip(kind)
    channel = spec.bind(cluster, cluster.world, 0)
    compressor = Strategy.parse(f"gossip + {code}").compression
    state = channel.init_state(compressor, torch.zeros(workers, 40))
    rows = rows_of(workers, 40)
    for exchange in range(12):
        rows, state = channel.weights(compressor, rows + 0.1 * rows_of(workers, 40, exchange), state, context(workers, exchange))
        entry = state[str(exchange % spec.period(workers, few=True))]
        for slot, sources in enumerate(spec.partners(workers, exchange, few=True).sources):
            for i in range(workers):
                if sources[i] >= 0:
                    assert torch.equal(entry["heard"][slot, i], entry["own"][sources[i]])


def test_compressed_allreduce_of_weights_counts_from_the_last_common_mean() -> None:
    cluster = VirtualCluster(4)
    channel = AllReduce().bind(cluster, cluster.world, 0)
    compressor, start = Strategy.parse("topk(0.1)").compression, rows_of(1, 50).expand(4, -1).contiguous()
    state = channel.init_state(compressor, start)
    mixed, state = channel.weights(compressor, start.clone(), state, context(4))
    assert torch.equal(mixed, start)  # nobody moved, nothing is lost
    mixed, state = channel.weights(compressor, start + rows_of(4, 50), state, context(4, 1))
    assert all(torch.equal(mixed[0], row) for row in mixed)
    assert torch.equal(state["reference"], mixed)
    assert 0 < (mixed[0] - start[0]).count_nonzero() <= 4 * 2  # per slice of 13 two places


def test_what_was_held_back_stays_in_the_workers_own_weights_where_asked() -> None:
    cluster = VirtualCluster(4)
    channel = AllReduce().bind(cluster, cluster.world, 0)
    compressor, start = Strategy.parse("topk(0.1)").compression, rows_of(1, 52).expand(4, -1).contiguous()
    state = channel.init_state(compressor, start)
    moved = start + rows_of(4, 52)
    mixed, state = channel.weights(compressor, moved, state, replace(context(4), residual_stays=True))
    reference = state["reference"]
    assert all(torch.equal(reference[0], row) for row in reference)
    rest = mixed - reference
    assert (rest.count_nonzero(1) >= 52 - 4 * 2).all()  # of each row at most two places per slice were sent
    # Nothing is lost: what the owners of slices hold back of the mean is all that the mean of the weights lacks.
    owners = state["inner"]["error"].T.flatten()
    torch.testing.assert_close(mixed.mean(0) + owners, moved.mean(0))


@pytest.mark.parametrize(
    "code, residual_stays",
    [
        *product(["topk(0.1)", "threshold(keep=0.2)", "sign", "topk(0.2) | qsgd(8)", "topk(3/12) | bins(2)"], [False, True]),
        ("lowrank(2)", False),
    ],
)
def test_compressed_weights_come_together_at_their_mean(code: str, residual_stays: bool) -> None:
    cluster = VirtualCluster(4)
    channel = AllReduce().bind(cluster, cluster.world, 0)
    compressor, rows = Strategy.parse(code).compression, rows_of(4, 64)
    state = channel.init_state(compressor, torch.zeros(4, 64))
    mean = rows.mean(0)
    before = (rows - mean).norm()
    for exchange in range(80):
        where = replace(context(4, exchange), residual_stays=residual_stays)
        rows, state = channel.weights(compressor, rows, state, where)
    assert (rows - mean).norm() < 0.05 * before


FACTS = ("uniform", "one_mean", "peer_to_peer", "partner_rule", "asynchronous_only", "pairs_workers", "has_servers")
FACTS += ("sums_on_servers", "has_server_settings", "lr_factor", "server_optimizer", "fetch_dtype")
NO_SERVER = (False, False, False, 1.0, None, "fp32")
MEANING = {
    "allreduce": (True, True, False, "", False, False, *NO_SERVER),
    "gossip": (False, False, True, "rotating", False, True, *NO_SERVER),
    "gossip(exponential)": (False, False, True, "exponential", False, False, *NO_SERVER),
    "gossip(matrix=[[0.5, 0.5], [0.5, 0.5]])": (False, False, True, "rotating", False, False, *NO_SERVER),
    "async + gossip(pushsum)": (False, False, True, "pushsum", True, True, *NO_SERVER),
    "hierarchical(size=2)": (True, False, False, "", False, False, *NO_SERVER),
    "hierarchical(size=2, every=2)": (False, False, False, "", False, False, *NO_SERVER),
    "hierarchical(allreduce, gossip, size=2)": (False, False, False, "", False, False, *NO_SERVER),
    "hierarchical(gossip, allreduce, size=2)": (False, False, False, "", False, False, *NO_SERVER),
    "server": (True, False, False, "", False, False, True, False, False, 1.0, None, "fp32"),
    "server(3)": (True, False, False, "", False, False, True, False, False, 1.0, None, "fp32"),
    "server(optimizer=adagrad)": (True, False, False, "", False, False, True, False, True, 1.0, "adagrad", "fp32"),
    "server(lr=10)": (True, False, False, "", False, False, True, False, True, 10, None, "fp32"),
    "server(fetch=bf16)": (True, False, False, "", False, False, True, False, True, 1.0, None, "bf16"),
    "server(2, role=sum)": (True, False, False, "", False, False, False, True, False, 1.0, None, "fp32"),
}
"""Who hears what from whom, where servers are, and what they do."""


@pytest.mark.parametrize("text", MEANING)
def test_topologies_are_what_they_are_called(text: str) -> None:
    topology = Strategy.parse(text).topology
    assert dict(zip(FACTS, (getattr(topology, name) for name in FACTS), strict=True)) == dict(
        zip(FACTS, MEANING[text], strict=True)
    )
    assert topology.num_shards(7) == (topology.shards if isinstance(topology, Server) else 7)


@pytest.mark.parametrize(
    "text, words",
    [
        ("server(shards=0)", "at least one shard"),
        ("server(shards=True)", "at least one shard"),
        ("server(optimizer=adagrat)", "did you mean 'adagrad'?"),
        ("server(optimizer=qwxz)", "unknown. Use one of sgd, adam"),
        ("server(role=summ)", "did you mean 'sum'?"),
        ("server(fetch=bf61)", "did you mean 'bf16'?"),
        ("server(lr=0)", "above 0"),
        ("server(lr=True)", "above 0"),
        ("server(role=sum, optimizer=adam)", "leave optimizer=, lr=, fetch= out"),
        ("server(role=sum, lr=2)", "leave optimizer=, lr=, fetch= out"),
        ("server(role=sum, fetch=bf16)", "leave optimizer=, lr=, fetch= out"),
        ("server(role=sum) + topk(0.1)", "cannot sum compressed rows"),
        ("gossip(rnig)", "did you mean 'ring'?"),
        ("gossip(qwxz)", "unknown kind. Use one of"),
        ("gossip(step=0)", "(0, 1]"),
        ("gossip(step=1.5)", "(0, 1]"),
        ("gossip(step=True)", "(0, 1]"),
        ("gossip(ring, matrix=[[1]])", "either a kind or a matrix"),
        ("gossip(matrix=[[0.5, 0.5]])", "must be square"),
        ("gossip(matrix=[[1.5, -0.5], [-0.5, 1.5]])", "without negative entries"),
        ("gossip(matrix=[[0.5000006, 0.5000006], [0.4999994, 0.4999994]])", "add up to 1"),  # columns do, rows do not
        ("gossip(matrix=[[0.5000006, 0.4999994], [0.5000006, 0.4999994]])", "add up to 1"),
        ("gossip(matrix=[[0.3, 0.7], [0.3, 0.7]])", "add up to 1"),
        ("gossip(matrix=[[0.3, 0.3], [0.7, 0.7]])", "add up to 1"),
        ("gossip(matrix=[[[1]], [[0.5, 0.5], [0.5, 0.5]]])", "one size"),
        ("hierarchical(size=0)", "at least 1"),
        ("hierarchical(every=0)", "at least 1"),
        ("hierarchical(server, allreduce)", "it must be allreduce or a gossip"),
    ],
)
def test_settings_of_topologies_that_make_no_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(HocketError) as caught:
        Strategy.parse(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "gossip(step=1)",
        "gossip(step=0.01)",
        "gossip(matrix=[[0.5000005, 0.5], [0.5, 0.5]])",
        "server(lr=0.001)",
        "hierarchical(size=1)",
    ],
)
def test_settings_at_the_edge_are_allowed(text: str) -> None:
    assert Strategy.parse(text).topology == Strategy.parse(str(Strategy.parse(text))).topology


@pytest.mark.parametrize("servers, workers, fits", [(3, 3, True), (4, 3, False), (1, 1, True)])
def test_at_most_one_summing_server_per_worker(servers: int, workers: int, fits: bool) -> None:
    cluster = VirtualCluster(workers)
    if fits:
        assert Server(servers, "sum").bind(cluster, cluster.world, 0).uniform
    else:
        with pytest.raises(HocketError, match=f"at most one per worker, {workers}"):
            Server(servers, "sum").bind(cluster, cluster.world, 0)
    with pytest.raises(HocketError, match="serves all workers at once"):
        Server(1).bind(cluster, cluster.world, 0)


# --- the order of sends and receives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [10, PIECE_BYTES])
def test_receives_are_posted_before_sends(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo announces a receive on the connection that carries the own message: behind it, both directions take turns."""
    posted: list[list[bool]] = []

    def carry_out(operations: list[Any]) -> list[Any]:
        posted.append([operation.op is point_to_point.dist.isend for operation in operations])
        return []

    operation = namedtuple("operation", "op tensor peer group tag")
    monkeypatch.setattr(point_to_point.dist, "P2POp", operation)
    monkeypatch.setattr(point_to_point.dist, "batch_isend_irecv", carry_out)
    pairs = PointToPoint(0, [0, 1, 2], [range(w, w + 1) for w in range(3)], "gloo", torch.device("cpu"))
    outgoing = [Outgoing(0, 0, target, slot) for slot, target in enumerate((1, 2))]
    incoming = [Incoming(source, 0, slot, -1) for slot, source in enumerate((2, 1))]
    pairs.route(None, Message((torch.zeros(1, values),)), outgoing, incoming)
    assert sum(map(len, posted)) == (4 if values == 10 else 4 * 4)
    assert all(sent == sorted(sent) for sent in posted)
