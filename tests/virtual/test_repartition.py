"""Workers that become more or fewer: means are kept, what is owed is added up, and every strategy trains on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.cluster import VirtualCluster
from hocket.data import load
from hocket.files import unsealed
from hocket.programs.repartition import mean_of
from hocket.supervisor.kept import Keeping, KeptWeights
from hocket.train.checks import layout_for
from hocket.train.other_workers import one_for_all, optimizer_names
from hocket.train.record import Record
from hocket.train.run import repeated, run
from hocket.train.settings import RunSettings
from virtual.test_resume import TABLE, _saved
from virtual.world import World, sgd


def optimizer_of(strategy: str) -> Callable:
    return sgd(0.1) if "dgc" in strategy or "demo" in strategy else sgd(0.1, momentum=0.9)


def moved(strategy: str, workers: int, others: int, steps: int = 5) -> tuple[World, World]:
    """A world, and another one of other workers that went on from it."""
    first, second = (World(strategy, n, optimizer=optimizer_of(strategy)) for n in (workers, others))
    first.step(steps)
    replicas = first.replicas
    given = (replicas.model, optimizer_of(strategy), replicas.strategy, replicas.layout, 0, None)
    second.replicas.take_over(one_for_all([_saved(replicas.state_dict())], *given))
    second.at = steps
    return first, second


@pytest.mark.parametrize("strategy", TABLE)
def test_every_strategy_goes_on_with_fewer_and_with_more(strategy: str) -> None:
    for others in (2, 6):
        for steps in (4, 5):  # with a mean under way, and without one
            _, second = moved(strategy, 4, others, steps)
            rows = second.rows
            assert torch.equal(rows, rows[:1].expand_as(rows))
            assert second.replicas.program.step == steps
            second.step(7)
            assert torch.isfinite(second.rows).all()
    if "hierarchical" not in strategy:
        moved(strategy, 4, 1)[1].step(3)
        moved(strategy, 1, 3)[1].step(3)


PLAIN = [
    s for s in TABLE if "+ " not in s.replace("+ gossip", "").replace("+ exchange", "") and "overlap" not in s and "guard" not in s
]


@pytest.mark.parametrize("strategy", PLAIN)
def test_the_mean_model_and_the_mean_momentum_are_kept(strategy: str) -> None:
    first, second = moved(strategy, 4, 3)
    torch.testing.assert_close(second.rows.mean(0), first.rows.mean(0), rtol=1e-5, atol=1e-7)
    for bucket in range(len(first.replicas.layout.buckets)):
        before, after = (w.replicas._stacked.rows_of(bucket, "momentum_buffer") for w in (first, second))
        torch.testing.assert_close(after, before.mean(0).expand_as(after))


def owed(world: World) -> Tensor:
    """All that error feedback holds back, summed over all workers."""
    program, compression = world.replicas.program, world.replicas.strategy.compression
    zeros = [torch.zeros_like(g) for g in world.replicas.grads]
    parts = [
        program.channel.whole_gradients(compression, z, state, program.context(b))[0]
        for b, (z, state) in enumerate(zip(zeros, program.gradient_state, strict=True))
    ]
    return torch.cat(parts) * world.cluster.size


FEEDBACK = ["bulk + topk(0.1)", "bulk + threshold(keep=0.2)", "bulk + lowrank(1)", "bulk + sign", "bulk + topk(0.1) | qsgd(4)"]
FEEDBACK += ["bulk + threshold(keep=0.2) | ternary", "postlocal(2, 40) + topk(0.1)"]
FEEDBACK += ["hierarchical(allreduce, allreduce, size=2) + topk(0.2) + exchange=gradients"]


@pytest.mark.parametrize("strategy", FEEDBACK)
def test_the_sum_of_residuals_is_kept(strategy: str) -> None:
    """Those that owners of slices hold back included."""
    for others in (3, 6) if "hierarchical" not in strategy else (6, 8):
        first, second = moved(strategy, 4, others)
        before = owed(first)
        assert before.norm() > 0.01
        torch.testing.assert_close(owed(second), before, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("strategy", "names"), [("bulk + dgc(0.1)", ("u", "v")), ("bulk + demo(8, 0.9)", ("momentum",))])
def test_the_sums_of_accumulated_momentum_are_kept(strategy: str, names: tuple[str, ...]) -> None:
    first, second = moved(strategy, 4, 2)
    for before, after in zip(first.replicas.program.gradient_state, second.replicas.program.gradient_state, strict=True):
        for name in names:
            own = before["inner"].get("error") if name in ("v", "momentum") else None
            assert after[name].shape[0] == 2
            if own is None:
                torch.testing.assert_close(after[name].sum(0), before[name].sum(0))
            else:  # with what owners of slices hold back, which counts for all workers
                more = (after[name].sum(0) - before[name].sum(0)).norm()
                torch.testing.assert_close(more, 4 * own.norm(), rtol=1e-3, atol=1e-5)


def test_the_residuals_of_two_workers_that_become_one_are_added() -> None:
    first, second = moved("gossip + topk(0.1) + exchange=gradients", 2, 1)
    for before, after in zip(first.replicas.program.gradient_state, second.replicas.program.gradient_state, strict=True):
        torch.testing.assert_close(after["error"][0], before["error"][0] + before["error"][1])


def test_equal_replicas_stay_what_they_are_bit_for_bit() -> None:
    for strategy in ("bulk", "bulk + topk(0.1)", "bulk + qsgd(4)"):
        first, second = moved(strategy, 3, 7)
        assert torch.equal(second.rows, first.rows[:1].expand(7, -1))
    values = torch.rand(3, 100)
    torch.testing.assert_close(mean_of(values), values.mean(0))
    assert torch.equal(mean_of(values[:1].expand(3, -1)), values[0])


@pytest.mark.parametrize(
    "strategy", ["async + server(2)", "ssp(2) + server", "async + gossip", "downpour(2, 2) + server + topk(0.2)"]
)
def test_workers_that_send_messages_go_on_from_the_global_weights(tmp_path: Path, strategy: str) -> None:
    base = RunSettings.of(virtual=True, batch_size=80, strategy=strategy)
    for epochs, workers in ((2, 3), (3, 2), (4, 2), (5, 4)):  # with others, exactly, and with others again
        said: list[str] = []
        training = run(
            base.changed(epochs=epochs, workers=workers),
            base.changed(workers=workers).virtual_cluster("cpu"),
            out=tmp_path,
            resume=epochs > 2,
            note=said.append,
        )
        assert training.step == epochs * len(training.batches.partition)
    assert [m["epoch"] for m in training.metrics] == [1, 2, 3, 4, 5]
    losses = [m["loss"] for m in training.metrics]
    assert max(losses[1:]) < losses[0], "it did not begin anew"
    assert said[1].startswith("2 workers become 4: all begin with the global weights; ")
    assert ("one part of 4 of the sum of the residuals" in said[1]) == ("topk" in strategy)


@pytest.mark.parametrize("strategy", ["async + server(2) + topk(0.2)", "asyncdiloco(2) + server + topk(0.2)", "async + gossip"])
def test_workers_that_send_messages_take_over_residuals_and_optimiser_states(tmp_path: Path, strategy: str) -> None:
    base = RunSettings.of(virtual=True, batch_size=200, strategy=strategy, momentum=0.9, epochs=1)
    left = []
    for workers in (3, 2, 4):  # no epoch follows: what they begin with is what they have
        settings = base.changed(workers=workers)
        training = run(settings, settings.virtual_cluster("cpu"), out=tmp_path / "run", resume=workers != 3)
        states = [worker.state_dict() for worker in training.protocol.workers]  # type: ignore[attr-defined]
        owed = [torch.cat(state["encoder"]["errors"]) for state in states if "encoder" in state]
        alone = training.replicas.state_dict()["alone"].values()
        held = [torch.cat([e["momentum_buffer"].flatten() for e in saved["state"].values()]) for saved in alone]
        left.append([torch.stack(owed).sum(0) if owed else None, torch.stack(held).mean(0) if held else None])
        assert len(states) == workers
        assert len(held) == (0 if strategy.startswith("async +") and owed else workers)
    for found in left[1:]:
        for before, after in zip(left[0], found, strict=True):
            assert (before is None) == (after is None)
            if before is not None:
                assert before.norm() > 0
                torch.testing.assert_close(after, before)


def test_what_virtual_workers_owe_real_ones_take_over_and_back(tmp_path: Path) -> None:
    settings = RunSettings.of(virtual=True, workers=3, batch_size=200, strategy="async + server(2) + topk(0.2)", epochs=1)
    owed = sum_of_residuals(run(settings, settings.virtual_cluster("cpu"), out=tmp_path))
    real, record = settings.changed(virtual=False, workers=2), Record(tmp_path, 0, True)
    model = real.build(load("digits"))
    optimizer = real.optimizer_for(model)(list(model.parameters()))
    layout = layout_for(model, optimizer, real.strategy)
    kept = KeptWeights(tmp_path, Keeping(True, True, note=lambda _: None), real.strategy, layout, optimizer_names(model, optimizer))
    lines = kept.load(model, record, repeated(real), 2)
    assert kept.begins is not None
    torch.testing.assert_close(2 * torch.cat(unsealed(Path(kept.begins).read_bytes())["residuals"]), owed)
    described = {**(record.read_run() or {}), **repeated(real), "resumed": kept.resumed}
    record.write_run(described)
    rows: list[Tensor | None] = [torch.rand(bucket.size) for bucket in layout.buckets]
    kept.prepare()
    for worker in range(2):
        kept.files.write(worker, 2, layout, rows, {})
    kept.save(model.state_dict(), [*lines, {**lines[-1], "epoch": 2}], 2, described)
    kept.checkpoints.wait()
    others = settings.changed(workers=4, epochs=2)
    again = run(others, others.virtual_cluster("cpu"), out=tmp_path, resume=True)
    torch.testing.assert_close(sum_of_residuals(again), 2 * torch.cat([row for row in rows if row is not None]))


def sum_of_residuals(training: Any) -> Tensor:
    """What virtual workers on servers owe together, flat."""
    return torch.stack([torch.cat(worker.state_dict()["encoder"]["errors"]) for worker in training.protocol.workers]).sum(0)


def test_a_run_goes_on_with_other_workers_says_so_and_sees_every_sample_once(tmp_path: Path) -> None:
    base = RunSettings.of(
        virtual=True, batch_size=60, strategy="local(3) + topk(0.3)", lr_schedule="linear", optimizer="adam", lr=0.01
    )
    run(base.changed(workers=3, epochs=1), VirtualCluster(3), out=tmp_path)
    said: list[str] = []
    seen: list[Tensor] = []
    for epochs, workers, virtual in ((2, 2, True), (3, 5, True), (4, 1, False), (5, 2, True)):
        cluster = VirtualCluster(workers, timed=not virtual)
        settings = base.changed(epochs=epochs, workers=workers, virtual=virtual)
        training = run(settings, cluster, out=tmp_path, resume=True, note=said.append)
        partition = training.batches.partition
        assert training.step == epochs * len(partition)
        rounds = partition.rounds(epochs - 1)
        seen = [torch.cat(r.indices) for r in rounds]
        assert len(torch.cat(seen).unique()) == len(torch.cat(seen)) >= partition.samples - workers
    assert [m["epoch"] for m in training.metrics] == [1, 2, 3, 4, 5]
    assert training.metrics[-1]["accuracy"] > training.metrics[0]["accuracy"]
    assert said[1].startswith("3 workers become 2: each begins with the mean of their weights, buffers and optimiser states")
    assert said[1].endswith("epoch 2 begins at its first sample.")
    assert [s.split(":")[0] for s in said[1::2]] == [
        "3 workers become 2", "2 workers become 5", "5 workers become 1", "1 workers become 2",
    ]  # fmt: skip
