"""The learning rate ``auto``: a short search for the learning rate of a strategy.

It goes from coarse and short to fine and long, as successive halving does (Jamieson, Talwalkar 2016, arXiv:1502.07943):

1. A ladder with steps of about √10 (… 0.01, 0.03, 0.1, 0.3, 1 …). Three learning rates are tried around the optimiser's default;
   while the best is the lowest or the highest, the next beyond it is tried, seven in all at most.
2. The best of these times and divided by 10^¼ = 1.78.
3. The two best of these three, and the one in the middle between them, in trainings twice as long.

A try is a short training with the same schedule. The one with the lowest mean *training* loss in the last epoch of the longest
tries is taken, so that test accuracy has no influence. One that diverges (NaN or Inf) is never taken, nor is any above it: a higher
one that did not diverge did so by chance, or learned nothing.

Short trainings tolerate higher learning rates than long ones: very short tries choose some at which whole trainings diverge. So a
try has at least a hundred steps (but at most half of the training), and the choice is checked: if the whole training diverges, or
ends with a higher training loss than its short one, the next lower learning rate is taken. Where the training is so short that
tries have fewer steps, the best one and the best below it are compared over whole trainings before the choice, and so on downwards.

The *outer* optimiser ``auto`` (of diloco and its kin): momenta are tried at the strategy's own outer rate, then outer rates at the
best of these momenta; the pair with the lowest training loss is taken. A try has at least twelve exchanges (but at most half of the
training), since momentum takes some to build up. Shorter tries prefer less momentum than whole trainings do.
"""

import math
from collections.abc import Mapping

from hocket.train.settings import RunSettings

MOST = 7
"""Of the coarse ladder."""
FINE = 10**0.25
LONGER = 2
"""How many times as long the last tries are."""
ENOUGH_STEPS = 100
"""A try with fewer steps is short: its choice is checked in whole trainings."""
_STEPS = tuple(float(f"{digit}e{power}") for power in range(-6, 3) for digit in (1, 3))


def next_lr(losses: Mapping[float, float], start: float) -> float | None:
    """The learning rate to try next, given the training losses of those tried (infinite: diverged); None: the search is complete.

    >>> next_lr({}, 0.1), next_lr({0.1: 1.0, 0.03: 2.0, 0.3: 0.5}, 0.1), next_lr({0.1: 1.0, 0.03: 2.0, 0.3: 1.5}, 0.1)
    (0.1, 1.0, None)
    >>> next_lr({0.1: 2.3, 0.03: math.inf, 0.3: math.inf}, 0.1)
    0.01
    """
    ladder = sorted({*_STEPS, start})
    middle = ladder.index(start)
    for place in (middle, middle - 1, middle + 1):
        if ladder[place] not in losses:
            return ladder[place]
    if len(losses) >= MOST:
        return None
    best = best_lr(losses)
    lowest, highest = ladder.index(min(losses)), ladder.index(max(losses))
    if best is None or best == min(losses):
        return ladder[lowest - 1] if lowest > 0 else None
    return ladder[highest + 1] if best == max(losses) and highest + 1 < len(ladder) else None


def best_lr(losses: Mapping[float, float], below: float = math.inf) -> float | None:
    """The learning rate of the lowest loss below ``below`` and all that diverged, the lower of two; None: there is none."""
    limit = min([below, *(lr for lr, loss in losses.items() if not math.isfinite(loss))])
    sound = [(loss, lr) for lr, loss in losses.items() if lr < limit]
    return min(sound)[1] if sound else None


