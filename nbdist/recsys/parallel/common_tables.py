"""Embedding tables with sparse gradients that CPU ranks of one machine share in memory.

A rank looks up rows directly in the shared memory. Each row belongs to one rank. In a step, the gradients of a row are
sent to its rank, which updates the row. So no update is done twice, and the optimizer's state is stored once, too.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ...shm.collectives import SharedCollectives
from ...shm.gather import SharedGather, rows_as_bytes
from .row_steps import step_rows


def sparse_tables(model: nn.Module) -> tuple[dict[str, nn.Parameter], bool]:
    """Return the tables with sparse gradients, by the names of their weights; and whether ranks can share all these
    tables.
    """
    sparse: dict[str, Any] = {
        f"{path}.weight".lstrip("."): module
        for path, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
    }
    # With max_norm, tables are written to by those who look rows up.
    possible = all(module.max_norm is None for module in sparse.values())
    return {name: module.weight for name, module in sparse.items()}, possible


def run_closure(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the closure of a step, if it has one, before the step. Return the step's arguments with a closure that
    only returns this value.
    """
    closure = kwargs.get("closure", *args[1:])
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return (optimizer, lambda: loss), {}


def dense_gradient(name: str) -> RuntimeError:
    """Return the error for a table with a dense gradient."""
    return RuntimeError(
        f"{name} has a dense gradient, though its table says sparse=True: something else than looking rows up uses it. "
        "Use sparse=False for this table"
    )


class CommonTables:
    """The tables of a model in shared memory. All ranks must call its methods at the same time.

    Args:
        tables: The weights of the tables, by name; they become rank 0's on all ranks.
        collectives: The collectives of all ranks.
    """

    def __init__(self, tables: dict[str, nn.Parameter], collectives: SharedCollectives) -> None:
        self._names = {table: name for name, table in tables.items()}
        self._collectives = collectives
        self._tables = list(self._names)
        self._gather = SharedGather(collectives, 2 * len(self._tables))
        self._means: dict[torch.Tensor, torch.Tensor] = {}  # of tables, their gradients that are means already
        self._stepped = False  # since the last exchange
        self._kept: dict[tuple[nn.Parameter, str], torch.Tensor] = {}  # of an optimizer, and in common
        adds_to = weakref.WeakMethod(self._adds_to)  # a hook that held this would keep the memory
        for i, table in enumerate(self._tables):
            table.data = self._in_common(table.data, slice(None) if collectives.rank == 0 else slice(0))
            table.register_hook(lambda _, i=i: (adds := adds_to()) and adds(i))
        self._collectives.barrier()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on, make each step of the optimizer of these tables a common step of all ranks."""
        self.adopt(optimizer)
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def exchange(self) -> None:
        """Set each table's gradient to the mean over the ranks, for the rows of this rank alone. Repeated calls do
        nothing."""
        if not self._stepped and all(self._means.get(table) is table.grad is not None for table in self._tables):
            return
        for i in range(len(self._tables)):
            self._adds_to(i)
        mine = [part for table in self._tables for part in self._gradient(table)]
        found = list(zip(*self._gather(mine), strict=True))  # of all ranks, for each table in turn: ids, gradients
        for table, ids, rows in zip(self._tables, found[::2], found[1::2], strict=True):
            own = [np.flatnonzero(self._owned(some, table)) for some in ids]
            own_ids = np.concatenate([some.take(chosen) for some, chosen in zip(ids, own, strict=True)])
            grad = table.new_empty(len(own_ids), table.shape[1])
            places = np.split(rows_as_bytes(grad), np.cumsum([len(chosen) for chosen in own[:-1]]))
            for some, chosen, place in zip(rows, own, places, strict=True):
                some.take(chosen, 0, place, mode="clip")  # another mode copies once more
            grad /= self._collectives.size
            indices = torch.from_numpy(own_ids)[None]
            mean = torch.sparse_coo_tensor(indices, grad, table.shape, check_invariants=False)
            table.grad = self._means[table] = mean
        self._stepped = False

    def squared_norm(self) -> torch.Tensor:
        """Return the squared norm of all tables' gradients after `exchange`. It is equal on all ranks."""
        total = torch.zeros(1, dtype=torch.float64)
        for table in self._tables:
            total += table.grad.coalesce().values().double().square().sum()  # type: ignore[union-attr]
        return torch.stack(self._collectives.gather(total)).sum()

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._names

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the optimizer's state of the tables' rows to shared memory."""
        for table, state, key in self._rows_kept(optimizer):
            state[key] = self._in_common(state[key], self._owned(np.arange(len(table)), table))
            self._kept[table, key] = state[key]
        self._collectives.barrier()

    def _begin(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = run_closure(optimizer, args, kwargs)
        self.exchange()
        for table in step_rows(optimizer, self):
            table.grad = None  # so that the optimizer passes over it
        return changed

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped = True
        for table, mean in self._means.items():
            table.grad = mean
        if next(self._rows_kept(optimizer), None):  # some make it in the first step
            self.adopt(optimizer)
        else:
            self._collectives.barrier()  # the next rows are looked up when all are updated

    def _rows_kept(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any], str]]:
        """Yield the optimizer's values per row that ranks do not share yet: table, its state, key."""
        for table in self._tables:
            state = optimizer.state.get(table, {})
            for key, value in list(state.items()):
                if not isinstance(value, torch.Tensor) or value.shape[:1] != table.shape[:1]:
                    continue
                if self._kept.get((table, key)) is value:
                    continue
                if value.layout is not torch.strided:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} keeps {key} of {self._names[table]} as a sparse tensor, which "
                        "ranks cannot share: use Adagrad, SparseAdam or SGD, without weight decay"
                    )
                yield table, state, key

    def _adds_to(self, i: int) -> None:
        """Multiply a table's mean gradient by the number of ranks if another gradient will be added to it, without
        `zero_grad`, because the next `exchange` will divide the sum by the number of ranks.
        """
        table = self._tables[i]
        mean = self._means.pop(table, None)
        if mean is not None and table.grad is mean:
            table.grad = mean * self._collectives.size

    def _gradient(self, table: nn.Parameter) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a table that this rank's batch has used, shape (rows,), and their gradients, as bytes for
        each row."""
        if table.grad is None:
            return np.empty(0, np.int64), rows_as_bytes(table.new_empty(0, table.shape[1]))
        if not table.grad.is_sparse:
            raise dense_gradient(self._names[table])
        return table.grad._indices()[0].numpy(), rows_as_bytes(table.grad._values())

    def _owned(self, ids: np.ndarray, table: nn.Parameter) -> np.ndarray:
        """Return a mask, in the shape of `ids`, of the rows that belong to this rank. Ranks take turns by about a page
        of memory, because popular ids are often adjacent."""
        rows = mmap.PAGESIZE // (table.shape[1] * table.element_size())
        block = ids >> max(rows.bit_length() - 1, 0)
        return np.asarray(block % self._collectives.size == self._collectives.rank)

    def _in_common(self, tensor: torch.Tensor, written: Any) -> torch.Tensor:
        """Return a tensor in shared memory; this rank writes some of its rows."""
        memory = self._collectives.memory(max(tensor.nbytes, 1))
        common = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
        common[written] = tensor[written]
        return common
