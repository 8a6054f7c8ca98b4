"""Runs of several processes on this machine that talk by messages: started, watched, evaluated and recorded by this process.

>>> from hocket.supervisor import FaultPolicy, prepare
>>> from hocket.train.settings import RunSettings
>>> run = prepare(RunSettings.of(strategy="async + gossip", workers=3), policy=FaultPolicy(replace=True))
>>> run.description
'3 workers'

``run.train()`` trains to the end and returns a line of metrics per epoch.
"""

from hocket.drivers.processes import Role, Supervisor
from hocket.supervisor.policy import FaultPolicy
from hocket.supervisor.prepare import prepare
from hocket.supervisor.run import SupervisedRun

__all__ = ["FaultPolicy", "Role", "SupervisedRun", "Supervisor", "prepare"]
