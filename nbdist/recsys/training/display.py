"""The display of a run: a table and a plot that grow in a notebook, lines of text elsewhere."""

from __future__ import annotations

import html
import io
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...notebook.shell import shell
from ...replay.target import is_replay
from .history import History, cells, failures, head, text_row

_PART = 0.05
"""The largest share of the time for drawing: a plot takes as long as many steps, and the other ranks wait for rank
0."""


def shown(history: History, total: int, metrics: Sequence[str], progress: bool, note: str) -> RunDisplay | None:
    """Return a display with a note, on rank 0; None if nothing is to be displayed, for example when a recorded step
    runs again.
    """
    if not progress or dist.get_rank() != 0 or is_replay():
        return None
    display = RunDisplay(history, total, metrics)
    if note:
        display.note(note)
    return display


class RunDisplay:
    """The display of one run, on rank 0.

    Args:
        history: The history to show. Call `update` after it has grown.
        total: The number of steps of the run.
        metrics: The names of the metrics that at least some records have.
    """

    def __init__(self, history: History, total: int, metrics: Sequence[str]) -> None:
        self._history, self._total, self._metrics = history, total, metrics
        self._began = self._noted = time.monotonic()
        self._drawn, self._cost = float("-inf"), 0.0
        self._table: Any = None
        self._plot: Any = None
        self._line = ""
        self._headed = False
        if _in_notebook():
            from IPython.display import display

            self._table = display(self, display_id=True)

    def note(self, text: str) -> None:
        """Show a note above the table."""
        self._line = text
        if self._table is None:
            print(text, flush=True)
        else:
            self._table.update(self)

    def progress(self, step: int, first: int) -> None:
        """Show the progress of the run, at most once a second, and only in a notebook. The run began at step
        `first`."""
        now = time.monotonic()
        if self._table is None or now - self._noted < 1.0:
            return
        self._noted = now
        left = (now - self._began) / (step - first) * (self._total - step)
        self.note(f"step {step:,} of {self._total:,}, {left:,.0f} s left")

    def update(self) -> None:
        """Show the last record."""
        if self._table is not None:
            self._table.update(self)
            self._draw(time.monotonic() - self._drawn > self._cost / _PART)
            return
        if not self._headed:
            print(text_row(head(self._metrics)))
            self._headed = True
        print("\n".join([text_row(cells(self._history[-1], self._metrics)), *failures(self._history[-1])]), flush=True)

    def close(self, text: str) -> None:
        """Show the end of the run, and draw everything."""
        self.note(text)
        if self._table is not None:
            self._draw(True)

    def _draw(self, now: bool) -> None:
        if not now or not len(self._history):
            return
        from IPython.display import Image, display

        began = time.monotonic()
        file = io.BytesIO()
        self._history.plot().savefig(file, dpi=80)
        image = Image(file.getvalue(), format="png")
        if self._plot is None:
            self._plot = display(image, display_id=True)
        else:
            self._plot.update(image)
        self._drawn = time.monotonic()
        self._cost = self._drawn - began

    def __repr__(self) -> str:
        return f"{self._line}\n{self._history!r}".strip()

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self._line)}</p>{self._history._repr_html_()}"


def _in_notebook() -> bool:
    """Return whether displays can be updated: in a notebook's kernel, and in its ranks."""
    return type(shell()).__name__ == "ZMQInteractiveShell"
