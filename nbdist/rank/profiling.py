"""A profiled call in a rank: torch's profiler around some of its optimizer steps, and the resulting trace."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..system.interrupts import undivided, undivided_context

#: A value, a number of steps, and a trace.
Profiled = tuple[Any, int, bytes]


def run(first: int, skip: int, steps: int, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Profiled:
    """Call `fn(*args, **kwargs)` and profile `steps` of its optimizer steps after the first `skip`.

    Returns:
        The function's value, on the rank `first`; the number of completed steps; and the trace, as the profiler writes
        it for Chrome, compressed. The trace is empty if the function made no more than `skip` steps.
    """
    with _profiled(skip, steps) as window:
        value = fn(*args, **kwargs)
    return value if dist.get_rank() == first else None, window.whole, window.trace()


class _Window:
    """The steps to profile.

    Attributes: `whole`, the number of steps that were completed so far.

    It uses the internal profiler of torch: `torch.profiler.profile` does the same, but imports torch's compiler, which
        takes seconds.
    """

    def __init__(self, skip: int, steps: int) -> None:
        self._profiler = torch.autograd.profiler.profile(
            use_kineto=True, use_device="cuda" if torch.cuda.is_available() else None
        )
        self._first, self._last = skip, skip + steps
        self._count = self.whole = 0
        self._open: contextlib.ExitStack | None = None
        self._done = False
        if not skip:
            self._begin()

    @undivided("begins or ends a profile")
    def step(self) -> None:
        """Record the end of a step."""
        self._count += 1
        if self._open is not None:
            self._open.close()
        if self._count == self._first:
            self._begin()
        elif self._count == self._last:
            self.close()
        elif self._open is not None:
            self._mark()

    def close(self) -> None:
        """Record the end of all steps."""
        self.whole = min(self._count, self._last)
        if self._open is not None:
            self._open.close()
            self._open, self._done = None, True
            with _quiet():
                self._profiler.__exit__(None, None, None)

    def trace(self) -> bytes:
        """Return the trace. It is written after the function has returned, so that other ranks need not wait for it."""
        if not self._done:
            return b""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            return zlib.compress(path.read_bytes(), 1)

    def _begin(self) -> None:
        with _quiet():
            self._profiler.__enter__()
        self._mark()

    def _mark(self) -> None:
        """Label the following work with the name that users of the profiler know for a step."""
        self._open = contextlib.ExitStack()
        self._open.enter_context(torch.profiler.record_function(f"ProfilerStep#{self._count}"))


@undivided_context
def _profiled(skip: int, steps: int) -> Iterator[_Window]:
    """Profile steps in the `with` block. All that switches the profiler on or off is undivided, here or in `step`."""
    window = _Window(skip, steps)
    with contextlib.closing(window), after_each_step(window.step):
        yield window


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard output to descriptor 2: the profiler reports its begin and end there, in C++."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


@contextlib.contextmanager
def after_each_step(action: Callable[[], None]) -> Iterator[None]:
    """Call an action after each step of any optimizer of torch or fastai."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    own = getattr(sys.modules.get("fastai.optimizer"), "Optimizer", None)
    hook = register_optimizer_step_post_hook(lambda *args: action())
    if own is None:
        try:
            yield
        finally:
            hook.remove()
        return
    original = own.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            action()

    own.step = step
    try:
        yield
    finally:
        own.step = original
        hook.remove()
