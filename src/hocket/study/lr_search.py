"""The learning rate ``auto``: a short search for the learning rate of a strategy.

The ladder has steps of about √10 (… 0.01, 0.03, 0.1, 0.3, 1 …). Three learning rates are tried around the optimiser's default;
while the best is the lowest or the highest, the next beyond it is tried, seven in all at most. A try is a short training with the
same schedule. The one with the lowest mean *training* loss in the last epoch of its try is taken, so that test accuracy has no
influence. One that diverges (NaN or Inf) is never taken, nor is any above it: a higher one that did not diverge did so by chance,
or learned nothing.

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


def short(settings: RunSettings, lr: float, rounds: int, steps: int, least: int = 0) -> RunSettings:
    """A try, with the warm-up shortened likewise; ``least``: so many steps, where half of the training has them.

    >>> tried = short(RunSettings.of(epochs=50, warmup=5.0), 0.3, rounds=32, steps=1600)
    >>> tried.epochs, tried.optimizer.warmup, tried.optimizer.lr
    (5, 0.5, 0.3)
    """
    wanted = min(max(search_steps(rounds, steps), least), max(1, steps // 2))
    epochs = -(-wanted // rounds)
    return settings.changed(epochs=epochs, warmup=settings.optimizer.warmup * wanted / steps, lr=lr, max_steps=wanted)
