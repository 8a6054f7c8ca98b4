"""``hocket.predict``: step time, efficiency, traffic, memory and money of strategies, for any number of workers, without training.

It is the clock of virtual workers without their values: the same strategy code, the same cost model, hence the same seconds as
``hocket.simulate(cluster=…)`` for the same inputs. Where values decide the size of messages, the size to expect is taken: the
density that the method aims at (5 % for a static threshold), Rice's code of random indices.
"""

from __future__ import annotations

import csv
import inspect
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hocket.cluster.spec import ClusterSpec
from hocket.errors import HocketError
from hocket.models.registry import cross_entropy
from hocket.prediction import storage
from hocket.prediction.answers import answers
from hocket.prediction.events import step_apart
from hocket.prediction.mesh import step_split
from hocket.prediction.model import ModelSize, of_module, of_name, of_size
from hocket.prediction.steps import Prediction, step_together
from hocket.prediction.storage import Reading
from hocket.prediction.tables import predictions_html
from hocket.split.mesh import Mesh
from hocket.split.options import DEFAULT_SCHEDULE, Pipeline, refuse_split_options
from hocket.strategy import Strategy
from hocket.train.adaptive import with_exchange
from hocket.train.checks import Factory, check_job, layout_for

STRATEGIES = (
    "bulk", "bulk + cast(bf16)", "bulk + lowrank(2)", "bulk + topk(0.01)", "local(16)", "diloco(100)",
    "local(16) + topk(0.01) | qsgd(4)", "bulk + gossip", "local(16) + gossip", "bulk + server(4)", "async + server(4)",
)  # fmt: skip
"""What is predicted where no strategy is named."""
WORKERS = tuple(2**k for k in range(13))


@dataclass(frozen=True)
class Predictions:
    """All predictions for one model on one cluster."""

    model: ModelSize
    cluster: ClusterSpec
    rows: tuple[Prediction, ...]
    again: Callable[[Prediction, ClusterSpec], Prediction]
    """The same prediction for another cluster."""
    reading: Reading | None = None
    """The data that are read, where their size is known."""

    def answers(self) -> list[str]:
        """Where communication overtakes computing, where more workers stop paying, and what the bottleneck is: a sentence each."""
        of_data = [] if self.reading is None else storage.answers(self.reading, self.rows, self.cluster)
        return answers(self.rows, self.cluster, self.again) + of_data

    def _repr_html_(self) -> str:
        return predictions_html(self)

    def csv(self) -> str:
        text = io.StringIO()
        lines = [row.plain() for row in self.rows]
        table = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(lines)
        return text.getvalue()

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        about: dict[str, Any] = {"model": self.model.name, "parameters": self.model.parameters, "batch_size": self.model.batch_size}
        if self.reading is not None:
            about["data"] = [self.reading.figures(self.cluster, row) for row in self.rows if row.refused is None]
        return {**about, "cluster": self.cluster.describe(), "answers": self.answers(), "rows": [row.plain() for row in self.rows]}


def predict(
    model: str | nn.Module | Callable[[], nn.Module] | ModelSize | None = None,
    cluster: str | Path | ClusterSpec = "1gbit",
    strategies: Iterable[str | Strategy] = STRATEGIES,
    workers: Iterable[int] | int | None = None,
    *,
    parameters: float | None = None,
    step_s: float | None = None,
    batch_size: int = 100,
    batch: tuple[Tensor, Tensor] | None = None,
    loss: Any = cross_entropy,
    data: str | None = None,
    optimizer: str | Factory = "momentum",
    meshes: Iterable[str | Mesh] = (),
    schedule: str = DEFAULT_SCHEDULE,
    num_microbatches: int | None = None,
    stages_per_rank: int | None = None,
    sharding: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    sample_bytes: float | None = None,
    samples: float | None = None,
) -> Predictions:
    """Predict what each of ``strategies`` costs on ``cluster`` with each number of ``workers`` (1 to 4096, as far as it has them).

    ``model`` is a name (for ``data``, or made-up images or texts), ``module:factory``, a module or what makes one, with a ``batch``
    of a few samples to count operations on; or give the number of its ``parameters``. A step takes ``step_s`` seconds of a worker,
    or what the cluster says, or its operations at the worker's speed.

    ``meshes`` split every worker's model further (``"pipeline=4,tensor=2"``; then ``workers`` counts processes); ``schedule``,
    ``num_microbatches`` and ``stages_per_rank`` are those of :func:`hocket.parallelize`. ``sharding`` is ``"zero1"`` or ``"fsdp"``.
    ``steps``: of the first so many steps, instead of those when the strategy has settled.

    With ``sample_bytes`` (and the number of ``samples``, for the cache) the answers say when reading data from storage, not
    exchanging gradients, is the limit, and what packing or caching would give.

    >>> found = predict(parameters=1e6, step_s=0.01, cluster="1gbit", strategies=["bulk", "local(8)"], workers=[1, 16])
    >>> [(row.strategy, row.workers, round(row.efficiency, 1)) for row in found.rows if row.workers > 1]
    [('bulk + allreduce', 16, 0.1), ('local(8) + allreduce', 16, 0.6)]
    """
    spec = ClusterSpec.parse(cluster)
    size = _size(model, parameters, step_s, batch_size, batch, loss, data)
    parsed = [Strategy.parse(s) for s in strategies]
    pipeline = Pipeline(schedule, num_microbatches, stages_per_rank)
    counts = _counts(workers, spec)
    ways: list[Mesh | None] = [Mesh.parse(m) for m in meshes] or [None]
    refuse_split_options(next((way for way in ways if way is not None and way.pipeline > 1), ways[0]), pipeline)
    if not parsed:
        raise HocketError("A prediction needs at least one strategy, such as 'local(16)'.")

    def one(row: Prediction, on: ClusterSpec) -> Prediction:
        mesh = Mesh.parse(row.mesh) if row.mesh else None
        return _row(Strategy.parse(row.strategy), mesh, pipeline, row.workers, size, on, optimizer, sharding, steps, seed)

    wanted = [Prediction(str(s), n, mesh="" if m is None else str(m)) for s in parsed for m in ways for n in counts]
    reading = None if sample_bytes is None else Reading(_positive("sample_bytes", sample_bytes), batch_size, samples)
    return Predictions(size, spec, tuple(one(row, spec) for row in wanted), one, reading)


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise HocketError(f"{name}={value:g}: it must be above 0.")
    return value


