"""Made-up messages against every listener: shards, coordinators, gossip workers, servers that sum, Sandblaster's processes, the
rendezvous of elastic runs; and bytes against what is no program: agents of a launcher's job, the tunnel, `hocket watch`.

    python benchmarks/fuzz_messages.py --messages 1000000

Each listener is the program that serves in a real run, in the midst of one, driven in this process: frames go through the decoder,
what it lets through to the program, and every answer through the encoder. A message is one that belongs there with something wrong,
from a seed: bits flipped, frames cut short, dropped, added or exchanged (half of them with a checksum that is right nevertheless);
metadata with other types, sizes and names; other kinds, senders, steps and numbers; tensors of other dtypes and shapes. A share of
them travels over real sockets, with and without keys, beside bytes that are no messages at all.

A *crash* is any error that leaves the program, an answer that cannot be sent, a message that takes longer than a second, and a
listener that does not serve a right message afterwards. What is no program is in benchmarks/fuzz_bytes.py.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import math
import random
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

import psutil
import torch
import zmq
from flood import mutated
from fuzz_bytes import Agents, Bytes, TunnelExit, WatchPage
from torch import nn

from hocket.cluster.layout import Layout
from hocket.drivers.sockets import SocketDriver
from hocket.errors import WorkerLost
from hocket.programs.base import Connect, Effects, Program, Send, SetTimer
from hocket.programs.coordinator import Coordinator
from hocket.programs.elastic.rendezvous import Rendezvous
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.gossip.peer import GossipPeer
from hocket.programs.gossip.state import PeerState, weight_tensor
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.push_encoder import PushEncoder, Slices
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.wire import OBSERVER, as_tensors, job_config
from hocket.programs.summation import SummationServer
from hocket.sandblaster.coordinator import CoordinatorConfig, SandblasterCoordinator
from hocket.sandblaster.lbfgs import Settings
from hocket.sandblaster.protocol import COORDINATOR
from hocket.sandblaster.roles import SandblasterShard
from hocket.strategy import Strategy
from hocket.train.checks import layout_for
from hocket.transport import Caller, Envelope, Keys, Kind, Listener, Refused, pack, unpack
from hocket.transport.address import parts_of

JOB = bytes(range(16))
MOST_BYTES = 1 << 26
SLOW_S = 1.0
WIDTH = 50
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 255, 4096, 1 << 20, 1 << 31, (1 << 63) - 1, -(1 << 63), 1 << 64, 10**30),
    *(0.5, -1.0, 1e308, math.inf, -math.inf, math.nan, "", "x", "x" * 65_000, "0", "tcp://127.0.0.1:1", "\u00e9", "over", "taylor"),
    *([], [0], [[1, 0]], [[]], [None], [1, 2, 3], list(range(3000)), [[[[1]]]], {}, {"a": 1}, {"0": {"seconds": 1}}, {"": []}),
)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
)


@dataclass
class Target:
    """A listener: how to make one that serves, messages that belong there (by their sender's identity), one that it must answer."""

    name: str
    make: Callable[[], tuple[Program, Effects]]
    messages: list[tuple[bytes, Envelope]]
    right: tuple[bytes, Envelope]
    answered_by: Kind
    round: int = 500
    """Messages to one program before another takes its place."""
    found: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    sent: int = 0


# --- the listeners ---------------------------------------------------------------------------------------------------------------


def _layout(strategy: Strategy) -> Layout:
    model = nn.Linear(WIDTH - 1, 1)
    return layout_for(model, torch.optim.SGD(model.parameters(), 0.1), strategy)


def shard(text: str) -> Target:
    """A shard of ``text`` with two workers, in the midst of its training."""
    strategy, world = Strategy.parse(text), 2
    layout = _layout(strategy)
    slices = Slices.of(strategy, layout, world)
    rows = [torch.randn(bucket.size) for bucket in layout.buckets]
    groups = [bucket.group for bucket in layout.buckets]
    optimizer = OptimizerSpec("sgd", ({"lr": 0.1, "momentum": 0.9},)).describe()
    config = {"job_config": job_config(strategy, layout, 0, world), "pushed": 0, "replaces": False, "holds": []}
    start = {"optimizer": optimizer, "groups": groups, "total": 40, "per_epoch": 10}
    cut = tuple(slices.cut(b, row)[0].clone().contiguous() for b, row in enumerate(rows))

    def pushed(worker: int, step: int, number: int) -> Envelope:
        parts, tensors = as_tensors(PushEncoder(strategy, slices, worker, world, 0).encode(step, [r / 10 for r in rows])[0])
        metadata = {"parts": parts, "lrs": [0.1], "fetch": True, "seen": 0, "batch_ids": [worker], "want": 1, "buffers": True}
        metadata |= {"figures": {"seconds": 1.0, "bytes_sent": 5, "staleness": {}}, "options": [{"momentum": 0.8}]}
        return Envelope(Kind.PUSH, worker, 0, step, number, metadata, (*tensors, torch.zeros(3)))

    first = Envelope(Kind.HELLO, 0, metadata={**config, **start}, tensors=cut)
    hello = Envelope(Kind.HELLO, 1, metadata={**config, "replaces": True})

    def make() -> tuple[Program, Effects]:
        server = ShardServer(0, snapshot_s=5.0, stays=True)
        effects = server.start(0.0)
        for peer, message in ((b"w0", first), (b"w1", hello), (b"w0", pushed(0, 1, 1))):
            effects += server.message(peer, message, 0.1)
        return server, effects

    messages = [(b"w0", first), (b"w1", hello), *((b"w%d" % w, pushed(w, s, s)) for w in (0, 1) for s in (1, 2, 3))]
    messages += [
        (b"w0", Envelope(Kind.FETCH, 0, 0, 1, 5, {"fetch": True, "want": 2, "final": False})),
        (b"w1", Envelope(Kind.FETCH, 1, 0, 1, 5, {"fetch": True, "want": 2, "final": True})),
        (b"o1", Envelope(Kind.FETCH, OBSERVER, number=4, metadata={"epoch": 1, "within_s": 3.0})),
        (b"o1", Envelope(Kind.ORDER, OBSERVER, number=4, metadata={"order": "status"})),
        (b"o1", Envelope(Kind.ORDER, OBSERVER, number=4, metadata={"gone": 1, "unseen": True})),
        (b"w1", Envelope(Kind.BEAT, 1, metadata={"waits_elsewhere": True})),
        (b"w1", Envelope(Kind.GOODBYE, 1)),
    ]
    right = b"o9", Envelope(Kind.ORDER, OBSERVER, number=99, metadata={"order": "status"})
    return Target(f"shard of {text}", make, messages, right, Kind.ANSWER)


def empty_shard() -> Target:
    """A shard that has no weights yet: the first hello decides what it is."""
    full = shard("async + server")

    def make() -> tuple[Program, Effects]:
        server = ShardServer(0, stays=True)
        return server, server.start(0.0)

    return replace(full, name="shard without weights", make=make, round=25, found=Counter(), crashes=[])


def coordinator() -> Target:
    like = PeerState([torch.zeros(WIDTH)])
    hellos = [
        (b"w%d" % w, Envelope(Kind.HELLO, w, number=1, metadata={"address": f"tcp://127.0.0.1:{9000 + w}", "incarnation": 0}))
        for w in (0, 1)
    ]
    report = {"done": [0], "ledger": {"seconds": 1.0, "bytes_sent": 3, "staleness": {"0": 1}}, "incarnation": 0}
    mean = {"here": [0, 1], "push_sum_weight": 2.0, "buffers": False, **report}

    def make() -> tuple[Program, Effects]:
        program = Coordinator(2, 40, like) if "like" in Coordinator.__init__.__annotations__ else Coordinator(2, 40)
        effects = program.start(0.0)
        for peer, message in hellos:
            effects += program.message(peer, message, 0.1)
        return program, effects

    messages = [*hellos, *((b"w%d" % w, Envelope(Kind.FETCH, w, number=n, metadata=report)) for w in (0, 1) for n in (2, 3, 4))]
    messages += [(b"w1", Envelope(Kind.PUSH, 1, number=5, metadata=mean, tensors=(torch.ones(WIDTH),)))]
    right = b"w0", Envelope(Kind.FETCH, 0, number=(1 << 63) - 1, metadata=report)
    return Target("coordinator of gossip", make, messages, right, Kind.REPLY)


def gossip(kind: str) -> Target:
    """Worker 1 of three, which the others push to."""

    def make() -> tuple[Program, Effects]:
        peer = GossipPeer(PeerConfig(1, 3, kind, greets=False, address="tcp://127.0.0.1:9001"))
        effects = peer.start([torch.randn(1, WIDTH)], 0.0)
        effects += peer.before_update(0.1)
        return peer, [*effects, *peer.after_update(None, 0.2)]

    status = {"incarnation": 0, "to": 0, "phase": "training", "open": [1]}
    row = (torch.ones(WIDTH),) if kind != "pushsum" else (torch.ones(WIDTH), weight_tensor(0.5))
    messages = [(b"c%d" % w, Envelope(Kind.PUSH, w, 1, number=n, metadata=status, tensors=row)) for w in (0, 2) for n in (1, 2, 3)]
    messages += [
        (b"c0", Envelope(Kind.BEAT, 0, 1, number=4, metadata=status)),
        (b"c0", Envelope(Kind.BEAT, 0, 1, number=4, metadata={**status, "about": 9})),
        (b"c2", Envelope(Kind.BEAT, 2, 1, metadata={**status, "settled": 1})),
        (b"c2", Envelope(Kind.HELLO, 2, 1, number=5, metadata={**status, "address": "tcp://127.0.0.1:9002"})),
        (b"c0", Envelope(Kind.FETCH, 0, 1, number=6, metadata=status)),
        (b"o", Envelope(Kind.FETCH, OBSERVER, 1, number=6, metadata={"mean": True})),
        (b"c0", Envelope(Kind.GOODBYE, 0, 1, metadata={**status, "resolved": [3, True]})),
    ]
    right = b"o", Envelope(Kind.FETCH, OBSERVER, 1, number=77)
    return Target(f"gossip worker ({kind})", make, messages, right, Kind.REPLY)


def summation() -> Target:
    def make() -> tuple[Program, Effects]:
        return SummationServer(2), []

    messages = [
        (b"s%d" % w, Envelope(Kind.PUSH, w, step=k, number=n, tensors=(torch.ones(WIDTH),)))
        for w, k, n in itertools.product((0, 1), range(3), (1, 2))
    ]
    messages += [(b"s1", Envelope(Kind.BEAT)), (b"s0", Envelope(Kind.GOODBYE, 0))]
    return Target("server that sums", make, messages, (b"s9", Envelope(Kind.BEAT)), Kind.ANSWER)


def sandblaster_shard() -> Target:
    def make() -> tuple[Program, Effects]:
        program = SandblasterShard(0, torch.zeros(WIDTH), address="tcp://127.0.0.1:9000")
        effects = program.start(0.0)
        effects += program.message(COORDINATOR, Envelope(Kind.ORDER, step=1, number=1, metadata={"ask": [["begin", 1, "x"]]}), 0.1)
        return program, effects

    messages = [(b"w%d" % w, Envelope(Kind.FETCH, w, 0, 1)) for w in (0, 1)]
    messages += [(b"w%d" % w, Envelope(Kind.PUSH, w, 0, 1, n, tensors=(torch.ones(WIDTH),))) for w in (0, 1) for n in (0, 1)]
    return Target("Sandblaster's shard", make, messages, (b"w9", Envelope(Kind.FETCH, 9, 0, 1)), Kind.REPLY)


def sandblaster_coordinator() -> Target:
    """With two shards and a worker that has a portion to compute."""
    address = {"address": "tcp://127.0.0.1:9000", "incarnation": 0}
    hellos = [(b"s%d" % s, Envelope(Kind.HELLO, s, metadata=address)) for s in (0, 1)]

    def answer(effects: Effects) -> list[tuple[bytes, Envelope]]:
        asked = [e for e in effects if isinstance(e, Send) and "ask" in e.message.metadata]
        return [
            (e.to, Envelope(Kind.REPLY, int(e.to[1:]), step=e.message.step, number=e.message.number, metadata=_terms(e.message)))
            for e in asked
            if isinstance(e.to, bytes)
        ]

    def make() -> tuple[Program, Effects]:
        program = SandblasterCoordinator(CoordinatorConfig(Settings(), portions=4, shards=2, liveness_timeout_s=1e9))
        effects = program.start(0.0)
        waiting = [*hellos, (b"w0", Envelope(Kind.HELLO, -1, metadata={"free": True}))]
        for _ in range(12):
            for peer, message in waiting:
                effects += program.message(peer, message, 0.1)
            waiting, effects = answer(effects), []
        return program, effects

    program, _ = make()
    session, evaluation = program._session, program._evaluation  # type: ignore[attr-defined]
    messages = [*hellos, (b"w0", Envelope(Kind.HELLO, 0, step=evaluation, number=1, metadata={"free": True}))]
    messages += [
        (b"s%d" % s, Envelope(Kind.REPLY, s, 0, session, n, {"answers": [[0.5]], "moved": 9})) for s in (0, 1) for n in (1, 2, 3)
    ]
    messages += [(b"w0", Envelope(Kind.ANSWER, 0, p, evaluation, 1, {"loss": 0.5})) for p in range(4)]
    messages += [(b"s%d" % s, Envelope(Kind.PUSH, s, 0, evaluation, 0)) for s in (0, 1)]
    messages += [(b"w0", Envelope(Kind.BEAT, 0)), (b"w7", Envelope(Kind.HELLO, -1, metadata={"free": True}))]
    return Target("Sandblaster's coordinator", make, messages, (b"w0", Envelope(Kind.GOODBYE, 0)), Kind.REFUSAL)


def rendezvous(parts: int) -> Target:
    """Of two replicas of ``parts`` processes, which have formed their first generation; another one comes."""
    members = range(2 * parts)

    def beat(uid: int, number: int, **changes: Any) -> tuple[bytes, Envelope]:
        told = {
            "attempt": 0,
            "formed": 0,
            "failed": 0,
            "leaving": False,
            "finished": False,
            "terms": "same",
            "host": "node",
            "reported": 0,
        }
        waits = {"waits": ["elastic", number, "gradients"], "late": 0.1} if uid else {}
        stack, launched = ["read (data/files.py:7)"], {"elastic": [number, 3]}
        told["standing"] = {"for_s": 5.0, "launched": launched, "stack": stack, "pid": 7, **waits}
        metadata = {**told, "part": uid % parts, "parts": parts, **changes}
        return b"m%d" % uid, Envelope(Kind.BEAT, uid, number=number, metadata=metadata)

    def make() -> tuple[Program, Effects]:
        program = Rendezvous(1, 4, 2)
        effects = program.start(0.0)
        for number, formed in ((1, 0), (2, 1)):
            for uid in members:
                effects += program.message(*beat(uid, number, formed=formed), 0.1 * number)
            effects += program.timer("check", 0.25 * number)
        assert len(program.generation.members) == len(members)
        return program, effects

    messages = [beat(uid, number, formed=1) for uid in members for number in (3, 4, 50)]
    messages += [beat(uid, 1) for uid in range(members.stop, members.stop + parts + 1)]
    messages += [beat(0, 5, formed=1, failed=1), beat(1, 6, formed=1, leaving=True), beat(1, 7, formed=1, finished=True)]
    messages += [beat(1, 8, attempt=1), beat(0, 9, formed=2), beat(9, 1, attempt=-1, terms="")]
    for uid in members:
        for k, adds in ((1, False), (2, True), (3, False)):
            value = torch.tensor([k]) if adds else torch.ones(WIDTH, dtype=torch.uint8)
            told = {"generation": 1, "name": "count" if adds else f"address {k}", "adds": adds}
            messages.append((b"m%d" % uid, Envelope(Kind.PUSH, uid, number=k, metadata=told, tensors=(value,))))
        told = {"generation": 1, "names": ["address 1", "count"]}
        messages.append((b"m%d" % uid, Envelope(Kind.FETCH, uid, number=4, metadata=told)))
        messages.append((b"m%d" % uid, Envelope(Kind.GOODBYE, uid, metadata={"attempt": 0, "before": 2})))
    whom = "workers" if parts == 1 else f"replicas of {parts}"
    return Target(f"rendezvous of {whom}", make, messages, beat(77, 1), Kind.ORDER)


def _terms(asked: Envelope) -> dict[str, Any]:
    return {"answers": [[1.0] for _ in asked.metadata["ask"]], "moved": 1}


def targets() -> list[Target]:
    texts = ("async + server", "bulk + server + topk(0.1)", "ssp(2) + server + qsgd(4)", "stale(2) + server")
    texts += ("async + server + topk(0.1, indices=rice) | sign", "async + server + natural")
    shards = [shard(text) for text in texts]
    others = [coordinator(), gossip("rotating"), gossip("pushsum"), summation(), sandblaster_shard(), sandblaster_coordinator()]
    return [*shards, empty_shard(), *others, rendezvous(1), rendezvous(3)]


def listeners_of_bytes() -> list[Bytes]:
    return [Agents(), TunnelExit(), WatchPage()]


# --- messages with something wrong -----------------------------------------------------------------------------------------------


def spoilt(dice: random.Random, envelope: Envelope) -> Envelope:
    """The same message with something else in it than belongs there."""
    metadata, fields = json.loads(json.dumps(dict(envelope.metadata))), dict[str, Any]()
    for _ in range(dice.randint(1, 3)):
        choice = dice.randrange(10)
        if choice < 4 and metadata:
            _spoil(dice, metadata)
        elif choice == 4:
            metadata[dice.choice((*metadata, "address", "gone", "about", "settled", "total", "x"))] = copy.deepcopy(
                dice.choice(ODD)
            )
        elif choice < 7:
            fields["tensors"] = tuple(_tensors(dice, list(fields.get("tensors", envelope.tensors))))
        else:
            name = dice.choice(("kind", "sender", "place", "step", "number"))
            small = name in ("sender", "place")
            fields[name] = dice.choice(list(Kind)) if name == "kind" else dice.choice(_NUMBERS if not small else _NUMBERS[:10])
    return replace(envelope, metadata=metadata, **fields)


_NUMBERS = (-1, 0, 1, 2, 3, 7, 255, 4096, (1 << 31) - 1, -(1 << 31), 1 << 40, (1 << 63) - 1, -(1 << 63))


def _spoil(dice: random.Random, inside: Any) -> None:
    """Change one thing somewhere in lists and mappings."""
    keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
    if not keys:
        return
    key = dice.choice(keys)
    if isinstance(inside[key], (dict, list)) and inside[key] and dice.random() < 0.7:
        _spoil(dice, inside[key])
    elif dice.random() < 0.2:
        del inside[key]
    else:
        inside[key] = copy.deepcopy(dice.choice(ODD))


def _tensors(dice: random.Random, tensors: list[Any]) -> list[Any]:
    choice = dice.randrange(6)
    if choice == 0 or not tensors:
        return [*tensors, torch.ones(dice.choice((0, 1, WIDTH, 1000))).to(dice.choice(DTYPES))]
    k = dice.randrange(len(tensors))
    if choice == 1:
        del tensors[k]
    elif choice == 2:
        tensors[k] = tensors[k].to(dice.choice(DTYPES))
    elif choice == 3:
        tensors[k] = tensors[k][: dice.randrange(len(tensors[k]) + 1)].clone()
    elif choice == 4 and tensors[k].is_floating_point():
        tensors[k] = torch.full_like(tensors[k], dice.choice((math.inf, math.nan, 6e4, 0.0)))
    else:
        tensors[k] = torch.randint(0, 255, (len(tensors[k]),)).to(tensors[k].dtype)
    return tensors


def frames_of(dice: random.Random, target: Target) -> tuple[bytes, list[bytes]]:
    """A message and who sends it."""
    peer, envelope = dice.choice(target.messages)
    if dice.random() < 0.1:
        peer = dice.choice((b"w0", b"w1", b"c0", b"o1", b"s0", b"", b"x" * 255, dice.randbytes(9)))
    if dice.random() < 0.95:
        envelope = spoilt(dice, envelope)
    try:
        frames = [bytes(frame) for frame in pack(envelope, JOB)]
    except ValueError:  # what no sender can write
        frames = [bytes(frame) for frame in pack(Envelope(envelope.kind), JOB)]
    return peer, mutated(dice, frames) if dice.random() < 0.2 else frames


# --- in this process -------------------------------------------------------------------------------------------------------------


def fuzz(target: Target, count: int, seed: int) -> None:
    """Hand ``count`` messages to the listener."""
    dice = random.Random(f"{target.name} {seed}")
    while target.sent < count:
        program, effects = target.make()
        now, due = 1.0, list(_carried_out(effects))
        for _ in range(min(target.round, count - target.sent)):
            target.sent += 1
            now += dice.random() * 0.02
            peer, frames = frames_of(dice, target)
            begun = time.thread_time()  # not the time in which others had the processor
            try:
                effects = _handed_over(program, peer, frames, now, target)
                effects += _timers(program, due, now) if dice.random() < 0.02 else []
                due = list(dict.fromkeys([*due, *_carried_out(effects)]))[-8:]
            except Exception as error:
                _note(target, error, frames)
                break
            if (took := time.thread_time() - begun) > SLOW_S:
                _note(target, TimeoutError(f"{took:.1f} s for one message"), frames)
        else:
            _still_serves(target, program, now)


def _handed_over(program: Program, peer: bytes, frames: Sequence[bytes], now: float, target: Target) -> Effects:
    try:
        envelope = unpack(frames, JOB, MOST_BYTES)
    except Refused as refusal:
        target.found[f"refused: {refusal.reason}"] += 1
        return []
    effects = program.message(peer, envelope, now)
    rejected = any(isinstance(e, Send) and e.message.kind == Kind.REFUSAL for e in effects)
    target.found["rejected" if rejected else "taken"] += 1
    return effects


def _timers(program: Program, due: list[str], now: float) -> Effects:
    effects: Effects = []
    for name in dict.fromkeys(due):
        with contextlib.suppress(WorkerLost):  # a program may find that somebody is silent
            effects += program.timer(name, now)
    return effects


def _carried_out(effects: Effects) -> Iterator[str]:
    """What a driver would do: all that is sent must be a message, all that is connected to an address."""
    for effect in effects:
        if isinstance(effect, Send):
            pack(effect.message, JOB)
        elif isinstance(effect, Connect) and effect.address is not None:
            parts_of(effect.address)
        elif isinstance(effect, SetTimer):
            yield effect.name


def _still_serves(target: Target, program: Program, now: float) -> None:
    peer, message = target.right
    try:
        effects = program.message(peer, message, now)
        list(_carried_out(effects))
        # A coordinator knows each worker as one process: another may have taken its place.
        kinds = [e.message.kind for e in effects if isinstance(e, Send)]
        if target.answered_by not in kinds and Kind.REFUSAL not in kinds:
            raise AssertionError(f"a right message was answered by {kinds}")
    except Exception as error:
        _note(target, error, [])


def _note(target: Target, error: Exception, frames: Sequence[bytes]) -> None:
    where = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(where) if "hocket" in f.filename), where[-1] if where else None)
    place = "" if last is None else f" in {Path(last.filename).name}:{last.lineno}"
    target.crashes.append(f"{type(error).__name__}{place}: {str(error)[:120]}")


