"""Where the figures of a training go beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, or a file of lines.

    with open_loggers(["tensorboard:runs", "wandb:my-project"], run={"strategy": "local(16)"}) as log:
        log.epoch({"epoch": 1, "loss": 0.5, **job.summary()})

A logger is named as ``KIND`` or ``KIND:PLACE``; the place is a folder (tensorboard), a project (wandb), the address of a store
(mlflow) or a file (jsonl). It is given every line of metrics.jsonl: losses, accuracy, seconds, bytes; staleness as mean and
largest; the seconds of a step as those of the fastest and of the slowest worker, and who that was.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hocket.errors import HocketError, nearest
from hocket.extras import require

WANDB_MODES = ("online", "offline", "disabled", "shared")


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one epoch by name, for loggers that know numbers alone.

    >>> scalars({"epoch": 2, "loss": 0.5, "accuracy": None, "staleness": {"0": 1, "4": 3},
    ...          "step_times": {"p50_s": [0.1, 0.3], "p99_s": [0.2, 0.4], "slowest": 1}})
    {'loss': 0.5, 'staleness/mean': 3.0, 'staleness/max': 4.0, 'step_s/fastest': 0.1, 'step_s/slowest': 0.3,
     'step_s/slowest_worker': 1.0}
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if name == "staleness" and value:
            staleness = {int(updates): count for updates, count in value.items()}
            found["staleness/mean"] = sum(updates * count for updates, count in staleness.items()) / max(1, sum(staleness.values()))
            found["staleness/max"] = float(max(staleness))
        elif name == "step_times" and value and value.get("p50_s"):
            found |= {"step_s/fastest": min(value["p50_s"]), "step_s/slowest": max(value["p50_s"])}
            found["step_s/slowest_worker"] = float(value["slowest"])
        elif isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in scalars(value).items()}
        elif isinstance(value, (int, float)) and name != "epoch":
            found[name] = float(value)
    return found


class Logger(ABC):
    """Is given the settings of a run, then one line per epoch."""

    @abstractmethod
    def epoch(self, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""

    @abstractmethod
    def close(self, failed: bool = False) -> None:
        """The training is over, or has failed."""


class JsonlLogger(Logger):
    """A file with one line per epoch, which other programs may follow."""

    def __init__(self, place: Path, run: Mapping[str, Any]) -> None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            self._file = place.open("a")
        except OSError as error:
            raise HocketError(f"Cannot write {place} ({error.strerror}); choose another file for jsonl:FILE.") from None
        self._write({"run": dict(run)})

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        self._write(dict(metrics))

    def close(self, failed: bool = False) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, default=str) + "\n")
        self._file.flush()


class TensorBoardLogger(Logger):
    """A folder for ``tensorboard --logdir``."""

    def __init__(self, place: Path, run: Mapping[str, Any]) -> None:
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(str(place))
        except OSError as error:
            raise HocketError(
                f"Cannot write into {place} ({error.strerror}); choose another folder for tensorboard:FOLDER."
            ) from None
        self._writer.add_text("run", "    " + json.dumps(dict(run), indent=2, default=str).replace("\n", "\n    "))

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, int(metrics["epoch"]))
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        self._writer.close()


class WandbLogger(Logger):
    """A run of a project of Weights & Biases; with ``mode="offline"`` it lies in ``folder`` until ``wandb sync``."""

    def __init__(self, project: str, run: Mapping[str, Any], folder: Path, mode: str | None) -> None:
        check_wandb_mode(mode)
        wandb = require("wandb", "wandb")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(project=project, config=dict(run), dir=str(folder), mode=mode)
        except wandb.errors.Error as error:
            first = str(error).strip().splitlines()[0].rstrip(".")
            raise HocketError(f"Weights & Biases: {first}; run `wandb login`, or set WANDB_MODE=offline.") from None

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        self._run.log(scalars(metrics), step=int(metrics["epoch"]))

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowLogger(Logger):
    """A run of the experiment ``hocket`` in a store of MLflow, such as ``sqlite:///mlflow.db`` or ``http://host:5000``."""

    def __init__(self, address: str, run: Mapping[str, Any]) -> None:
        self._mlflow = require("mlflow", "mlflow")
        if address.startswith("sqlite:///"):
            Path(address.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._client = self._mlflow.MlflowClient(tracking_uri=address)
            known = self._client.get_experiment_by_name("hocket")
            experiment = self._client.create_experiment("hocket") if known is None else known.experiment_id
            self._id = self._client.create_run(experiment).info.run_id
        except self._mlflow.exceptions.MlflowException as error:
            first = str(error).strip().splitlines()[0].rstrip(".")
            raise HocketError(f"MLflow at {address}: {first}; use sqlite:///FILE, or the address of a server.") from None
        for name, value in run.items():
            if value is not None:
                self._client.log_param(self._id, name, str(value)[:500])

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        now, step = int(time.time() * 1000), int(metrics["epoch"])
        entities = [self._mlflow.entities.Metric(name, value, now, step) for name, value in scalars(metrics).items()]
        self._client.log_batch(self._id, metrics=entities)

    def close(self, failed: bool = False) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def check_wandb_mode(mode: str | None) -> None:
    """Refuse a mode that Weights & Biases does not know."""
    if mode and mode not in WANDB_MODES:
        raise HocketError(f"WANDB_MODE={mode}: Weights & Biases knows {', '.join(WANDB_MODES)}{nearest(mode, WANDB_MODES) or '.'}")


class Loggers:
    """Several loggers as one; a context that closes them."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, or any dict of numbers with ``epoch``. A logger that fails gets no more."""
        for logger in list(self._loggers):
            try:
                logger.epoch(metrics)
            except Exception as error:  # of somebody else's library; the training goes on
                self._loggers.remove(logger)
                name = type(logger).__name__
                warnings.warn(f"{name} failed ({type(error).__name__}: {error}) and gets no more figures.", stacklevel=2)

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for logger in self._loggers:
            with contextlib.suppress(Exception):
                logger.close(failed=kind is not None)


KINDS: dict[str, tuple[str, str]] = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "jsonl": ("json", ""),
}
"""By the name of a logger: the module that it needs, and the extra that brings it."""