def _size(
    model: Any, parameters: float | None, step_s: float | None, batch_size: int, batch: Any, loss: Any, data: Any
) -> ModelSize:
    if step_s is not None and not step_s > 0:
        raise HocketError(f"step_s={step_s}: give the seconds of a step, above 0.")
    if batch_size < 1:
        raise HocketError(f"batch_size={batch_size}: a mini-batch has at least one sample.")
    if (model is None) == (parameters is None):
        raise HocketError("Give a model (a name, module:factory or a module), or the number of its parameters, and not both.")
    if parameters is not None:
        if not 1 <= parameters < math.inf:
            raise HocketError(f"parameters={parameters:g}: a model has at least one parameter.")
        return of_size(parameters, batch_size, step_s)
    found = model if isinstance(model, ModelSize) else of_name(model, batch_size, data) if isinstance(model, str) else None
    if found is None:
        found = of_module(model, batch, loss, batch_size)
    return replace(found, step_s=step_s) if step_s is not None else found


def _counts(workers: Iterable[int] | int | None, spec: ClusterSpec) -> list[int]:
    if workers is None:
        return [n for n in WORKERS if spec.workers is None or n <= spec.workers]
    counts = [workers] if isinstance(workers, int) else list(workers)
    for n in counts:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise HocketError(f"workers={n!r}: it must be a whole number of at least 1.")
        spec.check_workers(n)
    if not counts:
        raise HocketError("A prediction needs at least one number of workers, such as 16.")
    return counts


def _row(
    strategy: Strategy, mesh: Mesh | None, pipeline: Pipeline, workers: int, size: ModelSize, spec: ClusterSpec,
    optimizer: str | Factory, sharding: str | None, steps: int | None, seed: int,
) -> Prediction:  # fmt: skip
    """One prediction; a combination that cannot be says why."""
    template = size.optimizer(optimizer)
    try:
        check_job(size.module, template, strategy, 1, "raise")
        chosen = with_exchange(strategy, template, tell=False)
        if mesh is not None or sharding is not None:
            found, state = step_split(chosen, mesh or Mesh(), pipeline, sharding, size, spec, workers, steps, seed, template)
        elif workers == 1 or chosen.runtime == "collective":
            plain = Strategy() if workers == 1 else chosen
            layout = layout_for(size.module, template, plain)
            found, state = step_together(plain, layout, spec, workers, size.seconds(spec), steps, seed)
        else:
            found = step_apart(chosen, size.parameters, spec, workers, size.seconds(spec), seed)
            state = float(4 * size.parameters)  # what was fetched
    except HocketError as error:
        return Prediction(str(strategy), workers, mesh="" if mesh is None else str(mesh), refused=str(error))
    return _whole(replace(found, strategy=str(strategy)), size, spec, chosen, state, template, mesh, sharding)


def _whole(
    found: Prediction, size: ModelSize, spec: ClusterSpec, strategy: Strategy, state: float, template: Any, mesh: Mesh | None,
    sharding: str | None,
) -> Prediction:  # fmt: skip
    """With memory, samples per second and money."""
    split = 1 if mesh is None else mesh.pipeline * mesh.tensor
    replicas = max(1, found.workers // split)
    weights = sum(p.numel() * p.element_size() for p in size.module.parameters()) / split
    moments = optimizer_bytes(template) / split / (replicas if sharding else 1)
    held = 2 * weights / (replicas if sharding == "fsdp" else 1)
    memory = held + moments + state + size.kept_bytes / split
    elastic_step_s = found.step_s if sharding is None and strategy.can_be_elastic else None
    lasts = found.step_s * spec.pauses(found.workers, not strategy.sync.asynchronous, elastic_step_s, split)
    cost = spec.cost(found.workers, lasts) / replicas * 1000 if spec.price else None
    return replace(
        found,
        memory_bytes=memory,
        samples_per_s=replicas * size.batch_size / lasts,
        cost=cost,
        mesh="" if mesh is None else str(mesh),
    )


def optimizer_bytes(optimizer: Any) -> float:
    """Bytes of an optimiser's state after a step: what it keeps per value is found on one value."""
    from torch import zeros

    groups = optimizer.param_groups
    probe = nn.Parameter(zeros(4, 4))
    probe.grad = zeros(4, 4)
    options = {k: v for k, v in groups[0].items() if k != "params"}
    needed = inspect.signature(type(optimizer)).parameters
    twin = type(optimizer)([{**options, "params": [probe]}], **{k: v for k, v in options.items() if k in needed})
    twin.step()
    kept = [v for v in twin.state[probe].values() if isinstance(v, Tensor) and v.shape == probe.shape]
    per_value = sum(v.element_size() for v in kept)
    return float(per_value * sum(p.numel() for group in groups for p in group["params"]))
