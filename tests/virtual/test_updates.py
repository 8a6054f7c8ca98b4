"""Laws of exchanged updates, and of their choice from the optimiser: all ways into a training choose alike."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.cluster import VirtualCluster
from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.train.adaptive import is_adaptive, with_exchange
from hocket.train.run import run
from hocket.train.settings import RunSettings
from virtual.world import World, sgd

STEPS = 8
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
CODED = ["sign", "topk(0.2)", "topk(0.2) | qsgd(4)", "lowrank(1)", "threshold(keep=0.2)"]


def adam(lr: float = 0.01) -> Callable:
    return lambda params: torch.optim.Adam(params, lr)


# --- updates -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["allreduce", "hierarchical(size=2)", "server(2, role=sum)"])
def test_updates_of_plain_sgd_are_bulk(topology: str) -> None:
    """The mean of the updates is the update of the mean gradient, where an update is linear in the gradient."""
    found = World(f"bulk + {topology} + exchange=updates").step(STEPS).rows
    torch.testing.assert_close(found, World("bulk").step(STEPS).rows, **CLOSE)


@pytest.mark.parametrize("compression", CODED)
@pytest.mark.parametrize("optimizer", [sgd(0.1, momentum=0.9), adam()], ids=["momentum", "adam"])
def test_coded_updates_leave_all_replicas_equal_and_are_local_steps_of_one(compression: str, optimizer: Callable) -> None:
    world = World(f"bulk + {compression} + exchange=updates", optimizer=optimizer).step(STEPS)
    assert torch.equal(world.rows, world.rows[:1].expand_as(world.rows))
    local = World(f"local(1, mean=after) + {compression}", optimizer=optimizer).step(STEPS)
    assert torch.equal(world.rows, local.rows)
    assert world.sent == local.sent


def test_updates_carry_all_that_feedback_holds_back() -> None:
    """With a linear loss and a rate of 1 the weights and the residuals together hold the mean of all updates."""
    linear: dict[str, Any] = {"make": lambda: nn.Linear(4, 3), "loss": lambda out, y: out.gather(1, y[:, None]).mean()}
    coded = World("bulk + topk(0.3) + exchange=updates", **linear).step(STEPS)
    plain = World("bulk", **linear).step(STEPS)
    (state,) = coded.replicas.program.weight_state
    inner = state["inner"]
    held = inner["error"].mean(0).double()
    owned = inner["inner"]["error"].double()  # each slice owner's, interleaved
    whole = owned.t().reshape(-1)[: held.numel()]
    torch.testing.assert_close(coded.rows[0] + held + whole, plain.rows[0], **CLOSE)


# --- the choice --------------------------------------------------------------------------------------------------------------


class Own(torch.optim.AdamW):
    """A subclass of an adaptive one."""


class Lion(torch.optim.Optimizer):
    """Unknown to PyTorch; it has betas."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99)})


class Lars(torch.optim.SGD):
    """A subclass of SGD, with an epsilon of its own: it keeps no statistics of gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__([{"params": params, "eps": 1e-8}])


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "Adafactor"]
)
def test_adaptive_optimisers_of_pytorch_are_known(name: str) -> None:
    assert is_adaptive(getattr(torch.optim, name)([torch.ones(2, 2)]))


def test_other_optimisers_are_judged_by_what_they_are() -> None:
    params = [torch.ones(2, 2)]
    assert [is_adaptive(kind(params)) for kind in (Own, Lion, hocket.Muon)] == [True] * 3
    assert [is_adaptive(kind(params)) for kind in (torch.optim.SGD, torch.optim.ASGD, Lars)] == [False] * 3


def chosen(text: str, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[str, list[str]]:
    """What is exchanged under an optimiser, and what is said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = with_exchange(Strategy.parse(text), kind([torch.ones(2, 2)]), **options)
    return found.exchanged, [str(w.message) for w in caught]


@pytest.mark.parametrize("code", CODED)
def test_a_code_with_feedback_under_an_adaptive_optimiser_sends_updates_and_says_so(code: str) -> None:
    exchanged, (sentence,) = chosen(f"bulk + {code}")
    assert exchanged == "updates"
    assert f"{code} under AdamW: workers exchange their updates (exchange=updates)" in sentence
    assert "docs/methods/updates.md" in sentence
    assert chosen(f"bulk + {code}", torch.optim.SGD) == ("gradients", [])
    assert chosen(f"bulk + {code} + exchange=updates") == ("updates", [])
    assert chosen(f"bulk + {code}", tell=False) == ("updates", [])


@pytest.mark.parametrize("text", ["bulk", "bulk + qsgd(4)", "bulk + cast(bf16)", "bulk + topk(1.0)", "local(4) + sign",
                                  "gossip + sign", "diloco(4) + topk(0.1)", "bulk + topk(0.1, feedback=False)"])  # fmt: skip
def test_what_holds_no_coded_gradient_back_stays_as_it_is_without_a_word(text: str) -> None:
    strategy = Strategy.parse(text)
    assert chosen(text) == (strategy.exchanged, [])


SGD = "use SGD, or a strategy that exchanges weights."


