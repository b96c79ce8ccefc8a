"""The checks of a call, by the names that users give them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ..system.interrupts import undivided_context
from .alike import rank_check
from .nan import nan_check


@undivided_context
def checked(checks: Sequence[str]) -> Iterator[None]:
    """Make these checks in the `with` block.

    Args:
        checks: "nan", and "ranks:N", where N is the number of steps between two comparisons.
    """
    with contextlib.ExitStack() as stack:
        for check in checks:
            name, _, every = check.partition(":")
            if name == "nan":
                stack.enter_context(nan_check())
            elif name == "ranks":
                stack.enter_context(rank_check(int(every)))
        yield
