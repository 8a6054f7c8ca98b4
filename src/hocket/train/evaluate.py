"""Evaluation: test loss, accuracy and the user's metric of a model, by one function for every kind of run.

    test loss = Σ_b samples_b · loss(model(x_b), y_b) / Σ_b samples_b        accuracy = right answers / answers

Accuracy needs integer targets and logits that fit them: the output itself, or its ``logits``. Any other output has none: a guess
which of its tensors are logits could be wrong without a word. The perplexity of a language model (tokens in, the next tokens as
targets) is exp(test loss).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.data.base import DataSet
from hocket.data.fields import Unpacking
from hocket.train.engines.base import Loss
from hocket.train.engines.loop import draws_numbers, forked

Metric = Callable[[Any, Tensor], Tensor | float]
"""``metric(output, targets)``: a number for a batch, the mean over its samples."""

LEAST_SAMPLE = 256
"""Of the test set, on which the worst replica is found."""
_BATCH, _TOKENS = 1000, 2**16
_MOST_ON_CUDA, _ROOM = 10_000, 2**34


@dataclass(frozen=True)
class Tally:
    """Sums over samples; those of several processes add up."""

    loss: float = 0.0
    samples: float = 0.0
    right: float = 0.0
    answers: float = 0.0
    metric: float = 0.0

    @property
    def accuracy(self) -> float | None:
        """None where targets are not classes, or no output fits them."""
        return self.right / self.answers if self.answers else None


@dataclass(frozen=True)
class Evaluation:
    """What is known of a model: None for what was not evaluated."""

    accuracy: float | None = None
    test_loss: float | None = None
    metric: float | None = None
    perplexity: float | None = None
    """Of a language model."""

    def line(self, loss: float | None) -> dict[str, Any]:
        """Its part of an epoch's metrics, with the training loss; ``metric`` and ``perplexity`` only where there is one."""
        line = {"accuracy": self.accuracy, "loss": loss, "test_loss": self.test_loss}
        more = {"metric": self.metric, "perplexity": self.perplexity}
        return line | {name: value for name, value in more.items() if value is not None}


@dataclass(frozen=True)
class Evaluator:
    """How models are evaluated: on the test set of ``data``, with the loss of the training."""

    data: DataSet
    loss: Loss
    metric: Metric | None = None

    @torch.no_grad()
    def tally(self, model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tally:
        """The sums over the samples of ``pair``; the model computes in eval mode, and torch's random state stays as it was."""
        (x, y), training, batch = pair, model.training, _batch_size(pair[0], _tokens(model, self.data))
        sums = torch.zeros(5, dtype=torch.float64, device=y.device)
        model.eval()
        try:
            with forked(draws_numbers(model, self.loss), y.device, 0):
                for start in range(0, len(x), batch):
                    part = slice(start, start + batch)
                    sums += self._sums(model(self.data.prepare(x[part])), y[part])
        finally:
            model.train(training)
        return Tally(*sums.tolist())

    def _sums(self, output: Any, targets: Tensor) -> Tensor:
        samples, logits = len(targets), logits_for(output, targets)
        loss = torch.as_tensor(self.loss(output, targets)).to(targets.device, torch.float64) * samples
        right = loss.new_zeros(()) if logits is None else (logits.argmax(-1) == targets).sum()
        metric = 0.0 if self.metric is None else self.metric(output, targets)
        metric = torch.as_tensor(metric).to(targets.device, torch.float64) * samples
        counts = loss.new_tensor([samples, 0 if logits is None else int((targets >= 0).sum())])  # -100: ignored
        return torch.stack([loss, counts[0], right.double(), counts[1], metric])

    def evaluation(self, tally: Tally) -> Evaluation:
        """The means of these sums."""
        if not tally.samples:
            return Evaluation()
        test_loss = tally.loss / tally.samples
        metric = None if self.metric is None else tally.metric / tally.samples
        return Evaluation(tally.accuracy, test_loss, metric, perplexity(test_loss) if self.data.language else None)


def spread(pair: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """``count`` samples from all over ``pair``; itself if it has no more.

    >>> spread((torch.arange(8), torch.arange(8)), 4)[0]
    tensor([0, 2, 4, 6])
    """
    x, y = pair
    if count >= len(x):
        return pair
    chosen = torch.arange(count, device=y.device) * len(x) // count
    return x[chosen], y[chosen]


def perplexity(loss: float) -> float | None:
    """``exp(loss)``; None where that is no finite number.

    >>> perplexity(0.0), perplexity(1e9), perplexity(math.nan)
    (1.0, None, None)
    """
    return math.exp(loss) if loss < 700 else None


def logits_for(output: Any, targets: Tensor) -> Tensor | None:
    """The logits ``[*targets, classes]`` in a model's output; None where targets are not classes or nothing fits them.

    >>> y = torch.tensor([0, 1])
    >>> logits_for({"loss": torch.tensor(0.1), "logits": torch.zeros(2, 3)}, y).shape, logits_for(torch.zeros(2), y)
    (torch.Size([2, 3]), None)
    """
    if targets.is_floating_point():
        return None
    if isinstance(output, Tensor):
        if output.shape[:-1] == targets.shape:
            return output
        # torch's own cross-entropy has the classes in the second place of what has several targets per sample
        return output.movedim(1, -1) if output.shape[:1] + output.shape[2:] == targets.shape and output.dim() > 2 else None
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits_for(named, targets) if isinstance(named, Tensor) else None


def _tokens(model: nn.Module, data: DataSet) -> int:
    """The length of a text, or of the longest field of tokens; 0 where a sample is none."""
    if data.text:
        return math.prod(data.shape)
    fields = model.fields if isinstance(model, Unpacking) else ()
    return max((f.shape[0] for f in fields if f.dtype == torch.int64 and len(f.shape) == 1), default=0)


def _batch_size(x: Tensor, tokens: int) -> int:
    """Samples at a time; a GPU with room takes more of them where they are small, so as not to wait for the next launch."""
    if tokens:  # activations are many times as large
        return max(1, min(_BATCH, _TOKENS // tokens))
    if not x.is_cuda or not len(x) or torch.cuda.mem_get_info(x.device)[0] < _ROOM:
        return _BATCH
    return min(_MOST_ON_CUDA, max(_BATCH, 2**25 // x[0].numel()))
