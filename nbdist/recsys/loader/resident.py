"""Rows in a GPU's memory, so that batches are gathered there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .batches import Window
from .columns import Columns, version_of

_PART = 4  # of the GPU's free memory that a table may take, at most: one part in this number


class _Copy(NamedTuple):
    source: Columns
    versions: list[int]
    """The number of torch's writes to each column."""
    table: dict[str, Tensor]
    done: torch.cuda.Event


class Resident:
    """The copy of a loader's table on a GPU, made in its first epoch; it is not sent to other processes."""

    def __init__(self) -> None:
        self._copy: _Copy | None = None

    def __reduce__(self) -> tuple[type[Resident], tuple[()]]:
        return Resident, ()

    def windows(self, windows: Iterator[Window], device: torch.device, table: Columns | None) -> Iterator[Window]:
        """Yield the same windows, on a GPU if they have dense columns and are small enough, for the GPU's current
        stream.

        Args:
            windows: The windows, in CPU memory or on the GPU already.
            device: The GPU.
            table: The table that stays on the GPU from epoch to epoch. Rows of other windows are copied each time.
        """
        for window in windows:
            dense = _dense(window.table)
            if dense is not None and (self._holds(window.table, device) or _fits(dense, device)):
                there = self._kept(dense, device) if window.table is table else _copied(dense, device)
                window = Window(window.start, dict(there), window.order.to(device))
                del there
            else:
                window = window._replace(order=window.order.cpu())
            yield window
            del window, dense  # before the next one is read: it may take as much memory

    def _holds(self, table: Columns, device: torch.device) -> bool:
        made = self._copy
        return (
            made is not None
            and made.source is table
            and all(column.device == device for column in made.table.values())
            and made.versions == _versions(made.source)
        )

    def _kept(self, table: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        stream = torch.cuda.current_stream(device)
        if self._copy is None or not self._holds(table, device):  # type: ignore[arg-type]
            self._copy = None
            there, done = _copied(table, device), torch.cuda.Event()
            done.record(stream)
            self._copy = _Copy(table, _versions(table), there, done)  # type: ignore[arg-type]
        stream.wait_event(self._copy.done)
        for column in self._copy.table.values():
            column.record_stream(stream)  # its memory is not given away before that stream is done with it
        return self._copy.table


def _dense(table: Columns) -> dict[str, Tensor] | None:
    """Return the table, or None if one of its columns has lists, which cannot be gathered without waiting for a GPU."""
    return table if all(isinstance(column, Tensor) for column in table.values()) else None  # type: ignore[return-value]


def _versions(table: Columns) -> list[int]:
    return [version_of(column) for column in table.values() if isinstance(column, Tensor)]


def _fits(table: dict[str, Tensor], device: torch.device) -> bool:
    size = sum(column.nbytes for column in table.values() if column.device != device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return size <= (torch.cuda.mem_get_info(device)[0] + cached) // _PART


def _copied(table: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: column.to(device) for name, column in table.items()}
