"""Hashes of ids that are equal on every rank, device and machine: SplitMix64 in torch's signed integers."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


# Of SplitMix64 (Steele, Lea and Flood, 2014), as in `etl.hashing`.
_ADD, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mixed(ids: Tensor, seed: int = 0) -> Tensor:
    """Return the hash of each id, int64, any shape. Different ids have different hashes, for the same seed."""
    found = ids + _signed((_ADD * (seed + 1)) % (1 << 64))
    found = (found ^ _shifted(found, 30)) * _FIRST
    found = (found ^ _shifted(found, 27)) * _SECOND
    return found ^ _shifted(found, 31)


def uniform(numbers: Tensor) -> Tensor:
    """Return a float32 at least 0 and below 1 for each hash of `mixed`."""
    return _shifted(numbers, 40).to(torch.float32) * 2.0**-24


def owners(ids: Tensor, ranks: int) -> Tensor:
    """Return the rank, int64, that stores the row of each id."""
    return _shifted(mixed(ids), 40) % ranks  # not the bits that choose a bucket


def initial_rows(ids: Tensor, width: int, bound: float) -> Tensor:
    """Return the first row of each id, float32, shape (ids, width): uniform from -bound to bound."""
    columns = torch.arange(width, device=ids.device)
    return (uniform(mixed(mixed(ids, 1)[:, None] + columns, 2)) * 2 - 1) * bound


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right, and fill with zeros, as for unsigned integers."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
