"""Runs of a study side by side: one thread per group of runs, each of which waits for trainings that other machines do.

Runs that share a search for their learning rate go one after another, so that all seeds get the rate that the first one found. Who
trains decides how many trainings go on at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from hocket.study.carry_out import Data, OuterSearch, Search, Train, Watch, carry_out_run, ended_before
from hocket.study.folder import Folder, Outcome
from hocket.study.plan import Planned, Study

_THREADS = 256


class RunWatch(Watch):
    """The watch of one of several runs: passes its remarks on, each once."""

    def __init__(self, watch: Watch, noted: set[str], lock: threading.Lock) -> None:
        self._watch, self._noted, self._lock = watch, noted, lock

    def note(self, text: str) -> None:
        with self._lock:
            if text not in self._noted:
                self._noted.add(text)
                self._watch.note(text)

    def end(self, number: int, outcome: Outcome) -> None:
        with self._lock:
            self._watch.end(number, outcome)


def carry_out_side_by_side(
    folder: Folder,
    study: Study,
    data: Data,
    train: Train,
    stop: Callable[[], None],
    watch: Watch | None = None,
    retry: bool = False,
) -> list[Outcome]:
    """Do all runs of the study in ``folder``; ``train`` is called by several threads, and ``stop`` ends what it has begun."""
    watch, lock, noted, tries = watch or Watch(), threading.Lock(), set[str](), set[str]()
    outcomes: dict[int, Outcome] = {}
    waiting: dict[int, Planned] = {}
    for number, planned in enumerate(study.runs):
        if (outcome := ended_before(folder, planned, retry)) is not None:
            watch.begin(number, planned, outcome)
            outcomes[number] = outcome
        else:
            waiting[number] = planned

    def work(numbers: Sequence[int]) -> None:
        run_watch = RunWatch(watch, noted, lock)
        for number in numbers:
            outcomes[number] = carry_out_run(folder, waiting[number], data, train, train, run_watch, tries)
            run_watch.end(number, outcomes[number])

    groups = grouped(waiting, lambda planned: _search(folder, planned, data, train, watch))
    with ThreadPoolExecutor(min(_THREADS, max(1, len(groups)))) as pool:
        futures = [pool.submit(work, numbers) for numbers in groups]
        try:
            _finish(futures)
        except BaseException:
            stop()
            pool.shutdown(cancel_futures=True)
            raise
    return [outcomes[number] for number in range(len(study.runs))]


def grouped(runs: dict[int, Planned], search_of: Callable[[Planned], str | None]) -> list[list[int]]:
    """Groups of the numbers of runs that go one after another: runs with the same search; a run without one is alone."""
    groups: dict[object, list[int]] = {}
    for number, planned in runs.items():
        groups.setdefault(number if (search := search_of(planned)) is None else search, []).append(number)
    return list(groups.values())


def _search(folder: Folder, planned: Planned, data: Data, train: Train, watch: Watch) -> str | None:
    if not planned.tuned and not planned.outer:
        return None
    kind = Search if planned.tuned else OuterSearch
    return kind(folder, planned.settings, data, train, watch).what


def _finish(futures: list[Future[None]]) -> None:
    """Wait until all have ended, or one has failed; in short waits, so that Ctrl-C interrupts them."""
    left = set(futures)
    while left:
        ended, left = wait(left, 0.2, FIRST_EXCEPTION)
        for future in ended:
            future.result()
