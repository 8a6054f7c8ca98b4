"""Damaged checkpoints and snapshots: flipped bits, truncations, other structures. Nothing may crash, nothing wrong may be loaded.

    python benchmarks/fuzz_checkpoints.py --count 100000

Two generations of a small run lie in a folder, and two snapshots of a shard in another. Each time the newest of one of them is
damaged, both are read as a resumed run and a restarted shard read them, and what was loaded is compared with what had been saved:
it must be the newest generation (where the damage is none), or the one before it, or a refusal in one sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import io
import random
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hocket.cluster import VirtualCluster
from hocket.data.base import DataSet, identity
from hocket.drivers.shard_process import check_snapshot
from hocket.drivers.snapshots import Snapshots
from hocket.errors import HocketError
from hocket.files import read_state, sealed, sealed_json, state_bytes, unlike, unsealed_json
from hocket.programs.server.shard_server import ShardServer
from hocket.strategy import Strategy
from hocket.train.checkpoints import MANIFEST, Checkpoints, Generation, process_file
from hocket.train.loop import EpochLoop, TrainingPlan
from hocket.train.resume import check_structure
from hocket.train.simulate import train_rows

STATE = process_file(0)
OTHER_KINDS = (None, "text", [torch.zeros(2, 2)], {"a": 1}, torch.zeros(3))
FACTS = {"workers": 2, "processes": 1, "run": {}}


def training(strategy: str, workers: int = 2, width: int = 5, seed: int = 1) -> EpochLoop:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 4, generator=generator), torch.randint(0, 3, (48,), generator=generator)
    data = DataSet("d", (x, y), (x, y), 3, identity)
    plan = TrainingPlan(epochs=3, batch_size=4, seed=seed, evaluate=False, evaluate_last=False)
    model = lambda: nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))  # noqa: E731
    optimizer = lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)  # noqa: E731
    return train_rows(model, F.cross_entropy, optimizer, data, Strategy.parse(strategy), VirtualCluster(workers), plan)


def digest(value: Any) -> str:
    """Of plain data and tensors."""
    found = hashlib.sha256()

    def feed(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            found.update(f"{part.dtype}{tuple(part.shape)}".encode() + part.detach().contiguous().numpy().tobytes())
        elif isinstance(part, dict):
            for key in sorted(part, key=str):
                found.update(str(key).encode())
                feed(part[key])
        elif isinstance(part, (list, tuple)):
            for item in part:
                feed(item)
        else:
            found.update(repr(part).encode())

    feed(value)
    return found.hexdigest()


def damaged(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Damaged bytes, and how."""
    kind = draw.choice(["bit", "bits", "cut", "zeros", "longer", "noise", "empty"])
    changed = bytearray(content)
    if kind in ("bit", "bits"):
        for _ in range(1 if kind == "bit" else draw.randint(2, 64)):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del changed[draw.randrange(len(changed)) :]
    elif kind == "zeros":
        at = draw.randrange(len(changed))
        changed[at : at + draw.randint(1, 512)] = bytes(min(draw.randint(1, 512), len(changed) - at))
    elif kind == "longer":
        changed += draw.randbytes(draw.randint(1, 64))
    elif kind == "noise":
        changed = bytearray(draw.randbytes(draw.randint(1, len(changed))))
    else:
        changed = bytearray()
    return kind, bytes(changed)


def restructured(state: Any, draw: random.Random) -> Any:
    """The same state with one entry missing, or of another kind."""
    state = copy.deepcopy(state)
    part, name = state, ""
    while (names := [key for key in part if isinstance(key, str)] if isinstance(part, dict) else []) and (
        not name or draw.random() < 0.6
    ):
        name = draw.choice(names)
        holder, part = part, part[name]
    if draw.random() < 0.5 or not isinstance(part, (dict, list, torch.Tensor)):
        del holder[name]
    else:
        holder[name] = draw.choice([other for other in OTHER_KINDS if not isinstance(other, type(part))])
    return state


