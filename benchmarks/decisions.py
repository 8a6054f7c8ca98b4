"""Measurements behind decision 18: virtual workers on the embedded digits, one CPU core.

python benchmarks/decisions.py rates | hierarchy | ternary | prefetch [--seeds 3]

Each prints one table. A cell is the mean over seeds and, in parentheses, the standard deviation between them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import hocket
from hocket.cluster.message import Message
from hocket.compression.base import Compressor, Context, State
from hocket.compression.bitpack import pack_trits, unpack_trits
from hocket.compression.ternary import Ternary
from hocket.data import load
from hocket.data.partition import Round
from hocket.noise import uniform
from hocket.programs.collective import CollectiveProgram
from hocket.topology import Hierarchical
from hocket.train.loop import Training
from hocket.train.lr_schedule import factor

DATA = load("digits")
TRAIN, TEST = ((DATA.prepare(x), y) for x, y in (DATA.train, DATA.test))


def net(*hidden: int) -> nn.Module:
    sizes = (64, *hidden, 10)
    layers = [layer for two in itertools.pairwise(sizes) for layer in (nn.Linear(*two), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def sgd(lr: float = 0.1, momentum: float = 0.0) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, lr, momentum=momentum)


def simulated(
    strategy: str | hocket.Strategy, seed: int, hidden: tuple[int, ...] = (64,), train: Any = TRAIN, **options: Any
) -> hocket.Run:
    options = {"workers": 4, "batch_size": 16, "epochs": 100, "optimizer": sgd(), **options}
    return hocket.simulate(lambda: net(*hidden), nn.functional.cross_entropy, train, TEST, strategy=strategy, seed=seed, **options)


def cell(values: list[float], digits: int = 2) -> str:
    return f"{mean(values):.{digits}f} ({stdev(values) if len(values) > 1 else 0:.{digits}f})"


def judged(model: nn.Module) -> tuple[float, float, float]:
    """Accuracy in percent, test loss and training loss."""
    with torch.no_grad():
        right = float((model(TEST[0]).argmax(1) == TEST[1]).float().mean())
        return 100 * right, *(float(nn.functional.cross_entropy(model(x), y)) for x, y in (TEST, TRAIN))


def table(head: str, rows: Iterator[tuple[str, list[str]]]) -> None:
    print(head)
    print("|---" * (head.count("|") - 1) + "|")
    for name, cells in rows:
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


# --- residuals when the rate changes ---------------------------------------------------------------------------------------------


def scaled(state: Any, ratio: float, inside: bool = False) -> Any:
    """A compressor's state with all residuals multiplied by ``ratio``."""
    if isinstance(state, dict):
        return {key: scaled(value, ratio, inside or key in ("error", "u", "v")) for key, value in state.items()}
    return state * ratio if inside and isinstance(state, Tensor) else state


@contextmanager
def residuals_in_weights(at: Callable[[int], float]) -> Iterator[None]:
    """Inside, residuals are kept as rate × gradient: one of a rate before is worth more gradient when the rate has fallen."""
    original = CollectiveProgram.after_update

    def after_update(self: CollectiveProgram, weights: list[Tensor]) -> None:
        original(self, weights)
        now, then = at(self.step - 1), at(self.step)
        if now != then and then > 0:
            self.gradient_state = [scaled(state, now / then) for state in self.gradient_state]

    CollectiveProgram.after_update = after_update  # type: ignore[method-assign]
    try:
        yield
    finally:
        CollectiveProgram.after_update = original  # type: ignore[method-assign]


def rates(seeds: int) -> None:
    steps = 400
    head = "| | rate | accuracy, as gradients | as updates | training loss, as gradients | as updates |"

    def rows() -> Iterator[tuple[str, list[str]]]:
        for code in ("topk(0.01)", "topk(0.001)", "randomk(0.01)", "sign", "lowrank(1)"):
            for schedule, momentum in (("step", 0.0), ("cosine", 0.0), ("step", 0.9)):
                found: list[list[tuple[float, float, float]]] = []
                for kept in (False, True):
                    at = factor(schedule, steps) if kept else lambda step: 1.0
                    options: dict[str, Any] = {"optimizer": sgd(0.1 * (1 - momentum), momentum), "lr_schedule": schedule}
                    with residuals_in_weights(at):
                        runs = [
                            simulated(f"bulk + {code}", seed, max_steps=steps, evaluate=False, **options) for seed in range(seeds)
                        ]
                    found.append([judged(run.model) for run in runs])
                name = schedule + (f", momentum {momentum:g}" if momentum else "")
                yield (
                    f"`{code}`",
                    [name, *(cell([run[0] for run in f], 1) for f in found), *(cell([run[2] for run in f], 3) for f in found)],
                )

    table(head, rows())


# --- hosts that exchange seldom --------------------------------------------------------------------------------------------------


def apart(run: hocket.Run) -> float:
    """How far workers are from their mean, relative to its norm."""
    rows = torch.cat(run.replicas.weights, 1)
    centre = rows.mean(0)
    return float((rows - centre).norm(dim=1).mean() / centre.norm())


@dataclass(frozen=True)
class Unrefused(Hierarchical):
    """With any exchange."""

    def refusal(self, compressor: Compressor, weights: bool) -> str | None:
        return None


