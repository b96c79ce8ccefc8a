"""Tables of raw ids: saved to a checkpoint with a file for each rank, and gathered on one rank."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .raw_tables import RawTables

PARTS = "raw_ids"
"""The key of the number of files in a checkpoint's state."""
_OPTIMIZER = "optimizer."
_BLOCK = 1 << 16
"""The number of rows that are loaded at once."""


def save(folder: str | os.PathLike[str], tables: RawTables) -> None:
    """Write the rows of this rank and their optimizer's state to a file. All ranks must call it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(_file(folder, tables.rank), "wb") as file:
        torch.save({path: _state(tables, path) for path in tables.tables}, file)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()


def load(folder: str | os.PathLike[str], tables: RawTables, parts: int, optimizer: bool) -> None:
    """Load the rows that belong to this rank from the files of `parts` ranks. Runs no code from the files.

    Raises:
        ValueError: The checkpoint has different tables, or the state of another optimizer.
    """
    files = [torch.load(_file(folder, part), weights_only=True, mmap=True) for part in range(parts)]
    for path, table in tables.tables.items():
        states = [file.get(path) for file in files]
        for state in states:
            if state is None or state["weight"].shape[1] != table.weight.shape[1]:
                found = "has none" if state is None else f"has one of {state['weight'].shape[1]} columns"
                raise ValueError(
                    f"{folder} does not fit: the table of raw ids {path} has {table.weight.shape[1]} columns here, and "
                    f"the checkpoint {found}"
                )
        table.clear()
        if optimizer:
            tables.optimizer.state.pop(table.weight, None)
        for part in itertools.chain.from_iterable(map(_blocks, states)):
            own = tables.own(part)
            rows = table.add_state(own)
            if optimizer:
                _add_optimizer_state(tables, path, own, rows)


def _blocks(state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield a state in parts, so that only the rows of a part are in memory."""
    for start in range(0, len(state["ids"]) or 1, _BLOCK):
        waiting = slice(None) if start == 0 else slice(0)
        yield {
            name: value[waiting if name.startswith("waiting_") else slice(start, start + _BLOCK)]
            if value.ndim
            else value
            for name, value in state.items()
        }


def _state(tables: RawTables, path: str) -> dict[str, Tensor]:
    table = tables.tables[path]
    state = table.rows_state()
    rows = table.rows.map.find(state["ids"])
    kept = tables.optimizer.state.get(table.weight, {})
    tables.row_state(table.weight)  # as long as the table
    for name, value in kept.items():
        if isinstance(value, Tensor):
            state[_OPTIMIZER + name] = table.store.taken(value, rows) if value.ndim else value
    return {name: value.cpu() for name, value in state.items()}


def _add_optimizer_state(tables: RawTables, path: str, own: dict[str, Tensor], rows: Tensor) -> None:
    weight = tables.tables[path].weight
    kept = tables.optimizer.state[weight]
    for name, value in own.items():
        if not name.startswith(_OPTIMIZER):
            continue
        key = name.removeprefix(_OPTIMIZER)
        if not value.ndim:
            kept[key] = value.clone()
            continue
        if key not in kept:
            kept[key] = tables.made_longer(weight, key, value[:0].to(weight.device))
        tables.row_state(weight)[key][rows] = value.to(weight.device)


def gather(tables: RawTables) -> dict[str, dict[str, Tensor]] | None:
    """Return, by path, the `rows_state` of all ranks together, in the order of ids, on the CPU of rank 0; None on other
    ranks."""
    found = {}
    for path, table in tables.tables.items():
        state = table.rows_state()
        parts = {name: _collected(tables, value) for name, value in state.items()}
        if tables.rank == 0:
            found[path] = _in_order({name: value for name, value in parts.items() if value is not None})
    return found if tables.rank == 0 else None


def _collected(tables: RawTables, value: Tensor) -> Tensor | None:
    """Return the rows of all ranks on rank 0's CPU, rank after rank."""
    if not value.ndim:
        return value.cpu()
    device = tables.device
    sizes = [int(one) for one in tables.gather(torch.tensor([len(value)], device=device))]
    if tables.rank:
        dist.send(value.contiguous().to(device), 0)
        return None
    parts = [value.cpu()]
    for rank, size in enumerate(sizes[1:], 1):
        part = torch.empty(size, *value.shape[1:], dtype=value.dtype, device=device)
        dist.recv(part, rank)
        parts.append(part.cpu())
    return torch.cat(parts)


def _in_order(state: dict[str, Tensor]) -> dict[str, Tensor]:
    orders = {False: state["ids"].argsort(), True: state["waiting_ids"].argsort()}
    return {name: value[orders[name.startswith("waiting_")]] if value.ndim else value for name, value in state.items()}


def _file(folder: str | os.PathLike[str], rank: int) -> Path:
    return Path(folder) / f"raw-ids-{rank}.pt"


def checkpoint_part(tables: RawTables | None) -> dict[str, Any]:
    """Return the description of tables of raw ids for a checkpoint's state."""
    return {} if tables is None else {PARTS: {"files": torch.tensor(tables.size)}}
