"""A worker of torchft's, for benchmarks/elastic.py: the same network and data, DDP or LocalSGD on Gloo, one replica per process."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.local_sgd import LocalSGD

from hocket.data import load
from hocket.models import build

BATCH = 16


def main(strategy: str, folder: Path, planned: int, place: int, seed: int) -> None:
    """Until ``planned`` steps are made."""
    torch.set_num_threads(1)
    digits = load("digits", None)
    torch.manual_seed(seed)
    model = build("cnn", digits)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    period = 16 if strategy.startswith("local") else 1

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        use_async_quorum=period == 1,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"worker{place}",
        hostname="127.0.0.1",
    )
    together: Any = LocalSGD(manager, model, optimizer, period) if period > 1 else nullcontext()
    net = model if period > 1 else DistributedDataParallel(manager, model)
    stepper: Any = optimizer if period > 1 else Optimizer(manager, optimizer)
    dealt = torch.Generator().manual_seed(1000 * seed + 10 * place + os.getpid() % 10)
    x, y = digits.train
    with open(folder / f"{os.getpid()}.steps", "w", buffering=1) as steps, together:
        made = 0
        while (done := manager.current_step() * period) < planned:
            given = torch.randint(len(x), (BATCH,), generator=dealt)
            stepper.zero_grad()
            F.cross_entropy(net(digits.prepare(x[given])), y[given]).backward()
            stepper.step()
            made += 1
            steps.write(f"{time.time()} {done + made % period}\n")
    assert digits.test is not None
    with torch.no_grad():
        right = (model.eval()(digits.prepare(digits.test[0])).argmax(1) == digits.test[1]).float().mean()
    (folder / f"{os.getpid()}.json").write_text(json.dumps({"accuracy": float(right)}))
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    os._exit(0)
