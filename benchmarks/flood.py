"""Made-up messages against a shard that serves a training: what it refuses, what that costs it, and whether a bit changes.

    python benchmarks/flood.py --frames 100000

One shard and two workers (``bulk + server``) on this machine, once in peace and once under a flood that begins when the workers
have begun to push and ends before their last steps. The flood is real messages with something wrong, from a seed: cut short, bytes
changed, frames added, dropped or exchanged, other kinds, senders, jobs and shapes, huge numbers; half of them with a checksum that
is right nevertheless. Strangers come and go under new names all the time and read nothing of what they are told before they leave.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import struct
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import psutil
import torch
import zmq
from torch import Tensor, nn

from hocket.cluster.layout import Layout
from hocket.data import load
from hocket.drivers.server_runtime import Observer
from hocket.drivers.shard_process import start_serving
from hocket.programs.server.push_encoder import Slices
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.wire import OBSERVER, job_config, link_bytes
from hocket.strategy import Strategy
from hocket.train.async_worker import WorkerTask, work
from hocket.train.checks import layout_for
from hocket.train.settings import RunSettings
from hocket.transport import Envelope, Kind, Listener, Refused, pack, unpack

JOB = bytes(range(32, 48))
WORKERS, STRANGERS = 2, 8
SETTINGS: dict[str, Any] = {"strategy": "bulk + server", "model": "flood:small", "batch_size": 32, "workers": WORKERS, "epochs": 2}
BEFORE, UNTIL = 5, 30
"""The flood begins after so many steps; workers that have done so many wait for its end."""
PACE_S = 0.02
SAY_EVERY = 400
"""A stranger sends so many messages under one name."""
LIMIT_S = 600.0
MOST_GROWTH = 16 << 20
"""So many bytes a shard may grow by, whatever is sent to it."""

_fork = multiprocessing.get_context("fork")  # torch is imported once
_over = _fork.Event()
sys.modules.setdefault("flood", sys.modules[__name__])  # workers find `flood:small` here, with the same event


@dataclass(frozen=True)
class Outcome:
    """What a flood did."""

    frames: int
    seconds: float
    refused: dict[str, int]
    growth_bytes: int
    """Of the shard's resident memory, from before the flood to its end."""
    same_bits: bool
    lost: int


