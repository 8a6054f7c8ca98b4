"""Gossip programs in the simulation: what they keep on perfect and on faulty networks, and after being saved."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from faults.gossip_world import LIVENESS_TIMEOUT_S, GossipWorld, PerfectNetwork
from hocket.drivers.simulation import Call, Simulation
from hocket.programs.base import Connect, Send
from hocket.programs.coordinator import COORDINATOR, Coordinator, CoordinatorClient
from hocket.programs.gossip.links import PeerConfig, Request
from hocket.programs.gossip.observer import PeerObserver
from hocket.programs.gossip.peer import GossipPeer
from hocket.programs.gossip.state import Mean, PeerState, weight_of
from hocket.transport.frame import Envelope, Kind

KINDS = ("rotating", "ring", "random", "pushsum")
TIMEOUT_S = LIVENESS_TIMEOUT_S
SEEDS = 100


class Faulty:
    """Drops, duplicates, delays (so that messages overtake each other) and cuts links for a while, from a seed.

    After ``heals`` it is perfect.
    """

    def __init__(self, seed: int, workers: int, heals: float, worst_cut_s: float = 3 * TIMEOUT_S) -> None:
        self.random, self.heals = random.Random(seed), heals
        self.drop, self.twice, self.slow = (self.random.choice([0.0, 0.05, 0.3]) for _ in range(3))
        self.cuts = []
        for _ in range(self.random.randrange(4)):
            begins, group = self.random.uniform(0, heals), self.random.sample(range(workers), self.random.randrange(1, workers))
            self.cuts.append((begins, begins + self.random.uniform(0, worst_cut_s), set(group), self.random.random() < 0.5))

    def arrivals(self, now: float, source: Any, target: Any, message: Envelope) -> list[float]:
        if now >= self.heals:
            return [now + 0.01]
        for begins, ends, group, both in self.cuts:
            inward = (source[1] in group) < (target[1] in group)
            if begins <= now < ends and (inward or (both and (source[1] in group) != (target[1] in group))):
                return []
        if self.random.random() < self.drop:
            return []
        copies = 2 if self.random.random() < self.twice else 1
        return [now + 0.01 + (self.random.uniform(0, 15) if self.random.random() < self.slow else 0.0) for _ in range(copies)]


# --- a perfect network ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("timers", [False, True])
def test_all_is_kept_at_every_moment_and_ends_in_one_mean(kind: str, workers: int, timers: bool) -> None:
    run = GossipWorld(kind, workers, 12, timers=timers)
    run.check = run.assert_kept
    run.go()
    run.assert_agreed()
    mean = run.peer(0).mean
    assert mean is not None
    assert mean.here == list(range(workers))
    assert mean.push_sum_weight == workers
    assert all(p.account.lost == 0 and p.state.lost_weight == 0 and not p.rejected for p in run.peers.values())
    assert sum(p.account.staleness[age] for p in run.peers.values() for age in p.account.staleness) == 12 * workers
    assert workers == 1 or sum(p.account.exchanges for p in run.peers.values()) > 0
    expected = sum(u.flatten() for own in run.workers.values() for u in own.updates[::2]) / workers + run.start[0].flatten()
    torch.testing.assert_close(mean.rows[0], expected, rtol=0, atol=1e-9)
    kept = [d.reply for p in run.peers.values() for d in p.decisions.values() if d.reply is not None and d.reply.tensors]
    assert not kept, "answers are let go when the caller has them"


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_is_plain_training(kind: str) -> None:
    run = GossipWorld(kind, 1, 20, dtype=torch.float32)
    weights = [row.clone() for row in run.start]
    run.go()
    own = run.workers[0]
    for bucket, weight in enumerate(weights):
        for update in own.updates[bucket::2]:
            weight += update
    assert all(torch.equal(a, b) for a, b in zip(own.rows, weights, strict=True))
    assert run.peer(0).account.bytes_sent == 0


def test_staleness_counts_what_came_from_others_between_two_steps() -> None:
    run = GossipWorld("rotating", 4, 10, timers=False, step_s=lambda worker: 1.0)
    run.go()
    for peer in run.peers.values():
        assert set(peer.account.staleness) == {0, 1}
        assert peer.account.staleness[0] == 1, "nobody has called before the first step"


@pytest.mark.parametrize("kind", ["rotating", "pushsum"])
def test_changes_by_the_user_are_kept(kind: str) -> None:
    """Also while an exchange is under way."""
    run = GossipWorld(kind, 4, 10)
    run.go(lambda: run.workers[0].steps == 4)
    before = run.sums()
    run.workers[0].rows[0] += 1.0
    run._carry(0, run.peer(0).look_around(run.simulation.now))
    run.go(lambda: not run.peer(0).busy)
    torch.testing.assert_close(run.sums()[0], before[0] + 1.0, rtol=0, atol=1e-9)
    run.go()
    run.assert_agreed()


# --- a faulty network ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rotating", "random", "pushsum"])
def test_on_a_faulty_network_nothing_counts_twice_and_nothing_hangs(kind: str) -> None:
    for seed in range(SEEDS):
        workers = 2 + seed % 4
        run = GossipWorld(kind, workers, 20, Faulty(seed, workers, heals=40.0), seed=seed, step_s=lambda worker: 1.0 + 0.3 * worker)
        chance = random.Random(seed)

        def check(run: GossipWorld = run, chance: random.Random = chance, workers: int = workers) -> None:
            run.assert_kept()
            if chance.random() < 0.1:  # as if this worker had been suspended until now
                run.peer(chance.randrange(workers))._late_until = run.simulation.now + 1.0

        run.check, run.check_every = check, 31
        run.go(lambda run=run: all(own.steps == 20 for own in run.workers.values()))  # type: ignore[misc]
        run.check = lambda: None
        run.go()
        run.assert_kept()
        if all(p.mean.here == list(range(workers)) for p in run.peers.values()):  # type: ignore[union-attr]
            run.assert_agreed()
        assert all(p.state.lost_weight == 0 for p in run.peers.values()), "nobody has died"


@pytest.mark.parametrize("kind", ["rotating", "pushsum"])
def test_on_a_lossy_network_all_agree_on_the_same_bits(kind: str) -> None:
    """Messages are lost, doubled and late also while the workers agree; no link is cut for long.

    One that answered too late need not be part of the mean, but it has the same.
    """
    for seed in range(SEEDS // 4):
        network = Faulty(seed, 4, heals=float("inf"))
        network.cuts, network.drop = [], min(network.drop, 0.1)
        run = GossipWorld(kind, 4, 6, network, seed=seed, step_s=lambda worker: 1.0 + 0.3 * worker)
        run.go()
        run.assert_kept()
        run.assert_agreed()


@pytest.mark.parametrize("kind", ["rotating", "pushsum"])
def test_a_crash_is_counted_and_a_replacement_goes_on(kind: str) -> None:
    for seed in range(SEEDS // 4):
        workers, chance = 4, random.Random(seed)
        run = GossipWorld(kind, workers, 20, Faulty(seed, workers, 30.0, TIMEOUT_S / 2), seed=seed, step_s=lambda worker: 1.0)
        when, victim = chance.uniform(1, 15), chance.randrange(workers)
        run.go(lambda run=run, when=when: run.simulation.now > when)  # type: ignore[misc]
        gone = run.crash(victim)
        halves = gone.exchanges_open
        arrived: set[int] = set()
        unneeded: list[float] = []  # counted as lost, though the dead worker had taken them

        if kind == "pushsum":
            for worker, peer in run.peers.items():
                _watch(worker, peer, gone, unneeded)

        def follow(
            run: GossipWorld = run, halves: list[Request] = halves, arrived: set[int] = arrived, victim: int = victim
        ) -> None:
            """Halves of the dead worker that were on their way may arrive yet."""
            unaware = [r for r in halves if run.peer(r.peer).peers[victim].incarnation == 0]  # numbers begin anew with the next
            arrived |= {r.peer for r in unaware if _took(run.peer(r.peer), victim, r.message.number)}

        follow()
        run.check = follow
        run.go(lambda run=run, when=when: run.simulation.now > when + 3)  # type: ignore[misc]
        run.replace(victim)
        run.go()
        run.assert_agreed()
        if kind == "rotating":
            assert all(run.peer(answerer).account.lost > 0 for answerer in arrived), "only one side has taken the mean"
        else:
            died = gone.state.push_sum_weight + sum(weight_of(r.message.tensors[-1]) for r in halves if r.peer not in arrived)
            lost = sum(p.state.lost_weight for p in run.peers.values()) - sum(unneeded)
            assert run.weight() + lost == pytest.approx(workers + 1 - died), "only what died is missing, and it is counted"


def _watch(worker: int, peer: GossipPeer, gone: GossipPeer, unneeded: list[float]) -> None:
    """Note the halves that a worker counts as lost though the dead worker had taken them."""
    lose = peer.exchanges.lost

    def lost(request: Request, taken: bool) -> None:
        if _took(gone, worker, request.message.number):
            unneeded.append(weight_of(request.message.tensors[-1]))
        lose(request, taken)

    peer.exchanges.lost = lost  # type: ignore[method-assign]


def _took(receiver: GossipPeer | None, sender: int, number: int) -> bool:
    decision = None if receiver is None else receiver.decisions.get(sender)
    return decision is not None and decision.taken and decision.number == number


def test_a_worker_that_dies_for_good_is_left_out() -> None:
    for kind in ("rotating", "pushsum"):
        run = GossipWorld(kind, 4, 10)
        run.go(lambda run=run: run.workers[1].steps == 3)  # type: ignore[misc]
        run.crash(1)
        run.go()
        run.assert_agreed()
        assert run.peer(0).mean.here == [0, 2, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["rotating", "pushsum"])
def test_who_leaves_says_what_it_took(kind: str) -> None:
    """What others had under way to it is theirs again, or was taken; nothing is lost, and they go on."""
    for seed in range(10):
        run = GossipWorld(kind, 4, 20, seed=seed, step_s=lambda worker: 0.05 * (1 + worker))
        run.go(lambda run=run, seed=seed: run.events == 40 + 7 * seed)  # type: ignore[misc]
        leaver = run.peer(1)
        run.workers[1].state = "dead"
        if not leaver.busy:
            run._carry(1, leaver.drain(run.simulation.now))
        run.go(lambda leaver=leaver: not leaver.busy)  # type: ignore[misc]
        run._carry(1, leaver.leave(run.simulation.now))
        run.assert_kept()
        run.go()
        run.assert_kept()
        run.assert_agreed()
        assert run.peer(0).mean.here == [0, 2, 3]  # type: ignore[union-attr]
        assert all(p.state.lost_weight == 0 for p in run.peers.values())


@pytest.mark.parametrize("kind", ["rotating", "pushsum"])
def test_an_observer_sees_the_mean(kind: str) -> None:
    run = GossipWorld(kind, 3, 8)
    observer = PeerObserver(3, PeerState(run.start), TIMEOUT_S)
    for node in run.simulation.nodes.values():
        node.routes = {**node.routes, -1: ("observer", 9)}
    run.simulation.add(("observer", 9), observer, b"o", {w: ("worker", w) for w in range(3)})
    idle = run.simulation.on_idle
    run.simulation.on_idle = lambda key: None if key[0] == "observer" else idle(key)  # type: ignore[index]
    run.simulation.carry_out(("observer", 9), observer.start(0.0))
    run.go(lambda: run.workers[0].state == "done")
    run.simulation.carry_out(("observer", 9), observer.look(run.simulation.now))
    run.go(lambda: not observer.busy)
    assert observer.looked is not None
    assert observer.looked.here == [0, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(observer.looked.rows, run.peer(0).mean.rows, strict=True))  # type: ignore[union-attr]


def test_a_worker_that_was_suspended_refuses_what_lay_there() -> None:
    run = GossipWorld("rotating", 2, 30, step_s=lambda worker: 1.0 if worker == 0 else 100.0)
    run.go(lambda: run.simulation.now > 2.0)
    run.simulation.nodes["worker", 1].timers.clear()  # its timers do not fire: it is suspended
    run.go(lambda: run.simulation.now > 2.0 + TIMEOUT_S)
    assert run.peer(1).rejected["late"] > 0
    run.assert_kept()


# --- saved and loaded ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rotating", "random", "pushsum"])
def test_saved_at_any_moment_it_goes_on_as_if_never_stopped(kind: str) -> None:
    busy = 0
    for seed in range(SEEDS // 4):
        chance = random.Random(seed)
        plain, saved = (
            GossipWorld(
                kind, 4, 12, Faulty(seed, 4, 30.0), seed=seed, dtype=torch.float32, step_s=lambda worker: 0.5 + 0.2 * worker
            )
            for _ in range(2)
        )

        def trained(run: GossipWorld) -> bool:
            return all(own.steps == 12 for own in run.workers.values())

        def save_some(run: GossipWorld = saved, chance: random.Random = chance) -> None:
            nonlocal busy
            worker = chance.randrange(4)
            old = run.peer(worker)
            if chance.random() < 0.1 and run.workers[worker].state in ("computed", "before"):
                busy += old.busy
                new = GossipPeer(old.config)
                new.load_state_dict(old.state_dict())
                new.rows = run.workers[worker].rows
                run.simulation.nodes["worker", worker].program = new

        saved.check = save_some
        for run in (plain, saved):
            run.go(lambda run=run: trained(run))  # type: ignore[misc]
            run.check = lambda: None
            run.go()
        for worker in range(4):
            one, other = plain.peer(worker), saved.peer(worker)
            assert all(torch.equal(a, b) for a, b in zip(one.state.x, other.state.x, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(plain.workers[worker].rows, saved.workers[worker].rows, strict=True))
            assert one.state.push_sum_weight == other.state.push_sum_weight
            assert vars(one.account) == vars(other.account)
    assert busy > 0 or kind == "pushsum", "some were saved while they waited"


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_of_another_run_goes_on_from_its_strategy_state(kind: str) -> None:
    config = PeerConfig(0, 4, kind, greets=False)

    def begun(weights: torch.Tensor) -> GossipPeer:
        peer = GossipPeer(config)
        peer.start([weights.clone().view(1, -1)], 0.0)
        return peer

    old = begun(torch.arange(4.0))
    for step in range(3):
        old.before_update(step + 0.1)
        if old.busy:
            break  # a caller waits for its partner
        old.rows[0].mul_(1.5)
        old.after_update(None, step + 0.2)
    new = begun(old.rows[0])
    new.resume(old.strategy_state(), 1.0)
    assert new.strategy_state() == old.strategy_state()
    assert (new.step, new.exchanges.turn) == (old.step, old.exchanges.turn)
    assert new.step > 0
    assert new.exchanges.turn > 0
    assert (new.state.push_sum_weight < 1) == (kind == "pushsum")
    assert torch.equal(new.rows[0], old.rows[0])
    assert torch.equal(new.state.x[0], old.state.x[0])


# --- the coordinator -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_every_mini_batch_is_dispatched_once_whatever_is_lost(seed: int) -> None:
    workers, total = 3, 25
    sim = Simulation(Faulty(seed, workers, heals=1e9, worst_cut_s=3.0) if seed else PerfectNetwork(), timers=seed > 0)
    coordinator = Coordinator(workers, total)
    sim.add(("coordinator", 0), coordinator, b"c", {})
    sim.carry_out(("coordinator", 0), coordinator.start(0.0))
    done: list[int] = []
    phases = dict.fromkeys(range(workers), "joining")
    mean = Mean([torch.ones(2)], None, list(range(workers)), 3.0)

    def idle(key: Any) -> None:
        if key[0] != "worker":
            return
        client, worker = sim.nodes[key].program, key[1]
        assert isinstance(client, CoordinatorClient)
        if client.busy or phases[worker] == "done":
            return
        if phases[worker] == "delivering":
            phases[worker] = "done"
        elif phases[worker] == "joining":
            phases[worker] = "taking"
            sim.carry_out(key, client.take_batch(sim.now))
            idle(key)
        elif phases[worker] == "taking":
            number, effects = client.next_batch(sim.now)
            sim.carry_out(key, effects)
            if number is None:
                phases[worker] = "delivering"
                sim.carry_out(key, client.deliver(mean, sim.now))
                return
            phases[worker] = "computing"
            done.append(number)
            sim.put(sim.now + 0.1 * (worker + 1), Call("computed", key))

    def computed(call: Call) -> None:
        client = sim.nodes[call.node].program
        assert isinstance(client, CoordinatorClient)
        phases[call.node[1]] = "taking"  # type: ignore[index]
        sim.carry_out(call.node, client.take_batch(sim.now))
        idle(call.node)

    sim.on_idle, sim.on_call = idle, computed
    for worker in range(workers):
        sim.add(("worker", worker), CoordinatorClient(worker), b"w%d" % worker, {COORDINATOR: ("coordinator", 0)})
        client = sim.nodes["worker", worker].program
        assert isinstance(client, CoordinatorClient)
        sim.carry_out(("worker", worker), client.join(f"tcp://127.0.0.1:{worker + 1}", 0.0))
    while any(phase != "done" for phase in phases.values()):
        assert sim.step()
    assert sorted(done) == list(range(total))
    assert coordinator.dispatcher.counted == total
    assert sorted(coordinator.means) == list(range(workers))
    assert client.worker_addresses == [f"tcp://127.0.0.1:{w + 1}" for w in range(workers)]
    assert set(coordinator.figures) == {"0", "1", "2"}
    assert not coordinator.rejected


def test_the_coordinator_gives_a_dead_workers_mini_batches_to_others() -> None:
    coordinator = Coordinator(2, 3)
    coordinator.start(0.0)

    def ask(worker: int, kind: Kind, number: int, incarnation: int = 0, **metadata: Any) -> list[Any]:
        metadata = {"incarnation": incarnation, "done": [], "ledger": {}, **metadata}
        return coordinator.message(b"w%d" % worker, Envelope(kind, worker, number=number, metadata=metadata), 1.0)

    ask(0, Kind.HELLO, 1, address="tcp://127.0.0.1:1")
    assert len(ask(1, Kind.HELLO, 1, address="tcp://127.0.0.1:2")) == 2
    assert ask(1, Kind.FETCH, 2)[0].message.metadata["batch_ids"] == [0]
    assert ask(1, Kind.FETCH, 2)[0].message.metadata["batch_ids"] == [0], "the same request gets the same answer"
    coordinator.worker_lost(1, 2.0)
    assert coordinator.worker_addresses == ["tcp://127.0.0.1:1", None]
    assert ask(0, Kind.FETCH, 2)[0].message.metadata["batch_ids"] == [0]
    ask(1, Kind.HELLO, 1, 1, address="tcp://127.0.0.1:3")
    assert coordinator.worker_addresses == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:3"]
    assert ask(1, Kind.FETCH, 9)[0].message.metadata["reason"] == "outdated"
    assert ask(1, Kind.FETCH, 2, 1)[0].message.metadata["batch_ids"] == [1]
    assert coordinator.lost == 1


def test_an_observer_connects_anew_only_to_workers_that_have_moved() -> None:
    observer = PeerObserver(3, PeerState([torch.zeros(2)]), TIMEOUT_S)
    observer.start(0.0)

    def moved(*addresses: str | None) -> list[tuple[int, str | None]]:
        return [(e.peer, e.address) for e in observer.move(addresses, 1.0) if isinstance(e, Connect)]

    assert moved("a", "b", "c") == [(0, "a"), (1, "b"), (2, "c")]
    assert moved("a", "b", "c") == []
    assert moved("a", None, "d") == [(1, None), (2, "d")]
    assert [peer.left for peer in observer.peers.values()] == [False, True, False]
    assert moved("a", None, "d") == []
    assert moved("a", "b", "d") == [(1, "b")]
    assert not any(peer.left for peer in observer.peers.values())


def test_a_replacement_begins_at_the_given_weights_with_a_push_sum_weight_of_one() -> None:
    state = PeerState([torch.ones(3)])
    state.push_sum_weight, state.joined = 0.25, False
    before = state.version
    state.begin_at([torch.arange(3.0)])
    assert torch.equal(state.look()[0], torch.arange(3.0))
    assert (state.push_sum_weight, state.joined) == (1.0, True)
    assert state.version > before


def test_goodbye_is_said_to_those_who_are_still_there() -> None:
    peer = GossipPeer(PeerConfig(0, 4, greets=False))
    peer.start([torch.ones(1, 3)], 0.0, None)
    peer.peers[2].left = True
    told = [e.to for e in peer.leave(1.0) if isinstance(e, Send) and e.message.kind == Kind.GOODBYE]
    assert told == [1, 3]
