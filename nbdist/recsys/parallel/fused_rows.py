"""Adagrad on the rows in sparse gradients, in one Triton kernel for all tables of one width: for GPUs.

The ids are sorted, so that equal ids are adjacent. The program of the first of them sums their gradients, always in the
same order, and updates the row and its sum of squares.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 512
"""The approximate number of elements of gradients that are read at once."""


class FusedAdagrad:
    """Adagrad's step on tables of one width.

    Args:
        tables: The tables, shape (rows, width) each, float32, on one GPU.
        sums: The sums of squares, of the same shapes.
        eps: The number added to the root of a sum.
    """

    def __init__(self, tables: Sequence[Tensor], sums: Sequence[Tensor], eps: float) -> None:
        device, self._width, self._eps = tables[0].device, tables[0].shape[1], eps
        *self._starts, rows = itertools.accumulate((len(table) for table in tables), initial=0)
        self._kind = torch.int32 if rows < 2**31 else torch.int64
        places = [tensor.data_ptr() for tensor in (*tables, *sums)]
        self._kept = (*tables, *sums)  # for as long as a graph may write there
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self._firsts = torch.tensor(self._starts, dtype=torch.int64, device=device)
        self._offsets: dict[tuple[int, ...], Tensor] = {}

    def step(self, grads: Sequence[Tensor | None], rate: Tensor) -> None:
        """Update the tables from their gradients.

        Args:
            grads: The sparse gradient of each table. Rows may occur several times. None: the table does not change.
            rate: The learning rate, shape (), on the GPU.
        """
        keys, rows = self._keys(grads)
        if not len(keys):
            return
        ordered, places = torch.sort(keys, stable=True)
        columns = triton.next_power_of_2(self._width)
        _adagrad[(len(keys),)](
            self._places,
            self._firsts,
            ordered,
            places,
            rows,
            rate,
            len(keys),
            self._eps,
            TABLES=len(self._starts),
            SLOTS=triton.next_power_of_2(len(self._starts)),
            WIDTH=self._width,
            COLUMNS=columns,
            SOME=max(1, _TILE // columns),
            num_warps=1 if columns <= 256 else 4,
        )

    def _keys(self, grads: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return rows, shape (n,), numbered over all tables, and their gradients, shape (n, width)."""
        there = [grad for grad in grads if grad is not None]
        counts = tuple(0 if grad is None else grad._nnz() for grad in grads)
        ids = torch.cat([grad._indices()[0] for grad in there])
        rows = torch.cat([grad._values() for grad in there])
        if len(self._starts) == 1:
            return ids.to(self._kind), rows
        offsets = self._offsets.get(counts)
        if offsets is None:
            parts = [torch.full((n,), start, device=ids.device) for n, start in zip(counts, self._starts, strict=True)]
            offsets = torch.cat(parts)
            if not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):  # it would be there in that graph alone
                self._offsets[counts] = offsets
        return torch.add(ids, offsets, out=torch.empty(len(ids), dtype=self._kind, device=ids.device)), rows


def try_out(tables: int, width: int, device: torch.device) -> None:
    """Update an empty set of rows, which compiles the kernel. Raises if that fails."""
    parts = [torch.zeros(1, width, device=device) for _ in range(2 * tables)]
    ids, rows = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.zeros(1, width, device=device)
    grad = torch.sparse_coo_tensor(ids, rows, (1, width), check_invariants=False)
    FusedAdagrad(parts[:tables], parts[tables:], 1.0).step([grad] * tables, torch.zeros((), device=device))
    torch.cuda.synchronize(device)


# With these specialized, Triton would compile the kernel again for some rates, while a graph is recorded.
@triton.jit(do_not_specialize=["rate", "count"])  # type: ignore[untyped-decorator]
def _adagrad(  # type: ignore[no-untyped-def]
    places,
    firsts,
    keys,
    order,
    grads,
    rate,
    count,
    eps,
    TABLES: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOME: tl.constexpr,
):
    at = tl.program_id(0)
    key = tl.load(keys + at)
    before = tl.load(keys + at - 1, mask=at > 0, other=-1)
    if key != before:
        slots = tl.arange(0, SLOTS)
        starts = tl.load(firsts + slots, mask=slots < TABLES, other=0)
        table = tl.sum(((slots < TABLES) & (starts <= key)).to(tl.int32), 0) - 1
        row = key.to(tl.int64) - tl.load(firsts + table)
        columns = tl.arange(0, COLUMNS)
        inside = columns < WIDTH
        weights = tl.load(places + table).to(tl.pointer_type(tl.float32)) + row * WIDTH + columns
        squares = tl.load(places + TABLES + table).to(tl.pointer_type(tl.float32)) + row * WIDTH + columns
        some = tl.arange(0, SOME)
        total = tl.zeros((COLUMNS,), tl.float32)
        place = at
        more = 1
        while more > 0:
            here = place + some
            same = tl.load(keys + here, mask=here < count, other=-1) == key
            source = tl.load(order + here, mask=same, other=0)
            mine = same[:, None] & inside[None, :]
            part = tl.load(grads + source[:, None] * WIDTH + columns[None, :], mask=mine, other=0.0)
            total += tl.sum(part, 0)
            place += SOME
            more = tl.where(tl.sum(same.to(tl.int32), 0) == SOME, 1, 0)
        square = tl.load(squares, mask=inside, other=1.0) + total * total
        tl.store(squares, square, mask=inside)
        scaled = tl.div_rn(total, tl.sqrt_rn(square) + eps)
        tl.store(weights, tl.load(weights, mask=inside, other=0.0) - tl.load(rate) * scaled, mask=inside)
