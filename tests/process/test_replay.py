"""The law for asynchronous runs: a recorded run of real processes replays to the same bits, without sockets and clocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket import Sandblaster
from hocket.drivers.record import digest, read_record
from hocket.drivers.replay import ReplayLink, ReplayNode, describe_recording, main, replay
from hocket.errors import HocketError
from hocket.programs.base import Effects
from hocket.programs.gossip.peer import GossipPeer
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.worker import ServerWorker
from hocket.sandblaster.replay import replay_nodes
from hocket.strategy import Strategy
from process.launch import Hocket, Nursery, eventually
from process.replayed import BATCHES, WORKERS, config_of, peer_config, shard_state, train, train_peer, worker_state

pytestmark = pytest.mark.process
LIMIT_S = 60.0


def _again(program: Any, loop: Callable[[Any], None]) -> Callable[[ReplayLink], None]:
    """A worker's own loop with its program on recorded events."""

    def work(link: ReplayLink) -> None:
        link.program = program
        loop(link)

    return work


def _start(server: ShardServer, event: dict[str, Any]) -> Effects:
    return server.start(event["now"])


@pytest.mark.parametrize(
    "text",
    [
        "async + server(2)",
        "async + server(2) + topk(0.2) | qsgd(4)",
        "async(overlap=True) + server + sign",
        "ssp(1) + server(2)",
        "ssp(2) + server + qsgd(4)",
        "downpour(2, 3) + server(2)",
        "downpour(2, 2) + server + topk(0.1)",
        "asyncdiloco(2) + server(2) + sign",
        "stale(2) + server(2)",
        "aedit(0.01) + server(2)",
    ],
)
def test_a_recorded_run_of_real_processes_replays_to_the_same_bits(text: str, nursery: Nursery, tmp_path: Path) -> None:
    count = Strategy.parse(text).topology.num_shards(WORKERS)
    shards = [
        nursery.start("process.replayed:shard", 1, tmp_path / f"s{place}", place=place, record=str(tmp_path / f"shard-{place}"))
        for place in range(count)
    ]
    files = [group.folder / "address" for group in shards]
    assert eventually(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files), LIMIT_S)
    addresses = [json.loads(file.read_text()) for file in files]
    groups = [
        nursery.start(
            "process.replayed:worker",
            1,
            tmp_path / f"w{w}",
            text=text,
            number=w,
            addresses=addresses,
            record=f"{tmp_path}/worker-{w}",
        )
        for w in range(WORKERS)
    ]
    for group in (*groups, *shards):
        assert group.wait(LIMIT_S) == [0], group.said()

    servers, workers = [ShardServer(place) for place in range(count)], [ServerWorker(config_of(text, w)) for w in range(WORKERS)]
    routes = {place: ("shard", place) for place in range(count)}
    nodes: dict[Any, ReplayNode] = {
        ("shard", s): ReplayNode(server, read_record(tmp_path / f"shard-{s}"), call=_start) for s, server in enumerate(servers)
    }
    for w, worker in enumerate(workers):
        nodes["worker", w] = ReplayNode(worker, read_record(tmp_path / f"worker-{w}"), routes, work=_again(worker, train))
    assert replay(nodes) == {key: [] for key in nodes}
    for s, server in enumerate(servers):
        assert _same(torch.load(tmp_path / f"shard-{s}.pt", weights_only=False), shard_state(server))
        assert server.progress == BATCHES
    for w, worker in enumerate(workers):
        assert _same(torch.load(tmp_path / f"worker-{w}.pt", weights_only=False), worker_state(worker))
        assert worker.account.bytes_sent > 0


@pytest.mark.parametrize(("kind", "world"), [("rotating", 2), ("random", 4), ("pushsum", 3)])
def test_a_recorded_run_of_real_gossip_workers_replays_to_the_same_bits(
    kind: str, world: int, nursery: Nursery, tmp_path: Path
) -> None:
    group = nursery.start("process.replayed:peer", world, tmp_path / "w", kind=kind, world=world, record=f"{tmp_path}/worker")
    assert group.wait(LIMIT_S) == [0] * world, group.said()
    peers, nodes = [], dict[Any, ReplayNode]()
    for w in range(world):
        events = read_record(tmp_path / f"worker-{w}")
        config = replace(peer_config(kind, w, world), address=events[0]["address"])
        peers.append(peer := GossipPeer(config))
        routes = {other: ("worker", other) for other in range(world) if other != w}
        nodes["worker", w] = ReplayNode(peer, events, routes, work=_again(peer, train_peer))
    assert replay(nodes) == {key: [] for key in nodes}
    for w, peer in enumerate(peers):
        found = torch.load(tmp_path / f"worker-{w}.pt", weights_only=False)
        assert digest(found) == digest(peer.end_state())
        assert torch.equal(found["rows"][0], peers[0].rows[0]), "all end with the mean"
        assert peer.state.heard > 0


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _sandblaster(exact: bool) -> Sandblaster:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator)
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).long()
    options: dict[str, Any] = {"workers": 3, "shards": 2, "max_iter": 8, "exact": exact, "portions_per_worker": 4}
    return Sandblaster(net, nn.functional.cross_entropy, (x, y), (x, y), **options)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))


