"""A worker that exchanges messages with servers or peers, as a training job uses it: a program and the driver that runs it.

Per step the job calls :meth:`WorkerRuntime.before_update` with its gradients, steps its own optimiser where ``steps_locally`` says
so, and calls :meth:`WorkerRuntime.after_update`. Weights come into the rows that it joined with.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from hocket.drivers.record import Recorder
from hocket.drivers.sockets import SocketDriver
from hocket.errors import HocketError
from hocket.programs.account import Account, data_of, entry_of, steps_of

REDIAL_S = 3.0
"""A connection without acknowledgements for these seconds is closed and opened again."""


class WorkerRuntime(ABC):
    """Worker ``worker``; ``record``: a file for the events of its program."""

    driver: SocketDriver
    program: Any

    def __init__(self, worker: int, record: Path | None) -> None:
        self.worker = worker
        self.attached = False
        """Whether the worker has joined and not left."""
        self._recorder = Recorder(record)

    # --- training ------------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps done; with servers it jumps ahead where this worker was away."""
        return int(self.program.step)

    @property
    def steps_locally(self) -> bool:
        """Whether the worker's own optimiser makes the step under way."""
        return bool(self.program.steps_locally)

    @abstractmethod
    def before_update(self, gradients: Sequence[Tensor]) -> None:
        """This step's gradients, flat, one per bucket (none where the program takes none); do not write to them any more."""

    def set_options(self, options: list[dict[str, Any]]) -> None:  # noqa: B027 - peers keep their optimisers
        """The optimiser's changed options other than learning rates, per group, before the step is done; servers adopt them."""

    @abstractmethod
    def after_update(self, lrs: Sequence[float], buffers: Tensor | None) -> None:
        """The step is done, with these learning rates; ``buffers`` are the worker's floating-point buffers, flat."""

    @abstractmethod
    def next_batch(self) -> int | None:
        """The number of the next mini-batch that shard 0 or the coordinator hands out; None when there is none left."""

    @abstractmethod
    def flush(self) -> None:
        """Push the remaining sums."""

    @abstractmethod
    def finish(self) -> Tensor | None:
        """End with the final weights, the same on all workers, in the rows; all workers' mean buffers. All must call it."""

    @abstractmethod
    def leave(self) -> None:
        """Say goodbye, and close the links."""

    def record_batch(self, number: int | None) -> int | None:
        """Record the number of the mini-batch that this worker takes for its next step, if there is a recording."""
        with self.driver.lock:
            self._recorder.write("batch", id=number)
        return number

    # --- state ---------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def global_weights(self) -> tuple[list[Tensor], Tensor | None]:
        """The current global weights ``[1, values]`` per bucket, and mean buffers; one worker may ask alone."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All strategy state of this worker."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a :meth:`state_dict`, before the first step of this job."""

    def residuals(self) -> list[Tensor | None] | None:
        """What error feedback holds back of this worker's pushes, per bucket; None while steps wait to be pushed."""
        return []

    def begin_with(self, residuals: list[Tensor | None]) -> None:  # noqa: B027 - peers have none
        """Begin with these residuals, before the first step."""

    def _refuse_late_load(self) -> None:
        if self.step:
            raise HocketError(f"load_state_dict after {self.step} steps: load it before the first step of this job.")

    def late_exchanges(self) -> list[dict[str, Any]]:
        """The latest waits that took far longer than those before, and for whom, as far as the program knows."""
        with self.driver.lock:
            return list(self.program.late.reports)

    # --- figures -------------------------------------------------------------------------------------------------------------

    @property
    def account(self) -> Account:
        found = self.program.account
        assert isinstance(found, Account)
        return found

    def figures(self) -> dict[str, Any]:
        """This worker's current account, as plain data."""
        with self.driver.lock:
            return self.account.describe(self.driver.clock())

    def summary(self) -> dict[str, Any]:
        """Everything so far of all workers, as servers or peers tell it: seconds are means over workers, ``bytes_sent`` and
        ``exchanges`` sums over workers, in both directions; and what :meth:`refresh` counts.

        Workers and servers that do not answer keep the figures that they told last.
        """
        accounts, counts = self.refresh()
        return {**vars(entry_of(accounts)[0]), **data_of(accounts), **counts, "step_times": steps_of(accounts)}

    @abstractmethod
    def refresh(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """All workers' accounts, asked for anew as long as this worker is attached; ``lost`` and ``staleness``."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, time does not count as training."""
        if self.account.paused is not None:  # inside another pause, or after the end
            yield
            return
        self._time(self.account.pause)
        try:
            yield
        finally:
            self._time(self.account.resume)

    def _time(self, method: Callable[[float], None]) -> None:
        """Call a method of the account with the time, also in the recording."""
        with self.driver.lock:
            now = self.driver.clock()
            self._recorder.write("call", name=f"account.{method.__name__}", arguments=(), now=now)
            method(now)
