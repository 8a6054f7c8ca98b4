"""Laws of the random numbers: uniform, and as good as independent for keys, steps and indices that lie close together."""

from __future__ import annotations

import pytest
import torch

from hocket.compression.base import Context
from hocket.noise import bits, fold, uniform

N = 40_000


def _keys(kind: str, count: int = 16) -> torch.Tensor:
    if kind == "consecutive":
        return torch.arange(count)
    if kind == "one bit apart":
        return torch.tensor([0, *(1 << b for b in range(count - 1))])
    if kind == "folded":
        return torch.tensor([fold(0, t) for t in range(count)])
    return Context(0, 0, 0, 0, torch.arange(count), world=count).keys(1)


KINDS = ["consecutive", "one bit apart", "folded", "of workers"]


@pytest.mark.parametrize("kind", KINDS)
def test_uniform_is_uniform(kind: str) -> None:
    cells = (uniform(_keys(kind), N) * 64).long()
    for row in cells:
        expected = N / 64
        assert ((row.bincount(minlength=64) - expected) ** 2 / expected).sum() < 125  # 63 degrees of freedom, p < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_uncorrelated_with_each_other_and_with_themselves_shifted(kind: str) -> None:
    u = uniform(_keys(kind), N).double() - 0.5
    bound = 6 * (1 / 12) / N**0.5
    products = u @ u.t() / N
    assert products.fill_diagonal_(0).abs().max() < bound
    for shift in (1, 2, 3, 64, 512, 1024):
        assert (u[:, shift:] * u[:, :-shift]).mean(1).abs().max() < bound * 1.1


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_is_fair(kind: str) -> None:
    values = bits(_keys(kind), N)
    for bit in range(32):
        share = ((values >> bit) & 1).double().mean(1)
        assert (share - 0.5).abs().max() < 6 * 0.5 / N**0.5


@pytest.mark.parametrize("difference", [1, 2, 7, 64])
def test_rows_of_neighbouring_keys_are_no_permutations_of_each_other(difference: int) -> None:
    """After a single round of mixing, row ``k ^ d`` is row ``k`` with its indices exchanged, and shifted by a constant."""
    one, two = bits(torch.tensor([40, 40 ^ difference]), 1024)
    shifts = one - two[torch.arange(1024) ^ difference]
    assert shifts.unique().numel() > 1000


def test_a_row_depends_on_its_key_alone_and_its_start_not_on_its_length() -> None:
    keys = _keys("of workers")
    assert torch.equal(bits(keys[3:4], 100), bits(keys, 1000)[3:4, :100])
    assert torch.equal(bits(keys, 10), bits(keys, 10))


def test_fold_tells_its_parts_apart() -> None:
    parts = [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (2**31,), (2**40 + 5,), (5,), (1, 2, 3), (3, 2, 1)]
    assert len({fold(*p) for p in parts}) == len(parts)
    assert len({fold(s, t) for s in range(100) for t in range(100)}) > 9990


def test_keys_differ_in_all_that_names_them() -> None:
    base = {"seed": 0, "step": 0, "bucket": 0}
    seen = []
    for change in ({}, {"seed": 1}, {"step": 1}, {"bucket": 1}):
        c = {**base, **change}
        seen += Context(c["seed"], c["step"], 0, c["bucket"], torch.arange(50), world=50).keys(1).tolist()
    assert len(set(seen)) == len(seen)
    assert Context(0, 0, 0, 0, torch.arange(2), world=2).common_key(1) != Context(0, 0, 0, 0, torch.arange(2), world=2).common_key(
        2
    )


def test_the_noise_is_the_recorded_one() -> None:
    """Runs of other versions and machines draw the same."""
    found = bits(torch.tensor([0, 1, 2**31 - 1]), 3).tolist()
    assert found == [[0, 1492470133, 911671261], [-1181402391, 193573057, 2105510504], [1036344163, -725496665, -1186537398]]


@pytest.mark.parametrize(("ids", "world"), [(range(4), 4), ([2], 4), (range(3, 5), 6), (range(10_000), 10_000)])
def test_keys_are_hashes_of_the_worker_whenever_and_wherever_they_are_made(ids: list[int], world: int) -> None:
    for step in (0, 31, 32, 77):
        where = Context(5, step, step, 2, torch.tensor(list(ids)), world)
        expected = bits(torch.tensor([fold(5, step, 2, 1)]), world)[0].to(torch.int64)[list(ids)]
        assert torch.equal(where.keys(1), expected)
        assert torch.equal(where.keys(1, slices=3), bits(expected, 3).to(torch.int64).flatten())