class Paced(nn.Flatten):
    """Takes its time, and trains the last steps only after the flood."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(PACE_S)
        self.steps += 1
        if self.steps > UNTIL:
            _over.wait()
        return super().forward(x)


def small() -> nn.Module:
    """What is trained."""
    return nn.Sequential(Paced(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


class Training:
    """One shard and its workers, as processes; afterwards nobody is left."""

    def __enter__(self) -> Training:
        _over.clear()
        here, there = _fork.Pipe()
        self.shard = _fork.Process(target=_serve, args=(there,))
        self.shard.start()
        self.address: str = here.recv()
        self.workers = [_fork.Process(target=_work, args=(k, self.address)) for k in range(WORKERS)]
        for worker in self.workers:
            worker.start()
        self.layout, slices, most = plan()
        self.observer = Observer([self.address], JOB, self.layout, slices, most, None)
        self.process = psutil.Process(self.shard.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self.observer.close(0)
        for worker in self.workers:
            worker.kill()
            worker.join()
        self.shard.kill()
        self.shard.join()

    def status(self) -> dict[str, Any]:
        return self.observer.statuses(5.0).get(0) or {"progress": 0, "refused": {}, "lost": 0}

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > deadline or self.shard.exitcode is not None:
                raise RuntimeError(f"the shard does not serve any more (exit code {self.shard.exitcode})")
            time.sleep(0.05)

    def end(self) -> tuple[dict[str, Any], Tensor]:
        """Let the workers train to the end; the last status and the weights."""
        _over.set()
        self.wait(lambda: all(worker.exitcode is not None for worker in self.workers))
        if codes := [worker.exitcode for worker in self.workers if worker.exitcode]:
            raise RuntimeError(f"a worker ended with {codes[0]}")
        found = self.observer.global_weights(30.0)
        if found is None:
            raise RuntimeError("the shard does not tell the weights")
        return self.status(), torch.cat([row.flatten() for row in found.rows])


def plan() -> tuple[Layout, Slices, int]:
    """The layout of the model, its slices, and the largest message."""
    settings, model = RunSettings.of(**SETTINGS), small()
    strategy = settings.strategy
    layout = layout_for(model, settings.optimizer_for(model)(list(model.parameters())), strategy, None, None)
    return layout, Slices.of(strategy, layout, WORKERS), link_bytes(strategy, layout)


def _serve(there: Any) -> None:
    torch.set_num_threads(1)
    with Listener("tcp://127.0.0.1:0", JOB) as listener:
        there.send(listener.address)
        start_serving(ShardServer(0, liveness_timeout_s=120.0, stays=True), listener).serve()


def _work(worker: int, address: str) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    work(WorkerTask(SETTINGS, worker, [address], JOB.hex(), liveness_timeout_s=120.0))


# --- strangers -----------------------------------------------------------------------------------------------------------------


def originals(layout: Layout) -> list[list[bytes]]:
    """Messages as workers and observers send them, of nobody who belongs to the job."""
    config = job_config(Strategy.parse(SETTINGS["strategy"]), layout, 0, WORKERS)
    gradients = tuple(torch.randn(bucket.size) for bucket in layout.buckets)
    push = {
        "parts": [[1, 0]] * len(gradients),
        "lrs": [0.1],
        "fetch": True,
        "seen": 3,
        "batch_ids": [1],
        "want": 1,
        "buffers": False,
    }
    made = [
        Envelope(Kind.HELLO, 0, metadata={"job_config": config, "pushed": 0, "replaces": False}),
        Envelope(
            Kind.HELLO, 1, metadata={"job_config": {**config, "model": "x"}, "pushed": 2**62, "replaces": False}, tensors=gradients
        ),
        Envelope(Kind.PUSH, 0, 0, 7, 9, {**push, "figures": {"seconds": 1.0}}, gradients),
        Envelope(Kind.PUSH, 1, 0, 2**62, 9, push, tuple(g[:-1] for g in gradients)),
        Envelope(Kind.FETCH, 1, 0, 3, 4, {"fetch": True, "want": 2**40, "final": True}),
        Envelope(Kind.FETCH, OBSERVER, number=4, metadata={"epoch": 10**9, "within_s": 1e300}),
        Envelope(Kind.GOODBYE, 0),
        Envelope(Kind.BEAT, 1),
        Envelope(Kind.ANSWER, 1, metadata={"x": [[[1]]]}),
    ]
    return [[bytes(frame) for frame in pack(envelope, JOB)] for envelope in made]


def mutated(dice: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """A message with something wrong."""
    frames = list(frames)
    for _ in range(dice.randint(1, 3)):
        k = dice.randrange(len(frames)) if frames else 0
        choice = dice.randrange(8)
        if not frames or choice == 0:
            frames.insert(k, dice.randbytes(dice.choice((0, 1, 5, 56, 70, 300))))
        elif choice == 1:
            del frames[k]
        elif choice == 2:
            frames[k] = frames[k][: dice.randint(0, len(frames[k]))]
        elif choice == 3:
            frames[k] += dice.randbytes(dice.randint(1, 20))
        elif choice == 4:
            dice.shuffle(frames)
        elif frames[k]:
            at = dice.randrange(min(len(frames[k]), 64))
            frames[k] = frames[k][:at] + bytes([dice.randrange(256)]) + frames[k][at + 1 :]
    if dice.random() < 0.5 and len(frames) >= 2 and len(frames[0]) > 60:
        head = frames[0][:-4]
        frames[0] = head + struct.pack("<I", zlib.crc32(frames[1], zlib.crc32(head)))
    return frames or [b""]


def flood(address: str, layout: Layout, frames: int, seed: int) -> None:
    """Send so many messages; each waits until the shard has room for it."""
    dice, real, sent = random.Random(seed), originals(layout), 0
    with zmq.Context() as context:
        while sent < frames:
            sockets = [context.socket(zmq.DEALER) for _ in range(STRANGERS)]
            for stranger in sockets:
                stranger.setsockopt(zmq.RCVHWM, 1)
                stranger.setsockopt(zmq.SNDTIMEO, int(LIMIT_S * 1000))
                stranger.connect(address)
            for number in range(min(SAY_EVERY * STRANGERS, frames - sent)):
                sockets[number % STRANGERS].send_multipart(mutated(dice, dice.choice(real)))
                sent += 1
            for stranger in sockets:
                _hear_out(stranger)
                stranger.close(linger=0)


def _hear_out(stranger: zmq.Socket[bytes]) -> None:
    """Wait until the shard has come to the end of what was sent: who leaves before takes what is under way along."""
    asks, asked = pack(Envelope(Kind.ORDER, OBSERVER, metadata={"order": "status"}), JOB), 0.0
    while True:
        if time.monotonic() - asked > 1.0:
            stranger.send_multipart(asks)
            asked = time.monotonic()
        while stranger.poll(100):
            with contextlib.suppress(Refused):  # refusals name no job
                if unpack(stranger.recv_multipart(), JOB, 1 << 20).kind == Kind.ANSWER:
                    return


def measure(frames: int, seed: int = 0) -> Outcome:
    """In peace, and under a flood."""
    with Training() as training:
        _, expected = training.end()
    with Training() as training:
        training.wait(lambda: training.status()["progress"] >= BEFORE * WORKERS)
        before, begun = training.process.memory_info().rss, time.monotonic()
        stranger = _fork.Process(target=flood, args=(training.address, training.layout, frames, seed))
        stranger.start()
        training.wait(lambda: stranger.exitcode is not None)
        seconds, growth = time.monotonic() - begun, training.process.memory_info().rss - before
        status, found = training.end()
    return Outcome(frames, seconds, status["refused"], growth, torch.equal(found, expected), status["lost"])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=100_000, help="messages to send (default 100000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load("digits")
    try:
        found = measure(options.frames, options.seed)
    except RuntimeError as error:
        raise SystemExit(f"flood: {error}") from None
    if options.json:
        print(json.dumps(asdict(found)))
        return
    print(f"{found.frames} messages in {found.seconds:.1f} s, {sum(found.refused.values())} refused: {found.refused}")
    print(f"the shard grew by {found.growth_bytes / 2**20:.1f} MB; lost mini-batches: {found.lost}; same bits: {found.same_bits}")
    if found.growth_bytes > MOST_GROWTH or not found.same_bits or found.lost:
        raise SystemExit("flood: the shard did not stand it")


if __name__ == "__main__":
    main()
