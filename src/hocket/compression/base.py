"""A compressor: a mean of rows that sends fewer bytes.

A compressor receives rows and the channel (topology and cluster). It returns the mixed rows (``mixed``) and each row as the other
workers decode it (``sent``), so that error feedback can wrap any method. Most compressors are codecs: they encode rows as a message
and decode it, and every channel can mix encoded rows. Low rank needs two means per exchange, so it overrides ``mean``.

Specs are frozen dataclasses; the *state* that a method keeps between exchanges (a dict of tensors whose first dimension is the
rows) is an argument and a result.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from hocket.cluster.layout import Bucket
from hocket.cluster.message import Message
from hocket.compression.indices import put_sent, with_indices
from hocket.errors import HocketError, is_number
from hocket.noise import fold, worker_keys
from hocket.notation import write

State = dict[str, Any]
CONSENSUS_STEP = 0.4


@dataclass(frozen=True)
class Context:
    """The position of an exchange in the run; randomness is a function of this alone."""

    seed: int
    step: int
    exchange: int
    bucket: int
    workers: Tensor
    """Ids of the workers whose rows these are, int64 ``[rows]``."""
    world: int = 1
    """How many workers there are in all."""
    shapes: tuple[tuple[int, ...], ...] | None = None
    """Shapes of the parameters in the bucket, where rows are whole buckets."""
    residual_stays: bool = False
    """Whether the residual of exchanged weights stays in them, not in the compressor's state."""

    def keys(self, salt: int = 0, slices: int = 0, device: torch.device = torch.device("cpu")) -> Tensor:  # noqa: B008 - frozen
        """One random key per row, a hash of (seed, worker, step, bucket, salt), or one per (row, slice), flattened; not to be
        changed."""
        return worker_keys(self.seed, self.step, self.bucket, salt, self.workers, slices, device)

    def common_key(self, salt: int = 0) -> int:
        """A random key that all workers share."""
        return fold(self.seed, self.step, self.bucket, salt, -1)


class Mixed(NamedTuple):
    """The result of a mean: the mixed rows, each row as other workers decode it, and the new state."""

    mixed: Tensor
    sent: Tensor
    state: State


class MeanChannel(Protocol):
    """A topology on a cluster, as compressors see it."""

    @property
    def uniform(self) -> bool:
        """Whether all workers receive the same mean."""

    def mean(self, rows: Tensor, context: Context) -> Tensor:
        """Plain mixing of rows (in place where possible)."""

    def coded(self, codec: Codec, rows: Tensor, state: State, context: Context, wants_sent: bool = True) -> Mixed:
        """Mixing of coded rows; without ``wants_sent`` the rows as others decode them may be left out."""


@dataclass(frozen=True)
class Compressor:
    """Base of all compressors."""

    biased: ClassVar[bool] = True
    """Whether the decoded value differs from the original in expectation; error feedback needs such a method."""
    compresses: ClassVar[bool] = True
    """Whether values are coded at all."""
    carries_momentum: ClassVar[bool] = False
    """Whether it accumulates momentum, so that the optimiser's own must be zero."""
    sums: ClassVar[tuple[str, ...]] = ("error",)
    """What of its state are sums of values that workers have not sent yet: of workers that become fewer they are added up."""
    paper: ClassVar[str] = ""
    name: ClassVar[str] = ""

    @property
    def gives_signs(self) -> bool:
        """Whether the optimiser receives signs, whose norm says nothing of the gradient's."""
        return False

    @property
    def links(self) -> tuple[Compressor, ...]:
        """The methods of which this one consists, in the order of the notation's ``|``."""
        return (self,)

    @property
    def methods(self) -> list[str]:
        """The names under which a table of costs may have this method, the most specific first.

        >>> from hocket.compression import QSGD, Chain, TopK
        >>> Chain(TopK(0.01), QSGD(4)).methods
        ['topk(0.01) | qsgd(4)', 'topk | qsgd', 'topk(0.01)', 'topk']
        """
        texts, names = [write(link) for link in self.links], [link.name for link in self.links]
        return list(dict.fromkeys([" | ".join(texts), " | ".join(names), texts[0], names[0]]))

    @property
    def codec(self) -> Codec | None:
        """Itself if it encodes rows independently of the channel, otherwise None."""
        return None

    def with_precision(self, second: Compressor) -> Compressor | None:
        """This method with ``second`` as the codec of the values that it sends; None where it has no such values."""
        return None

    @property
    def lossless(self) -> bool:
        """Whether nothing is lost (then the method equals no compression)."""
        return False

    @property
    def uses_error_feedback(self) -> bool:
        """Whether error feedback is on."""
        return False

    @property
    def feedback_decay(self) -> float:
        """Error feedback's factor on the residual of the exchange before."""
        given = getattr(self, "feedback", None)
        return 1.0 if given is None or isinstance(given, (bool, str)) else float(given)

    @property
    def sends_differences(self) -> bool:
        """Whether feedback is EF21's: what is sent is the difference from the sum of what was sent before."""
        return self.uses_error_feedback and getattr(self, "feedback", None) == "ef21"

    @property
    def global_selection(self) -> bool:
        """Whether it compares values of the whole model; such methods use one bucket and interleaved slices."""
        return False

    def sends_per_value(self, exchanges: int) -> float | None:
        """How often ``exchanges`` send each value on average, where the residual waits for later ones; None: it does not wait, or
        the values decide (a static threshold)."""
        return None

    @property
    def single_bucket(self) -> bool:
        """Whether all values are to be exchanged at once, in one bucket."""
        return self.global_selection

    @property
    def residual_stays(self) -> bool:
        """Whether the residual may stay in the worker's own weights: the method must send every value after a few exchanges, and
        weights cannot decay."""
        return self.uses_error_feedback and self.feedback_decay == 1 and not self.sends_differences

    @property
    def for_gradients_only(self) -> bool:
        """Whether it can exchange gradients only."""
        return False

    @property
    def contracts(self) -> bool:
        """Whether ``‖C(x) − x‖ ≤ ‖x‖`` always; public copies, which add such messages up, otherwise grow without bound."""
        return self.biased

    def consensus_step(self, size: int, context: Context) -> float:
        """CHOCO's γ for rows of ``size``: the less of a difference a message carries, the smaller γ must be."""
        return 1.0 if self.lossless else CONSENSUS_STEP

    @abstractmethod
    def mean(self, rows: Tensor, channel: MeanChannel, state: State, context: Context) -> Mixed:
        """The mean of ``rows`` over ``channel``, compressed."""

    def decoded(self, rows: Tensor, size: int, context: Context) -> Tensor:
        """Rows of the channel's codec as rows ``[rows, size]`` of the exchanged values."""
        return rows[:, :size]


