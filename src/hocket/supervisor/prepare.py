"""The supervised run of some settings."""

from __future__ import annotations

from pathlib import Path

import torch

from hocket.errors import HocketError
from hocket.supervisor.evaluation import Evaluate
from hocket.supervisor.gossip import GossipRun
from hocket.supervisor.policy import FaultPolicy
from hocket.supervisor.run import SupervisedRun
from hocket.supervisor.servers import ServerRun
from hocket.train.settings import RunSettings

_KINDS: dict[str, type[SupervisedRun]] = {"server": ServerRun, "peers": GossipRun}


def prepare(
    settings: RunSettings,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    out: Path | None = None,
    policy: FaultPolicy = FaultPolicy(),  # noqa: B008 - it is frozen
    evaluate: Evaluate | None = None,
) -> SupervisedRun:
    """A run of ``settings``, whose strategy has servers or gossip; no process is started before ``train()``.

    ``out`` is the folder for run.json and metrics.jsonl. ``evaluate`` is called with the global weights after every epoch (default:
    the accuracy on the test set).
    """
    strategy = settings.strategy
    if strategy.runtime not in _KINDS:
        raise HocketError(f"{strategy} is collective: start it with torchrun, or with `hocket train`.")
    return _KINDS[strategy.runtime](settings, torch.device(device), data_dir, out, policy, evaluate)
