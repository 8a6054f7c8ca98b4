"""Laws of the shards, without sockets: who waits for whom, what counts once, what is refused, what is kept."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hocket.cluster.layout import Layout, layout_of
from hocket.cluster.virtual import VirtualCluster
from hocket.drivers.server_runtime import Observer, ServerRuntime
from hocket.drivers.snapshots import Snapshots
from hocket.errors import HocketError
from hocket.files import sealed, state_bytes, unsealed
from hocket.programs.account import Account, entry_of
from hocket.programs.base import Effects, Say, Send, SetTimer, Snapshot
from hocket.programs.server.members import BatchDispatcher
from hocket.programs.server.observer import ShardObserver
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.push_encoder import PushEncoder, Slices
from hocket.programs.server.shard import ParameterShard, Shard
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.wire import (
    OBSERVER,
    as_messages,
    as_tensors,
    gradients_of,
    job_config,
    link_bytes,
    read_figures,
    slices_of,
    write_figures,
)
from hocket.strategy import Strategy
from hocket.sync import SSP, Async, Bulk, Sync
from hocket.train import throttle
from hocket.train.checks import layout_for
from hocket.train.replicas import LiveReplica
from hocket.train.runtimes.collective import CollectiveRuntime
from hocket.transport import Envelope, Kind, Listener
from shard_servers import JOB, ShardServers

SGD = OptimizerSpec("sgd", ({"lr": 0.1, "momentum": 0.9},))
LRS = [0.1]


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def shard(sync: Sync, workers: int) -> ParameterShard:
    return ParameterShard([torch.linspace(-1, 1, 7), torch.ones(3)], [0, 0], SGD, sync, range(workers))


def gradient(worker: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return [torch.randn(7, generator=generator), torch.randn(3, generator=generator)]


def weights(of: Shard) -> Tensor:
    return torch.cat([w.clone() for w in of.weights])


# --- pushes ------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=25))
def test_a_push_that_comes_again_is_not_taken_again(repeats: list[tuple[int, int]]) -> None:
    once, often = shard(Async(), 3), shard(Async(), 3)
    for step in (1, 2, 3):
        for worker in range(3):
            assert once.push(worker, step, gradient(worker, step), LRS)
            assert often.push(worker, step, gradient(worker, step), LRS)
            for w, s in repeats:
                if s <= often.done[w]:
                    assert not often.push(w, s, gradient(w, s), LRS)
    assert torch.equal(weights(once), weights(often))
    assert once.staleness == often.staleness


@given(st.permutations(range(4)), st.integers(1, 5))
def test_a_round_is_one_step_with_the_mean_in_worker_order(order: list[int], rounds: int) -> None:
    server = shard(Bulk(), 4)
    parameters = [nn.Parameter(w.clone()) for w in server.weights]
    plain = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for step in range(1, rounds + 1):
        for k, worker in enumerate(order):
            assert not server.ready(worker, step)
            server.push(worker, step, gradient(worker, step), LRS)
            assert server.ready(worker, step) == (k == 3)
        for b, p in enumerate(parameters):
            total = gradient(0, step)[b].clone()
            for worker in (1, 2, 3):
                total += gradient(worker, step)[b]
            p.grad = total / 4
        plain.step()
    assert torch.equal(weights(server), torch.cat([p.data for p in parameters]))
    assert server.version == rounds


@given(st.integers(0, 4), st.randoms(use_true_random=False))
def test_nobody_is_further_ahead_than_the_lead(lead: int, random: Any) -> None:
    server, steps, waits = shard(SSP(lead), 3), [0, 0, 0], [False] * 3
    for _ in range(120):
        worker = random.randrange(3)
        if waits[worker] and not server.ready(worker, steps[worker]):
            continue
        server.give(worker)
        steps[worker] += 1
        server.push(worker, steps[worker], gradient(worker, steps[worker]), LRS)
        waits[worker] = True
        assert max(steps) - min(steps) <= lead + 1
    assert any(server.ready(w, steps[w]) for w in range(3)), "somebody can always go on"


@pytest.mark.parametrize("sync", [Bulk(), SSP(0), SSP(2)])
def test_who_leaves_is_not_waited_for(sync: Sync) -> None:
    server = shard(sync, 3)
    for step in range(1, 4):
        for worker in (0, 1):
            server.push(worker, step, gradient(worker, step), LRS)
        if server.together:
            break
    assert not server.ready(0, server.done[0])
    assert not server.leave(2)
    assert server.ready(0, server.done[0])
    assert server.join(2) == server.done[0], "who comes back goes on with the others"
    assert server.ready(2, server.done[2])


def test_a_push_that_the_others_had_not_come_to_is_lost_with_its_worker() -> None:
    server, alone = shard(Bulk(), 2), shard(Bulk(), 1)
    server.push(1, 1, gradient(1, 1), LRS)
    assert server.leave(1)
    server.push(0, 1, gradient(0, 1), LRS)
    alone.push(0, 1, gradient(0, 1), LRS)
    assert torch.equal(weights(server), weights(alone))


def test_a_newcomer_that_stands_a_step_ahead_holds_nobody_up() -> None:
    server = shard(Bulk(), 3)
    server.leave(2)
    for worker in (0, 1):
        server.push(worker, 1, gradient(worker, 1), LRS)
    server.join(2, 2)  # other shards were a step further when it came
    server.push(0, 2, gradient(0, 2), LRS)
    server.push(1, 2, gradient(1, 2), LRS)
    assert server.ready(0, 2)
    assert server.version == 2
    server.push(2, 3, gradient(2, 3), LRS)
    server.push(0, 3, gradient(0, 3), LRS)
    assert not server.ready(2, 3)
    server.push(1, 3, gradient(1, 3), LRS)
    assert server.ready(2, 3)
    assert server.version == 3


def test_a_push_from_before_a_restart_is_not_lost_when_its_worker_has_gone_on() -> None:
    server, alone = shard(Bulk(), 2), shard(Bulk(), 1)
    server.push(0, 1, gradient(0, 1), LRS)
    for worker in (0, 1):
        server.join(worker, 9)  # so far have they come meanwhile; the push of worker 1 is forgotten
    alone.push(0, 1, gradient(0, 1), LRS)
    assert server.version == 1
    assert torch.equal(weights(server), weights(alone))
    server.push(0, 10, gradient(0, 10), LRS)
    server.push(1, 10, gradient(1, 10), LRS)
    assert server.version == 2


def test_a_worker_that_has_gone_on_shows_that_its_push_was_in_a_step_of_all() -> None:
    """Whether the other worker has come by again or not."""
    server, alone = shard(Bulk(), 2), shard(Bulk(), 1)
    server.push(0, 1, gradient(0, 1), LRS)
    alone.push(0, 1, gradient(0, 1), LRS)
    assert server.version == 0
    server.join(0, 9)
    assert server.version == 1
    assert torch.equal(weights(server), weights(alone))


def test_a_push_from_before_a_restart_is_not_overwritten_by_the_next() -> None:
    server = shard(Bulk(), 2)
    server.push(0, 1, gradient(0, 1), LRS)
    server.push(0, 2, gradient(0, 2), LRS)  # worker 1's first push was answered and forgotten, or worker 0 would not be here
    assert server.version == 1
    server.join(1, 1)
    server.push(1, 2, gradient(1, 2), LRS)
    assert server.version == 2


@pytest.mark.parametrize("sync", [Bulk(), SSP(2), Async("adaptive")])
def test_a_shard_goes_on_from_its_state_as_if_it_had_never_stopped(sync: Sync, tmp_path: Path) -> None:
    whole = shard(sync, 2)

    def go(of: Shard, steps: range) -> None:
        for step in steps:
            for worker in (0, 1):
                of.push(worker, step, gradient(worker, step), LRS)
                of.give(worker)

    go(whole, range(1, 4))
    whole.push(0, 4, gradient(0, 4), LRS)
    Snapshots(tmp_path, 0).save({"shard": whole.state_dict()})
    saved = Snapshots(tmp_path, 0).load()
    assert saved is not None
    again = shard(sync, 2)
    again.load_state_dict(saved["shard"])
    for of in (whole, again):
        of.push(1, 4, gradient(1, 4), LRS)
        go(of, range(5, 8))
    assert torch.equal(weights(whole), weights(again))
    assert whole.staleness == again.staleness


# --- mini-batches ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 30), st.lists(st.tuples(st.sampled_from("dpg"), st.integers(0, 2), st.integers(1, 4)), max_size=60))
def test_every_mini_batch_is_done_once_or_held_or_there_to_be_dealt(total: int, moves: list[tuple[str, int, int]]) -> None:
    dispatcher = BatchDispatcher(total)
    held: dict[int, list[int]] = {0: [], 1: [], 2: []}
    done: list[int] = []
    for move, worker, count in moves:
        if move == "d":
            held[worker] += dispatcher.take(worker, count)
        elif move == "p":
            own, held[worker] = held[worker][:count], held[worker][count:]
            assert dispatcher.done(worker, own) == len(own)
            assert dispatcher.done(worker, own) == 0, "once"
            done += own
        else:
            assert dispatcher.give_back(worker) == len(held[worker])
            held[worker] = []
    rest = dispatcher.take(0, total + 1)
    assert sorted([*done, *rest, *(n for numbers in held.values() for n in numbers)]) == list(range(total))
    assert dispatcher.counted == len(done)
    assert dispatcher.empty


# --- what travels ------------------------------------------------------------------------------------------------------------


def layout() -> Layout:
    return layout_of(nn.Linear(9, 5).named_parameters())


def test_options_about_how_to_compute_stay_with_the_worker() -> None:
    model = nn.Linear(3, 2)
    plain = OptimizerSpec.of(torch.optim.Adam(model.parameters(), 0.1))
    for name in ("fused", "foreach", "differentiable"):
        assert OptimizerSpec.of(torch.optim.Adam(model.parameters(), 0.1, **{name: True})) == plain


def test_a_link_has_room_for_buffers() -> None:
    strategy = Strategy.parse("async + server")

    class Keeps(nn.Linear):
        def __init__(self, values: int) -> None:
            super().__init__(3, 2)
            self.register_buffer("kept", torch.zeros(values, dtype=torch.float64))
            self.register_buffer("counted", torch.zeros(7, dtype=torch.int64))

    def room(model: nn.Module) -> int:
        return link_bytes(strategy, layout_for(model, torch.optim.SGD(model.parameters(), 0.1), strategy, None, None))

    assert room(Keeps(10**6)) == room(Keeps(0)) + 4 * 10**6


@pytest.mark.parametrize("code", [
    "none", "topk(0.2)", "topk(0.2) | qsgd(4)", "qsgd(4)", "sign", "threshold(0.5)", "cast(bf16)", "topk(2/9) | bins(2)",
])  # fmt: skip
@pytest.mark.parametrize("shards", [1, 3])
def test_a_push_arrives_as_the_code_says(code: str, shards: int) -> None:
    strategy = Strategy.parse(f"async + server({shards})" + (f" + {code}" if code != "none" else ""))
    slices = Slices.of(strategy, layout())
    flat = torch.randn(50, generator=torch.Generator().manual_seed(1))
    encoder = PushEncoder(strategy, slices, 1, 4, seed=3)
    found = torch.zeros(50)
    for s, messages in enumerate(encoder.encode(7, [flat])):
        shapes, tensors = as_tensors(messages)
        like = [slices.cut(b, torch.zeros(n))[s] for b, n in enumerate(slices.sizes)]
        parts = gradients_of(strategy, as_messages(shapes, tensors), like, 7, 1, 4, 3)
        slices.put(0, s, parts[0], found)
    rest = encoder.errors[0]
    if code == "none":
        assert torch.equal(found, flat)
    elif rest is not None:
        assert torch.allclose(found + rest, flat, atol=1e-6)
    else:
        assert (found - flat).norm() < 1.5 * flat.norm()


def test_what_a_worker_did_not_push_counts_by_its_decay_next_time() -> None:
    strategy = Strategy.parse("async + server(2) + topk(2/9, feedback=0.5)")
    encoder = PushEncoder(strategy, Slices.of(strategy, layout()), 1, 4, seed=3)
    flat = torch.randn(50, generator=torch.Generator().manual_seed(1))
    encoder.encode(1, [flat])
    held = encoder.errors[0]
    assert held is not None
    encoder.encode(2, [torch.zeros(50)])
    kept = encoder.errors[0]
    assert torch.equal(torch.where(kept != 0, 0.5 * held, 0.0), kept)
    assert 0 < kept.count_nonzero() < held.count_nonzero()


# --- a host ------------------------------------------------------------------------------------------------------------------


class Host(ShardServer):
    """A shard server without a socket: what it wants to send is kept; time stands still unless :meth:`later` moves it."""

    def __init__(self, state: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(0, **options)
        self.sent: list[tuple[bytes, Envelope]] = []
        self.said: list[str] = []
        self.saved: dict[str, Any] = {}
        self.clock = 100.0
        self._carry_out(self.start(self.clock, state))

    def handle(self, peer: bytes, message: Envelope) -> None:
        self._carry_out(self.message(peer, message, self.clock))

    def later(self, seconds: float, alive: Sequence[int] = ()) -> None:
        """Time goes by; its timer runs out as often as on sockets, and those workers beat their hearts."""
        until = self.clock + seconds
        while self.clock < until:
            self.clock = min(self.clock + 0.2, until)
            for worker in alive:
                self.handle(b"w%d" % worker, Envelope(Kind.BEAT, worker))
            self._carry_out(self.timer("check", self.clock))

    def _carry_out(self, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                assert isinstance(effect.to, bytes)
                self.sent.append((effect.to, effect.message))
            elif isinstance(effect, Say):
                self.said.append(effect.text)
            elif isinstance(effect, Snapshot):
                self.saved = unsealed(sealed(self.state_dict()))

    @property
    def last(self) -> Envelope:
        return self.sent[-1][1]


def hello(worker: int, text: str = "ssp(2) + server", world: int = 2, brings: bool = True, **changes: Any) -> Envelope:
    strategy = Strategy.parse(text)
    metadata: dict[str, Any] = {"job_config": job_config(strategy, layout(), 0, world) | changes, "pushed": 0}
    metadata |= {"optimizer": SGD.describe(), "groups": [0], "total": None, "per_epoch": None}
    tensors = slices_of(Slices.of(strategy, layout()), 0, [torch.ones(1, 50)]) if brings else ()
    return Envelope(Kind.HELLO, worker, metadata=metadata, tensors=tensors)


def push(worker: int, step: int, number: int = 1, **changes: Any) -> Envelope:
    metadata = {"parts": [[1, 0]], "lrs": [0.1], "fetch": True, "seen": 0} | changes.pop("metadata", {})
    given: dict[str, Any] = {"sender": worker, "step": step, "number": number, "metadata": metadata, "tensors": (torch.ones(50),)}
    return Envelope(Kind.PUSH, **(given | changes))


def host(text: str = "ssp(2) + server", world: int = 2, **options: Any) -> Host:
    made = Host(**options)
    for worker in range(world):
        made.handle(b"w%d" % worker, hello(worker, text, world))
        assert made.last.kind == Kind.WELCOME
    return made


@pytest.mark.parametrize(
    "changes, word, sentence",
    [
        ({"hocket": "0.0.1"}, "hocket", "The job has hocket"),
        ({"strategy": "async + server(1)"}, "strategy", "The job has strategy"),
        ({"model": "another"}, "model", "other parameters"),
        ({"seed": 5}, "seed", "seed"),
        ({"world": 3}, "world", "world"),
    ],
)
def test_who_has_other_terms_is_told_so(changes: dict[str, Any], word: str, sentence: str) -> None:
    made = host()
    made.handle(b"wx", hello(1, brings=False, **changes))
    assert made.last.kind == Kind.REFUSAL
    assert sentence in made.last.metadata["sentence"]
    assert made.rejected == {word: 1}


WRONG = {
    "another shape": push(0, 1, tensors=(torch.ones(49),)),
    "another dtype": push(0, 1, tensors=(torch.ones(50, dtype=torch.int64),)),
    "a tensor too many": push(0, 1, tensors=(torch.ones(50), torch.ones(50))),
    "no tensor": push(0, 1, tensors=()),
    "a bucket too many": push(0, 1, metadata={"parts": [[1, 0], [1, 0]]}, tensors=(torch.ones(50), torch.ones(50))),
    "no parts": push(0, 1, metadata={"parts": 7}),
    "no learning rates": push(0, 1, metadata={"lrs": []}),
    "learning rates that are no numbers": push(0, 1, metadata={"lrs": ["a"]}),
    "a step too far": push(0, 2),
    "step zero": push(0, 0),
    "a negative step": push(0, -3),
    "an unknown worker": push(2, 1),
    "a negative worker": push(-5, 1),
    "another's name": push(1, 1),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused_and_counted_and_touches_nothing(what: str) -> None:
    made = host()
    assert made.shard is not None
    before = weights(made.shard)
    made.handle(b"w0", WRONG[what])
    assert made.last.kind == Kind.REFUSAL
    assert made.rejected.total() == 1
    assert torch.equal(weights(made.shard), before)
    assert made.shard.version == 0
    made.handle(b"w0", push(0, 1))
    assert made.last.kind == Kind.REPLY
    assert made.shard.version == 1


@given(
    st.dictionaries(
        st.sampled_from(
            ["parts", "lrs", "seen", "fetch", "want", "batch_ids", "figures", "buffers", "final", "job_config", "pushed", "holds"]
        ),
        st.recursive(st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3), st.lists, max_leaves=4),
    ),
    st.sampled_from(list(Kind)),
    st.integers(-3, 3),
    st.integers(-2, 4),
    st.lists(st.integers(0, 60), max_size=3),
)
def test_no_message_brings_a_shard_down(metadata: dict[str, Any], kind: Kind, worker: int, step: int, sizes: list[int]) -> None:
    made = host("async + server + topk(0.1)")
    made.handle(b"w0", Envelope(kind, worker, 0, step, 1, metadata, tuple(torch.ones(n) for n in sizes)))
    made.later(0.2)
    made.handle(b"w1", hello(1, "async + server + topk(0.1)", brings=False))
    assert made.last.kind == Kind.WELCOME


def test_a_fetch_is_held_back_until_it_may_be_answered_and_waiting_is_told() -> None:
    made = host("bulk + server")
    made.handle(b"w0", push(0, 1, number=5))
    assert made.last.kind == Kind.WELCOME, "nothing yet"
    made.later(1.1)
    assert (made.last.kind, made.last.number) == (Kind.WAIT, 5)
    made.handle(b"w1", push(1, 1, number=8))
    replies = {peer: e for peer, e in made.sent if e.kind == Kind.REPLY}
    assert {peer: e.number for peer, e in replies.items()} == {b"w0": 5, b"w1": 8}
    assert made.shard is not None
    given = replies[b"w0"].tensors[0]
    kept = given.clone()
    for worker in (0, 1):
        made.handle(b"w%d" % worker, push(worker, 2, number=9))
    assert torch.equal(given, kept), "what was sent is a copy"
    assert not torch.equal(weights(made.shard), kept)


@pytest.mark.parametrize("text", ["bulk + server", "ssp(1) + server"])
def test_the_silent_are_not_waited_for_and_may_return(text: str) -> None:
    made = host(text, liveness_timeout_s=1.0)
    for step in (1, 2, 3):
        made.handle(b"w0", push(0, step, number=step))
        if made.members[0].request is not None:
            break
    assert made.shard is not None
    reached = made.shard.done[0]
    assert (made.members[0].request is not None, reached) == (True, step)
    made.later(2.0, alive=[0])
    assert made.said == ["worker 1 has been silent for 1 s; the others go on without it"]
    assert (made.last.kind, made.last.number) == (Kind.REPLY, step)
    assert 1 not in made.shard.done
    made.handle(b"w1", push(1, 1, number=4))
    assert made.shard.done[1] == reached, "it goes on with the slowest"
    assert (made.last.kind, made.last.step) == (Kind.REPLY, reached)


@pytest.mark.parametrize("text, step", [("async + server", 1), ("ssp(9) + server", 5), ("bulk + server", 5)])
def test_only_where_nobody_may_be_far_ahead_does_one_that_was_away_go_on_with_the_others(text: str, step: int) -> None:
    made = host(text, liveness_timeout_s=1.0)
    made.later(2.0, alive=[0])
    for number in range(1, 6):
        made.handle(b"w0", push(0, number, number=number))
    made.handle(b"w1", push(1, 1, number=9))
    assert made.shard is not None
    assert made.shard.done == {0: 5, 1: step}
    assert (made.last.kind, made.last.step) == (Kind.REPLY, step)


def test_a_meeting_calls_those_who_have_joined_and_have_not_come() -> None:
    made = Host()
    for worker in (0, 1, 2):
        made.handle(b"w%d" % worker, hello(worker, "stale(4) + server", 4))
    made.handle(b"w2", push(2, 1, number=3))
    calls = [peer for peer, e in made.sent if e.kind == Kind.WAIT and "call" in e.metadata]
    assert calls == [b"w0", b"w1"], "not worker 3, which nobody has seen"
    made.handle(b"w0", push(0, 2, number=3))
    calls = [peer for peer, e in made.sent if e.kind == Kind.WAIT and "call" in e.metadata]
    assert calls == [b"w0", b"w1", b"w1"]


def test_who_comes_late_but_is_waited_for_misses_nothing() -> None:
    made = host("bulk + server", world=3)
    for worker in (0, 1):
        made.handle(b"w%d" % worker, push(worker, 1))
    made.handle(b"w2", hello(2, "bulk + server", 3, brings=False))
    assert (made.last.kind, made.last.step) == (Kind.WELCOME, 0)
    made.handle(b"w2", push(2, 1))
    assert made.shard is not None
    assert made.shard.staleness == {0: 3}


def test_what_a_shard_holds_for_a_worker_is_bounded() -> None:
    made = host("bulk + server")
    for number in range(50):
        made.handle(b"w0", push(0, 1 + number % 3, number=number))
    assert made.shard is not None
    assert len(made.shard._waiting) == 1
    assert made.members[0].request is not None


def test_the_dead_are_not_waited_for_once_an_observer_has_said_so() -> None:
    made = host("bulk + server")
    made.handle(b"w0", push(0, 1))
    made.handle(b"o", Envelope(Kind.ORDER, OBSERVER, metadata={"gone": 1, "unseen": True}))
    assert made.members[0].request is not None, "somebody is worker 1"
    made.handle(b"o", Envelope(Kind.ORDER, OBSERVER, metadata={"gone": 1}))
    assert made.members[0].request is None
    answer = next(e for _, e in reversed(made.sent) if e.kind == Kind.ANSWER)
    assert read_figures(answer.tensors)["here"] == [0]
    made.handle(b"w0", Envelope(Kind.ORDER, 0, metadata={"gone": 0}))
    assert made.last.kind == Kind.REFUSAL


def test_who_ends_sooner_than_the_others_has_lost_nothing() -> None:
    made = host("ssp(9) + server")
    for worker, steps in ((0, 2), (1, 5)):
        for step in range(1, steps + 1):
            made.handle(b"w%d" % worker, push(worker, step, number=step))
        if worker == 0:
            made.handle(b"w0", Envelope(Kind.FETCH, 0, number=9, metadata={"fetch": True, "final": True}))
    assert (made.progress, made.all_lost) == (7, 0)
    made.handle(b"o", Envelope(Kind.ORDER, OBSERVER, metadata={"gone": 1}))
    assert (made.progress, made.all_lost) == (7, 0)


def test_a_shard_that_was_stopped_itself_blames_nobody() -> None:
    made = host("bulk + server", liveness_timeout_s=5.0)
    made.clock += 100  # without a timer
    made.later(0.2)
    assert made.shard is not None
    assert sorted(made.shard.done) == [0, 1]


def test_a_number_that_is_taken_is_refused_unless_it_is_to_be_replaced() -> None:
    made = host()
    made.handle(b"wx", hello(1, brings=False))
    assert made.last.metadata["reason"] == "taken"
    message = hello(1, brings=False)
    made.handle(b"wx", Envelope(Kind.HELLO, 1, metadata={**message.metadata, "replaces": True}))
    assert made.last.kind == Kind.WELCOME
    made.handle(b"w1", push(1, 1))
    assert made.last.metadata["reason"] == "replaced"


@pytest.mark.parametrize("total", [None, 40])
def test_what_was_computed_before_a_missed_meeting_is_lost_and_its_worker_goes_on(total: int | None) -> None:
    made = Host(liveness_timeout_s=1.0)
    for worker in (0, 1):
        message = hello(worker, "stale(4) + server")
        metadata = {**message.metadata, "total": total, "per_epoch": total}
        made.handle(b"w%d" % worker, Envelope(Kind.HELLO, worker, metadata=metadata, tensors=message.tensors))
        made.handle(b"w%d" % worker, Envelope(Kind.FETCH, worker, number=1, metadata={"fetch": True, "want": 4}))
    own = made.last.metadata.get("batch_ids", [])
    made.later(2.0, alive=[0])
    made.handle(b"w0", push(0, 4, number=2, metadata={"batch_ids": [0, 1, 2, 3]}))
    assert made.shard is not None
    mean = weights(made.shard)
    made.handle(b"w1", push(1, 4, number=2, metadata={"seen": 0, "batch_ids": own}, tensors=(torch.full((50,), 9.0),)))
    assert made.last.kind == Kind.WAIT, "it waits for the next meeting, to which worker 0 is called"
    assert torch.equal(weights(made.shard), mean)
    assert made.lost == 4
    made.handle(b"w0", push(0, 6, number=3, metadata={"seen": 1}, tensors=(torch.full((50,), 3.0),)))
    replies = [message for _, message in made.sent if message.kind == Kind.REPLY][-2:]
    assert {(r.number, r.metadata["seen"]) for r in replies} == {(2, 2), (3, 2)}
    assert all(torch.equal(r.tensors[0], torch.full((50,), 3.0)) for r in replies), "its own weights do not count"


def test_a_restarted_shard_is_as_far_as_its_snapshot_and_counts_what_was_lost() -> None:
    made = host("async + server", snapshot_s=1.0)
    for step in (1, 2, 3):
        made.handle(b"w0", push(0, step))
    made.later(1.1)
    for step in (4, 5):
        made.handle(b"w0", push(0, step))
    again = Host(made.saved)
    assert again.shard is not None
    assert again.shard.version == 3
    again.handle(b"w0", push(0, 6))
    assert again.last.metadata["reason"] == "hello"
    message = hello(0, "async + server", brings=False)
    again.handle(b"w0", Envelope(Kind.HELLO, 0, metadata={**message.metadata, "pushed": 5}))
    assert (again.last.kind, again.last.step) == (Kind.WELCOME, 5)
    assert again.lost == 2
    again.handle(b"w0", push(0, 6))
    assert again.shard.version == 4


def test_a_damaged_snapshot_gives_way_to_the_one_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = Snapshots(tmp_path, 1)
    for k in range(5):
        kept.save({"k": k})
    newest, before = sorted(tmp_path.iterdir(), reverse=True)
    newest.write_bytes(newest.read_bytes()[:-30])
    assert kept.load() == {"k": 3}
    assert newest.name in capsys.readouterr().err
    before.write_bytes(b"")
    assert kept.load() is None


def test_a_shard_servers_state_stays_that_of_its_moment() -> None:
    """It is what snapshots are written from, while the server goes on."""
    made = host("async + server")
    buffers = torch.ones(3)
    made.handle(b"w0", push(0, 1))
    made.members[0].buffers = buffers
    state = made.state_dict()
    before = state_bytes(state)
    made.handle(b"w0", push(0, 2))
    made.members[0].dispatched.append(5)
    made._start_config["total"] = 77
    buffers.fill_(4.0)
    assert made.shard is not None
    for weights in made.shard.weights:
        weights.add_(1.0)
    assert state_bytes(state) == before
    assert state_bytes(made.state_dict()) != before


class _Disk:
    """A disk on which nothing is written while it is held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.begun, fsync = threading.Event(), threading.Event(), os.fsync

        def held(handle: int) -> None:
            self.begun.set()
            assert self.free.wait(30)
            fsync(handle)

        monkeypatch.setattr(os, "fsync", held)


