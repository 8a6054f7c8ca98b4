"""Laws of synchronisation: the schedule is data, and an outer optimiser is torch's own."""

from __future__ import annotations

import pytest
import torch

from hocket.sync import Bulk, DiLoCo, Local, Moment, PostLocal, Sync, proven_period


@pytest.mark.parametrize("p", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "make, moment", [(Local, Moment.BEFORE), (lambda p: Local(p, "after"), Moment.AFTER), (DiLoCo, Moment.AFTER)]
)
def test_periodic_exchanges_happen_when_t_mod_p_is_zero(p: int, make, moment: Moment) -> None:
    for t in range(1, 50):
        assert make(p).moment(t, weights=True) is (moment if t % p == 0 else Moment.NEVER)


@pytest.mark.parametrize("sync", [Bulk(), Local(3), PostLocal(3, 5)])
def test_exchanges_of_gradients_keep_the_period(sync: Sync) -> None:
    for t in range(1, 50):
        due = t % sync.period == 0 or (isinstance(sync, PostLocal) and t <= sync.after)
        assert sync.moment(t, weights=False) is (Moment.GRADIENTS if due else Moment.NEVER)


@pytest.mark.parametrize("p, after", [(1, 0), (2, 5), (4, 4), (3, 100)])
def test_postlocal_is_bulk_and_then_local(p: int, after: int) -> None:
    for t in range(1, 120):
        expected = Bulk().moment(t, False) if t <= after else Local(p).moment(t, True)
        assert PostLocal(p, after).moment(t, weights=True) is expected
        assert PostLocal(p, after).rebases(t) is (t == after)


@pytest.mark.parametrize("lr, momentum", [(0.7, 0.9), (1.0, 0.0), (0.3, 0.5)])
def test_diloco_lands_like_torchs_nesterov(lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 5, generator=generator)
    spec = DiLoCo(3, lr, momentum)
    state = spec.init_state(rows)
    outer = torch.nn.Parameter(rows.clone())
    optimizer = torch.optim.SGD([outer], lr, momentum=momentum, nesterov=momentum > 0)
    for _ in range(5):
        mixed = outer.detach() + torch.randn(2, 5, generator=generator)
        landed, state = spec.apply(mixed, state)
        outer.grad = outer.detach() - mixed
        optimizer.step()
        torch.testing.assert_close(landed, outer.detach(), rtol=1e-6, atol=1e-6)


def test_without_an_outer_optimiser_the_mix_lands_as_it_is() -> None:
    mixed = torch.randn(2, 3)
    for sync in (Bulk(), Local(2), PostLocal(2, 2)):
        assert sync.apply(mixed, {})[0] is mixed
        assert sync.init_state(mixed) == {}


def test_the_proven_period() -> None:
    assert proven_period(16, 1) == 2
    assert proven_period(10_000, 16) == pytest.approx(10 / 8)
