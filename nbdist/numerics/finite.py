"""Checks of tensors for NaN and infinities: all in one fused pass, and one by one to name rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

#: Rows that are named at most.
MOST_ROWS = 8


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all elements are finite. For tensors on GPUs, this waits for the kernels, once for each device."""
    total, others = 0.0, []
    for one in tensors:
        if type(one) is Tensor and one.is_cpu and one.is_floating_point():
            total += one.sum().item()  # a sum over several tensors would take an operation more than Python's
        else:
            others.append(one)
    # A sum overflows before its elements do.
    if not math.isfinite(total) and not all(bool(one.isfinite().all()) for one in map(_dense, tensors)):
        return False
    return not others or _others_finite(others)


def _others_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors on GPUs, in other layouts, and of other types are finite."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for dense in map(_dense, tensors):
        by_kind.setdefault((dense.device, dense.dtype), []).append(dense)
    for (_, dtype), same in by_kind.items():
        if not dtype.is_floating_point:
            continue
        finite = bool(torch.stack(torch._foreach_norm(same)).sum().isfinite())
        if not finite and not all(bool(one.isfinite().all()) for one in same):  # a norm overflows, too
            return False
    return True


def _dense(one: Tensor) -> Tensor:
    """Return the values that a tensor of any layout stores."""
    one = one.detach()
    local = getattr(one, "to_local", None)
    if local is not None:  # of a DTensor
        one = local()
    return one._values() if one.layout is torch.sparse_coo else one


def is_float(value: Any) -> bool:
    """Return whether an object is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided


def badness(tensor: Tensor) -> int:
    """Return 0 if a tensor is finite, 1 if it has an infinity, 2 if it has NaN."""
    tensor = tensor.detach()
    if bool(tensor.isfinite().all()):
        return 0
    return 2 if bool(tensor.isnan().any()) else 1


def bad_rows(tensor: Tensor, rows: int) -> list[int]:
    """Return the rows of a batch that are not finite in a tensor whose first dimension is the rows.

    The result is empty if the first dimension is not the rows, if all rows are finite, or if no row is.
    """
    if not rows or not tensor.ndim or tensor.shape[0] != rows:
        return []
    bad = (~tensor.detach().isfinite()).reshape(rows, -1).any(1)
    found = bad.nonzero().flatten().tolist()
    return found if len(found) < rows or rows == 1 else []


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and dataclass objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif hasattr(value, "__dataclass_fields__"):
        for one in vars(value).values():
            yield from tensors_in(one)


def has_graph(value: Any) -> bool:
    """Return whether a tensor in nested lists, tuples, mappings and dataclass objects is a result in an autograd
    graph."""
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    if type(value) is dict:
        value = value.values()
    elif type(value) not in (list, tuple):
        value = tensors_in(value)
    for one in value:
        if isinstance(one, Tensor):
            if one.grad_fn is not None:
                return True
        elif has_graph(one):
            return True
    return False


def batch_rows(values: Iterable[Any]) -> int:
    """Return the number of rows of a batch: the first dimension of its first tensor that has one; 0 without such a
    tensor."""
    return next((one.shape[0] for one in tensors_in(list(values)) if one.ndim), 0)


def number(value: float) -> str:
    """Return the text for a number that is not finite."""
    return "nan" if value != value else "inf" if value > 0 else "-inf"
