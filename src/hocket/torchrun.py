"""``torchrun --nnodes 1:4 --rdzv-backend hocket --rdzv-endpoint HOST:PORT``: an elastic run under torchrun's agents.

torchrun's own backends make every agent restart its workers whenever an agent comes or goes or a worker dies, so no worker is left
that has the weights. With this one an agent starts its own workers again, and those of no other agent; workers find each other by
the `hocket rendezvous` at the endpoint. How many there may be is said there: ``--nnodes`` is not used.

torchrun finds the backend by an entry point, ``torchrun.handlers``, while it imports its own, also where another one is used: no
torch is imported here before, and little of Hocket. The run's id comes in the environment, ``HOCKET_JOB``: other users can read
arguments, ``--rdzv-id`` among them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "hocket"


def backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What the entry point names: gives what makes an agent's handler."""
    return _handler


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    from hocket.cluster.join import RENDEZVOUS, RENDEZVOUS_JOB
    from hocket.cluster.loopback import LoopbackRendezvous

    endpoint = parameters.endpoint.strip()
    if not endpoint or not os.environ.get(RENDEZVOUS_JOB):
        raise SystemExit(
            f"hocket: --rdzv-backend {BACKEND} wants a `hocket rendezvous`; add --rdzv-endpoint HOST:PORT, and set "
            f"{RENDEZVOUS_JOB} to the run's id, which it prints."
        )
    os.environ[RENDEZVOUS] = endpoint if "://" in endpoint else f"tcp://{endpoint}"  # workers inherit the agent's environment
    return LoopbackRendezvous(parameters.run_id, BACKEND)
