"""Laws of the cost model and of cluster files: each term alone does what its equation says, and bad files are refused by line."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import hocket
from hocket import ClusterSpec, HocketError, Strategy
from hocket.cluster import Subgroups, VirtualCluster
from hocket.cluster.clock import Clock
from hocket.cluster.layout import layout_of
from hocket.cluster.message import summed_bytes
from hocket.cluster.spec_file import PRESET_FOLDER, PRESETS, text_of
from hocket.drivers.links import LinkModel
from hocket.programs.collective import CollectiveProgram

M, B, A = 4_000_000.0, 1e6, 0.5
PLAIN = ClusterSpec(bandwidth=B, latency_s=A)


def ring(spec: ClusterSpec, workers: int, members: list[list[int]] | None = None, size: float = M) -> float:
    clock = Clock(spec, workers)
    clock.launch()
    clock.ring(size, Subgroups.world(workers) if members is None else Subgroups(torch.tensor(members)))
    return float(clock.net.max())


def gossip(spec: ClusterSpec, workers: int, size: float = M) -> torch.Tensor:
    clock = Clock(spec, workers)
    clock.launch()
    partners = Strategy.parse("gossip").topology.partners(workers, 0, 0).sources  # type: ignore[attr-defined]
    clock.neighbor_exchange(torch.full((workers,), size), partners, False)
    return clock.net


# --- the formulas of the literature, with no overheads ---------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 64, 4096])
def test_without_overheads_the_formulas_hold_exactly(n: int) -> None:
    assert ring(PLAIN, n, size=2 * (n - 1) / n * M) == pytest.approx(2 * (n - 1) * A + 2 * (n - 1) / n * M / B, rel=1e-12)
    if n > 2:
        assert gossip(PLAIN, n).tolist() == pytest.approx([2 * A + 2 * M / B] * n, rel=1e-12)
    clock = Clock(ClusterSpec(bandwidth=B), n)
    clock.launch()
    servers = n // 2
    clock.summed(2 * n * (n - 1) * M / (n * n + servers * n - 2 * servers), Subgroups.world(n))
    own, _ = summed_bytes(int(M), n, servers)
    assert float(clock.net[0]) == pytest.approx(own / B, rel=0.04 + 350 * 2 * n / own)  # without frames and headers


def test_a_server_is_the_bottleneck_of_its_workers() -> None:
    links = LinkModel(ClusterSpec(bandwidth=B), 9)
    assert max(links.send(0.0, worker, 8, int(M)) for worker in range(8)) == pytest.approx(8 * M / B)


# --- each term ---------------------------------------------------------------------------------------------------------------


def test_each_message_costs_what_the_file_says() -> None:
    dear = replace(PLAIN, message_s=0.1)
    assert ring(dear, 5) - ring(PLAIN, 5) == pytest.approx(8 * 0.1)
    assert (gossip(dear, 5) - gossip(PLAIN, 5)).tolist() == pytest.approx([0.2] * 5)
    sent = [LinkModel(spec, 2).send(0.0, 0, 1, 100) for spec in (dear, PLAIN)]
    assert sent[0] - sent[1] == pytest.approx(0.1)


@pytest.mark.parametrize("half", [0.0, 0.4, 1.0])
def test_half_duplex_links_carry_one_direction_at_a_time(half: float) -> None:
    spec = ClusterSpec(bandwidth=B, half_duplex=half)
    assert ring(spec, 4) == pytest.approx((1 + half) * M / B)
    assert gossip(spec, 5)[0] == pytest.approx((1 + half) * 2 * M / B)
    pairs = ClusterSpec(bandwidth=B, pairs_half_duplex=half)
    assert ring(pairs, 4) == pytest.approx(M / B)
    assert gossip(pairs, 5)[0] == pytest.approx((1 + half) * 2 * M / B)
    pieces = replace(pairs, pieces_half_duplex=0.0)
    assert gossip(pieces, 5)[0] == pytest.approx(2 * M / B)  # a large message goes in pieces
    assert gossip(pieces, 5, 1000.0)[0] == pytest.approx((1 + half) * 2 * 1000 / B)
    links = LinkModel(spec, 2)
    assert max(links.send(0.0, 0, 1, int(M)), links.send(0.0, 1, 0, int(M))) == pytest.approx((1 + half) * M / B)


def test_workers_of_a_host_share_its_links() -> None:
    own = ClusterSpec(bandwidth=B, host_size=4)
    shared, two = replace(own, shared_links=True), replace(own, shared_links=True, links=2)
    across = [[0, 4], [1, 5], [2, 6], [3, 7]]  # four rings leave each host at once
    assert [ring(s, 8, across) for s in (own, shared, two)] == pytest.approx([M / B, 4 * M / B, 2 * M / B])
    assert ring(shared, 8) == pytest.approx(M / B)  # of a ring in order one hop leaves each host
    assert [float(gossip(s, 16)[3]) for s in (own, shared)] == pytest.approx([M / B, 2 * M / B])  # to both neighbouring hosts
    for verb, sizes in (("all_gather", torch.full((8,), M)), ("all_to_all", torch.full((64,), M))):
        times = []
        for spec in (own, shared):
            clock = Clock(spec, 8)
            clock.launch()
            getattr(clock, verb)(sizes, Subgroups.world(8), False)
            times.append(float(clock.net[0]))
        assert times == pytest.approx([4 * M / B, 16 * M / B]), verb


def test_a_trunk_carries_what_leaves_its_switch() -> None:
    spec = ClusterSpec(bandwidth=B, latency_s=A, trunk_hosts=4, trunk_bandwidth=B, trunk_latency_s=1.0)
    assert ring(spec, 8, [[0, 1, 2, 3], [4, 5, 6, 7]]) == pytest.approx(6 * A + M / B)  # nothing leaves
    crossing = ring(spec, 8, [[0, 4], [1, 5], [2, 6], [3, 7]])
    assert crossing == pytest.approx(2 * (A + 1.0) + 4 * M / B)
    assert ring(replace(spec, trunk_bandwidth=4 * B), 8, [[0, 4], [1, 5], [2, 6], [3, 7]]) == pytest.approx(2 * (A + 1.0) + M / B)


def test_unequal_messages_are_counted_where_they_go() -> None:
    spec = ClusterSpec(bandwidth=B, host_size=2, host_bandwidth=B / 10, shared_links=True)
    sizes = torch.tensor([[0.0, 7, 1, 1], [7, 0, 1, 1], [2, 2, 0, 9], [2, 2, 9, 0]]) * B
    clock = Clock(spec, 4)
    clock.launch()
    clock.all_to_all(sizes.flatten(), Subgroups.world(4), False)
    assert clock.net.tolist() == pytest.approx([90.0] * 4)  # 9 inside the second host; between hosts 8 out and 4 in
    clock = Clock(replace(spec, host_bandwidth=1e12), 4)
    clock.launch()
    clock.all_to_all(sizes.flatten(), Subgroups.world(4), False)
    assert clock.net.tolist() == pytest.approx([8.0] * 4)


def test_coding_updating_and_loading_take_their_time() -> None:
    spec = ClusterSpec(step_s=1.0, slowdown=(1, 3), coding={"topk": (0.5, 1e-3)}, update_s=1e-3, load_s=0.25, exchange_s=0.125)
    clock = Clock(spec, 2)
    clock.compute(0)
    assert clock.now.tolist() == [1.25, 3.75]
    clock.launch()
    clock.code(["topk(0.01)", "topk"], 1000)
    assert clock.net.tolist() == [1.25 + 1.625, 3.75 + 3 * 1.625]
    clock.wait()
    clock.update(1000)
    assert clock.now.tolist() == [1.25 + 1.625 + 1, 3.75 + 3 * 1.625 + 3]


@pytest.mark.parametrize(
    "strategy, times, values",
    [
        ("bulk + topk(0.5)", 4, 20), ("local(2) + topk(0.5)", 2, 20), ("gossip + topk(0.5)", 4, 20), ("bulk", 0, 0),
        ("gossip + topk(0.5) + exchange=gradients", 4, 20), ("hierarchical(size=2) + topk(0.5)", 4, 10),
    ],
)  # fmt: skip
def test_every_coded_exchange_pays_for_its_code(strategy: str, times: int, values: int) -> None:
    cluster = VirtualCluster(4, spec=ClusterSpec(step_s=1.0))
    layout = layout_of(nn.Linear(4, 4).named_parameters())
    weights = [b.empty(4) for b in layout.buckets]
    program = CollectiveProgram(Strategy.parse(strategy), layout, cluster, weights)
    clock = cluster.clock
    assert clock is not None
    paid: list[float] = []
    clock.code = lambda methods, count: paid.append(count)  # type: ignore[method-assign, assignment]
    for step in range(4):
        clock.compute(step)
        for b, rows in enumerate([w.clone() for w in weights]):
            program.gradient_ready(b, rows)
        program.gradients_done()
        program.before_update(weights)
        program.after_update(weights)
    assert paid[:times] == [values] * times
    assert len(paid) - times in (0, 1)  # the next step's mix may be under way


def test_links_jitter_around_their_mean() -> None:
    spec = ClusterSpec(bandwidth=B, link_jitter=0.2)
    clock = Clock(spec, 2)
    times = []
    for _ in range(400):
        before = float(clock.net[0])
        clock.ring(M, Subgroups.world(2))
        times.append(float(clock.net[0]) - before)
    found = torch.tensor(times) / (M / B)
    assert float(found.mean()) == pytest.approx(1.0, abs=0.04)
    assert float(found.log().std()) == pytest.approx(0.2, abs=0.03)


def test_checkpoints_and_failures_make_runs_longer() -> None:
    assert ClusterSpec().pauses(1000) == 1.0
    assert ClusterSpec(checkpoint_every_s=100, checkpoint_s=10).pauses(8) == pytest.approx(1.1)
    spot = ClusterSpec(failure_every_s=1e5, restart_s=90, checkpoint_every_s=20, checkpoint_s=0.0)
    assert spot.pauses(100) == pytest.approx(1 / (1 - 100 * 100 / 1e5))
    assert spot.pauses(100, together=False) == pytest.approx(1 / (1 - 90 / 1e5))
    assert spot.pauses(10_000) == float("inf")


def test_a_failure_of_an_elastic_run_costs_a_pause_and_a_step() -> None:
    spot = ClusterSpec(failure_every_s=1e5, restart_s=90, checkpoint_every_s=2000, checkpoint_s=20, elastic_pause_s=3.0)
    assert spot.pauses(100, elastic_step_s=2.0) == pytest.approx(1.01 / (1 - (100 * 5 + 90) / 1e5))
    assert spot.pauses(100, elastic_step_s=2.0, replica=4) == pytest.approx(1.01 / (1 - (100 * 5 + 4 * 90) / 1e5))
    assert spot.pauses(100) == replace(spot, elastic_pause_s=None).pauses(100, elastic_step_s=2.0)  # it cannot be elastic
    free = replace(spot, elastic_pause_s=0.0, restart_s=0.0)
    assert free.pauses(10**6, elastic_step_s=0.0) == pytest.approx(1.01), "without any loss only checkpoints remain"
    assert replace(spot, failure_every_s=math.inf).pauses(10**6, elastic_step_s=2.0) == pytest.approx(1.01)
    assert free.describe()["elastic_pause_s"] == 0.0
    assert spot.pauses(20_000, elastic_step_s=2.0) == math.inf


def test_only_strategies_that_can_be_elastic_are_predicted_so() -> None:
    spec = ClusterSpec(step_s=0.1, failure_every_s=86400.0, restart_s=300.0, elastic_pause_s=1.0)
    for strategy, elastic in (("bulk", True), ("local(4) + gossip", True), ("bulk + server(2)", False), ("acco", False)):
        found, plain = (
            hocket.predict(None, cluster, [strategy], 64, parameters=1e6).rows[0].samples_per_s
            for cluster in (spec, replace(spec, elastic_pause_s=None))
        )
        assert (found > 1.2 * plain) == elastic, strategy


def test_a_cluster_refuses_more_workers_than_it_holds() -> None:
    with pytest.raises(HocketError, match="study-slow holds 210 workers, not 211; use at most 210"):
        VirtualCluster(211, spec=ClusterSpec.parse("study-slow"))


# --- files -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_and_read_again_as_they_are_written(name: str, tmp_path: Path) -> None:
    spec = ClusterSpec.parse(name)
    (tmp_path / f"{name}.toml").write_text(text_of(spec))
    again = ClusterSpec.parse(tmp_path / f"{name}.toml")
    assert text_of(again) == text_of(spec)
    Clock(spec, min(16, spec.workers or 16))


@pytest.mark.parametrize("name", PRESETS)
def test_each_figure_of_a_preset_has_a_source_or_is_said_to_be_assumed(name: str) -> None:
    content = tomllib.loads((PRESET_FOLDER / f"{name}.toml").read_text())
    sources = content.pop("sources")
    given = [f"{table}.{key}" for table, entries in content.items() for key in entries]
    assert [key for key in given if key not in sources and key.partition(".")[0] not in sources] == []
    assert [key for key in sources if key not in given and key not in content] == [], "sources of what is not there"
    checkable = ("assumed", "IEEE ", "arXiv:", "doi", ".com", "source study", "SIGCOMM")
    assert [text for text in sources.values() if not any(word in text for word in checkable)] == []


def test_a_written_file_keeps_every_field(tmp_path: Path) -> None:
    spec = ClusterSpec(
        "full", 2e9, 0.02, (1, 2.5), 0.1, 0.01, 10, 125e6, 1e-4, 4, 1e9, 1e-5, 5e-10, 2e-3, 1e-4, 16e9,
        {"topk": (1e-4, 2e-8), "topk(0.01) | qsgd(4)": (0.0, 3e-8)}, 2e-5, 0.5, 1.0, 0.25, 0.2, True, 2, 8, 1e8, 1e-3, 64, 1800, 20,
        2592000, 300, 2.5, "EUR", contention=0.5, link_contention=0.1, pairs_contention=0.05, servers_on_workers=True, fixed_s=1e-3,
        storage_bandwidth=1e9, storage_latency_s=1e-3, cache_bytes=1e10,
        alone_s=0.01, ready=((0.1, 0.5), (1.0, 0.9)), server_message_s=1e-4,
        server_byte_s=2.5e-10, elastic_pause_s=1.5, sources={"link": "measured", "link.latency": "assumed"},
    )  # fmt: skip
    (tmp_path / "full.toml").write_text(text_of(spec, {"link": "measured", "link.bandwidth": "of the slowest pair"}))
    again, usual = ClusterSpec.parse(tmp_path / "full.toml"), vars(ClusterSpec())
    assert text_of(again) == text_of(spec)
    assert [name for name in usual if vars(again)[name] == usual[name]] == []
    assert 'bandwidth = "1Gbit"  # of the slowest pair' in (tmp_path / "full.toml").read_text()


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "[link]\nlatency = '1ms'\nbandwith = '1Gbit'\n",
            r"bad.toml, line 3: \[link\] has no 'bandwith' — did you mean 'band",
        ),
        ("\n[links]\nlatency = '1ms'\n", "bad.toml, line 2: unknown table 'links' — did you mean 'link'"),
        ("[link]\nbandwidth = '0Gbit'\n", r"line 2: \[link\] bandwidth = '0Gbit': it must be above 0"),
        ("[link]\nbandwidth = 0\n", r"line 2: \[link\] bandwidth = 0: it must be above 0"),
        ("[host]\nbandwidth = '1Gbit'\n", r"line 1: \[host\] needs 'size', how many workers share a host"),
        ("[trunk]\noversubscription = 2\n", r"\[trunk\] needs 'hosts'"),
        ("[failures]\nevery = '1d'\nelastic = true\n", r"line 3: \[failures\] elastic = True: expected how long all workers pause"),
        ("[failures]\nevery = '1d'\nelastic = -1\n", r"elastic_pause_s = -1 must be at least 0"),
        ("[failures]\nrestart = '1min'\n", r"\[failures\] needs 'every'"),
        ("[link]\nduplex = 'both'\n", "line 2: .*expected full, half, or a number"),
        ("[link]\nduplex = 3\n", "half_duplex = 3 is a share"),
        ("[link]\nlatency = '5 parsec'\n", "line 2: .*expected a time"),
        ("[coding]\ntopk = ['1ms', '1ns', '1ns']\n", r"line 2: \[coding\] topk"),
        ("[compute]\nslowdown = [1, 0]\n", "all of them above 0"),
        ('[sources]\n"link.bandwith" = "assumed"\n', "line 2: .*there is no such table or key — did you mean 'link.bandwidth'"),
        ("[sources]\nlink = 3\n", "line 2: .*expected where the figure is from"),
        ("[link\n", "not a TOML file"),
    ],
)
def test_a_bad_file_is_refused_by_line_with_what_was_meant(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(HocketError, match=words) as found:
        ClusterSpec.parse(tmp_path / "bad.toml")
    assert "\n" not in str(found.value)


def test_an_oversubscribed_trunk_has_so_many_times_less_than_its_hosts(tmp_path: Path) -> None:
    text = "[link]\nbandwidth = '1Gbit'\ncount = 2\nshared = true\n[host]\nsize = 4\n[trunk]\nhosts = 8\noversubscription = 4\n"
    (tmp_path / "over.toml").write_text(text)
    assert ClusterSpec.parse(tmp_path / "over.toml").trunk_bandwidth == 125e6 * 2 * 8 / 4
