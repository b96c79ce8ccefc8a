"""The table of a session's ranks: `Session.status`."""

from __future__ import annotations

import html
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..capture.explain import html_table, size
from ..system.gpus import GpuUse, gib
from ..system.gpus import look as look_at_gpu
from .calls.group import Group, Layout
from .cell.cell import Cell

_HEAD = ("rank", "pid", "device", "state", "runs", "memory", "since", "last line of output")
#: Seconds from one look at the ranks to the next, while the table is shown.
INTERVAL = 1.0
_LONGEST_LINE = 60


@dataclass(frozen=True)
class Snapshot:
    """The table at one moment: a title, and a row of texts for each rank, in the order of `_HEAD`."""

    title: str
    rows: Sequence[Sequence[str]]
    busy: bool
    """True if a call runs, or waits for its turn."""


class Status:
    """A table, as text and as HTML, with the state at the time of display.

    While it is displayed in a notebook during a call, it is updated until the call is over.
    """

    def __init__(self, look: Callable[[], Snapshot]) -> None:
        self.look = look
        """Returns the table at this moment."""

    def __str__(self) -> str:
        return _as_text(self.look())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _as_html(self.look())

    def _ipython_display_(self) -> None:
        cell, transient = Cell(background=True), {"display_id": uuid.uuid4().hex}

        def show(snapshot: Snapshot, update: bool) -> None:
            data = {"text/plain": _as_text(snapshot), "text/html": _as_html(snapshot)}
            cell.message("display", {"data": data, "metadata": {}, "transient": transient, "update": update})

        def follow() -> None:
            busy = True
            while busy:
                time.sleep(INTERVAL)
                snapshot = self.look()
                busy = snapshot.busy
                show(snapshot, update=True)
            cell.close()

        snapshot = self.look()
        show(snapshot, update=False)
        if snapshot.busy:
            threading.Thread(target=follow, name="nbdist: status", daemon=True).start()
        else:
            cell.close()


def look(state: str, layout: Layout, group: Group | None, busy: bool) -> Snapshot:
    """Return the table of a session with this state and layout, and with this group if the ranks run."""
    devices = _with_use(layout)
    title = f"{len(devices)} rank{'s' if len(devices) != 1 else ''}, {state}"
    if group is None:
        return Snapshot(
            title, [(str(rank), "", device, "", "", "", "", "") for rank, device in enumerate(devices)], busy
        )
    rows, now, memories, last = [], time.time(), group.memory(), group.last_lines()
    for rank, device in enumerate(devices):
        doing, memory = group.doing[rank], memories.get(rank)
        rows.append(
            (
                str(rank),
                str(group.ranks.pids[rank] or ""),
                device,
                doing.state,
                doing.what,
                "" if memory is None else size(memory),
                duration(now - doing.since),
                last[rank][-_LONGEST_LINE:].rpartition("\r")[2],
            )
        )
    return Snapshot(title, rows, busy)


def _with_use(layout: Layout) -> list[str]:
    """Return the ranks' devices, with memory and load of GPUs if they are known."""
    gpus = layout.gpus()
    if not gpus:
        return [*layout.devices]
    uses = {gpu: look_at_gpu(gpu) for gpu in set(gpus)}

    def describe(device: str, use: GpuUse | None) -> str:
        if use is None:
            return device
        load = "" if use.load is None else f", {use.load} %"
        return f"{device}: {use.used / (1 << 30):.1f} of {gib(use.total)}{load}"

    return [describe(device, uses[gpu]) for device, gpu in zip(layout.devices, gpus, strict=True)]


def duration(seconds: float) -> str:
    """Describe a time span, such as "2 min"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _as_text(snapshot: Snapshot) -> str:
    rows = [_HEAD, *snapshot.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([snapshot.title, *lines])


def _as_html(snapshot: Snapshot) -> str:
    return f"<p>{html.escape(snapshot.title)}</p>" + html_table(_HEAD, snapshot.rows)
