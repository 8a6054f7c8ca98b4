"""Damaged checkpoints and snapshots: flipped bits, truncations, other structures. Nothing may crash, nothing wrong may be loaded.

    python benchmarks/fuzz_checkpoints.py --count 100000

Two generations of a small run lie in a folder, two of an elastic run in another (of whole models, of a split one, and one that was
saved in the middle of an epoch), and two snapshots of a shard in a third. Each time the newest of one of them is damaged, both are
read as a resumed run and a restarted shard read them, and what was loaded is compared with what had been saved: it must be the
newest generation (where the damage is none), or the one before it, or a refusal in one sentence. What workers of an elastic run
tell each other in files is damaged, too: the generation must then be whole, or not be there.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import io
import json
import os
import random
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

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
from hocket.train.checkpoints import MANIFEST, WHOLE, Checkpoints, Generation, process_file
from hocket.train.elastic_checkpoints import FolderAgreement
from hocket.train.loop import EpochLoop, Training, TrainingPlan
from hocket.train.replicas import LiveReplica
from hocket.train.resume import Resumption, check_structure
from hocket.train.runtimes.collective import CollectiveRuntime
from hocket.train.settings import RunSettings
from hocket.train.simulate import train_rows

STATE = process_file(0)
OTHER_KINDS = (None, "text", [torch.zeros(2, 2)], {"a": 1}, torch.zeros(3))
PLAIN = (None, "text", [1], {"a": 1}, -1, 0, 10**30, 0.5)
FACTS = {"workers": 2, "processes": 1, "run": {}}


def data() -> DataSet:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 4, generator=generator), torch.randint(0, 3, (48,), generator=generator)
    return DataSet("d", (x, y), (x, y), 3, identity)


def network(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


def planned(seed: int = 1) -> TrainingPlan:
    return TrainingPlan(epochs=3, batch_size=4, seed=seed, evaluate=False, evaluate_last=False)


def training(strategy: str, workers: int = 2, width: int = 5, seed: int = 1) -> EpochLoop:
    given = (data(), Strategy.parse(strategy), VirtualCluster(workers), planned(seed))
    return train_rows(partial(network, width), F.cross_entropy, sgd, *given)


def alone(strategy: str, seed: int = 1) -> Training:
    """A process with one worker."""
    torch.manual_seed(seed)
    cluster = VirtualCluster(1, timed=True)
    replica = LiveReplica(network(), F.cross_entropy, sgd, Strategy.parse(strategy), CollectiveRuntime(cluster))
    return Training(replica, cluster, data(), F.cross_entropy, planned(seed))


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


def restructured(state: Any, draw: random.Random, others: Sequence[Any] = OTHER_KINDS) -> Any:
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
        holder[name] = draw.choice([other for other in others if not isinstance(other, type(part))])
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


class Elastic:
    """Two generations of two processes of an elastic run, as a run of one worker goes on from them."""

    STRATEGY = "local(2) + topk(0.2)"
    SHAPES: ClassVar[dict[str, dict[str, Any]]] = {
        "whole models": {"workers": 2, "processes": 2, "within": False, "host_size": 1, "run": {"virtual": False}},
        "split": {"workers": 1, "processes": 2, "within": False, "host_size": 1, "run": {"virtual": False, "mesh": "pipeline=2"}},
        "in the middle": {"workers": 2, "processes": 2, "within": True, "host_size": 1, "run": {"virtual": False}},
    }

    def __init__(self, folder: Path) -> None:
        self.folder, self.settings = folder, RunSettings.of(strategy=self.STRATEGY, workers=1, momentum=0.9)
        loops = [alone(self.STRATEGY, seed) for seed in (1, 2)]
        self.states: dict[int, dict[str, Any]] = {}
        for number, *_ in zip((1, 2), *(loop.run() for loop in loops), strict=False):
            states = {process_file(k): copy.deepcopy(loop.state_dict()) for k, loop in enumerate(loops)}
            first = states[STATE]["replicas"]
            whole = {**states[STATE], "replicas": None, "model": first["model"], "optimizer": first["optimizer"]}
            self.states[number] = {**states, WHOLE: whole}  # as a split model put together
        self.saved = {(n, shape): self._alone(n, shape) for n in self.states for shape in ("whole models", "split")}

    def _resumption(self) -> Resumption:
        loop = alone(self.STRATEGY)
        return Resumption(self.settings, loop.cluster, loop, {"virtual": False}, 0, 1)

    def _alone(self, number: int, shape: str) -> str:
        """What a run has that goes on from this generation alone."""
        self._write(number, *self._files(number, shape))
        run = self._resumption()
        run._load(Generation.read(self.folder / str(number)))
        return digest(run.training.state_dict()["replicas"])

    def _files(self, number: int, shape: str) -> tuple[dict[str, bytes], dict[str, Any]]:
        state = self.states[number]
        names = [name for name in state if name != WHOLE or shape == "split"]
        place = {"step": state[STATE]["step"], "epoch": state[STATE]["epoch"]}
        return {name: state_bytes(state[name]) for name in names}, {**place, **self.SHAPES[shape]}

    def _write(self, number: int, files: dict[str, bytes], facts: dict[str, Any]) -> None:
        folder = self.folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        sealed_files = {name: [len(content), zlib.crc32(content)] for name, content in files.items()}
        (folder / MANIFEST).write_bytes(sealed_json({"files": sealed_files, "facts": facts}))

    def attempt(self, draw: random.Random) -> str:
        shape, run = draw.choice(list(self.SHAPES)), self._resumption()
        before = "split" if shape == "split" else "whole models"
        self._write(1, *self._files(1, before))
        files, facts = self._files(2, shape)
        name, how = draw.choice(list(files)), draw.choice(["damage", "damage", "manifest", "structure", "facts", "lost"])
        if how == "structure":
            files[name] = state_bytes(restructured(self.states[2][name], draw))
        elif how == "facts":
            facts = restructured(facts, draw, PLAIN)
        self._write(2, files, facts)
        folder, kind = self.folder / "2", how
        if how in ("damage", "manifest"):
            path = folder / (name if how == "damage" else MANIFEST)
            kind, content = damaged(path.read_bytes(), draw)
            path.write_bytes(content)
        elif how == "lost":
            (folder / name).unlink()
        try:
            generation = Checkpoints(self.folder, run.cluster).resume(run._needed, run._load)
        except HocketError:
            return f"elastic, {kind}: refused"
        if how == "facts":  # what a manifest says with the right checksum is believed where it can be
            return f"elastic, {kind}: generation {generation.number} taken"
        taken = before if generation.number == 1 else shape
        if self.saved.get((generation.number, taken)) != digest(run.training.state_dict()["replicas"]):
            raise AssertionError(f"elastic, {shape}, {name}, {how}: generation {generation.number} was loaded, not as saved")
        return f"elastic, {kind}: generation {generation.number} taken"


class Told:
    """What the second worker of an elastic run tells the first one of a checkpoint, damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said, self.failed = folder, list[str](), list[str]()
        folder.mkdir()
        threading.excepthook = lambda raised: self.failed.append(repr(raised.exc_value))
        self.kept = Checkpoints(folder, VirtualCluster(1), note=self.said.append)
        self.second = Checkpoints(folder, VirtualCluster(1))

    def attempt(self, draw: random.Random) -> str:
        number, mark = self.kept.next, draw.getrandbits(52)
        first, second = (FolderAgreement(self.folder, place, 2, lambda: False, 0.0, mark) for place in range(2))
        first.clear()
        facts = {**FACTS, "processes": 2, "step": number, "epoch": number}
        for kept, agreement in ((self.second, second), (self.kept, first)):
            kept.meet(agreement, number)
            if kept is self.kept:
                (path,) = (self.folder / "told").iterdir()
                kind = self._spoil(path, draw)
            kept.save({process_file(agreement.rank): {"weights": torch.full((50,), float(number))}}, facts)
            kept.wait()
        if self.failed:
            raise AssertionError(f"told, {kind}: {self.failed[0]}")
        newest = self.kept.newest()
        if newest is None or newest.number != number:
            if not self.said or not self.said[-1].startswith(f"Checkpoint {number} was not saved: process 1 "):
                raise AssertionError(f"told, {kind}: checkpoint {number} is not there, and nobody said so")
            return f"told, {kind}: not saved"
        for place in range(2):
            if not torch.equal(newest.load(process_file(place))["weights"], torch.full((50,), float(number))):
                raise AssertionError(f"told, {kind}: checkpoint {number} is not what was written")
        return f"told, {kind}: saved"

    def _spoil(self, path: Path, draw: random.Random) -> str:
        content = path.read_bytes()
        if draw.random() < 0.7:
            kind, content = damaged(content, draw)
        else:
            kind, told = "structure", unsealed_json(content)
            other = draw.choice(
                ("", "[]", "{}", "[null, []]", "[3, {}]", '["no space", {}]', "null", "[" * 2000, json.dumps([None]))
            )
            content = sealed_json({"said": other} if draw.random() < 0.8 else restructured({**told, "more": 1}, draw, PLAIN))
        path.write_bytes(content)
        return kind


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
    os.fsync = lambda _: None  # no power cut is looked at here
    draw, found = random.Random(given.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        kinds = [Checkpointed(Path(folder, "checkpoints")), Elastic(Path(folder, "elastic")), Told(Path(folder, "told"))]
        kinds.append(Snapshotted(Path(folder, "snapshots")))
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
