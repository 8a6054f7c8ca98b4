"""Runs of several processes that talk by messages: started, watched, evaluated and recorded by this process.

>>> from hocket.supervisor import FaultPolicy, prepare
>>> from hocket.train.settings import RunSettings
>>> run = prepare(RunSettings.of(strategy="async + gossip", workers=3), policy=FaultPolicy(replace=True))
>>> run.description
'3 workers'

``run.train()`` trains to the end and returns a line of metrics per epoch.
"""

from pathlib import Path

import torch

from hocket.drivers.machines import Machines
from hocket.drivers.processes import Role, Supervisor
from hocket.errors import HocketError
from hocket.supervisor.gossip import GossipRun
from hocket.supervisor.kept import Keeping
from hocket.supervisor.run import Evaluate, FaultPolicy, SupervisedRun
from hocket.supervisor.servers import ServerRun
from hocket.train.settings import RunSettings

__all__ = ["FaultPolicy", "Keeping", "Role", "SupervisedRun", "Supervisor", "prepare"]

_KINDS: dict[str, type[SupervisedRun]] = {"server": ServerRun, "peers": GossipRun}


def prepare(
    settings: RunSettings,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    out: Path | None = None,
    policy: FaultPolicy = FaultPolicy(),  # noqa: B008 - it is frozen
    evaluate: Evaluate | None = None,
    keeping: Keeping = Keeping(),  # noqa: B008 - it is frozen
    machines: Machines | None = None,
) -> SupervisedRun:
    """A run of ``settings``, whose strategy has servers or gossip; no process is started before ``train()``.

    ``out`` is the folder for run.json and metrics.jsonl. ``evaluate`` is called with the global weights after every epoch (default:
    test loss and accuracy). ``keeping``: whether the run leaves checkpoints there, and whether it goes on from one.
    ``machines``: where processes are started (default: here).
    """
    strategy = settings.strategy
    if strategy.runtime not in _KINDS:
        raise HocketError(f"{strategy} is collective: start it with torchrun, or with `hocket train`.")
    return _KINDS[strategy.runtime](settings, torch.device(device), data_dir, out, policy, evaluate, keeping, machines)