@dataclass(frozen=True)
class MomentumCompressor(Compressor):
    """A compressor of gradients that accumulates their momentum itself."""

    carries_momentum: ClassVar[bool] = True
    precision: Precision | None = field(default=None, kw_only=True)

    @property
    def links(self) -> tuple[Compressor, ...]:
        return (self,) if self.precision is None else (replace(self, precision=None), self.precision)

    def with_precision(self, second: Compressor) -> Compressor | None:
        return replace(self, precision=second) if isinstance(second, Precision) else None

    @property
    def for_gradients_only(self) -> bool:
        return True


@dataclass(frozen=True)
class Codec(Compressor):
    """A compressor that is an encoding of rows, the same for every channel."""

    @property
    def codec(self) -> Codec:
        return self

    @abstractmethod
    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        """Float32 rows ``[rows, n]`` as a message; ``keys`` seed each row's randomness."""

    @abstractmethod
    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        """The float32 rows ``[rows, size]`` that a message encodes."""

    @property
    def second_phase(self) -> Codec:
        """The codec for the second phase of an all-reduce: it encodes a mean of rows that this codec encoded in the first."""
        return self

    def mean(self, rows: Tensor, channel: MeanChannel, state: State, context: Context) -> Mixed:
        return channel.coded(self, rows, state, context)


@dataclass(frozen=True)
class Precision(Codec):
    """A codec of *how precisely*: every value is sent, each in fewer bits. May be second in a chain."""

    def encode_some(self, rows: Tensor, counts: Tensor | None, keys: Tensor, context: Context) -> Message:
        """As :meth:`encode`, where only the first ``counts`` values of each row are real and the others zero."""
        return self.encode(rows, keys, {}, context)[0]

    @abstractmethod
    def lengths(self, counts: Tensor) -> Tensor:
        """For rows of ``counts`` values each: how many values each part holds, ``[rows, parts]``."""


class Selected(NamedTuple):
    """The selected values of each row and their sorted indices, both padded with zeros to one width."""

    indices: Tensor
    """int64 ``[rows, width]``"""
    values: Tensor
    """float32 ``[rows, width]``"""
    counts: Tensor | None
    """How many of each row are real, int64 ``[rows]``; ``None`` when all are."""


@dataclass(frozen=True)
class Selection(Codec):
    """A codec of *what*: some values are sent, with their indices. May be first in a chain."""

    @property
    def global_selection(self) -> bool:
        return True

    @abstractmethod
    def select(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Selected, State]:
        """Choose the values to send."""

    @abstractmethod
    def max_selected(self, size: int) -> int:
        """The most values that can be chosen of a row of ``size``."""

    @property
    def rice(self) -> bool:
        """Whether indices are sent in Rice's code."""
        return False

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        chosen, state = self.select(rows, keys, state, context)
        return with_indices(chosen, Message((chosen.values,), _column(chosen.counts)), rows.shape[1], self.rice), state

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        if message.parts[0].is_meta:
            return torch.empty(message.rows, size, device="meta")
        return put_sent(message, size, self.rice, lambda width, counts: message.parts[2])


def _column(counts: Tensor | None) -> Tensor | None:
    return None if counts is None else counts.unsqueeze(1)


def peaks(rows: Tensor) -> Tensor:
    """The largest magnitude of each row ``[rows, 1]``; 0 for rows without values."""
    if not rows.shape[1]:
        return rows.new_zeros(rows.shape[0], 1)
    if rows.is_cuda:  # one pass instead of two
        return torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True)
    return torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))


def check_density(value: float, name: str) -> None:
    """Refuse a density outside (0, 1]."""
    if not is_number(value) or not 0 < value <= 1:
        raise HocketError(f"{name}({value!r}): the share of values to send must lie in (0, 1], such as 0.01 for one percent.")


def flag(value: object, name: str, argument: str) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise HocketError(f"{name}({argument}={value!r}): {argument} must be True or False.")


def check_feedback(value: object, name: str) -> None:
    """Refuse anything but True, False, None (unset), a decay and ``ef21``."""
    if value in (None, "ef21") or isinstance(value, bool) or (isinstance(value, (int, float)) and 0 < value <= 1):
        return
    raise HocketError(f"{name}(feedback={value!r}): feedback must be True or False, a decay in (0, 1] such as 0.95, or ef21.")


def check_indices(value: object, name: str) -> None:
    """Refuse anything but the codes of indices and None (the method's own)."""
    if value not in (None, "plain", "rice"):
        raise HocketError(f"{name}(indices={value}): indices are sent as plain (two bytes each) or rice (in Rice's code).")


def slot_shapes(bucket: Bucket) -> tuple[tuple[int, ...], ...]:
    """The shapes of a bucket's parameters, in order."""
    return tuple(s.shape for s in bucket.slots)
