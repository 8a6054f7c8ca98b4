"""``hocket.Sandblaster``: minimise the mean loss over a whole data set with distributed L-BFGS."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.spec import ClusterSpec
from hocket.data.base import DataSet, Pair, identity
from hocket.data.tensors import as_tensors
from hocket.errors import HocketError, is_whole
from hocket.sandblaster.coordinator import CoordinatorConfig
from hocket.sandblaster.lbfgs import Settings
from hocket.sandblaster.objective import Objective
from hocket.sandblaster.portions import cut
from hocket.sandblaster.virtual import VirtualWorld
from hocket.train.engines.base import Loss
from hocket.train.evaluate import Evaluation, Evaluator
from hocket.train.simulate import seeded
from hocket.train.trial import try_batch


@dataclass
class SandblasterRun:
    """A run's result: ``metrics`` one dict per iteration (number 0: the first evaluation), the ``model``, and why it ``ended``.

    A dict holds ``iteration``, the ``loss`` reached, its ``accuracy`` and ``test_loss`` where there are
    test data, and what this iteration took:
    ``evaluations``, ``seconds``, ``bytes_coordinator`` (through the coordinator), ``bytes_shards`` (between workers and shards),
    portions ``issued``, ``duplicated`` (second copies), ``wasted`` (computed in vain), and workers ``lost``.
    """

    metrics: list[dict[str, Any]]
    model: nn.Module
    ended: str

    @property
    def loss(self) -> float:
        """The loss at the end."""
        return self.metrics[-1]["loss"]

    @property
    def accuracy(self) -> float | None:
        """At the end, on the test data."""
        return self.metrics[-1]["accuracy"]

    @property
    def test_loss(self) -> float | None:
        """At the end, on the test data."""
        return self.metrics[-1]["test_loss"]

    @property
    def evaluations(self) -> int:
        """Evaluations of the whole batch, over all iterations."""
        return self.total("evaluations")

    @property
    def seconds(self) -> float:
        """Seconds of all iterations; virtual seconds on virtual workers."""
        return self.total("seconds")

    def total(self, name: str) -> Any:
        """A figure added up over all iterations, such as ``total("bytes_shards")``."""
        return sum(row[name] for row in self.metrics)


class Sandblaster:
    """Sandblaster L-BFGS (Dean et al., 2012): equal to ``torch.optim.LBFGS(line_search_fn="strong_wolfe")`` on the whole batch.

    ``model`` is a module or a function that makes one (from ``seed``); ``loss(model(x), y)`` is a mean over samples; ``data`` is a
    pair of tensors, a map-style data set or a ``hocket.data.DataSet``, ``test`` likewise. ``l2`` adds l2/2·|w|² to the loss.

    The batch is cut into ``portions_per_worker`` portions for each of the ``workers``; ``backups`` gives out the last ones twice.
    ``static=True`` is the naive split to compare with: one portion each, no copies. ``exact=True`` makes the result the same bit
    for bit, whichever worker computed which portion and however many shards there are, given the same number of portions.

    :meth:`run` trains on virtual workers of ``cluster`` (a preset, a file or a ``ClusterSpec``). Those in ``deaths`` die at the
    given second, which the coordinator finds out ``notice_s`` later. :meth:`launch` trains on real processes.

    >>> x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)); y = (x.sum(1) > 0).long()
    >>> run = Sandblaster(lambda: nn.Linear(5, 2), nn.functional.cross_entropy, (x, y), (x, y), l2=0.01, max_iter=8).run()
    >>> run.accuracy > 0.95, run.total("bytes_coordinator") > 0
    (True, True)
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        data: Any,
        test: Any = None,
        *,
        workers: int = 4,
        shards: int = 2,
        history: int = 10,
        max_iter: int = 20,
        max_eval: int | None = None,
        lr: float = 1.0,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        l2: float = 0.0,
        portions_per_worker: int = 16,
        backups: bool = True,
        static: bool = False,
        exact: bool = False,
        seed: int = 0,
        cluster: str | ClusterSpec = "1gbit",
        deaths: Mapping[int, float] | None = None,
        notice_s: float = 1.0,
    ) -> None:
        for name, value in (("workers", workers), ("shards", shards), ("portions_per_worker", portions_per_worker)):
            if not is_whole(value):
                raise HocketError(f"{name}={value!r} must be a whole number of at least 1.")
        self.settings = Settings(history, max_iter, max_eval, lr, tolerance_grad, tolerance_change, l2)
        self.loss, self.workers, self.shards = loss, workers, shards
        self.backups, self.exact, self.seed = backups and not static, exact, seed
        self.cluster, self.deaths, self.notice_s = ClusterSpec.parse(cluster), deaths, notice_s
        self.model = copy.deepcopy(model) if isinstance(model, nn.Module) else seeded(model, seed)
        self.train, self.test, self.prepare = _parts(data, test)
        self.portions = cut(len(self.train[0]), workers if static else min(workers * portions_per_worker, len(self.train[0])))
        objective = self.objective()  # refuses models that cannot work
        values = len(objective.point)
        largest = max(part.stop - part.start for part in self.portions)
        if try_batch(objective.model, self._evaluator(None), largest):  # in the model's present mode
            raise HocketError(
                "L-BFGS compares losses at several points, and this model or loss draws new random numbers each time: "
                "remove dropout or put the model into eval mode."
            )
        if shards > values:
            raise HocketError(f"{shards} shards are too many for {values} parameters: use fewer.")

    def _evaluator(self, test: Pair | None) -> Evaluator:
        return Evaluator(DataSet("batch", self.train, test, 0, self.prepare), self.loss)

    def objective(self) -> Objective:
        """The mean loss at a copy of the model, in portions."""
        return Objective(copy.deepcopy(self.model), self.loss, self.train, self.portions, self.prepare)

    def config(self, **more: Any) -> CoordinatorConfig:
        """The coordinator's configuration, on virtual workers and on processes."""
        return CoordinatorConfig(self.settings, len(self.portions), self.shards, self.backups, self.exact, **more)

    def world(self) -> VirtualWorld:
        """The virtual cluster at its start."""
        return VirtualWorld(self.objective(), self.config(), self.cluster, self.workers, self.seed, self.deaths, self.notice_s)

    def run(self, watch: Callable[[dict[str, Any]], None] = lambda _: None) -> SandblasterRun:
        """Train on virtual workers; ``watch`` sees each iteration's metrics as they come."""
        world = self.world()

        def tell(row: dict[str, Any]) -> None:
            row |= self.evaluate(world.objective, world.x).line(row["loss"])
            watch(row)

        world.run(tell)
        world.objective.move(world.x)
        return SandblasterRun(world.coordinator.metrics, world.objective.model, world.coordinator.state.ended)

    def launch(
        self,
        folder: str | Path | None = None,
        *,
        liveness_timeout_s: float = 5.0,
        restarts: int = 3,
        watch: Callable[[Any], None] = lambda _: None,
        on_iteration: Callable[[dict[str, Any]], None] = lambda _: None,
        slowdown: Sequence[float] = (1.0,),
        record: str | Path | None = None,
    ) -> SandblasterRun:
        """Train on real processes of this machine: a coordinator, ``shards`` and ``workers`` (call it under ``__main__``).

        The run goes on without workers that die or are silent for ``liveness_timeout_s``; a coordinator or shard that is killed is
        started again, at most ``restarts`` times. With a ``folder`` a run that was stopped goes on where it was. ``on_iteration``
        sees each iteration's metrics as they come, those before a stop too; accuracy is that of the end. Worker ``i`` takes
        ``slowdown[i]`` times as long to compute (repeated over all), for experiments. ``record`` is a folder for recordings of the
        events of the processes; :func:`hocket.sandblaster.replay.replay_nodes` replays them.
        """
        from hocket.sandblaster.launch import launch  # ZeroMQ is not needed before

        if not slowdown or not all(1 <= factor < math.inf for factor in slowdown):
            raise HocketError(f"slowdown={slowdown!r}: real workers can only be made slower; give numbers of at least 1.")
        kept, recorded = (None if path is None else Path(path) for path in (folder, record))
        metrics, x, ended = launch(self, kept, liveness_timeout_s, restarts, watch, on_iteration, slowdown, recorded)
        objective = self.objective()
        metrics[-1] |= self.evaluate(objective, x).line(metrics[-1]["loss"])
        objective.move(x)
        return SandblasterRun(metrics, objective.model, ended)

    def evaluate(self, objective: Objective, x: Tensor) -> Evaluation:
        """The weights ``x`` on the test data."""
        if self.test is None:
            return Evaluation()
        objective.move(x)
        evaluator = self._evaluator(self.test)
        inputs, targets = (part.to(x.device) for part in self.test)
        return evaluator.evaluation(evaluator.tally(objective.model, (inputs, targets)))


def _parts(data: Any, test: Any) -> tuple[Pair, Pair | None, Callable[[Tensor], Tensor]]:
    """Training pair, test pair, and how their inputs are prepared."""
    if isinstance(data, DataSet):
        train = data.train if data.source is None else data.source[torch.arange(len(data.source))]
        return train, data.test if test is None else as_tensors(test), data.prepare
    return as_tensors(data), None if test is None else as_tensors(test), identity