def hierarchy(seeds: int) -> None:
    """Two hosts of two workers, three hidden layers, SGD with rate 0.1 and momentum 0.9."""
    head = "| | exchange | steps | accuracy of the mean model | of the worst worker | distance from the mean |"
    options: dict[str, Any] = {"hidden": (64, 64, 64), "optimizer": sgd(0.1, 0.9)}

    def rows() -> Iterator[tuple[str, list[str]]]:
        for every, exchange, steps in itertools.product((4, 16), ("weights", "gradients"), (400, 1600)):
            strategy = hocket.Strategy(topology=Unrefused(size=2, every=every), exchange=exchange)
            runs = [simulated(strategy, seed, max_steps=steps, **options) for seed in range(seeds)]
            ends = [run.metrics[-1] for run in runs]
            worst = [100 * end.get("accuracy_worst", end["accuracy"]) for end in ends]
            accuracies = [cell([100 * end["accuracy"] for end in ends], 1), cell(worst, 1)]
            yield f"`every={every}`", [exchange, f"{steps:,}", *accuracies, cell([apart(run) for run in runs], 4)]

    table(head, rows())


# --- TernGrad's scale and clipping -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clipped(Ternary):
    """Ternary of values clipped at ``sigmas`` standard deviations, with one scale for ``block`` values (0: for the row)."""

    sigmas: float = math.inf
    block: int = 0

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        size = rows.shape[1]
        block = min(self.block or size, size)
        blocks = pad(rows, (0, -size % block)).view(rows.shape[0], -1, block)
        if math.isfinite(self.sigmas):
            bound = self.sigmas * blocks.std(2, correction=0, keepdim=True)
            blocks = blocks.clamp(-bound, bound)
        scale = blocks.abs().amax(2)
        whole = blocks.reshape(rows.shape[0], -1)[:, :size]
        hit = uniform(keys, size) * self._spread(scale, size) < whole.abs()
        return Message((scale, pack_trits((whole.sign() * hit).add_(1).to(torch.uint8)))), state

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        scale, packed = message.parts
        return unpack_trits(packed, size).to(torch.float32).sub_(1) * self._spread(scale, size)

    def _spread(self, scale: Tensor, size: int) -> Tensor:
        return scale.repeat_interleave(min(self.block or size, size), 1)[:, :size]


def ternary(seeds: int) -> None:
    """A hidden layer of 512, 200 steps with rate 0.1; a slice has 9,600 values."""
    head = "| scale | clipped at | accuracy | training loss |"
    options: dict[str, Any] = {"hidden": (512,), "max_steps": 200, "evaluate": False}

    def rows() -> Iterator[tuple[str, list[str]]]:
        for block, sigmas in itertools.product((0, 512, 64), (math.inf, 2.5)):
            strategy = hocket.Strategy(compression=Clipped(sigmas=sigmas, block=block))
            found = [judged(simulated(strategy, seed, **options).model) for seed in range(seeds)]
            cells = [cell([f[0] for f in found], 1), cell([f[2] for f in found], 3)]
            yield f"of {block:,} values" if block else "of a slice", ["–" if math.isinf(sigmas) else f"{sigmas:g} σ", *cells]

    table(head, rows())


# --- weights of batches that were fetched ahead ----------------------------------------------------------------------------------


@contextmanager
def weights_of_the_next() -> Iterator[None]:
    """Inside, a step has the weights of the round after it, as behind a prefetcher that is one batch ahead."""
    original = Training._step

    def step(self: Training, round_: Round, index: Any) -> Tensor:
        rounds = self.batches.partition.rounds(self.epoch)
        after = rounds[self.step % len(rounds) + 1 :][:1]
        weights = after[0].weights if after else [1.0] * self.cluster.size
        found = type("Shifted", (), {"even": False, "weights": weights})()
        return original(self, cast(Round, found), index)

    Training._step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Training._step = original  # type: ignore[method-assign]


def prefetch(seeds: int) -> None:
    """Rounds of 64 samples, and a last one of 5, (2, 1, 1, 1), or of 29, (8, 7, 7, 7); 20 epochs with rate 0.1."""
    head = (
        "| samples of an epoch | accuracy, weights of the batch | of the next one | training loss, of the batch | of the next one |"
    )

    def rows() -> Iterator[tuple[str, list[str]]]:
        for samples in (64 * 22 + 5, 64 * 22 + 29):
            found = []
            for where in (nullcontext(), weights_of_the_next()):
                some = TRAIN[0][:samples], TRAIN[1][:samples]
                with where:
                    runs = [simulated("bulk", seed, train=some, epochs=20, evaluate=False) for seed in range(seeds)]
                found.append([judged(run.model) for run in runs])
            cells = [cell([f[0] for f in two], 1) for two in found] + [cell([f[2] for f in two], 4) for two in found]
            yield f"{samples:,}", cells

    table(head, rows())


MEASUREMENTS = {"rates": rates, "hierarchy": hierarchy, "ternary": ternary, "prefetch": prefetch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=sorted(MEASUREMENTS))
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    MEASUREMENTS[given.what](given.seeds)


if __name__ == "__main__":
    main()
