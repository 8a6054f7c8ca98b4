"""A worker's link is cut for some seconds while it trains: how soon after the link is back is the worker, and what was lost.

    python benchmarks/heal.py --cut 10

Three hosts of a lab (see netlab.py): one shard, two workers, links with keys. When both workers have pushed a few times, the switch
drops all packets of the second one, in silence, for ``--cut`` seconds. It is back when its next push arrives. A cut that is longer
than ``--liveness-timeout`` makes the shard go on without the worker meanwhile.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from netlab import Lab, require
from torch import Tensor, nn

from hocket.drivers.shard_process import start_serving
from hocket.programs.base import Address
from hocket.programs.server.shard_server import ShardServer
from hocket.train.async_worker import WorkerTask, work
from hocket.transport import Envelope, Keys, Kind, Listener

JOB = bytes(range(16, 32))
PORT = 41500
WORKERS, CUT_OFF = 2, 1
PUSHES = 10
"""So many of each worker's pushes come before the cut."""
PACE_S = 0.02
LIMIT_S = 300.0
NETWORK = 0x40000000
"""Linux's CLONE_NEWNET."""


@dataclass(frozen=True)
class Outcome:
    """What became of a training whose link was cut."""

    strategy: str
    back_s: float
    """From the link's return to the next push that arrives over it."""
    silent_s: float
    """The longest time between two pushes of that worker."""
    done: int
    total: int
    lost: int
    said: str
    """What the shard said meanwhile."""


class Paced(nn.Flatten):
    """Steps take at least ``PACE_S``, however quick the machine is."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(PACE_S)
        return super().forward(x)


def small() -> nn.Module:
    """What is trained."""
    return nn.Sequential(Paced(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def measure(strategy: str, cut_s: float, liveness_timeout_s: float, epochs: int) -> Outcome:
    """Train, cut, mend, and see how it ends."""
    with tempfile.TemporaryDirectory() as name, Lab(1 + WORKERS) as lab:
        folder = Path(name)
        Keys.make().write(folder / "keys")
        settings = {"strategy": strategy, "model": "heal:small", "batch_size": 32, "workers": WORKERS, "epochs": epochs}
        told = {"address": f"tcp://{lab.addresses[0]}:{PORT}", "settings": settings, "liveness_timeout_s": liveness_timeout_s}
        fork = multiprocessing.get_context("fork")  # torch is imported once
        roles = (None, *range(WORKERS))
        family = [fork.Process(target=live, args=(lab.namespace(h), role, folder, told)) for h, role in enumerate(roles)]
        try:
            for process in family:
                process.start()
            _wait(lambda: (folder / "begun").exists() or family[0].exitcode is not None)
            lab.plug(1 + CUT_OFF, False)
            family[0].join(cut_s)
            lab.plug(1 + CUT_OFF, True)
            back = time.monotonic()
            _wait(lambda: all(process.exitcode is not None for process in family))
        finally:
            for process in family:
                process.kill()
                process.join()
        said = (folder / "shard.err").read_text()
        if codes := [process.exitcode for process in family if process.exitcode]:
            raise RuntimeError(f"a process ended with {codes[0]}: {said[-1500:]}")
        end = json.loads((folder / "end").read_text())
    after = next((at for at in end["pushes"] if at > back), float("inf"))
    silent = max(b - a for a, b in zip(end["pushes"], end["pushes"][1:], strict=False))
    return Outcome(strategy, after - back, silent, end["done"], end["total"], end["lost"], said)


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the training did not come so far within {LIMIT_S:g} s")
        time.sleep(0.02)


def live(namespace: str, worker: int | None, folder: Path, told: dict[str, Any]) -> None:
    """A process on a host of the lab: the shard, or a worker."""
    with open(f"/run/netns/{namespace}") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), NETWORK):
            raise OSError(ctypes.get_errno(), f"{namespace} cannot be entered")
    torch.set_num_threads(1)
    if worker is None:
        be_shard(folder, told["address"], told["liveness_timeout_s"])
    else:
        keys = str(folder / "keys")
        work(
            WorkerTask(
                told["settings"], worker, [told["address"]], JOB.hex(), keys=keys, liveness_timeout_s=told["liveness_timeout_s"]
            )
        )


def be_shard(folder: Path, address: str, liveness_timeout_s: float) -> None:
    """Serve until all workers have left; write how it ended and when the pushes of the one that is cut off came."""
    os.dup2(os.open(folder / "shard.err", os.O_WRONLY | os.O_CREAT), 2)
    pushes: list[list[float]] = [[] for _ in range(WORKERS)]

    class Watched(ShardServer):
        def on_message(self, sender: Address, message: Envelope) -> None:
            super().on_message(sender, message)
            if message.kind == Kind.PUSH:
                pushes[message.sender].append(time.monotonic())
                if min(map(len, pushes)) == PUSHES:
                    (folder / "begun").touch()

    with Listener(address, JOB, Keys.read(folder / "keys")) as listener:
        server = Watched(0, liveness_timeout_s)
        start_serving(server, listener).serve()
        figures = server.figures()
    end = {"done": figures["progress"], "total": server.epochs.total, "lost": figures["lost"], "pushes": pushes[CUT_OFF]}
    (folder / "end").write_text(json.dumps(end))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["async + server", "ssp(4) + server", "bulk + server"])
    parser.add_argument("--cut", type=float, default=10.0, help="seconds without a link (default 10)")
    parser.add_argument(
        "--liveness-timeout", type=float, default=5.0, help="after so many seconds the shard goes on without (default 5)"
    )
    parser.add_argument("--epochs", type=int, default=30, help="long enough to outlast the cut (default 30)")
    parser.add_argument("--json", action="store_true", help="one line of JSON per strategy")
    return parser.parse_args(arguments)


def main() -> None:
    """The command."""
    options = parse()
    try:
        require()
        if not options.json:
            print(
                f"one of {WORKERS} workers cut off for {options.cut:g} s, given up after {options.liveness_timeout:g} s of silence"
            )
            print(f"{'strategy':24} {'back after':>11} {'silent':>8} {'done':>13} {'lost':>6}")
        for strategy in options.strategies:
            found = measure(strategy, options.cut, options.liveness_timeout, options.epochs)
            done = f"{found.done} of {found.total}"
            line = f"{strategy:24} {found.back_s:9.2f} s {found.silent_s:6.1f} s {done:>13} {found.lost:6}"
            print(json.dumps(asdict(found)) if options.json else line, flush=True)
    except (RuntimeError, TimeoutError) as error:
        raise SystemExit(f"heal: {error}") from None


if __name__ == "__main__":
    main()
