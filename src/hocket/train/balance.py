"""Each worker's share of a round: equal shares, or shares by speed, so that no worker waits for a slow one.

By speed, a round still has N × batch samples, dealt out so that all workers take equally long. A worker's speed is its samples per
second of computing in the epoch before; the first epoch is even. Its seconds are those of the ledger: all of the epoch but what it
stood still for in exchanges. So whatever makes a worker slow counts, on any device. Where part of a step does not depend on the
samples, shares settle after a few epochs, at equal times; where that part alone keeps others waiting, at one sample.

In every step each gradient is weighed by its worker's samples, also where weights are exchanged and every worker steps by itself
(this scales its rate linearly, as in Goyal 2017): the mean model moves by the mean over all samples, as under even shares.
Optimisers such as Adam do not see the length of a gradient; there the mean is that of N unbiased steps, a little noisier.

The ledger has gathered the seconds of all workers, and all processes round speeds alike: they compute the same shares without a
message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from hocket.cluster.base import Cluster
from hocket.data.label_skew import IID
from hocket.data.partition import proportional
from hocket.errors import SettingError, nearest
from hocket.strategy import Strategy

Balance = Literal["even", "speed"]
_DIGITS = 6
"""Speeds are rounded to so many digits of the fastest: workers that are equally fast stay so whatever the last bits say."""


def check_balance(balance: str, strategy: Strategy | None = None, partition: str = IID) -> None:
    """Refuse unknown names, and balance or partition where workers do not step together."""
    if partition != IID and strategy is not None and strategy.runtime != "collective":
        text = f"<partition> with {strategy}: its workers take mini-batches one by one, whoever is ready; use iid."
        raise SettingError(text, partition=partition)
    if balance not in get_args(Balance):
        hint = nearest(str(balance), get_args(Balance))
        text = f"<balance>: a worker's share of a round is even, or goes by its speed (speed){hint or '.'}"
        raise SettingError(text, balance=balance)
    if balance == "speed" and strategy is not None and strategy.runtime != "collective":
        raise SettingError(
            f"<balance:speed> with {strategy}: its workers take mini-batches one by one, each at its own pace, so there is no "
            "round to share out; leave it out."
        )


def check_speeds(cluster: Cluster) -> None:
    """Refuse workers whose speeds cannot be measured."""
    if cluster.clock is None and not (cluster.ledger.timed and cluster.rows == 1):
        raise SettingError(
            "<balance:speed> needs every worker's own speed: describe a cluster for virtual workers, such as 1gbit, and give each "
            "real worker a process of its own."
        )


def by_speed(shares: Sequence[int], samples: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """The shares after an epoch in which workers computed so many samples in so many seconds.

    >>> by_speed([100, 100], samples=[1000, 1000], seconds=[2.0, 6.0])
    [150, 50]
    """
    if not seconds or min(seconds) <= 0:  # too short to be measured
        return list(shares)
    speeds = [count / took for count, took in zip(samples, seconds, strict=True)]
    fastest, least = max(speeds), 10.0**-_DIGITS
    return proportional(sum(shares), [max(round(speed / fastest, _DIGITS), least) for speed in speeds])
