"""Small values that ranks exchange; a process without a process group is the only rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from tqdm.auto import tqdm

T = TypeVar("T")


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if _in_group() else 0


def world_size() -> int:
    return dist.get_world_size() if _in_group() else 1


def barrier() -> None:
    """Wait until all ranks have called this function."""
    if _in_group():
        dist.barrier()


def all_gather(value: T, group: Any = None) -> list[T]:
    """Return the values of all ranks, in order; through a process group that has all of them."""
    everyone: list[Any] = [value]
    if _in_group():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value, group)
    return everyone


def on_rank_0(fn: Callable[[], T]) -> T:
    """Call `fn` on rank 0 alone, and return its value on all ranks. Its exception is raised on all ranks."""
    if not _in_group():
        return fn()
    box: list[Any] = [None, None]
    if rank() == 0:
        try:
            box[0] = fn()
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]  # type: ignore[no-any-return]


def agree(what: str, **values: Any) -> None:
    """Raise `ValueError` on all ranks unless all ranks have the same values."""
    everyone = all_gather(values)
    for number, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                raise ValueError(
                    f"ranks do not agree about {what}: {name} is {value!r} on rank 0 and {theirs[name]!r} on rank "
                    f"{number}"
                )


def progress_bar(what: str, rows: int, show: bool) -> Any:
    """Return a progress bar over rows as a context manager; only rank 0's is shown."""
    return tqdm(total=rows, desc=what, unit=" rows", unit_scale=True, disable=not show or rank() > 0)
