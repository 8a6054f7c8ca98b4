"""What a checkpoint costs: how long training stands still for it, and an epoch with checkpoints beside one without.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --elastic 2

One worker and an MLP of ``--widths`` on made-up images, ``--steps`` steps per epoch, a checkpoint after every epoch (the default of
``hocket train``). *blocked* is the time for which ``save`` holds the training up (states are copied; a checkpoint that is still
being written is awaited), as a share of the epoch's seconds. *CPU* is the processor time of copying and writing, as a share of the
epoch's: what training loses where no core is idle.

``--elastic N``: an elastic run of N processes and an MLP on the digits. Its workers agree on each checkpoint in one exchange, and
make the mean model in another; *blocked* has both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hocket.cluster import VirtualCluster
from hocket.data.base import DataSet, identity
from hocket.strategy import Strategy
from hocket.train.checkpoints import Checkpoints, process_file
from hocket.train.loop import Training, TrainingPlan
from hocket.train.replicas import LiveReplica
from hocket.train.runtimes.collective import CollectiveRuntime

PIXELS, CLASSES, BATCH = 784, 10, 64


def training(width: int, steps: int, epochs: int) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(PIXELS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))
    x, y = torch.randn(BATCH * steps, PIXELS), torch.randint(0, CLASSES, (BATCH * steps,))
    data, cluster = DataSet("made-up", (x, y), None, CLASSES, identity), VirtualCluster(1, timed=True)
    optimizer = lambda params: torch.optim.Adam(params, 1e-4)  # noqa: E731
    replica = LiveReplica(model, F.cross_entropy, optimizer, Strategy(), CollectiveRuntime(cluster))
    return Training(replica, cluster, data, F.cross_entropy, TrainingPlan(epochs=epochs, batch_size=BATCH))


class Timed(Checkpoints):
    """Knows the processor time that its thread took."""

    cpu_s = 0.0

    def _write(self, *arguments: Any) -> None:
        super()._write(*arguments)
        self.cpu_s = time.thread_time()


def elastic(workers: int, epochs: int, folder: Path | None) -> None:
    """An elastic run by the command line, each of whose workers is :func:`member`."""
    from hocket.supervisor.elastic import ElasticRun
    from hocket.train.elastic import Elastic

    with tempfile.TemporaryDirectory(dir=folder) as out:
        limits = f"{workers}:{workers}"
        arguments = ["train", "--data", "digits", "--model", "mlp", "--elastic", limits, "--epochs", str(epochs), "--out", out]
        ElasticRun([sys.executable, __file__, "--member", *arguments], workers, Elastic(workers, workers), replace=False).run()
        lines = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
        told = json.loads(Path(out, "blocked.json").read_text())
        size = sum(path.stat().st_size for path in Path(out, "checkpoints", str(epochs)).iterdir())
    epoch, blocked = statistics.median(line["wall_s"] for line in lines), statistics.median(told)
    share = blocked / epoch
    print(f"{workers} workers  checkpoint {size / 1e6:.1f} MB  epoch {epoch:.1f} s  blocked {1e3 * blocked:.1f} ms  {share:.2%}")


def member(arguments: list[str]) -> None:
    """One worker; the first one writes how long each checkpoint held it up."""
    from hocket.cli.main import main as command
    from hocket.train import elastic_checkpoints

    save, blocked = elastic_checkpoints._save, list[float]()

    def timed(training: Any, kept: Checkpoints, *given: Any, **options: Any) -> None:
        begun = time.perf_counter()
        save(training, kept, *given, **options)
        blocked.append(time.perf_counter() - begun)
        if training.cluster.rank == 0:
            (kept.folder.parent / "blocked.json").write_text(json.dumps(blocked))

    elastic_checkpoints._save = timed
    sys.argv = ["hocket", *arguments]
    command()


def main() -> None:
    if sys.argv[1:2] == ["--member"]:
        member(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="256,1024,3072", help="of the MLPs, with commas between them")
    parser.add_argument("--steps", type=int, default=200, help="steps per epoch")
    parser.add_argument("--rounds", type=int, default=5, help="checkpoints")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: the temporary folder)")
    parser.add_argument("--elastic", type=int, help="an elastic run of so many processes instead")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.elastic is not None:
        elastic(given.elastic, given.rounds, given.folder)
        return
    print("parameters  checkpoint    step  epoch   copied in  blocked  written in     CPU")
    for width in map(int, given.widths.split(",")):
        loop = training(width, given.steps, 2 * given.rounds + 1)
        epochs = loop.run()
        next(epochs)
        seconds, cpu, blocked, wrote, waited = [], [], [], [], []
        with tempfile.TemporaryDirectory(dir=given.folder) as folder, Timed(Path(folder), loop.cluster) as kept:
            for _ in range(given.rounds):
                begun, used = time.perf_counter(), time.thread_time()
                next(epochs)
                seconds.append(time.perf_counter() - begun)
                cpu.append(time.thread_time() - used)
                begun, used = time.perf_counter(), time.thread_time()
                facts = {"step": loop.step, "epoch": loop.epoch, "workers": 1, "processes": 1, "run": {}}
                kept.save({process_file(0): loop.state_dict()}, facts)
                blocked.append(time.perf_counter() - begun)
                copied = time.thread_time() - used
                next(epochs)
                begun = time.perf_counter()
                kept.wait()
                waited.append(time.perf_counter() - begun)
                wrote.append(copied + kept.cpu_s)
            size = sum(path.stat().st_size for path in Path(folder, str(given.rounds)).iterdir())
        parameters = sum(p.numel() for p in loop.replicas.model.parameters())
        epoch, copy = statistics.median(seconds), statistics.median(blocked)
        more = statistics.median(wrote) / statistics.median(cpu)
        late = "the epoch" if max(waited) < 0.01 * epoch else f"{max(waited):.1f} s more"
        print(
            f"{parameters:10,}  {size / 1e6:7.1f} MB  {1e3 * epoch / given.steps:4.1f} ms  {epoch:4.1f} s  {1e3 * copy:6.1f} ms  "
            f"{copy / epoch:7.2%}  {late:>10}  {more:6.2%}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