def next_try(losses: Mapping[float, float], longer: Mapping[float, float], start: float) -> tuple[float, int] | None:
    """The learning rate to try next, and how many times as long as a short try; None: the search is complete.

    ``losses`` are those of short tries, ``longer`` those of tries :data:`LONGER` times as long.

    >>> next_try({0.1: 1.0, 0.03: 2.0, 0.3: 1.5}, {}, 0.1)
    (0.056, 1)
    >>> losses = {0.1: 1.0, 0.03: 2.0, 0.3: 1.5, 0.056: 1.4, 0.18: 0.9}
    >>> [next_try(losses, longer, 0.1) for longer in ({}, {0.1: 1.0}, {0.1: 1.0, 0.13: 0.8}, {0.1: 1.0, 0.13: 0.8, 0.18: 0.9})]
    [(0.1, 2), (0.13, 2), (0.18, 2), None]
    """
    ladder = {*_STEPS, start}
    coarse = {lr: loss for lr, loss in losses.items() if lr in ladder}
    if (lr := next_lr(coarse, start)) is not None:
        return lr, 1
    best = best_lr(coarse)
    if best is None:
        return None
    near = (_round(best / FINE), best, _round(best * FINE))
    for lr in near:
        if lr not in losses:
            return lr, 1
    limit = min((lr for lr, loss in losses.items() if not math.isfinite(loss)), default=math.inf)
    two = sorted((losses[lr], lr) for lr in near if lr < limit)[:2]
    last = {lr for _, lr in two} | ({_round(math.sqrt(two[0][1] * two[1][1]))} if len(two) == 2 else set())
    return next(((lr, LONGER) for lr in sorted(last) if lr not in longer), None)


def found_lr(losses: Mapping[float, float], longer: Mapping[float, float]) -> float | None:
    """The learning rate that the search has found: the best of the longest tries; None: all diverged."""
    limit = min((lr for lr, loss in (*losses.items(), *longer.items()) if not math.isfinite(loss)), default=math.inf)
    best = best_lr(longer, limit)
    return best_lr(losses, limit) if best is None else best


def _round(lr: float) -> float:
    return float(f"{lr:.2g}")


Pair = tuple[float, float]
OUTER_LRS, OUTER_MOMENTA = (0.3, 0.5, 0.7, 1.0), (0.0, 0.3, 0.6, 0.9)
OUTER_EXCHANGES = 12


def next_outer(losses: Mapping[Pair, float], start: Pair) -> Pair | None:
    """The outer rate and momentum to try next, given the training losses of those tried (infinite: diverged); None: complete.

    >>> next_outer({}, (0.7, 0.9)), next_outer({(0.7, m): 1 - m for m in OUTER_MOMENTA}, (0.7, 0.9))
    ((0.7, 0.0), (0.3, 0.9))
    """
    lr, momentum = start
    untried = [(lr, m) for m in sorted({*OUTER_MOMENTA, momentum}) if (lr, m) not in losses]
    if not untried:
        best = best_outer({pair: loss for pair, loss in losses.items() if pair[0] == lr}) or start
        untried = [(rate, best[1]) for rate in sorted({*OUTER_LRS, lr}) if (rate, best[1]) not in losses]
    return untried[0] if untried else None


def best_outer(losses: Mapping[Pair, float]) -> Pair | None:
    """The outer rate and momentum of the lowest loss; None where all diverged."""
    sound = [(loss, pair) for pair, loss in losses.items() if math.isfinite(loss)]
    return min(sound)[1] if sound else None


def search_steps(rounds: int, steps: int) -> int:
    """Steps of a try, in a training of ``steps`` with ``rounds`` an epoch: a tenth, but two to five epochs and a hundred steps at
    least, and half of the training at most.

    >>> search_steps(rounds=32, steps=1600), search_steps(rounds=18, steps=180), search_steps(rounds=500, steps=25_000)
    (160, 90, 2500)
    """
    return min(max(min(steps // 10, 5 * rounds), 2 * rounds, ENOUGH_STEPS), max(1, steps // 2))


def short(settings: RunSettings, lr: float, rounds: int, steps: int, least: int = 0, times: int = 1) -> RunSettings:
    """A try, with the warm-up shortened likewise; ``least``: so many steps, where half of the training has them; ``times`` as long.

    >>> tried = short(RunSettings.of(epochs=50, warmup=5.0), 0.3, rounds=32, steps=1600)
    >>> tried.epochs, tried.optimizer.warmup, tried.optimizer.lr
    (5, 0.5, 0.3)
    """
    wanted = times * min(max(search_steps(rounds, steps), least), max(1, steps // 2))
    epochs = -(-wanted // rounds)
    return settings.changed(epochs=epochs, warmup=settings.optimizer.warmup * wanted / steps, lr=lr, max_steps=wanted)
