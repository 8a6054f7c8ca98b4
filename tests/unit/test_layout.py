"""Laws of buckets: a pure function of parameters and cap, contiguous, one group and dtype each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hocket.cluster.layout import layout_of
from hocket.strategy import Strategy
from hocket.train.checks import layout_for


class Mixed(nn.Module):
    """Shared, frozen and float64 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3).double()
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(2.0))


def test_a_layout_is_a_pure_function() -> None:
    one, two = (layout_of(Mixed().named_parameters()) for _ in range(2))
    assert one == two
    assert one.digest() == two.digest()


@pytest.mark.parametrize("cap, first", [(64, 64), (1, 1), (200, 1), (10**9, 10**9)])
def test_another_cap_is_another_layout_of_the_same_values(cap: int, first: int) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    whole, cut = layout_of(model.named_parameters()), layout_of(model.named_parameters(), None, cap, first)
    assert (cut.digest() == whole.digest()) is (cap == 10**9)
    assert cut.parameters == whole.parameters == sum(p.numel() for p in model.parameters())
    assert cut.bytes == 4 * cut.parameters
    for bucket in cut.buckets[:-1]:
        sizes = [4 * s.size for s in bucket.slots]
        limit = first if bucket.index == 0 else cap
        assert sum(sizes) >= limit > sum(sizes[:-1])  # closed as soon as it is full


def test_a_bucket_has_one_group_and_dtype_and_holds_what_is_trained() -> None:
    model = Mixed()
    groups = [[model.scalar, *model.a.parameters()], [*model.c.parameters()]]
    layout = layout_of(model.named_parameters(), groups)
    names = [s.name for b in layout.buckets for s in b.slots]
    assert sorted(names) == ["a.bias", "a.weight", "c.bias", "c.weight", "scalar"]  # b.bias is in no group, b.weight is a.weight
    assert {(b.group, b.dtype) for b in layout.buckets} == {(0, torch.float32), (1, torch.float64)}
    assert [b.index for b in layout.buckets] == list(range(len(layout.buckets)))


def test_slots_fill_a_bucket_without_gaps_in_reverse_order() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    (bucket,) = layout_of(model.named_parameters()).buckets
    assert [s.name for s in bucket.slots] == ["1.bias", "1.weight", "0.bias", "0.weight"]
    at = 0
    for slot in bucket.slots:
        assert slot.offset == at
        at += slot.size
    assert at == bucket.size
    assert bucket.empty(3).shape == (3, at)
    assert bucket.empty(3).is_contiguous()


def test_views_share_the_storage() -> None:
    (bucket,) = layout_of(nn.Linear(3, 2).named_parameters()).buckets
    storage = bucket.empty(2)
    bias, weight = bucket.views(storage, 1)
    weight.fill_(1.0)
    bias.fill_(2.0)
    assert storage.tolist() == [[0.0] * 8, [2.0, 2.0, *[1.0] * 6]]
    assert [s.shape for s in bucket.stacked(storage)] == [(2, 2), (2, 2, 3)]


def test_digests_tell_shapes_names_dtypes_and_groups_apart() -> None:
    a, b = nn.Linear(4, 3), nn.Linear(3, 4)
    renamed = [(f"x.{n}", p) for n, p in a.named_parameters()]
    digests = [
        layout_of(named, groups).digest()
        for named, groups in [
            (a.named_parameters(), None),
            (b.named_parameters(), None),
            (renamed, None),
            (nn.Linear(4, 3).double().named_parameters(), None),
            (a.named_parameters(), [[a.weight], [a.bias]]),
        ]
    ]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_spaced_rows_start_where_a_storage_of_their_own_would(rows: int) -> None:
    for bucket in layout_of(Mixed().named_parameters(), first_bucket_cap_bytes=1, bucket_cap_bytes=1).buckets:
        storage = bucket.spaced(rows)
        assert storage.shape == (rows, bucket.size)
        assert all(row.data_ptr() % 64 == 0 and row.is_contiguous() for row in storage)


@pytest.mark.parametrize("code, one", [("none", False), ("qsgd(4)", False), ("topk(0.1)", True), ("lowrank(2)", True)])
def test_some_codes_want_the_whole_model_in_one_bucket(code: str, one: bool) -> None:
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))
    layout = layout_for(model, torch.optim.SGD(model.parameters(), 0.1), Strategy.parse(code), None, None)
    assert (len(layout.buckets) == 1) is one
