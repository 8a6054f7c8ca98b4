"""``hocket probe``: measures this machine or, under a launcher, the whole cluster, into a file that `hocket predict` reads."""

import os
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from hocket.cli.train import device_of
from hocket.cluster.base import Cluster
from hocket.cluster.join import find_launcher, join
from hocket.cluster.virtual import VirtualCluster
from hocket.data import load
from hocket.errors import HocketError
from hocket.models.registry import build, loss_for
from hocket.prediction.model import OPTIMIZERS, made_up, reads_text
from hocket.prediction.probe import CODES, LIMIT_S, probe
from hocket.strategy import Strategy
from hocket.train.simulate import seeded
from hocket.transport.tunnel import Tunnel


def command(
    model: Annotated[str, typer.Option(help="The model whose steps are timed: mlp, cnn, gpt:10m, … or module:factory.")] = "cnn",
    data: Annotated[str | None, typer.Option(help="The data set that the model is for (default: random samples).")] = None,
    batch_size: Annotated[int, typer.Option(help="Mini-batch per worker.")] = 100,
    optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")] = "momentum",
    code: Annotated[
        list[str] | None, typer.Option(help="A compression to time, such as 'topk(0.01)' (default: one of each kind).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda if there is one).")] = None,
    servers: Annotated[bool, typer.Option(help="With several workers, also measure how long a server takes for a push.")] = True,
    limit_s: Annotated[float, typer.Option(help="About how many seconds the probe takes.")] = LIMIT_S,
    keys: Annotated[Path | None, typer.Option(help="On several machines: keys made by `hocket keys`.")] = None,
    out: Annotated[Path, typer.Option(help="The cluster file to write.")] = Path("cluster.toml"),
) -> None:
    """Measure compute, codes and links into a cluster file; under torchrun, mpirun or srun those of a cluster."""
    sys.path.insert(0, os.getcwd())  # for module:factory
    if optimizer not in OPTIMIZERS:
        raise HocketError(f"--optimizer {optimizer}: use one of {', '.join(OPTIMIZERS)}.")
    for text in code or ():
        Strategy.parse(f"bulk + {text}")
    if not out.parent.is_dir():
        raise HocketError(f"--out {out}: the folder {out.parent} is not there; make it first.")
    where = device_of(device)
    dataset = load(data) if data is not None else made_up(text=reads_text(model), samples=batch_size)
    if len(dataset.samples) < batch_size:
        raise HocketError(f"--batch-size {batch_size}: the data set has {len(dataset.samples)} samples; use at most as many.")
    x, y = (t.to(where) for t in dataset.samples[torch.arange(batch_size)])
    built = seeded(lambda: build(model, dataset), 0).to(where)
    cluster: Cluster = VirtualCluster(1, where)
    if find_launcher(os.environ) is not None:
        cluster = join(device=where, keys=keys, tunnel=None if keys is None else Tunnel.with_keys(keys))
    try:
        found = probe(
            built, loss_for(dataset), (dataset.prepare(x), y), cluster, optimizer=OPTIMIZERS[optimizer], codes=code or CODES,
            name=out.stem, limit_s=limit_s, servers=servers,
        )  # fmt: skip
    finally:
        cluster.close()
    if cluster.workers.start == 0:
        text = found.text().replace(type(built).__name__, model, 1)
        out.write_text(text)
        print(text + f"# written to {out}; edit it, and use it with hocket predict --cluster {out}")
