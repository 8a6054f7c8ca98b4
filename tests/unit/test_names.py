"""Names: the field's names are answered with the notation's, and every table of the notation has the same methods."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import hocket
from hocket import compression, sync, topology
from hocket.cli.options import HELP
from hocket.errors import HocketError, bytes_text
from hocket.strategy import Strategy
from hocket.synonyms import ELSEWHERE, WRITTEN

ROOT = Path(__file__).parents[2]
AXES = {"when": sync.METHODS, "whom": topology.METHODS, "what": compression.METHODS}


def refusal(text: str) -> str:
    with pytest.raises(HocketError) as caught:
        Strategy.parse(text)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("text, answer", [
    ("powersgd", "write 'lowrank(2)'"), ("PowerSGD(4)", "write 'lowrank(2)'"), ("bulk + power_sgd", "write 'lowrank(2)'"),
    ("topk(1%)", "write 0.01 for 1 %"), ("local(4) + topk(0.5 %)", "write 0.005 for 0.5 %"),
    ("fedavg", "write 'local(16)'"), ("localsgd(8)", "write 'local(16)'"), ("local-sgd", "for 'local-sgd' write 'local(16)'"),
    ("adpsgd", "write 'async + gossip'"), ("AD-PSGD", "for 'AD-PSGD' write 'async + gossip'"),
    ("easgd", "it is not there; nearest is 'diloco(16)'"), ("dsgd", "write 'bulk + gossip'"),
    ("sgp", "gossip(pushsum)"), ("signsgd", "write 'sign'"), ("1bit", "for '1bit' write 'sign'"), ("onebit", "write 'sign'"),
    ("terngrad", "write 'ternary'"), ("ddp", "write 'bulk'"), ("sync", "write 'bulk'"), ("bmuf", "write 'diloco(16)'"),
    ("slowmo(8)", "write 'diloco(16)'"), ("hogwild", "write 'async'"), ("deepspeed", "sharding='zero1'"),
    ("zero", "sharding='zero1'"), ("zero-1", "sharding='zero1'"), ("ps", "write 'async + server'"),
    ("parameter server", "for 'parameter server' write 'async + server'"), ("top-k(0.1)", "for 'top-k' write 'topk'"),
    ("sparseloco", "write 'diloco(30, 1.0, 0) + topk(64/4096, feedback=0.95) | bins(2)'"), ("e3m0", "write 'cast(e3m0)'"),
    ("fp4", "write 'cast(e3m0)'"), ("elias", "write 'topk(0.01, indices=rice)'"), ("2-bit", "for '2-bit' write 'bins(2)'"),
    ("asink", "did you mean 'async'?"), ("AllReduce", "did you mean 'allreduce'?"), ("pipedream", "mesh="),
])  # fmt: skip
def test_the_fields_name_is_answered_with_the_notations(text: str, answer: str) -> None:
    assert answer in refusal(text)


def test_what_is_proposed_can_be_written_and_is_not_a_method_itself() -> None:
    for name, strategy in WRITTEN.items():
        Strategy.parse(strategy)
        assert name not in {method for methods in AXES.values() for method in methods}
    assert not WRITTEN.keys() & ELSEWHERE.keys()
    for name in (*WRITTEN, *ELSEWHERE):
        assert name == re.sub(r"[\s_-]", "", name).lower()


# --- tables of the notation ------------------------------------------------------------------------------------------------------


def rows(page: str) -> dict[str, list[str]]:
    """The terms of each axis in the page's table."""
    lines = [line.split("|") for line in (ROOT / page).read_text().splitlines()]
    return {
        axis: re.findall(r"`([^`]+)`", next(cells[2] for cells in lines if len(cells) == 4 and f"*{axis}*" in cells[1]))
        for axis in AXES
    }


@pytest.mark.parametrize("axis", AXES)
def test_a_table_has_all_methods_of_its_axis_and_only_arguments_that_exist(axis: str) -> None:
    terms = rows("docs/guide/strategies.md")[axis]
    assert {term.split("(")[0] for term in terms} == set(AXES[axis])
    for term in terms:
        known = {f.name for f in fields(AXES[axis][term.split("(")[0]])}  # type: ignore[arg-type]
        assert set(re.findall(r"(\w+)=", term)) <= known
        placeholders = set(re.findall(r"[(,] ?([a-z_]{3,})(?=[,)])", term))
        assert placeholders <= known | {"ring", "exponential", "random", "pushsum"}, term


def test_the_index_of_methods_and_the_help_have_every_method() -> None:
    index = re.findall(r"^\| \[`(\w+)[^`]*`\]\((\w+)\.md\)", (ROOT / "docs/methods/index.md").read_text(), re.M)
    known = {method for methods in AXES.values() for method in methods} - {"none"}
    assert {name for name, _ in index} == known
    assert all(name == page for name, page in index)
    words = set(re.findall(r"\w+", HELP["strategy"]))
    assert known <= words


# --- other messages --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given, fragment", [
    (nn.Sequential(nn.Linear(2, 2)), "got the model Sequential; a model is for parallelize"),
    (nn.Linear(2, 2), "got the model Linear"),
    (torch.utils.data.TensorDataset(torch.zeros(2)), "got TensorDataset"),
])  # fmt: skip
def test_only_batches_are_distributed(given: object, fragment: str) -> None:
    hocket.init(device="cpu")
    with pytest.raises(HocketError, match=fragment):
        hocket.distribute(given)  # type: ignore[arg-type]
    hocket.shutdown()


@pytest.mark.parametrize("count, text", [
    (0, "0.0 kB"), (2_600, "2.6 kB"), (999_949, "999.9 kB"), (999_960, "1.0 MB"), (25e6, "25.0 MB"), (2.5e12, "2,500.0 GB"),
])  # fmt: skip
def test_bytes_have_a_unit_that_leaves_digits(count: float, text: str) -> None:
    assert bytes_text(count) == text
