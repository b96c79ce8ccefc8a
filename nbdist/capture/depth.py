"""Pickling of objects that are nested deeper than Python's recursion limit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Stacks to try, in bytes of address space: only what is used of them is memory.
_STACKS = (1 << 30, 1 << 28)
#: Bytes of stack for each level that Python counts; pickling takes less than half of that.
_LEVEL = 1 << 11

_one_at_a_time = threading.Lock()


def with_large_stack(action: Callable[[], T]) -> T:
    """Call `action`, once more on a large stack if it raises `RecursionError`, and return its value.

    Up to 3.11, CPython's limit of levels can be set to what the stack allows. From 3.12 on the limit is fixed for C
    code, pickling included, so `RecursionError` is raised at once.
    """
    try:
        return action()
    except RecursionError:
        if sys.version_info >= (3, 12):
            raise
    with _one_at_a_time:
        limit = sys.getrecursionlimit()
        for size in _STACKS:
            results: list[T] = []
            errors: list[BaseException] = []

            def run(size: int = size, results: list[T] = results, errors: list[BaseException] = errors) -> None:
                sys.setrecursionlimit(max(limit, size // _LEVEL))
                try:
                    results.append(action())
                except BaseException as exc:
                    errors.append(exc)

            before = threading.stack_size(size)
            thread = threading.Thread(target=run, name="nbdist deep")
            try:
                thread.start()
            except RuntimeError:  # there is no room for such a stack
                continue
            finally:
                threading.stack_size(before)
            try:
                thread.join()
            finally:
                sys.setrecursionlimit(limit)
            if errors:
                raise errors[0]
            return results[0]
    raise RecursionError("nested too deeply for the stack that this process may have")
