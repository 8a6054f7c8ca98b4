"""Laws of predictions: they are the clock of virtual workers without their values, and what they say follows from it."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket import ClusterSpec, HocketError, OneBitAdam, Strategy
from hocket.cluster.spec_file import PRESETS
from hocket.cluster.virtual import VirtualCluster
from hocket.data.base import DataSet, identity
from hocket.prediction import predict
from hocket.prediction.events import MOST, step_apart
from hocket.train.loop import TrainingPlan
from hocket.train.simulate import train_rows

WORKERS, STEPS, BATCH = 6, 8, 4
ROUGH = ClusterSpec(
    step_s=0.01, slowdown=(1, 1, 3), jitter=0.3, stragglers=0.1, straggle=5, bandwidth=1e6, latency_s=1e-3, host_size=2,
    host_bandwidth=1e7, host_latency_s=1e-4, message_s=1e-5, half_duplex=0.2, pairs_half_duplex=0.7, exchange_s=1e-4, update_s=1e-7,
    load_s=1e-3, link_jitter=0.1, shared_links=True, trunk_hosts=2, trunk_bandwidth=1.5e6, trunk_latency_s=1e-3,
)  # fmt: skip
EXACT = [
    "bulk", "bulk + topk(0.1)", "bulk + lowrank(1)", "local(3)", "local(3, mean=after) + sign", "gossip", "gossip(random)",
    "gossip + exchange=gradients", "postlocal(2, 4)", "diloco(3)", "diloco(4, overlap=1)", "diloco(4, fragments=2)",
    "diloco(3, guard=3)", "hierarchical(allreduce, gossip, size=2)", "hierarchical(gossip, allreduce, size=2)",
    "local(2) + hierarchical(every=2)", "bulk + qsgd(4)", "bulk + ternary", "bulk + natural", "bulk + cast(bf16)", "bulk + bins(2)",
    "bulk + randomk(0.1)", "bulk + topk(0.1) | qsgd(4)", "bulk + sign(vote=True)", "local(2) + gossip + topk(0.2)", "gossip + sign",
    "bulk + server(2, role=sum)", "bulk + dgc(0.01)", "bulk + cast(e3m0)", "acco", "acco + topk(0.1)",
]  # fmt: skip
EXPECTED = {  # the values decide the size of messages: how near the expectation comes
    "bulk + threshold(keep=0.2)": 0.03, "gossip + threshold(keep=0.2)": 0.03, "bulk + topk(16/64)": 1e-3, "bulk + demo": 1e-2,
    "bulk + topk(0.1, indices=rice)": 1e-3, "bulk + topk(0.1, indices=rice) | qsgd(4)": 1e-3,
}  # fmt: skip


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 2))


def simulated(strategy: str) -> hocket.Run:
    x = torch.randn(WORKERS * STEPS * BATCH, 6, generator=torch.Generator().manual_seed(0))
    data, sgd = (x, (x.sum(1) > 0).long()), lambda params: torch.optim.SGD(params, 0.01)
    return hocket.simulate(
        net,
        F.cross_entropy,
        data,
        strategy=strategy,
        workers=WORKERS,
        batch_size=BATCH,
        cluster=ROUGH,
        optimizer=sgd,
        evaluate=False,
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("strategy", [*EXACT, *EXPECTED])
def test_a_prediction_equals_the_clock_of_virtual_workers(strategy: str) -> None:
    ledger = simulated(strategy).ledger
    (row,) = predict(net, ROUGH, [strategy], WORKERS, batch_size=BATCH, optimizer="sgd", steps=STEPS).rows
    assert row.refused is None
    figures = [row.step_s, row.compute_s, row.wait_s, row.transfer_s]
    measured = [ledger.seconds, ledger.compute_s, ledger.wait_s, ledger.transfer_s]
    if strategy in EXACT:
        assert [STEPS * f for f in figures] == pytest.approx(measured, rel=1e-12, abs=1e-15)
        assert row.bytes_sent * STEPS * WORKERS == pytest.approx(ledger.bytes_sent, rel=1e-12)
    else:
        assert STEPS * row.step_s == pytest.approx(ledger.seconds, rel=EXPECTED[strategy])


@pytest.mark.parametrize("strategy", ["bulk + server(2)", "async + server(2)", "ssp(1) + server(2)", "stale(4)", "async + gossip"])
def test_workers_apart_are_predicted_as_they_are_simulated(strategy: str) -> None:
    rounds, parsed = 8, Strategy.parse(strategy)
    spec = ClusterSpec(step_s=0.01, slowdown=(1, 2), jitter=0.2, bandwidth=1e6, latency_s=1e-3, message_s=1e-4, update_s=1e-7)
    data = DataSet("noise", (torch.zeros(4 * rounds, 128), torch.zeros(4 * rounds, dtype=torch.int64)), None, 2, identity)
    plan = TrainingPlan(3, 1, evaluate=False, evaluate_last=False, worst=False)
    sgd = lambda params: torch.optim.SGD(params, 0.1)  # noqa: E731
    large = lambda: nn.Linear(128, 64, bias=False)  # noqa: E731 - twice the model that stands for it
    training = train_rows(large, F.cross_entropy, sgd, data, parsed, VirtualCluster(4, spec=spec), plan)
    lines = [line for line in training.run()]
    row = step_apart(parsed, 128 * 64, spec, 4, 0.01)
    assert row.step_s * rounds == pytest.approx(lines[1]["seconds"], rel=1e-6)
    assert row.compute_s * rounds == pytest.approx(lines[1]["compute_s"], rel=1e-6)


def test_many_workers_at_a_server_take_what_its_link_takes() -> None:
    spec, m = ClusterSpec(step_s=0.1, bandwidth=1e8), 4e6
    for shards in (1, 4):
        many = step_apart(Strategy.parse(f"async + server({shards})"), int(m / 4), spec, 1000, 0.1)
        assert many.step_s == pytest.approx(1000 * m / (shards * 1e8), rel=0.04)  # N·M/(n·B), headers aside
    alone = step_apart(Strategy.parse("async + gossip(pushsum)"), int(m / 4), spec, 1000, 0.1)
    assert alone.step_s == pytest.approx(step_apart(Strategy.parse("async + gossip(pushsum)"), int(m / 4), spec, MOST, 0.1).step_s)


@pytest.mark.parametrize("cluster", PRESETS)
def test_every_preset_gives_predictions(cluster: str) -> None:
    spec = ClusterSpec.parse(cluster)
    counts = [n for n in (1, 4, 8, 32) if n <= (spec.workers or 32)]
    found = predict(parameters=1e6, step_s=0.01, cluster=cluster, strategies=["bulk", "bulk + gossip"], workers=counts)
    assert all(math.isfinite(row.step_s) and row.refused is None for row in found.rows)
    assert [row.efficiency for row in found.rows if row.workers == 1] == pytest.approx([1.0, 1.0])


def test_thousands_of_workers_follow_the_formula() -> None:
    n, m = 4096, 4e8
    spec = ClusterSpec(step_s=0.1, bandwidth=1e9, latency_s=1e-6)
    found = predict(parameters=m / 4, cluster=spec, strategies=["bulk"], workers=n, optimizer="sgd").rows[0]
    assert found.step_s == pytest.approx(0.1 + 2 * n * 1e-6 + 2 * m / 1e9 * 1.033, rel=0.35)  # overlap aside
    assert found.bytes_sent == pytest.approx(2 * m * 1.033, rel=0.1)


def test_memory_counts_weights_gradients_moments_and_the_strategys_state() -> None:
    def memory(strategy: str, optimizer: str, **more: object) -> float:
        rows = predict(parameters=1e6, step_s=0.1, strategies=[strategy], workers=4, optimizer=optimizer, **more).rows  # type: ignore[arg-type]
        return rows[0].memory_bytes / 4e6

    assert memory("bulk", "sgd") == pytest.approx(2)
    assert memory("bulk", "adamw") == pytest.approx(4)
    assert memory("bulk", "adamw", sharding="zero1") == pytest.approx(2.5)
    assert memory("bulk", "adamw", sharding="fsdp") == pytest.approx(1)
    assert memory("diloco(8)", "sgd") == pytest.approx(2 + 1 + 2)  # the copy that travels, outer weights and velocity
    assert memory("bulk + topk(0.01)", "sgd") == pytest.approx(2 + 2 + 0.25)  # residuals, those of a slice, and the reference


def test_prices_failures_and_checkpoints_enter_cost_and_speed() -> None:
    spec = ClusterSpec(step_s=3.6, price=10.0, checkpoint_every_s=90, checkpoint_s=9)
    (row,) = predict(parameters=1e3, cluster=spec, strategies=["bulk"], workers=2, batch_size=5).rows
    assert row.samples_per_s == pytest.approx(2 * 5 / (3.6 * 1.1))
    assert row.cost == pytest.approx(1000 * 3.6 * 1.1 / 3600 * 10)


def test_it_says_where_communication_overtakes_and_what_the_bottleneck_is() -> None:
    spec = ClusterSpec(step_s=0.1, bandwidth=1e8, coding={"other": (0.0, 0.0)})
    found = predict(parameters=5e6, cluster=spec, strategies=["bulk", "bulk + topk(0.01)"], workers=[1, 2, 4, 8], optimizer="sgd")
    bulk, topk = found.answers()
    assert "communication outweighs computing from 2 workers on" in bulk
    assert "the bottleneck is the bandwidth of the links" in bulk
    assert "computing outweighs communication up to 8 workers; 8 workers still pay" in topk
    slow = replace(spec, bandwidth=math.inf, slowdown=(1, 1, 1, 9))
    assert "slow and uneven workers" in predict(parameters=5e6, cluster=slow, strategies=["bulk"], workers=4).answers()[0]
    coded = replace(spec, coding={"topk": (1.0, 0.0)})
    said = predict(parameters=5e6, cluster=coded, strategies=["bulk + topk(0.01)"], workers=4, optimizer="sgd").answers()[0]
    assert "encoding and decoding" in said
    assert [row["workers"] for row in csv.DictReader(io.StringIO(found.csv()))] == [str(r.workers) for r in found.rows]
    assert len(json.loads(json.dumps(found.plain()))["rows"]) == 8


def test_a_split_model_has_bubbles_and_less_to_exchange() -> None:
    size = hocket.predict("cnn", "1gbit", ["bulk"], 1).model
    spec = ClusterSpec(step_s=0.8)  # links without limits: what is left is the bubble, (4−1)/(8+3)
    rows = predict(size, spec, ["bulk"], [4], meshes=["pipeline=4", "tensor=4"]).rows
    assert rows[0].step_s == pytest.approx(0.8 / 4 / (1 - 3 / 11))
    assert rows[1].step_s == pytest.approx(0.8 / 4)
    whole, halves = predict(size, ClusterSpec(step_s=0.8, bandwidth=1e6), ["bulk"], 8, meshes=["data=8", "tensor=2"]).rows
    assert halves.memory_bytes == pytest.approx(whole.memory_bytes / 2, rel=0.01)


@pytest.mark.parametrize("stages, microbatches", [(2, 2), (4, 8), (8, 64), (16, 48)])
def test_a_pipeline_has_the_bubble_of_the_formula(stages: int, microbatches: int) -> None:
    size = hocket.predict("cnn", "1gbit", ["bulk"], 1).model
    spec = ClusterSpec(step_s=0.8)

    def busy(schedule: str, **more: int) -> float:
        way = {"meshes": [f"pipeline={stages}"], "schedule": schedule, "num_microbatches": microbatches, **more}
        (row,) = predict(size, spec, ["bulk"], stages, **way).rows  # type: ignore[arg-type]
        return 0.8 / stages / row.step_s

    for schedule in ("1f1b", "gpipe"):
        assert 1 - busy(schedule) == pytest.approx((stages - 1) / (microbatches + stages - 1))
    pieces = 1 - busy("interleaved", stages_per_rank=2)
    assert pieces == pytest.approx((stages - 1) / (2 * microbatches + stages - 1))


def test_each_micro_batch_has_its_own_messages() -> None:
    size = replace(hocket.predict("cnn", "1gbit", ["bulk"], 1).model, activation_bytes=8e6)
    slow = ClusterSpec(step_s=0.8, latency_s=0.1)

    def step_s(mesh: str, microbatches: int) -> float:
        return predict(size, slow, ["bulk"], 4, meshes=[mesh], num_microbatches=microbatches).rows[0].step_s

    # gpipe's and 1f1b's first micro-batch passes one boundary, and its gradient comes back; each ring has two hops of latency
    assert step_s("pipeline=2,tensor=2", 8) - step_s("pipeline=2,tensor=2", 4) > 4 * 2 * 0.1


@pytest.mark.parametrize(
    "given, words",
    [
        ({"parameters": 1e6, "schedule": "gpipe"}, "for a model cut into stages, but there is no mesh"),
        ({"parameters": 1e6, "meshes": ["tensor=2"], "num_microbatches": 4}, "for a model cut into stages, but the mesh tensor=2"),
        ({"parameters": 1e6, "meshes": ["pipeline=2"], "schedule": "gpip"}, "no schedule 'gpip'"),
        ({"parameters": 1e6, "meshes": ["pipeline=2"], "num_microbatches": 0}, "whole number of at least 1"),
        ({}, "Give a model"),
        ({"model": "cnn", "parameters": 1e6}, "and not both"),
        ({"model": "cn"}, "did you mean 'cnn'"),
        ({"parameters": 0}, "at least one parameter"),
        ({"parameters": 1e6, "step_s": 0}, "give the seconds of a step, above 0"),
        ({"parameters": 1e6, "workers": 0}, "whole number of at least 1"),
        ({"parameters": 1e6, "workers": 61, "cluster": "study-fast"}, "holds 60 workers, not 61"),
        ({"parameters": 1e6, "optimizer": "adm"}, "use one of sgd"),
        ({"parameters": 1e6, "strategies": []}, "at least one strategy"),
        ({"model": nn.Identity()}, "no parameters to train"),
    ],
)
def test_bad_input_meets_one_sentence(given: dict[str, object], words: str) -> None:
    with pytest.raises(HocketError, match=words):
        predict(**given)  # type: ignore[arg-type]


def test_what_cannot_be_predicted_says_why() -> None:
    found = predict(parameters=1e6, step_s=0.1, strategies=["hierarchical(size=3)"], workers=[3, 4]).rows
    assert [row.refused is None for row in found] == [True, False]
    (split,) = predict(parameters=1e6, step_s=0.1, strategies=["bulk"], workers=4, meshes=["pipeline=2"]).rows
    assert "activations" in (split.refused or "")


def test_the_command_prints_tables_json_and_csv() -> None:
    from typer.testing import CliRunner

    from hocket.cli.main import app

    given = ["predict", "--parameters", "1M", "--step-s", "0.01", "--cluster", "spot", "-s", "bulk", "-s", "hierarchical(size=3)"]
    shown = CliRunner().invoke(app, [*given, "-n", "1,4"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert "1M parameters (1.0 million parameters), batch 100, predicted for spot" in shown.output
    assert "4 workers: hierarchical(size=3): 4 workers do not divide" in shown.output
    assert "USD" in shown.output
    assert "/1000" in shown.output
    found = json.loads(CliRunner().invoke(app, [*given, "--json"]).output)
    assert found["rows"][0]["workers"] == 1
    assert found["cluster"]["price"] == 0.3
    lines = CliRunner().invoke(app, [*given, "--csv", "-n", "4"]).output.splitlines()
    assert len(lines) == 3
    assert CliRunner().invoke(app, [*given, "-n", "4,x"]).exit_code != 0


def test_tied_parameters_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.out.weight = self.embedding.weight

    found = predict(Tied(), strategies=["bulk"], workers=[2], step_s=0.1)
    assert found.model.parameters == 40


def test_momentum_that_is_exchanged_now_and_then_travels_now_and_then() -> None:
    onebit: dict[str, Any] = {"optimizer": lambda p: OneBitAdam(p, freeze_step=1), "parameters": 1e5, "step_s": 0.1}
    names = ["bulk + sign + exchange=momentum", "local(4) + sign + exchange=momentum"]
    often, seldom = predict(strategies=names, workers=[4], **onebit).rows
    assert often.refused is None
    assert seldom.bytes_sent == pytest.approx(often.bytes_sent / 4)


def test_periods_in_seconds_are_predicted_by_the_steps_that_fit() -> None:
    (row,) = predict(parameters=1e4, step_s=0.01, strategies=["aedit(0.05)"], workers=[2]).rows
    assert row.refused is None
    assert row.step_s >= 0.009


def test_language_models_of_transformers_are_predicted_on_texts(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=256).save_pretrained(tmp_path)
    found = predict(f"hf:{tmp_path}", strategies=["bulk"], workers=[2])
    assert found.rows[0].refused is None


def test_a_run_that_failures_end_before_it_gets_anywhere_is_said_to_stand_still() -> None:
    many, few = (hocket.predict(parameters=1e8, cluster="spot", workers=[n], strategies=["bulk"], step_s=1.0) for n in (2048, 4))
    assert many.rows[0].samples_per_s == 0
    assert "failures come so often" in " ".join(many.answers())
    assert "failures come so often" not in " ".join(few.answers())
