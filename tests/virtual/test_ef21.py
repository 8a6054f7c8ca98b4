"""Laws of EF21: workers send differences, and all hold the mean of what each has sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hocket.cluster import VirtualCluster
from hocket.compression.base import Compressor, Context, State
from hocket.compression.feedback import mean_with_feedback
from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.topology import AllReduce

WORKERS, SIZE = 4, 48
CODES = [
    "topk(0.2, feedback=ef21)", "topk(3/12, feedback=ef21) | bins(3)", "sign(feedback=ef21, block=8)", "lowrank(1, feedback=ef21)",
    "threshold(keep=0.3, feedback=ef21)", "threshold(0.01, feedback=ef21)", "randomk(0.3, feedback=ef21)",
    "cast(e3m0, feedback=ef21)", "bins(2, feedback=ef21)",
]  # fmt: skip


def _compressor(text: str) -> Compressor:
    return Strategy.parse(text).compression


class Means:
    """One compressor's means over four workers."""

    def __init__(self, text: str) -> None:
        self.compressor, self.cluster = _compressor(text), VirtualCluster(WORKERS)
        self.channel = AllReduce().bind(self.cluster, self.cluster.world, 0)
        self.state: State = {}
        self.count = 0

    def mean(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        where = Context(0, self.count, self.count, 0, torch.arange(WORKERS), WORKERS, ((6, 8),))
        self.count += 1
        heard, own, self.state = mean_with_feedback(self.compressor, rows, self.channel, self.state, where)
        return heard, own


def _rows(seed: int = 0) -> Tensor:
    return torch.randn(WORKERS, SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("code", CODES)
def test_what_does_not_change_is_known_to_all_in_the_end(code: str) -> None:
    """Estimates of constant rows converge to them, and what all hear to their mean."""
    means, rows = Means(code), _rows()
    for _ in range(80):
        heard, own = means.mean(rows)
    close = {"rtol": 0, "atol": 0.02}  # a static threshold never sends less than 0.01
    torch.testing.assert_close(own, rows, **close)
    torch.testing.assert_close(heard, rows.mean(0).expand_as(rows), **close)


@pytest.mark.parametrize("code", CODES)
def test_all_hold_the_mean_of_the_estimates_but_for_what_slice_owners_hold_back(code: str) -> None:
    means = Means(code)
    for t in range(6):
        heard, own = means.mean(_rows(t))
        assert torch.equal(heard, heard[:1].expand_as(heard))
        held = means.state["inner"].get("error", torch.zeros(WORKERS, SIZE // WORKERS))  # [owner, its slice]; low rank has none
        whole = (held.mT if means.compressor.global_selection else held).reshape(-1)
        torch.testing.assert_close(heard[0] + whole, own.mean(0), rtol=0, atol=1e-5)


def test_the_formula_by_hand() -> None:
    """One value of three is sent in each exchange, of the difference."""
    own = torch.zeros(3)
    cluster = VirtualCluster(1)
    channel, compressor, state = AllReduce().bind(cluster, cluster.world, 0), _compressor("topk(1/3, feedback=ef21)"), {}
    for t, x in enumerate(torch.tensor([[1.0, -3.0, 2.0], [1.0, -3.0, 2.0], [0.5, 5.0, 2.0], [-4.0, 5.0, 2.0]])):
        place = int((x - own).abs().argmax())
        own[place] = x[place]
        heard, sent, state = mean_with_feedback(compressor, x[None], channel, state, Context(0, t, t, 0, torch.arange(1)))
        assert torch.equal(sent[0], own)
        assert torch.equal(heard[0], own)
    assert own.tolist() == [-4.0, 5.0, 2.0]


def test_nothing_is_held_back_where_weights_follow_gradients() -> None:
    """The last gradients of postlocal's first phase travel whole, and nothing is added to them."""
    means = Means(CODES[0])
    means.mean(_rows())
    where = Context(0, 1, 1, 0, torch.arange(WORKERS), WORKERS)
    whole = means.channel.whole_gradients(means.compressor, _rows(1), means.state, where)
    torch.testing.assert_close(whole, _rows(1).mean(0).expand_as(whole))


@pytest.mark.parametrize("text, words", [
    ("gossip + topk(0.1, feedback=ef21)", "they do not all receive it"),
    ("gossip + topk(0.1, feedback=ef21) + gradients", "they do not all receive it"),
    ("async + sign(feedback=ef21)", "they do not all receive it"),
    ("bulk + server + sign(feedback=ef21)", "use allreduce"),
    ("local(2, residual=weights) + topk(0.1, feedback=ef21)", "residual=weights needs"),
    ("sign(vote=True, feedback=ef21)", "a vote is not a mean"), ("topk(0.1, feedback=ef22)", "or ef21"),
    ("randomk(0.1, unbiased=True, feedback=ef21)", "leave one of the two out"),
    ("cast(bf16, feedback=ef21) + async", "they do not all receive it"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(HocketError, match=words):
        Strategy.parse(text)


@pytest.mark.parametrize("code", CODES)
def test_the_notation_gives_it_back(code: str) -> None:
    strategy = Strategy.parse(code)
    assert Strategy.parse(str(strategy)) == strategy
    assert "feedback=ef21" in str(strategy)