def check_loggers(names: Iterable[str], wandb_mode: str | None = None) -> None:
    """Refuse names that are none, packages that are missing and a wrong mode, before anything is started."""
    for name in names:
        kind = name.partition(":")[0]
        if kind not in KINDS:
            raise HocketError(f"There is no logger '{kind}'{nearest(kind, KINDS) or '.'} Use {', '.join(KINDS)}.")
        require(*KINDS[kind])
        if kind == "wandb":
            check_wandb_mode(wandb_mode)


def open_loggers(
    names: Iterable[str], run: Mapping[str, Any] | None = None, folder: str | Path = ".", wandb_mode: str | None = None
) -> Loggers:
    """The loggers of these names, given the settings of a ``run``; those without a place of their own write into ``folder``.

    Only the process that hosts worker 0 should open any.
    """
    names, run, folder = list(names), dict(run or {}), Path(folder)
    check_loggers(names, wandb_mode)
    make: dict[str, Callable[[str], Logger]] = {
        "tensorboard": lambda place: TensorBoardLogger(Path(place or folder / "tensorboard"), run),
        "wandb": lambda place: WandbLogger(place or "hocket", run, folder, wandb_mode or None),
        "mlflow": lambda place: MlflowLogger(place or f"sqlite:///{folder / 'mlflow.db'}", run),
        "jsonl": lambda place: JsonlLogger(Path(place or folder / "log.jsonl"), run),
    }
    opened: list[Logger] = []
    try:
        for kind, _, place in (name.partition(":") for name in names):
            opened.append(make[kind](place))
    except BaseException:
        for logger in opened:
            logger.close(failed=True)
        raise
    return Loggers(opened)
