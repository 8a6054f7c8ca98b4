"""The steps of a probe: how long all workers take for one together, and how it and exchanges delay each other.

Workers begin each step together (after an exchange of one flag), as they do in a training whose workers step together: where
several share a core, each step is as long as it will be then, and what the slowest needs beyond the mean is seen, not assumed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.ledger import CudaClock, HostClock
from hocket.cluster.message import Message, ring_bytes
from hocket.cluster.one_row import OneRowCluster
from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.train.checks import Factory, layout_for, optimizer_for
from hocket.train.job import Job
from hocket.train.runtimes.collective import CollectiveRuntime

MOST, LEAST, WARM_UP = 40, 6, 2
STRAGGLING = 0.1
"""The share of the rounds, the slowest ones, that counts as disturbed by other programs."""
_BLOCK_S = 0.02
"""Threads that share a core take turns of some milliseconds: what is measured at a time lasts longer."""
MOST_CONTENTION = 4.0
_ALONE = 0.95
_PART = 0.05
"""Of the gradients: the times at which smaller parts are ready are not told apart."""


class Steps:
    """Steps of ``model`` under a job that never exchanges; all workers make and use it together."""

    def __init__(
        self, model: nn.Module, loss: Any, batch: tuple[Tensor, Tensor], factory: Factory, cluster: Cluster, limit_s: float
    ) -> None:
        self.cluster, self._model, self._loss, self._batch = cluster, model, loss, batch
        self._optimizer = optimizer_for(factory, list(model.parameters()))
        self._job = Job(model, self._optimizer, Strategy.parse(f"local({10**9})"), CollectiveRuntime(cluster.for_job()))
        steps = self._measure(limit_s / 3)
        everyone = cluster.all_gather_metrics(torch.tensor([steps], dtype=torch.float64))
        kept = everyone.amax(0).argsort()[: max(LEAST - 1, math.ceil(len(steps) * (1 - STRAGGLING)))]
        self.times = everyone[:, kept]
        """Seconds of each worker and round, without the update."""
        self.free, updates = self._free(limit_s / 3).unbind(2)
        """The same of steps in a row, without waiting for each other."""
        self.fixed_s = self._fixed(limit_s / 3)
        self.update_s = float(updates.median(1).values.mean()) / sum(p.numel() for p in model.parameters())

    def _free(self, limit_s: float) -> Tensor:
        """Seconds of steps in a row on all workers at once, and of their updates: ``[workers, blocks, 2]``."""
        blocks = self._blocks(limit_s)
        kept = max(LEAST, round(len(blocks) * 0.8))  # towards the end some have ended, and leave others their cores
        return self.cluster.all_gather_metrics(torch.tensor([blocks[:kept]], dtype=torch.float64))

    def _blocks(self, limit_s: float, together: bool = True) -> list[tuple[float, float]]:
        """Mean seconds of a step and of its update in blocks of steps in a row; ``together``: all workers make as many."""
        x, _ = self._batch
        begun = now(x)
        for _ in range(WARM_UP):
            self._step()
        took = (now(x) - begun) / WARM_UP
        if together:
            took = float(self.cluster.all_gather_metrics(torch.tensor([[took]], dtype=torch.float64)).max())
        repeats = max(1, math.ceil(_BLOCK_S / took))
        blocks = []
        for _ in range(max(LEAST, min(MOST, int(limit_s / took / repeats)))):
            stepping = updating = 0.0
            for _ in range(repeats):
                begun = now(x)
                between = self._step()
                stepping, updating = stepping + between - begun, updating + now(x) - between
            blocks.append((stepping / repeats, updating / repeats))
        return blocks

    def _fixed(self, limit_s: float) -> float:
        """Of a step's seconds those that do not depend on the number of samples, from steps on a quarter of them."""
        whole = self._batch
        if len(whole[0]) < 8:
            return 0.0
        self._batch = tuple(t[: len(t) // 4] for t in whole)  # type: ignore[assignment]
        share = len(self._batch[0]) / len(whole[0])
        try:
            part = self._free(limit_s)[..., 0]
        finally:
            self._batch = whole
        quarter_s, whole_s = float(part.median(1).values.mean()), float(self.free.median(1).values.mean())
        return min(whole_s, max(0.0, (quarter_s - share * whole_s) / (1 - share)))

    def _measure(self, limit_s: float) -> list[float]:
        steps: list[float] = []
        ends = time.perf_counter() + limit_s
        flags = torch.zeros(1, 1, dtype=torch.bool)
        for turn in range(MOST + WARM_UP):
            # Whoever has no time left says so, so that all make as many.
            flags[0, 0] = len(steps) >= LEAST and time.perf_counter() > ends
            if bool(once(self.cluster, lambda: self.cluster.all_reduce_any(flags))[1][0]):
                break
            begun = now(self._batch[0])
            between = self._step()
            if turn >= WARM_UP:
                steps.append(between - begun)
        return steps

    def _step(self, done: Callable[[], Any] = lambda: None) -> float:
        """One step, which calls ``done`` before its update; the time then."""
        x, y = self._batch
        self._optimizer.zero_grad()
        try:
            self._loss(self._model(x), y).backward()
        except Exception as error:  # whatever a user's model raises
            raise HocketError(f"The model cannot be measured on this batch: {type(error).__name__}: {error}.") from None
        done()
        between = now(x)
        self._optimizer.step()
        return between

    def found(self) -> dict[str, Any]:
        """``step_s`` and ``slowdown`` of steps in a row; ``jitter``, which makes the slowest as late as when all begin together."""
        slowdown = slowdowns(self.free)
        factors = torch.tensor(slowdown, dtype=torch.float64).view(-1, 1)
        step_s = float((self.free / factors).median(1).values.mean())
        workers = len(factors)
        if workers == 1:
            jitter = float(deviation(self.free / self.free.median()))
        else:
            late = float((self.times / factors).amax(0).median()) / step_s - 1
            jitter = max(0.0, late) / largest_of(workers)
        slow = slowdown if max(slowdown) > 1 else (1.0,)
        return {"step_s": step_s, "slowdown": slow, "jitter": round(jitter, 4), "fixed_s": self.fixed_s}

    def alone(self, step_s: float, limit_s: float) -> float | None:
        """A step while the other workers wait, of the first one; None where it takes about ``step_s``, as with all of them."""
        own = torch.zeros(1, 1, dtype=torch.float64)
        if self.cluster.workers.start == 0:
            own[0] = statistics.median(stepping for stepping, _ in self._blocks(limit_s, together=False))
        share = float(self.cluster.all_gather_metrics(own)[0]) / float(self.free[0].median())
        return share * step_s if share < _ALONE else None

    def ready(self) -> tuple[tuple[float, float], ...]:
        """Which share of the gradients is there, in the order of buckets, after which share of a step."""
        layout = layout_for(self._model, self._optimizer, Strategy())
        slots = [slot for bucket in layout.buckets for slot in bucket.slots]
        clock: HostClock = CudaClock() if self._batch[0].is_cuda else HostClock()
        stamps: dict[str, Any] = {}
        handles = [
            p.register_post_accumulate_grad_hook(lambda _, name=name: stamps.update({name: clock.stamp()}))
            for name, p in self._model.named_parameters()
            if p.requires_grad
        ]
        turns = []
        for _ in range(LEAST):
            stamps.clear()
            begun = clock.stamp()
            self._step(lambda: stamps.update({"": clock.stamp()}))
            first, last = clock.seconds(begun), clock.seconds(stamps[""])
            turns.append([(clock.seconds(stamps.get(s.name, begun)) - first) / (last - first) for s in slots])
        for handle in handles:
            handle.remove()
        own = torch.tensor(turns[1:], dtype=torch.float64).median(0).values
        shares = self.cluster.all_gather_metrics(own.unsqueeze(0)).mean(0).clamp(0, 1)
        return parts_ready([slot.size for slot in slots], shares.tolist())

    def gathering(self, limit_s: float) -> float:
        """What a step takes more whose gradients go through hooks and buckets, into an exchange with nobody; asked for last."""
        self._job.detach()
        nobody = OneRowCluster(self.cluster.size, self.cluster.device)
        self._job = Job(self._model, self._optimizer, Strategy(), CollectiveRuntime(nobody))
        whole_s = float(self._free(limit_s)[..., 0].median(1).values.mean())
        return max(0.0, whole_s - float(self.free.median(1).values.mean()))

    def contention(self, bandwidth: float, coding: Callable[[], Any]) -> dict[str, float]:
        """How far steps and exchanges delay each other: of a worker's own part (``coding``), and of bytes in flight."""
        alone_s = float(self.free.median(1).values.mean())
        repeats = max(1, round(_BLOCK_S / alone_s))
        workers = self.cluster.size
        values = int(min(1 << 23, max(1 << 12, alone_s * repeats * bandwidth / ring_bytes(1 << 20, workers) * (1 << 18))))
        rows = torch.zeros(1, values, device=self.cluster.device)
        code_s = statistics.median(common_times(self.cluster, coding, 0.1))
        times = max(1, round(alone_s * repeats / code_s))

        def steps() -> None:
            for _ in range(repeats):
                self._step()

        def codes() -> None:
            for _ in range(times):
                coding()

        limit_s = 12 * alone_s * repeats
        computing = statistics.median(common_times(self.cluster, lambda: None, limit_s, beside=steps))
        found = {}
        message, neighbours = Message((rows,)), torch.arange(workers).roll(1).unsqueeze(0)
        works: dict[str, Callable[[], Any]] = {
            "contention": codes,
            "link_contention": lambda: self.cluster.mean(rows, self.cluster.world),
            "pairs_contention": lambda: self.cluster.neighbor_exchange(message, neighbours),
        }
        for name, work in works.items():
            exchanging = statistics.median(common_times(self.cluster, work, limit_s))
            both = statistics.median(common_times(self.cluster, work, limit_s, beside=steps))
            found[name] = shared(computing, exchanging, both, most=MOST_CONTENTION if work is codes else 1.0)
        return found

    def close(self) -> None:
        self._job.detach()


def parts_ready(sizes: Sequence[int], at: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Of gradients of these sizes that are there after these shares of a step: pairs of the share that is there and the time.

    Small ones that follow each other count together.

    >>> parts_ready([10, 2, 988], [0.5, 0.4, 0.9])
    ((0.012, 0.5), (1.0, 0.9))
    """
    found: list[tuple[float, float]] = []
    total, done, told, latest = sum(sizes), 0, 0, 0.0
    for k, (size, share) in enumerate(zip(sizes, at, strict=True)):
        done, latest = done + size, max(latest, share)
        following = sizes[k + 1] if k + 1 < len(sizes) else total
        if done - told >= _PART * total or following >= _PART * total:
            found.append((round(done / total, 4), round(latest, 3)))
            told = done
    return tuple(found)


def shared(one: float, other: float, both: float, most: float = 1.0) -> float:
    """``h`` of ``both = max + h·min``, between 0 and ``most``.

    >>> shared(1.0, 0.5, 1.25), shared(1.0, 0.5, 0.9), shared(1.0, 0.5, 2.0), shared(1.0, 0.5, 2.0, most=3.0)
    (0.5, 0.0, 1.0, 2.0)
    """
    return round(min(most, max(0.0, (both - max(one, other)) / max(min(one, other), 1e-9))), 3)


def slowdowns(times: Tensor) -> tuple[float, ...]:
    """How many times as long each worker takes as the fastest, where that is more than chance: ``times`` ``[workers, rounds]``.

    Workers within 5 % of the fastest, or within three standard errors, count as equal.

    >>> slowdowns(torch.tensor([[1.0, 1.1, 1.0, 1.1], [3.0, 3.1, 3.2, 3.1]]))
    (1.0, 2.952)
    >>> slowdowns(torch.tensor([[1.0, 1.3, 1.0, 1.2], [1.1, 1.3, 1.2, 1.1]]))
    (1.0, 1.0)
    """
    means, errors = times.mean(1), times.std(1) / math.sqrt(times.shape[1]) if times.shape[1] > 1 else times.mean(1) * 0
    fastest = int(means.argmin())
    beyond = 3 * torch.sqrt(errors**2 + errors[fastest] ** 2) + 0.05 * means[fastest]
    equal = means - means[fastest] <= beyond
    base = means[equal].mean()
    return tuple(1.0 if equal[w] else round(float(means[w] / base), 3) for w in range(len(means)))


def largest_of(count: int) -> float:
    """The mean of the largest of ``count`` standard normal numbers.

    >>> round(largest_of(2), 2), round(largest_of(4), 2)
    (0.56, 1.03)
    """
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    below = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return float(torch.trapezoid(x * count * below ** (count - 1) * torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi), x))


def deviation(ratios: Tensor) -> Tensor:
    """Of the logarithms, without the largest twentieth: those are stragglers."""
    logs = ratios.log().flatten().sort().values
    return logs[: max(2, int(len(logs) * 0.95))].std()


def now(like: Tensor) -> float:
    """Seconds, when the device of ``like`` has done all that it was given."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()


def common_times(
    cluster: Cluster,
    work: Callable[[], Any],
    limit_s: float,
    most: int = 9,
    beside: Callable[[], Any] | None = None,
    together: bool = True,
) -> list[float]:
    """How long some exchanges take, the same list on all workers, who end together.

    An exchange whose members end ``together`` takes as long as for the worker that begins last: before, the others wait for it. Any
    other takes as long as for the slowest worker. While it is in flight, the caller does what ``beside`` does; then it is the mean.
    """
    flags = torch.zeros(1, 1, dtype=torch.bool)
    times: list[float] = []
    for turn in range(most):
        once(cluster, lambda: cluster.all_reduce_any(flags))  # all begin together
        own = once(cluster, work, beside)[0]
        everyone = cluster.all_gather_metrics(torch.tensor([[own]], dtype=torch.float64))
        if turn:  # the first one warms up
            times.append(float(everyone.mean() if beside is not None else everyone.min() if together else everyone.max()))
        if len(times) > 2 and sum(times) > limit_s:
            break
    return times


def once(cluster: Cluster, work: Callable[[], Any], beside: Callable[[], Any] | None = None) -> tuple[float, list[Any]]:
    """The seconds of one exchange, and its results."""
    exchange = cluster.exchange()
    begun = time.perf_counter()
    exchange.submit(work, name="probe")
    if beside is not None:
        beside()
    results = exchange.wait()
    if cluster.device.type == "cuda":
        torch.cuda.synchronize(cluster.device)
    return time.perf_counter() - begun, results
