"""The order of an epoch, equal on all CPUs and GPUs.

torch's own `randperm` gives another order on a GPU than on a CPU, and differs between GPUs with different numbers of
processors. Ranks would disagree about their rows, and a snapshot could not be resumed on another machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..io.permutation import Permutation

_FEW = 1 << 17  # rows for which torch draws an order in a few ms, on the CPU, every one as likely as any other
_CHUNK = 1 << 22  # rows that are drawn at a time on a GPU: what is computed on the way takes 32 MB a piece
_LOW = (1 << 32) - 1


def drawn(rows: int, seed: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return positions ``start .. stop - 1`` of the random order of `rows` for `seed`.

    Returns:
        The row numbers, shape (stop - start,), on `device`; int32 if all of them fit.
    """
    kind = torch.int32 if rows < 2**31 else torch.int64
    if rows < _FEW:
        return torch.randperm(rows, generator=torch.Generator().manual_seed(seed), dtype=kind)[start:stop].to(device)
    permutation = Permutation(rows, seed)
    if device.type == "cpu":
        return torch.from_numpy(permutation.at(start, stop - start).view("int64")).to(kind)
    order = torch.empty(stop - start, dtype=kind, device=device)
    for first in range(start, stop, _CHUNK):
        last = min(first + _CHUNK, stop)
        order[first - start : last - start] = at(permutation, torch.arange(first, last, device=device))
    return order


def at(permutation: Permutation, rows: Tensor) -> Tensor:
    """Compute `Permutation.at` for these rows (int64, shape (n,)) on their device."""
    found = _once(permutation, rows)
    while (beyond := found >= permutation.rows).any():
        found[beyond] = _once(permutation, found[beyond])
    return found


def _once(permutation: Permutation, rows: Tensor) -> Tensor:
    left = rows.div(permutation.b, rounding_mode="floor")
    right = rows - left * permutation.b
    for i, key in enumerate(permutation.keys.view("int64").tolist()):
        if i % 2:
            right = _shift(right, left, key, permutation.b)
        else:
            left = _shift(left, right, key, permutation.a)
    return left.mul_(permutation.b).add_(right)


def _shift(half: Tensor, other: Tensor, key: int, modulus: int) -> Tensor:
    """Return ``(half + hash of other) % modulus`` in signed integers, the only ones for which torch has these
    operations on GPUs."""
    mixed = other ^ key
    mixed.mul_(_signed(0x9E3779B97F4A7C15))
    mixed ^= (mixed >> 32).bitwise_and_(_LOW)
    mixed.mul_(_signed(0xBF58476D1CE4E5B9))
    mixed = (mixed >> 32).bitwise_and_(_LOW).mul_(modulus)
    mixed = (mixed >> 32).add_(half).sub_(modulus)
    return mixed.add_((mixed >> 63).bitwise_and_(modulus))  # what is below 0 wraps around


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
