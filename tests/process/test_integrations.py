"""Hocket inside other people's loops, on two real processes."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from process.integrated import DDP_CODES
from process.launch import Nursery

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def ddp(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    group = nursery.start("process.integrated:ddp", 2, tmp_path_factory.mktemp("ddp"))
    assert group.wait(120, together=True) == [0, 0], group.said()
    return group.results()


@pytest.mark.parametrize("code", DDP_CODES)
def test_a_code_on_ddps_buckets_is_bulk_with_that_code(ddp: list[dict[str, Any]], code: str) -> None:
    for worker in ddp:
        assert torch.equal(worker[code]["ddp"], worker[code]["ours"])
        assert worker[code]["step"] == 6
        assert worker[code]["bytes"] > 0
    assert torch.equal(ddp[0][code]["ddp"], ddp[1][code]["ddp"])
    assert ddp[0][DDP_CODES[0]]["bytes"] < ddp[0]["none"]["bytes"]


def test_a_resumed_hook_goes_on_as_if_it_had_not_stopped(ddp: list[dict[str, Any]]) -> None:
    for worker in ddp:
        assert torch.equal(worker["resumed"], worker[DDP_CODES[0]]["ddp"])


def test_nothing_is_lost_when_ddp_arranges_its_buckets_anew(ddp: list[dict[str, Any]]) -> None:
    workers = [worker["rebuilt"] for worker in ddp]
    for found in workers:
        assert [len(buckets) for buckets in found["arranged"]] == [1, 3, 3, 3, 3]
    owed, computed = (torch.stack([found[name] for found in workers]).mean(0) for name in ("owed", "computed"))
    assert owed.norm() > 0.1
    torch.testing.assert_close(workers[0]["delivered"] + owed, computed)


def test_what_ddp_cannot_do_is_refused(ddp: list[dict[str, Any]]) -> None:
    said = ddp[0]["refused"]
    assert len(said) == 7
    assert all("use a code alone" in text or "parallelize instead of DDP" in text for text in said[:4])
    assert "of its own" in said[4]
    assert "The saved strategy is" in said[5]
    assert "NaN or Inf at step 1 on worker 0" in said[6]


def test_an_overflow_on_one_worker_leaves_nothing_in_what_a_code_keeps(ddp: list[dict[str, Any]]) -> None:
    """All workers skip the step, and go on as if it had not been."""
    for worker in ddp:
        without, skipped = worker["overflow"]
        assert torch.equal(without, skipped)
        assert torch.equal(skipped, ddp[0]["overflow"][1])


# --- Lightning, Accelerate, Hugging Face -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frameworks(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two workers found in the frameworks that are installed."""
    needed = {"lightning": ("lightning",), "hugging_face": ("accelerate", "peft", "transformers")}
    wanted = [name for name, modules in needed.items() if all(find_spec(module) for module in modules)]
    folder = tmp_path_factory.mktemp("frameworks")
    group = nursery.start("process.frameworks:main", 1, folder, wanted=wanted)
    assert group.wait(180) == [0], group.said()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture
def on_lightning(frameworks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pytest.importorskip("lightning")
    return [worker["lightning"] for worker in frameworks]


@pytest.fixture
def on_hugging_face(frameworks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for module in ("accelerate", "peft", "transformers"):
        pytest.importorskip(module)
    return [worker["hugging_face"] for worker in frameworks]


def test_lightning_trains_as_a_loop_of_ones_own(on_lightning: list[dict[str, Any]]) -> None:
    """With closures, accumulation, an incomplete last step and clipping, bit for bit."""
    for worker in on_lightning:
        assert torch.equal(worker["fit"], worker["ours"])


def test_lightning_goes_on_from_its_checkpoints_as_if_it_had_not_stopped(on_lightning: list[dict[str, Any]]) -> None:
    for worker in on_lightning:
        assert torch.equal(worker["resumed"], worker["whole"])


def test_lightning_validates_saves_and_ends_with_the_mean_model(on_lightning: list[dict[str, Any]]) -> None:
    one, other = on_lightning
    assert torch.equal(one["validated"], other["validated"])
    assert torch.equal(one["whole"], other["whole"])
    assert torch.equal(one["saved"], one["validated"][1])  # after the second epoch


def test_lightning_and_fabric_run_their_examples(on_lightning: list[dict[str, Any]]) -> None:
    assert float(re.findall(r"accuracy ([\d.]+)", on_lightning[0]["example"])[0]) > 0.85
    assert float(re.findall(r"accuracy ([\d.]+)", on_lightning[0]["fabric"])[0]) > 0.85
    assert on_lightning[0]["fabric_workers"] == 2
    assert on_lightning[0]["named"] == "bulk + allreduce"


def test_lightning_refuses_what_cannot_work_by_name(on_lightning: list[dict[str, Any]]) -> None:
    said = on_lightning[0]["refused"]
    for text, word in zip(said, ("async", "find_unused_parameters", "downpour", "Unfreezing", "clip"), strict=True):
        assert word in text


def test_accelerate_saves_all_workers_and_goes_on(on_hugging_face: list[dict[str, Any]]) -> None:
    said, resumed = on_hugging_face[0]["accelerate"], on_hugging_face[0]["accelerate_resumed"]
    assert "after 23 steps" in said
    assert "after 46 steps" in resumed
    assert float(re.findall(r"accuracy ([\d.]+)", resumed)[0]) > 0.85


def test_accelerate_goes_on_with_several_optimisers(on_hugging_face: list[dict[str, Any]]) -> None:
    for worker in on_hugging_face:
        assert torch.equal(worker["pair"], worker["pair_resumed"])


def test_the_trainer_goes_on_from_its_checkpoints_as_if_it_had_not_stopped(on_hugging_face: list[dict[str, Any]]) -> None:
    found = on_hugging_face[0]
    assert found["whole"].keys() == found["resumed"].keys()
    assert all(torch.equal(found["whole"][name], found["resumed"][name]) for name in found["whole"])


def test_the_trainer_saves_the_mean_model(on_hugging_face: list[dict[str, Any]]) -> None:
    found = on_hugging_face[0]
    one, other = found["own"]
    name = "transformer.wte.weight"
    assert not torch.equal(one[name], other[name])
    torch.testing.assert_close(found["whole"][name], (one[name] + other[name]) / 2)


def test_of_a_model_with_adapters_only_these_travel(on_hugging_face: list[dict[str, Any]]) -> None:
    said = [on_hugging_face[0][name].replace(",", "") for name in ("trainer", "lora")]
    sent = [int(re.findall(r"(\d+) bytes sent", text)[0]) for text in said]
    assert 0 < sent[1] < sent[0] / 4
