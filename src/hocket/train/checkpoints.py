"""Checkpoints that all processes have agreed on: generations, each with a file per process and a manifest that seals it.

``OUT/checkpoints/7/`` is generation 7: ``process-0.pt``, ``process-1.pt``, … (the state of each process), ``model.safetensors``
(the mean model), for a split model ``whole.pt``, and ``manifest.json``: length and checksum of every file, and what the run is. A
process writes its files from copies, in a thread of its own, while training goes on. When all processes have told each other that
theirs are on the disk, each writes the manifest; only a generation with a manifest counts. So a process that is killed while it
saves, or finds the disk full, leaves the generation before as it was.

A resumed run takes the newest generation that *all* processes have whole. Processes may share a disk or have one each.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hocket.cluster.agreement import Agreement
from hocket.cluster.base import Cluster
from hocket.errors import HocketError, SettingError
from hocket.files import (
    CannotWrite,
    copied,
    read_state,
    safetensors,
    sealed_json,
    state_bytes,
    sync_folder,
    unsealed_json,
    write_whole,
)
from hocket.train.record import WEIGHTS

MANIFEST, WHOLE = "manifest.json", "whole.pt"
LEAST_KEPT = 2
_MOST = 1 << 20
"""Workers, or processes."""
_TOGETHER_S = 600.0
"""How long a process waits for others to have written their files."""
_LEAVE_S = 10.0
"""How long a process that ends with an error waits for its files."""
Note = Callable[[str], None]


class SharedAgreement(Protocol):
    """How processes that share a folder report to the first of them
    (:class:`~hocket.train.elastic_checkpoints.FolderAgreement`)."""

    shared: bool
    silent: str
    rank: int

    def gather(self, name: str, text: str, timeout_s: float) -> list[str | None]: ...


def process_file(process: int) -> str:
    """The file of one process."""
    return f"process-{process}.pt"


@dataclass(frozen=True)
class Generation:
    """One generation on the disk, and its manifest."""

    folder: Path
    manifest: Mapping[str, Any] = field(repr=False)

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def facts(self) -> dict[str, Any]:
        """What the run was when it was saved: ``run`` (run.json), ``step``, ``epoch``, ``workers``, ``processes``."""
        return dict(self.manifest["facts"])

    @property
    def title(self) -> str:
        return f"checkpoint {self.number} (epoch {self.facts['epoch']}, step {self.facts['step']})"

    @classmethod
    def read(cls, folder: Path) -> Generation:
        """Read the manifest; ValueError with a clause where it is missing or damaged."""
        try:
            manifest = unsealed_json((folder / MANIFEST).read_bytes())
            files, facts = manifest["files"], manifest["facts"]
            numbers = [facts[name] for name in ("step", "epoch", "workers", "processes")]
            if not all(isinstance(number, int) for number in numbers) or not isinstance(facts["run"], dict):
                raise TypeError("its facts have wrong types")
            if min(numbers) < 0 or not 0 < facts["workers"] <= _MOST or not 0 < facts["processes"] <= _MOST:
                raise ValueError("its facts are out of range")
            if not all(isinstance(length, int) and isinstance(check, int) for length, check in files.values()):
                raise TypeError("its files have wrong types")
        except FileNotFoundError:
            raise ValueError("was not finished") from None
        except OSError as error:
            raise ValueError(f"cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"has a damaged {MANIFEST}") from None
        return cls(folder, manifest)

    def content(self, name: str) -> bytes:
        """The bytes of a file; ValueError with a clause where it is missing or damaged."""
        if name not in self.manifest["files"]:
            raise ValueError(f"has no {name}")
        length, check = self.manifest["files"][name]
        try:
            found = (self.folder / name).read_bytes()
        except OSError as error:
            raise ValueError(f"lacks {name} ({error.strerror})") from None
        if len(found) != length:
            raise ValueError(f"has a damaged {name} ({len(found)} bytes, not {length})")
        if zlib.crc32(found) != check:
            raise ValueError(f"has a damaged {name} (its checksum does not match)")
        return found

    def load(self, name: str) -> dict[str, Any]:
        """The state in a file; ValueError with a clause where it cannot be read."""
        state = read_state(self.content(name))
        if not isinstance(state, dict):
            raise ValueError(f"has a {name} of another structure")
        return state


class Checkpoints:
    """The generations in ``folder`` as one process of ``cluster`` writes and reads them; all processes must make it together.

    ``note`` is called, on the first process, with remarks for people.
    """

    def __init__(self, folder: Path, cluster: Cluster, keep: int = LEAST_KEPT, note: Note = lambda _: None) -> None:
        if keep < LEAST_KEPT:
            raise SettingError(
                f"<keep:{keep}>: at least {LEAST_KEPT} checkpoints are kept, so that one is whole while another is written."
            )
        self.folder, self.keep, self.process = folder, keep, cluster.rank
        self._agreement: Agreement | SharedAgreement = cluster.agreement()
        self._note = note
        self._thread: threading.Thread | None = None
        self._good: list[int] = []
        """Generations that all processes have sealed, oldest first; others are removed when the next one is sealed."""
        self._next = 1

    # --- reading ---------------------------------------------------------------------------------------------------------------

    def resume(self, needed: Callable[[Generation], list[str]], load: Callable[[Generation], None]) -> Generation:
        """Load the newest generation of which every process has its ``needed`` files whole, and can ``load`` it.

        All processes must call it; the first one says which generation it is, and why no newer one.
        """
        passed: list[str] = []
        for number, problem in self._common(needed):
            if problem is None:
                generation = Generation.read(self.folder / str(number))
                problem = self._agreed(f"load {number}", _attempt(partial(load, generation)))
            if problem is None:
                self._good = [n for n in self._good if n <= number]
                self._say(" ".join([f"Goes on from {generation.title}, the newest that is whole.", *passed]))
                return generation
            passed.append(f"Checkpoint {number} is passed over: {problem}.")
        if not passed:
            raise SettingError(f"There is no checkpoint in {self.folder}; start without <resume>.")
        raise HocketError(f"No checkpoint in {self.folder} can be used. {' '.join(passed)} Start anew in another folder.")

    @property
    def next(self) -> int:
        """The number of the next generation, as far as this process knows."""
        return max([self._next, *(number + 1 for number in self._numbers())])

    def meet(self, agreement: SharedAgreement, number: int) -> None:
        """The next generation has this number, and is written by the processes of ``agreement``, which share the folder."""
        self._agreement, self.process, self._next = agreement, agreement.rank, number
        self._good = [n for n in self._numbers() if _attempt(partial(Generation.read, self.folder / str(n))) is None]

    def newest(self) -> Generation | None:
        """The newest generation with a manifest that this process can read."""
        return next(self.readable(), None)

    def readable(self) -> Iterator[Generation]:
        """All generations with a manifest that this process can read, newest first."""
        for number in reversed(self._numbers()):
            with contextlib.suppress(ValueError):
                yield Generation.read(self.folder / str(number))

    def _common(self, needed: Callable[[Generation], list[str]]) -> Iterator[tuple[int, str | None]]:
        """All generations that some process has, newest first, each with its first problem on any process."""
        own = {number: _problem(self.folder / str(number), needed) for number in self._numbers()}
        everyone = self._agreement.gather("generations", json.dumps(own), _TOGETHER_S)
        if None in everyone:
            raise HocketError(f"Process {everyone.index(None)} has not said which checkpoints it has; see its own output.")
        found = [json.loads(text) for text in everyone if text is not None]
        numbers = sorted({int(number) for had in found for number in had})
        problems = {n: [had.get(str(n), "has none of it") for had in found] for n in numbers}
        self._good = [n for n in numbers if not any(problems[n])]
        self._next = max([0, *numbers]) + 1  # a number is never used twice, so a rejected generation stays rejected
        for number in reversed(numbers):
            yield number, _named(problems[number])

    def _numbers(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    # --- writing ---------------------------------------------------------------------------------------------------------------

    def save(self, states: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Begin to write one more generation: this process's ``states`` by file name.

        Returns once they are copied; all processes must call it, with the same ``facts``.
        """
        self.wait()
        number, self._next = self._next, self._next + 1
        arguments = (number, copied(dict(states)), dict(facts))
        thread = threading.Thread(target=self._write, args=arguments, name="hocket-checkpoint", daemon=True)
        thread.start()
        self._thread = thread  # only now can it be awaited, also where an interruption comes in between

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the generation that is being written."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.wait(None if kind is None else _LEAVE_S)

    def _write(self, number: int, states: dict[str, Any], facts: dict[str, Any]) -> None:
        """Write this process's files; when all have, the manifest; when all have that, remove what is too old."""
        folder = self.folder / str(number)
        files: dict[str, tuple[int, int]] = {}
        problem = _attempt(lambda: files.update(_write_files(folder, states)))
        everyone = self._agreement.gather(f"written {number}", json.dumps([problem, files]), _TOGETHER_S)
        shared = self._agreement.shared
        if shared and self.process > 0:
            return  # the first process seals it
        reports = [_report_of(text) or (self._agreement.silent, {}) for text in everyone]
        problem = _named([text or "" for text, _ in reports])
        if problem is None:
            manifest = {"files": {name: entry for _, own in reports for name, entry in sorted(own.items())}, "facts": facts}
            write = lambda: write_whole(folder / MANIFEST, sealed_json(manifest), f"-{self.process}")  # noqa: E731
            problem = _attempt(write) if shared else self._agreed(f"sealed {number}", _attempt(write))
        if problem is None:
            self._good.append(number)
            self._remove_old()
            return
        self._remove(number)
        before = f"checkpoint {self._good[-1]} is the newest" if self._good else "there is none before it"
        self._say(f"Checkpoint {number} was not saved: {problem}; {before}, and training goes on.")

    def _remove_old(self) -> None:
        self._good = self._good[-self.keep :]
        for number in self._numbers():
            if number not in self._good and number < self._good[-1]:  # another process may be writing the next one
                self._remove(number)

    def _remove(self, number: int) -> None:
        with contextlib.suppress(OSError):  # another process may do the same
            (self.folder / str(number) / MANIFEST).unlink()  # first: from here on it does not count
        shutil.rmtree(self.folder / str(number), ignore_errors=True)

    # --- both ------------------------------------------------------------------------------------------------------------------

    def _agreed(self, name: str, problem: str | None) -> str | None:
        """None where no process has a problem; otherwise the first one's."""
        everyone = self._agreement.gather(name, problem or "", _TOGETHER_S)
        return _named([self._agreement.silent if text is None else text for text in everyone])

    def _say(self, text: str) -> None:
        if self.process == 0:
            self._note(text)


