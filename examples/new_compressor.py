"""A compressor of one's own in about 30 lines, tried on virtual workers.

    python examples/new_compressor.py

``EveryKthBlock(block, k)`` sends one block of values in ``k``, another one at each exchange. Which one follows from the number
of the exchange, so no places travel: ``1/k`` of the bytes, exactly. It is biased, so feedback adds what was not sent next time.
"""

import argparse
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.cluster.message import Message
from hocket.compression.base import Codec, Context, State
from hocket.data import load


@dataclass(frozen=True)
class EveryKthBlock(Codec):
    """At exchange ``e`` blocks ``e mod k``, ``e mod k + k``, … of each row."""

    block: int = 16
    k: int = 4
    name: ClassVar[str] = "every_kth_block"

    @property
    def uses_error_feedback(self) -> bool:
        return True

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        turn = context.exchange % self.k
        padded = F.pad(rows, (0, -rows.shape[1] % (self.block * self.k)))
        chosen = padded.view(len(rows), -1, self.k, self.block)[:, :, turn]
        return Message((chosen.flatten(1),)), state

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        values = message.parts[0].view(message.rows, -1, self.block)
        rows = values.new_zeros(message.rows, values.shape[1], self.k, self.block)
        rows[:, :, context.exchange % self.k] = values
        return rows.flatten(1)[:, :size].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    digits = load("digits")
    train, test = ((digits.prepare(x), y) for x, y in (digits.train, digits.test))
    strategies = [
        hocket.Strategy(),
        hocket.Strategy(compression=EveryKthBlock(k=4)),
        hocket.Strategy(compression=EveryKthBlock(k=8)),
        hocket.Strategy(sync=hocket.Local(4), topology=hocket.Gossip(), compression=EveryKthBlock(k=4)),
        hocket.Strategy(compression=hocket.TopK(0.05)),
    ]
    for strategy in strategies:
        run = hocket.simulate(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
            F.cross_entropy,
            train,
            test,
            strategy=strategy,
            workers=arguments.workers,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.2),
            batch_size=16,
            epochs=arguments.epochs,
        )
        print(f"{strategy!s:55} accuracy {run.accuracy:.3f}  {run.ledger.bytes_sent / arguments.workers / 1e6:7.2f} MB per worker")


if __name__ == "__main__":
    main()