@pytest.mark.parametrize("exact", [False, True])
def test_a_recorded_run_of_sandblaster_on_processes_replays_to_the_same_bits(exact: bool, tmp_path: Path) -> None:
    job = _sandblaster(exact)
    run = job.launch(record=tmp_path)
    nodes = replay_nodes(tmp_path, job)
    assert replay(nodes) == {key: [] for key in nodes}
    programs: list[Any] = [nodes["shard", i].program for i in range(job.shards)]
    end = torch.cat([program.shard.vectors["x"] for program in programs])
    assert torch.equal(end, torch.cat([p.detach().flatten() for p in run.model.parameters()]))
    coordinator: Any = nodes["coordinator", 0].program
    names = ("loss", "seconds", "bytes_coordinator", "bytes_shards", "issued", "duplicated", "wasted")
    assert [[row[name] for name in names] for row in coordinator.metrics] == [[row[name] for name in names] for row in run.metrics]


@pytest.mark.parametrize(
    "options",
    [
        ["--strategy", "async + server(2) + topk(0.1)"],
        ["--strategy", "ssp(1) + server"],
        ["--strategy", "async + gossip(pushsum)"],
        ["--optimizer", "sandblaster"],
    ],
    ids=lambda options: options[1],
)
def test_a_run_of_the_command_replays_to_the_same_bits(
    options: list[str], hocket: Hocket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    length = ["--epochs", "2"] if "--optimizer" in options else ["--epochs", "1", "--max-steps", "12"]
    done = hocket("train", *options, *length, "--workers", "2", "--device", "cpu", "--record", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    threads = torch.get_num_threads()
    try:
        assert main([str(tmp_path / "run")]) == 0
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    same = {line.partition(":")[0] for line in lines if line.endswith("the same bits")}
    # A worker of Sandblaster that came when the others had done everything is not told of the end.
    assert same & {"worker 0", "worker 1"} if "--optimizer" in options else same >= {"worker 0", "worker 1"}, lines
    assert not any("other bits" in line for line in lines)


def test_a_recording_that_was_changed_is_found_out(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.replayed:peer", 2, tmp_path / "w", kind="rotating", world=2, record=f"{tmp_path}/worker")
    assert group.wait(LIMIT_S) == [0, 0], group.said()

    def again(events: list[list[dict[str, Any]]]) -> dict[Any, list[str]]:
        peers = [GossipPeer(replace(peer_config("rotating", w, 2), address=events[w][0]["address"])) for w in range(2)]
        return replay(
            {
                ("worker", w): ReplayNode(peer, events[w], {1 - w: ("worker", 1 - w)}, work=_again(peer, train_peer))
                for w, peer in enumerate(peers)
            }
        )

    events = [read_record(tmp_path / f"worker-{w}") for w in range(2)]
    assert again([events[0], events[1][:-1]]) == {("worker", 0): []}, "worker 1 has no end to compare with"
    next(event for event in events[1] if event["event"] == "batch")["id"] += 1
    assert "rows" in again(events)["worker", 0]
    pushes = [event for event in events[1] if event.get("kind") == "PUSH"]
    events[1].remove(pushes[3])
    with pytest.raises(HocketError, match="does not replay"):
        again(events)


def test_what_is_not_a_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "holds no recording" in capsys.readouterr().err
    describe_recording(tmp_path, "train", settings={"workers": 1}, shards=1)
    with pytest.raises(HocketError, match="already"):
        describe_recording(tmp_path, "train")
    assert main([str(tmp_path)]) == 2
    assert "no recording of shard 0" in capsys.readouterr().err
    (tmp_path / "shard-0.jsonl").write_text('{"event": "start"}\n' * 2)
    assert main([str(tmp_path)]) == 2
    assert "without restarts" in capsys.readouterr().err