class Checkpointed:
    """Two generations of a run, the newer of which is damaged again and again."""

    OTHERS = (("bulk", {}), ("local(2) + topk(0.2)", {"workers": 3}), ("local(2) + topk(0.2)", {"width": 6}),
              ("local(2) + topk(0.2)", {"seed": 2}), ("gossip", {}), ("async + server", {}))  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self.folder, self.loop, self.fresh = folder, training("local(2) + topk(0.2)"), training("local(2) + topk(0.2)")
        kept = Checkpoints(folder, self.loop.cluster)
        self.saved: dict[int, str] = {}
        for number, _ in zip((1, 2), self.loop.run(), strict=False):
            state = self.loop.state_dict()
            self.saved[number] = digest(state["replicas"])
            kept.save({STATE: state}, {**FACTS, "step": self.loop.step, "epoch": self.loop.epoch})
        kept.wait()
        self.newest = {name: (folder / "2" / name).read_bytes() for name in (STATE, MANIFEST)}
        self.state = read_state(self.newest[STATE])
        self.others = []
        for strategy, options in self.OTHERS:
            other = training(strategy, **options)
            next(iter(other.run()))
            self.others.append(state_bytes(other.state_dict()))

    def attempt(self, draw: random.Random) -> str:
        """Damage it and go on from it; what happened."""
        names, how = dict(self.newest), draw.choice(["damage", "damage", "manifest", "structure", "other"])
        if how in ("damage", "manifest"):
            name = STATE if how == "damage" else MANIFEST
            kind, names[name] = damaged(names[name], draw)
        elif how == "structure":
            kind, names[STATE] = "structure", state_bytes(restructured(self.state, draw))
        else:
            kind, names[STATE] = "other", draw.choice(self.others)
        if kind in ("structure", "other"):  # with a manifest that fits
            manifest = unsealed_json(names[MANIFEST])
            manifest["files"][STATE] = [len(names[STATE]), zlib.crc32(names[STATE])]
            names[MANIFEST] = sealed_json(manifest)
        for name, content in names.items():
            (self.folder / "2" / name).write_bytes(content)
        try:
            generation = Checkpoints(self.folder, self.loop.cluster).resume(lambda _: [STATE], self._load)
        except HocketError:
            return f"{kind}: refused"
        if digest(self.loop.state_dict()["replicas"]) != self.saved[generation.number]:
            raise AssertionError(f"{kind}: generation {generation.number} was loaded, and is not what was saved")
        return f"{kind}: generation {generation.number} taken"

    def _load(self, generation: Generation) -> None:
        state = generation.load(STATE)
        check_structure(generation, self.fresh, state)
        self.loop.load_state_dict(state)


class Snapshotted:
    """Two snapshots of a shard."""

    def __init__(self, folder: Path) -> None:
        self.folder, loop = folder, training("async + server")
        self.kept = Snapshots(folder, 0)
        self.saved: list[str] = []
        for _ in zip(range(2), loop.run(), strict=False):
            self.state = loop.protocol.servers[0].state_dict()  # type: ignore[attr-defined]
            self.kept.save(self.state)
            self.saved.append(digest(self.state["shard"]))
        self.path = sorted(folder.glob("*.pt"))[-1]
        self.newest = self.path.read_bytes()

    def attempt(self, draw: random.Random) -> str:
        how = draw.choice(["damage", "damage", "structure"])
        if how == "damage":
            kind, content = damaged(self.newest, draw)
        else:
            kind, content = "structure", sealed(restructured(self.state, draw))
        self.path.write_bytes(content)
        with contextlib.redirect_stderr(io.StringIO()):
            found = self.kept.load(partial(check_snapshot, ShardServer(0)))
        if found is None:
            return f"snapshot, {kind}: none taken"
        which = digest(found["shard"])  # what is wrong with the description of the job is found when workers say theirs
        if which not in self.saved:
            raise AssertionError(f"snapshot, {kind}: something was loaded that was never saved: {unlike(self.state, found)}")
        return f"snapshot, {kind}: {'newest' if which == self.saved[-1] else 'the one before'} taken"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so long")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    draw, found = random.Random(given.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        kinds = [Checkpointed(Path(folder, "checkpoints")), Snapshotted(Path(folder, "snapshots"))]
        begun = time.monotonic()
        for _ in range(given.count):
            found[draw.choice(kinds).attempt(draw)] += 1
            if time.monotonic() - begun > given.seconds:
                break
        took = time.monotonic() - begun
    for what, count in sorted(found.items()):
        print(f"{count:8,}  {what}")
    total = sum(found.values())
    print(f"{total:8,} damaged checkpoints and snapshots in {took:.0f} s ({total / took:.0f} per second): no crash, no wrong load")


if __name__ == "__main__":
    sys.exit(main())
