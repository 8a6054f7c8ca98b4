"""Tables and progress bars for notebooks."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

_EVERY_S = 0.2
_WIDE = 30


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = (), words: int = 1) -> str:
    """A table; the first ``words`` columns are aligned as words, the others as numbers.

    >>> table("a < b", ["x", "y"], [["<1>", "2"]]).count("&lt;"), "<1>" in table("", ["x"], [["<1>"]])
    (2, False)
    """
    sides = ["left" if place < words else "right" for place in range(len(head))]

    def line(tag: str, cells: Sequence[str]) -> str:
        made = (f'<{tag} style="text-align: {side}">{html.escape(c)}</{tag}>' for c, side in zip(cells, sides, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line("td", row) for row in rows)
    named = f"<p><b>{html.escape(title)}</b></p>" if title else ""
    paragraphs = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<div>{named}<table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table>{paragraphs}</div>"


class TrainingPosition(Protocol):
    """Where a training stands (:class:`hocket.train.loop.Progress`)."""

    @property
    def epoch(self) -> int: ...
    @property
    def epochs(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def steps(self) -> int: ...


class ProgressBar:
    """Shows the progress of a training: ``hocket.simulate(…, watch=hocket.ProgressBar())``, ``hocket.advise(…, watch=…)``.

    In a notebook it is HTML, without widgets; on a terminal a line on standard error; elsewhere nothing.

    >>> bar = ProgressBar("local(4)")
    >>> bar("trying a rate")
    """

    def __init__(self, label: str = "") -> None:
        self.label = label
        self._handle: Any = None
        self._begun = self._shown = 0.0
        self._notebook, self._terminal = in_notebook(), sys.stderr.isatty()

    def __call__(self, where: TrainingPosition | str) -> None:
        now = time.monotonic()
        over = not isinstance(where, str) and where.step >= where.steps
        self._begun = self._begun or now
        if now - self._shown < _EVERY_S and not over:
            return
        self._shown = now
        share, text = (None, where) if isinstance(where, str) else (where.step / max(1, where.steps), self._described(where, now))
        if self._notebook:
            self._display(share, text)
        elif self._terminal:
            filled = "" if share is None else f"[{'#' * round(share * _WIDE):-<{_WIDE}}] "
            print(f"\r\x1b[K{self.label} {filled}{text}".rstrip(), end="\n" if over else "", file=sys.stderr, flush=True)

    def _described(self, where: TrainingPosition, now: float) -> str:
        passed = now - self._begun
        left = "" if where.step >= where.steps else f", about {passed / max(1, where.step) * (where.steps - where.step):.0f} s left"
        epoch = min(where.epoch + 1, where.epochs)  # the first ``where.epoch`` have ended
        return f"epoch {epoch} of {where.epochs}, step {where.step} of {where.steps}, {passed:.0f} s{left}"

    def _display(self, share: float | None, text: str) -> None:
        from IPython.display import HTML, display

        bar = "" if share is None else f'<progress value="{share:.4f}" max="1" style="width: 16em"></progress> '
        shown = HTML(f"<div>{html.escape(self.label)} {bar}{html.escape(text)}</div>")
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