@pytest.mark.parametrize("text, options, instead", [
    ("bulk + sign + exchange=gradients", {}, "use exchange=updates."),
    ("bulk + topk(0.1)", {"sharded": True}, "leave the sharding out."),
    ("async + topk(0.1)", {}, SGD),
    ("bulk + server + topk(0.1)", {}, SGD),
    ("async + server(optimizer=adagrad) + topk(0.1)", {"kind": torch.optim.SGD}, SGD),
    ("postlocal(4, 8) + sign", {}, SGD),
    ("bulk + dgc(0.1)", {"kind": torch.optim.RMSprop}, SGD),
])  # fmt: skip
def test_coded_gradients_under_an_adaptive_optimiser_are_warned_of(text: str, options: dict[str, Any], instead: str) -> None:
    exchanged, (sentence,) = chosen(text, **options)
    assert exchanged == Strategy.parse(text).exchanged
    assert "is known to ruin training with" in sentence
    assert sentence.endswith(instead)


@pytest.mark.parametrize("text", ["postlocal(4, 0) + sign", "postlocal(4, 8)"])
def test_postlocal_without_coded_gradients_is_not_warned_of(text: str) -> None:
    assert chosen(text) == ("weights", [])


def test_servers_with_sgd_may_have_adaptive_workers() -> None:
    assert chosen("async + server(optimizer=sgd) + topk(0.1)") == ("gradients", [])


# --- all ways in -------------------------------------------------------------------------------------------------------------

UPDATES = "bulk + allreduce + sign + exchange=updates"


def test_simulate_trains_with_updates() -> None:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    sets: Any = (x, (x.sum(1) > 0).long())
    given: Any = {"workers": 4, "batch_size": 4, "optimizer": adam(0.05)}
    make = lambda: nn.Linear(5, 2)  # noqa: E731
    with pytest.warns(UserWarning, match="workers exchange their updates"):
        found = hocket.simulate(make, F.cross_entropy, sets, sets, strategy="bulk + sign", **given)
    named = hocket.simulate(make, F.cross_entropy, sets, sets, strategy=UPDATES, **given)
    assert str(found.replicas.strategy) == UPDATES
    assert found.metrics[-1]["loss"] == named.metrics[-1]["loss"]


def test_a_job_trains_with_updates() -> None:
    hocket.init()
    model = nn.Linear(2, 2)
    job = hocket.parallelize(model, torch.optim.AdamW(model.parameters()), "bulk + sign")
    assert str(job.strategy) == UPDATES
    hocket.shutdown()


def test_with_a_part_of_the_state_gradients_stay() -> None:
    hocket.init()
    model = nn.Linear(2, 2)
    job = hocket.parallelize(model, torch.optim.AdamW(model.parameters()), "bulk + sign", sharding="zero1")
    assert str(job.strategy) == "bulk + allreduce + sign"
    hocket.shutdown()
    assert RunSettings.of(strategy="bulk + sign", optimizer="adamw", zero=1, workers=2).resolved.exchange is None


def test_settings_records_and_studies_name_what_is_exchanged(tmp_path: Path) -> None:
    settings = RunSettings.of(strategy="bulk + sign", optimizer="adam", lr=0.01, workers=2, virtual=True, max_steps=4)
    for plain in ({"optimizer": "sgd"}, {"strategy": "bulk + sign + exchange=gradients"}):
        assert settings.changed(**plain).resolved.exchanged == "gradients"
    assert RunSettings.from_recorded(settings.recorded()).recorded() == settings.recorded()
    with pytest.warns(UserWarning, match="workers exchange their updates"):
        run(settings, VirtualCluster(2), out=tmp_path / "a")
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    assert (record["strategy"], record["exchange"]) == (UPDATES, "updates")
    longer = settings.changed(max_steps=8, strategy=UPDATES)
    run(longer, VirtualCluster(2), out=tmp_path / "a", resume=True)
    with pytest.raises(HocketError, match="has strategy"):
        run(settings.changed(strategy="bulk + sign + exchange=gradients"), VirtualCluster(2), out=tmp_path / "a", resume=True)


def test_what_was_saved_before_strategies_named_it_goes_on_with_gradients(tmp_path: Path) -> None:
    """Such a run exchanged gradients, and its text does not say so."""
    settings = RunSettings.of(strategy="bulk + sign + exchange=gradients", optimizer="adam", workers=2, virtual=True, max_steps=4)
    run(settings, VirtualCluster(2), out=tmp_path)
    record = tmp_path / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "strategy": "bulk + allreduce + sign"}))
    run(settings.changed(max_steps=8), VirtualCluster(2), out=tmp_path, resume=True)
    state = World("bulk + sign + gradients", optimizer=adam()).step(2).replicas.program.state_dict()
    assert state["strategy"] == "bulk + allreduce + sign"
    for text in ("bulk + sign", "bulk + sign + exchange=gradients"):  # as texts were saved
        World("bulk + sign + gradients", optimizer=adam()).replicas.program.load_state_dict({**state, "strategy": text})
    with pytest.raises(HocketError, match="strategy"):
        World("bulk + sign", optimizer=adam()).replicas.program.load_state_dict(state)