def test_a_snapshot_is_written_beside_the_shard_and_the_newest_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, weights = Snapshots(tmp_path, 0), torch.zeros(1000)
    kept.save({"k": 0, "weights": weights})
    disk = _Disk(monkeypatch)
    for k in (1, 2, 3):
        weights.fill_(float(k))
        kept.begin({"k": k, "weights": weights.clone()})
        assert disk.begun.wait(30)
    weights.fill_(9.0)
    found = Snapshots(tmp_path, 0).load()
    assert found is not None
    assert found["k"] == 0, "whoever is killed while it writes goes on from the one before"
    disk.free.set()
    kept.wait()
    assert [(k, bool((w == k).all())) for k, w in (_snapshot(path).values() for path in sorted(tmp_path.iterdir()))] == [
        (1, True),
        (3, True),
    ]


def _snapshot(path: Path) -> dict[str, Any]:
    return dict(unsealed(path.read_bytes()))


def test_a_snapshot_that_others_are_told_of_is_on_the_disk_before_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another is being written; one that has not begun gives way to it."""
    kept = Snapshots(tmp_path, 0)
    disk = _Disk(monkeypatch)
    kept.begin({"k": 1})
    assert disk.begun.wait(30)
    kept.begin({"k": 2})
    threading.Timer(0.2, disk.free.set).start()
    kept.save({"k": 3})
    assert [_snapshot(path)["k"] for path in sorted(tmp_path.iterdir())] == [1, 3]


def test_final_weights_and_the_first_ones_are_told_of_once_they_are_durable() -> None:
    """Others count on them: whatever comes after any other snapshot is counted as lost."""
    made = host("async + server", snapshot_s=1.0, world=1)
    first = Host(snapshot_s=1.0).message(b"w0", hello(0, "async + server", 1), 100.0)
    made.handle(b"w0", push(0, 1))
    fetch = Envelope(Kind.FETCH, 0, 0, 1, 5, {"fetch": True, "want": 0, "final": True})
    for effects, kind in ((first, Kind.WELCOME), (made.message(b"w0", fetch, 100.1), Kind.REPLY)):
        told = [k for k, effect in enumerate(effects) if isinstance(effect, Send) and effect.message.kind == kind]
        durable = [k for k, effect in enumerate(effects) if isinstance(effect, Snapshot) and effect.durable]
        assert durable
        assert told
        assert durable[0] < told[0]
    assert [effect.durable for effect in made.timer("check", 102.0) if isinstance(effect, Snapshot)] == [False]


def test_a_full_disk_does_not_end_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = Snapshots(tmp_path, 0)
    kept.save({"k": 0})
    monkeypatch.setattr(os, "fsync", full)
    kept.begin({"k": 1})
    kept.wait()
    monkeypatch.undo()
    assert "shard 0: Cannot write" in (said := capsys.readouterr().err)
    assert "(No space left on device); it trains on" in said
    assert kept.load() == {"k": 0}
    kept.begin({"k": 2})
    kept.wait()
    assert kept.load() == {"k": 2}


@given(st.integers(0, 2**30), st.integers(1, 255))
def test_no_changed_byte_of_a_snapshot_goes_unnoticed(place: int, change: int) -> None:
    """Not even inside a tensor."""
    content = bytearray(sealed({"weights": torch.arange(100.0), "version": 7}))
    assert unsealed(bytes(content))["version"] == 7
    content[place % len(content)] ^= change
    with pytest.raises(ValueError, match="checksum"):
        unsealed(bytes(content))


def test_weights_that_come_while_something_else_is_requested_are_not_lost() -> None:
    """Otherwise an epoch would be recorded at the end of the training only, with its figures."""
    strategy = Strategy.parse("async + server")
    with Listener("tcp://127.0.0.1:0", JOB) as shard:
        slices = Slices.of(strategy, layout())
        with Observer([shard.address], JOB, layout(), slices, 1 << 20, None) as observer:
            observer.begin(observer.program.fetch, 3)
            peer, asked = shard.receive(10.0) or (b"", Envelope(Kind.BEAT))
            assert (asked.kind, asked.metadata["epoch"]) == (Kind.FETCH, 3)
            reply = Envelope(Kind.REPLY, number=asked.number, tensors=(torch.ones(50), write_figures({"progress": 12})))
            shard.send(peer, reply)
            shard.send(peer, Envelope(Kind.ANSWER, number=asked.number + 1, tensors=(write_figures({"progress": 15}),)))
            assert observer.statuses(10.0) == {0: {"progress": 15}}
            assert not observer.program.busy, "the weights came before"
            found = observer.program.found
            assert found is not None
            assert found.figures == {"progress": 12}


def test_an_observer_joins_the_shards_parts_and_gives_up_on_a_shard_that_is_silent() -> None:
    slices = Slices.of(Strategy.parse("async + server(2)"), layout())
    observer = ShardObserver(layout(), slices)

    def part(place: int, number: int) -> Envelope:
        figures = write_figures({"progress": 12, "lost": place})
        return Envelope(Kind.REPLY, number=number, tensors=(torch.full((25,), float(place)), figures))

    (first,) = (effect for effect in observer.fetch(3, 0.0) if isinstance(effect, Send))
    assert (first.to, first.message.metadata["epoch"]) == (0, 3)
    number = first.message.number
    (second,) = (effect for effect in observer.message(0, part(0, number), 5.0) if isinstance(effect, Send))
    assert (second.to, second.message.number) == (1, number)
    observer.timer("task", 11.9)
    assert observer.busy, "a shard has seconds to reach the end of the epoch, and to answer"
    observer.timer("task", 12.0)
    assert not observer.busy
    assert observer.found is None
    (again,) = (effect for effect in observer.fetch(3, 13.0) if isinstance(effect, Send))
    observer.message(0, part(0, again.message.number), 14.0)
    observer.message(1, part(1, number), 14.0)
    assert observer.busy, "that was the answer to another request"
    observer.message(1, part(1, again.message.number), 14.0)
    assert observer.found is not None
    assert observer.found.rows[0].tolist() == [[0.0] * 25 + [1.0] * 25]
    assert (observer.found.lost, observer.found.figures["progress"]) == (1, 12)
    with pytest.raises(HocketError, match="Shard 1: the job is another"):
        observer.message(1, Envelope(Kind.REFUSAL, metadata={"sentence": "the job is another"}), 15.0)


def test_an_observer_asks_again_where_its_request_was_lost() -> None:
    """With a connection, or with the shard that had it; more and more seldom, since an answer may take long."""
    observer = ShardObserver(layout(), Slices.of(Strategy.parse("async + server(1)"), layout()))
    asked: list[tuple[float, int]] = []
    now, effects = 0.0, observer.fetch(3, 0.0)
    while now < 100.0:
        asked += [(now, effect.message.number) for effect in effects if isinstance(effect, Send)]
        (timer,) = (effect for effect in effects if isinstance(effect, SetTimer))
        now, effects = timer.at, observer.timer(timer.name, timer.at)
    assert [at for at, _ in asked] == [0.0, 5.0, 15.0, 35.0, 75.0]
    assert {number for _, number in asked} == {asked[0][1]}, "a late answer to any of them is one to all"


def test_the_truth_at_the_end_of_an_epoch_is_kept_for_whoever_asks() -> None:
    made = Host()
    for worker in (0, 1):
        message = hello(worker, "bulk + server")
        made.handle(
            b"w%d" % worker,
            Envelope(Kind.HELLO, worker, metadata={**message.metadata, "total": 6, "per_epoch": 4}, tensors=message.tensors),
        )
    made.handle(b"o", Envelope(Kind.FETCH, OBSERVER, number=77, metadata={"epoch": 1, "within_s": 1e6}))
    truths = []
    for step in (1, 2, 3):
        for worker in (0, 1):
            made.handle(b"w%d" % worker, push(worker, step, number=step))
        assert made.shard is not None
        truths.append(weights(made.shard))
    shown = [e for peer, e in made.sent if peer == b"o"]
    assert [e.number for e in shown] == [77]
    assert torch.equal(shown[0].tensors[0], truths[1])
    assert read_figures(shown[0].tensors)["progress"] == 4
    made.handle(b"o", Envelope(Kind.FETCH, OBSERVER, number=78, metadata={"epoch": 2, "within_s": 1e6}))
    assert torch.equal(made.last.tensors[0], truths[2])


# --- clients -----------------------------------------------------------------------------------------------------------------


class Shards(ShardServers):
    """What ``after`` says is done once a message was handled."""

    def __init__(self, count: int, after: Callable[[Shards, int, Envelope], None]) -> None:
        super().__init__(count)
        self.heard: Counter[tuple[int, Kind]] = Counter()
        self._after = after

    def handle(self, place: int, sender: bytes, message: Envelope, now: float) -> Effects:
        effects = super().handle(place, sender, message, now)
        self.heard[place, message.kind] += 1
        self._after(self, place, message)
        return effects

    def worker(self, strategy: str, worker: int, **options: Any) -> ServerRuntime:
        return self.runtime(strategy, layout(), worker, 2, **options)


def test_of_two_that_come_at_once_one_initializes_all_shards() -> None:
    text = "async + server(shards=2)"
    slices = Slices.of(Strategy.parse(text), layout())

    def other(shards: Shards, place: int, message: Envelope) -> None:
        """Another worker is a little faster at the first shard and much slower at the second."""
        if shards.heard[place, Kind.HELLO] == (1, 3)[place]:
            brought = slices_of(slices, place, [torch.zeros(1, 50)])
            shards.tell(place, b"wother", Envelope(Kind.HELLO, 0, metadata=hello(0, text).metadata, tensors=brought))

    with Shards(2, other) as shards:
        worker = shards.worker(text, 1)
        worker.join([torch.ones(1, 50)], SGD)
        worker.leave()
        assert [float(server.shard.weights[0].abs().sum()) for server in shards.servers if server.shard is not None] == [0.0, 0.0]


def test_a_call_to_a_meeting_is_heard_while_a_mini_batch_is_waited_for() -> None:
    text = "stale(4) + server"

    def other(shards: Shards, place: int, message: Envelope) -> None:
        """Another worker comes to the meeting before this one has its mini-batch."""
        if message.kind == Kind.FETCH and message.metadata["fetch"]:
            shards.tell(0, b"wother", hello(0, text))
            shards.tell(0, b"wother", push(0, 4))

    with Shards(1, other) as shards:
        worker, rows = shards.worker(text, 1, total=40, per_epoch=40), [torch.ones(1, 50)]
        worker.join(rows, SGD)
        assert eventually(lambda: bool(shards.servers[0].shard.called()))  # type: ignore[union-attr]
        assert worker.next_batch() == 0
        worker.before_update([torch.zeros(50)])
        assert worker.steps_locally
        rows[0] += 4.0
        worker.after_update([0.1], None)
        server = shards.servers[0]
        assert server.shard is not None
        assert (server.shard.version, server.shard.done[1]) == (1, 1), "it came after its first step of four"
        torch.testing.assert_close(rows[0], torch.full((1, 50), (4 * 1.0 + 1 * 5.0) / 5), msg="and has the mean")
        worker.before_update([torch.zeros(50)])
        worker.after_update([0.1], None)
        assert server.shard.done[1] == 1, "it is not called again"
        worker.leave()


def test_what_was_lost_is_what_the_shard_lost_that_lost_most() -> None:
    text = "async + server(shards=2)"
    with Shards(2, lambda *_: None) as shards:
        worker = shards.worker(text, 0, total=8, per_epoch=8)
        worker.join([torch.ones(1, 50)], SGD)
        shards.servers[1].lost = 3
        with worker.observer() as observer:
            found = observer.global_weights(10.0)
        assert found is not None
        assert found.lost == 3
        worker.leave()


# --- slowing down ------------------------------------------------------------------------------------------------------------


def test_a_slowed_worker_sleeps_the_rest_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []
    monkeypatch.setattr(throttle.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(throttle.time, "sleep", slept.append)
    for factor in (1.0, 4.0):
        slow = throttle.Throttle(factor)
        slow.begin()
        now[0] += 2.0
        slow.end()
        slow.begin()
        now[0] += 1.0
        slow.between()  # forward 1 s, backward not known yet: twice that
        now[0] += 3.0
        slow.computed(now[0])
        slow.begin()
        now[0] += 1.0
        slow.between()
    assert slept == [6.0, 9.0, 12.0]


@pytest.mark.parametrize("slowdown, sleeps", [(1.0, 0), (3.0, 4)])
def test_a_worker_that_waits_for_all_is_slowed_before_its_exchange(
    monkeypatch: pytest.MonkeyPatch, slowdown: float, sleeps: int
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(throttle.time, "sleep", slept.append)
    make = partial(torch.optim.SGD, lr=0.1)
    runtime = CollectiveRuntime(VirtualCluster(1))
    replica = LiveReplica(nn.Linear(3, 2), nn.functional.cross_entropy, make, Strategy(), runtime, slowdown=slowdown)
    for _ in range(4):
        replica.step([torch.ones(2, 3)], [torch.tensor([0, 1])], torch.zeros(1), [1.0])
    assert len(slept) == sleeps
    assert all(0 < s < 300 for s in slept), "by the seconds of this step, not by those since the machine was started"


# --- accounts ----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.floats(0, 9)), max_size=9))
def test_standing_still_is_waiting_or_transfer(spans: list[tuple[float, float, float]]) -> None:
    account = Account()
    for blocked, held, hidden in spans:
        account.stalled(blocked, held, hidden)
    assert math.isclose(account.wait_s + account.transfer_s, sum(blocked for blocked, _, _ in spans), abs_tol=1e-9)


def test_a_replacement_starts_its_account_anew() -> None:
    old = {"0": {"seconds": 10.0, "bytes_sent": 100, "loss": 9.0, "losses": 3}}
    entry, loss = entry_of({"0": {"seconds": 2.0, "bytes_sent": 30, "loss": 1.0, "losses": 1}}, old)
    assert (entry.seconds, entry.bytes_sent, loss) == (2.0, 30, 1.0)
