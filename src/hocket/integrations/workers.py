"""What the integrations share: the states of all workers in one checkpoint, and the mean model in place of each worker's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.train.handover import pack_state, unpack_state
from hocket.train.job import Job

KEY = "hocket"
"""The entry of a checkpoint in which the states of all workers are."""


class Replicas:
    """The jobs of one model (one per optimiser), and whether the model is the mean of all workers at the moment."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        self._mean: ExitStack | None = None

    def average(self) -> None:
        """The model becomes the mean of all workers until :meth:`restore`; all workers call it together."""
        if self._mean is None:
            with torch.inference_mode(False), ExitStack() as stack:
                for job in self.jobs:
                    if job.attached:  # one that has ended left the mean model
                        stack.enter_context(job.averaged())
                self._mean = stack.pop_all()

    def restore(self) -> None:
        """Each worker has its own weights again."""
        if self._mean is not None:
            mean, self._mean = self._mean, None
            with torch.inference_mode(False):
                mean.close()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Each worker's own weights for a while."""
        was = self._mean is not None
        self.restore()
        try:
            yield
        finally:
            if was:
                self.average()

    def mean_state(self, model: nn.Module) -> dict[str, Any]:
        """A copy of the mean model's ``state_dict()``; all workers call it together."""
        was = self._mean is not None
        self.average()
        with torch.inference_mode(False):
            found = {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in model.state_dict().items()}
        if not was:
            self.restore()
        return found

    def gather(self) -> list[list[dict[str, Any]]] | None:
        """The states of all workers, one list of jobs each, on the first process; all workers call it together."""
        with self.own(), torch.inference_mode(False):
            mine = [_saved(job) for job in self.jobs]
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [mine]
        return _gathered(mine)

    def load(self, saved: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Go on from what :meth:`gather` found, with as many workers or others; every worker is given all of it."""
        if any(len(worker) != len(self.jobs) for worker in saved):
            raise HocketError(f"The checkpoint has {len(saved[0])} optimisers, this training {len(self.jobs)}; use the same ones.")
        for number, job in enumerate(self.jobs):
            job.load_workers([worker[number] for worker in saved])

    def finish(self) -> None:
        """Every worker's model becomes the mean model, and the jobs end; all workers call it together."""
        self.restore()
        for job in self.jobs:
            job.finish()

    def detach(self) -> None:
        """End the jobs where they are; an exchange under way may have failed with another worker, which has been said."""
        self._mean = None
        for job in self.jobs:
            with suppress(RuntimeError):
                job.detach()


def _gathered(mine: Any) -> list[Any] | None:
    """What every process brings, on the first one; as bytes and tensors, never pickle."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    packed = pack_state(mine).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([packed.numel()], device=device))
    most = max(int(size) for size in sizes)
    padded = torch.cat([packed, packed.new_zeros(most - packed.numel())])
    everyone = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(padded, everyone)
    return None if everyone is None else [unpack_state(one[: int(size)].cpu()) for one, size in zip(everyone, sizes, strict=True)]


def _saved(job: Job) -> dict[str, Any]:
    return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "job": job.state_dict()}


def together(strategy: str | Strategy, where: str, options: Mapping[str, Any]) -> Strategy:
    """The strategy; refused where workers do not step together, since ``where`` makes collectives of its own."""
    if "nonfinite" in options:
        raise HocketError(f"nonfinite={options['nonfinite']!r} is a part of check=; use check=hocket.Checks(nonfinite=…).")
    parsed = Strategy.parse(strategy)
    if parsed.runtime != "collective":
        raise HocketError(
            f"{parsed}: {where} makes collectives of its own, for which all workers must step together; use bulk, local, diloco or "
            "gossip there, or hocket.parallelize in a loop of your own."
        )
    return parsed
