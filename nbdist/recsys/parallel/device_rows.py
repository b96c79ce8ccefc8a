"""Steps on the rows of tables in sparse gradients, with shapes that are known in advance, so that no step waits for a
GPU.

The gradients of a row that occurs several times are summed first, as torch does for sparse gradients. So a step changes
the row and its state once, and no other rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .fused_rows import FusedAdagrad

FUSED = True
"""True if Triton's kernel is used on devices that have one."""


class RowSteps:
    """Steps of SGD or Adagrad on tables of one width.

    Args:
        tables: The tables, shape (rows, width) each, float32, on one device.
        sums: Adagrad's sums of squares of each table, with its shape. None: steps of SGD.
        eps: Adagrad's number that is added to the denominator.
        maximize: Whether a step maximizes the loss.
    """

    def __init__(
        self, tables: Sequence[nn.Parameter], sums: Sequence[Tensor] | None, *, eps: float, maximize: bool
    ) -> None:
        self.tables, self._sums, self._eps, self._maximize = list(tables), sums, eps, maximize
        self._fused = None if sums is None else _fused(tables, sums, eps)

    def step(self, grads: Sequence[Tensor | None], rate: Tensor) -> None:
        """Update the tables from their gradients.

        Args:
            grads: The sparse gradient of each table. Rows may occur several times. None: the table does not change.
            rate: The learning rate, shape (), on the device.
        """
        rate = -rate if self._maximize else rate
        if self._fused is not None and any(grad is not None for grad in grads):
            self._fused.step(grads, rate)
            return
        for i, (table, grad) in enumerate(zip(self.tables, grads, strict=True)):
            if grad is not None:
                ids, rows = grad._indices()[0], grad._values()
                if self._sums is None:
                    table.index_add_(0, ids, rows * -rate)
                else:
                    adagrad_rows(table, self._sums[i], ids, rows, rate, self._eps)


def _fused(tables: Sequence[Tensor], sums: Sequence[Tensor], eps: float) -> FusedAdagrad | None:
    """Return an object that updates the tables in one Triton kernel; None if this process cannot compile the kernel."""
    device, width = tables[0].device, tables[0].shape[1]
    if not FUSED or device.type != "cuda" or not all(one.is_contiguous() for one in (*tables, *sums)):
        return None
    try:
        from .fused_rows import FusedAdagrad, try_out

        try_out(len(tables), width, device)
    except Exception as error:  # no Triton, no compiler that it needs, a GPU that it does not know
        warnings.warn(
            f"no Triton kernel can update the tables; torch updates them, which is slower: {error}", stacklevel=2
        )
        return None
    return FusedAdagrad(tables, sums, eps)


def adagrad_rows(table: Tensor, sums: Tensor, ids: Tensor, grads: Tensor, rate: Tensor, eps: float) -> None:
    """Take Adagrad's step on some rows, in place.

    Args:
        table: The table, shape (rows, width).
        sums: The sums of squares, of the same shape.
        ids: The rows, shape (n,). A row may occur several times.
        grads: The gradients, shape (n, width). The gradients of equal rows are added up.
        rate: The learning rate, shape ().
        eps: Above 0.
    """
    total, rows = coalesced(ids, grads)
    squares = total * total
    scales = sums.index_select(0, rows).add_(squares).sqrt_().add_(eps)
    # What is beyond the last of the rows is zero, and is added to a row that others may name.
    sums.index_add_(0, rows, squares)
    table.index_add_(0, rows, total.div_(scales).mul_(-rate))


def coalesced(ids: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the gradients of each row, in shapes that do not depend on the number of different rows.

    Returns:
        The sums, shape (n, width), and the rows, shape (n,). The distinct rows come first; after them, the sums are
        zeros.
    """
    ordered, places = torch.sort(ids, stable=True)
    begins = torch.ones_like(ordered)
    begins[1:] = ordered[1:] != ordered[:-1]
    segments = begins.cumsum(0) - 1
    sums = torch.zeros_like(grads).index_add_(0, segments, grads.index_select(0, places))
    return sums, torch.zeros_like(ordered).scatter_(0, segments, ordered)