# --- over sockets ----------------------------------------------------------------------------------------------------------------


def over_sockets(target: Target, count: int, seed: int, keys: Keys | None) -> str | None:
    """Send ``count`` messages and as many connections of other bytes to the listener of a real driver; what went wrong."""
    dice, failed = random.Random(f"{target.name} {seed} sockets"), list[BaseException]()
    program, effects = target.make()
    with Listener("tcp://127.0.0.1:0", JOB, keys) as listener:
        driver = SocketDriver(program, listener=listener, connect=lambda _, address: Caller(address, JOB, keys))
        over = threading.Event()

        def serve() -> None:
            try:
                while not over.is_set():
                    driver.poll(0.05)
            except BaseException as error:
                failed.append(error)

        driver.clock = lambda: 2.0 + time.monotonic()
        driver.carry_out([e for e in effects if isinstance(e, SetTimer)])
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            _flood(dice, target, listener.address, count, keys)
            answered = failed or _answers(target, listener.address, keys)
        finally:
            over.set()
            thread.join()
            for caller in driver.callers.values():
                caller.close(0)
    if failed:
        return f"{type(failed[0]).__name__}: {failed[0]}"
    return None if answered else "a right message was not answered"


def _flood(dice: random.Random, target: Target, address: str, count: int, keys: Keys | None) -> None:
    where = urlsplit(address)
    with zmq.Context() as context:
        for k in range(0, count, 50):
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.setsockopt(zmq.SNDTIMEO, 20_000)
            stranger.setsockopt(zmq.ROUTING_ID, dice.choice(target.messages)[0] or b"x")
            if keys is not None:
                stranger.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public.encode())
                stranger.setsockopt(zmq.CURVE_PUBLICKEY, keys.worker_public.encode())
                stranger.setsockopt(zmq.CURVE_SECRETKEY, keys.worker_secret.encode())
            stranger.connect(address)
            for _ in range(min(50, count - k)):
                stranger.send_multipart(frames_of(dice, target)[1])
            stranger.close()
            with contextlib.suppress(OSError), socket.create_connection((where.hostname, where.port), 5) as raw:
                raw.sendall(dice.choice((b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", dice.randbytes(200))))


def _answers(target: Target, address: str, keys: Keys | None) -> bool:
    peer, message = target.right
    with Caller(address, JOB, keys, peer) as caller:
        for _ in range(30):
            caller.send(message, 1.0)
            if caller.receive(1.0) is not None:
                return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--socket-messages", type=int, default=2000, help="of these, over real sockets, for each listener")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    every, others = targets(), listeners_of_bytes()
    before, begun, crashes = psutil.Process().memory_info().rss, time.monotonic(), 0
    each = given.messages // (len(every) + len(others))
    share = max(each - given.socket_messages, 0)
    for target in every:
        fuzz(target, share, given.seed)
        print(f"{target.name:30} {target.sent:8} in process   {_told(target)}", flush=True)
        for keys in (None, Keys.make()) if given.socket_messages else ():
            wrong = over_sockets(target, given.socket_messages // 2, given.seed, keys)
            if wrong is not None:
                target.crashes.append(f"over sockets: {wrong}")
        target.sent += given.socket_messages // 2 * 2
        crashes += _tell_crashes(target.crashes)
    for other in others:
        other.fuzz(each, given.seed)
        print(f"{other.name:30} {other.sent:8} of bytes     {other.told()}", flush=True)
        crashes += _tell_crashes(other.crashes)
    seconds, sent = time.monotonic() - begun, sum(one.sent for one in (*every, *others))
    grown = (psutil.Process().memory_info().rss - before) / 2**20
    print(f"{sent} messages in {seconds:.0f} s, {sent / seconds:.0f} per second; {crashes} crashes; memory grew by {grown:.0f} MiB")
    return int(crashes > 0)


def _tell_crashes(crashes: list[str]) -> int:
    for crash, times in Counter(crashes).most_common(8):
        print(f"    CRASH {times} × {crash}")
    return len(crashes)


def _told(target: Target) -> str:
    taken, rejected = target.found["taken"], target.found["rejected"]
    return f"{taken} taken, {rejected} rejected, {target.found.total() - taken - rejected} refused by the decoder"


if __name__ == "__main__":
    sys.exit(main())