def _write_files(folder: Path, states: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Write files; of each its length and its checksum."""
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)
    found: dict[str, tuple[int, int]] = {}
    for name, state in states.items():
        content = safetensors(state, {"format": "pt"}) if name == WEIGHTS else state_bytes(state)
        write_whole(folder / name, content)
        found[name] = len(content), zlib.crc32(content)
    return found


def _report_of(text: str | None) -> tuple[str | None, dict[str, Any]] | None:
    """A process's report on its files: a problem, and the length and checksum of each; None where it sent no report."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        problem, files = json.loads(text or "")
        if isinstance(problem, str | None) and isinstance(files, dict):
            return problem, files
    return None


def _problem(folder: Path, needed: Callable[[Generation], list[str]]) -> str:
    """The problem of a generation on this process; empty where it is whole."""
    try:
        generation = Generation.read(folder)
        for name in needed(generation):
            generation.content(name)
    except ValueError as error:
        return str(error)
    except Exception as error:  # its facts are of another version, or damaged
        return f"has facts that do not fit ({type(error).__name__})"
    return ""


def _attempt(work: Callable[[], Any]) -> str | None:
    """Call ``work``; returns a clause on what went wrong, or None."""
    try:
        work()
    except CannotWrite as error:
        return error.cause[0].lower() + error.cause[1:]
    except OSError as error:
        return f"cannot write ({error.strerror})"
    except HocketError as error:
        return f"does not fit: {str(error).rstrip('.')}"
    except Exception as error:  # any error: the state does not fit, and the generation before may
        return f"does not fit ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'})"
    return None


def _named(problems: list[str]) -> str | None:
    """The first problem with its process; None where there is none.

    >>> _named(["", "lacks process-1.pt"]), _named([""])
    ('process 1 lacks process-1.pt', None)
    """
    return next((f"process {process} {problem}" for process, problem in enumerate(problems) if problem), None)
