"""Control of interrupts in a rank: one interrupt is allowed while the rank works for the kernel."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from ..system.interrupts import accept_nudges, defer, undivided_steps

#: Seconds from one interrupt to the next, until one is noticed.
PAUSE = 0.05
#: Seconds that one waits for the end of what it would leave by half, at most.
_MOST = 30.0
#: Seconds from one word about that to the next: the kernel has a little patience after each.
_WORD = 1.0
#: What `torch.save` to an open file begins and ends with. torch's own destructor ends a file that was torn away between
#: these, and the process with it where the file has been closed meanwhile.
_OF_A_FILE = {"_open_zipfile_writer", "__init__", "__enter__", "__exit__"}
#: Where other blocks of torch, such as `torch.autocast`, begin and end: half of it would leave a mode switched on.
_OF_A_BLOCK = {"__enter__", "__exit__"}


class Interrupts:
    """Handler that raises `KeyboardInterrupt` for SIGINT in blocks that are `allowed`.

    Args:
        notify: Called in the main thread, now and then, while an interrupt waits for the end of a critical section,
            with the name of the section and the seconds that the interrupt has waited.
    """

    def __init__(self, notify: Callable[[str, float], None] = lambda *_: None) -> None:
        self._notify = notify
        self.possible = False
        """True if an interrupt may come now."""
        self._interrupted = False
        self.block = 0
        """The number of the block in which an interrupt may come."""
        self._turning = threading.Lock()  # from one block to the next
        self._waits: float | None = None  # since when one does
        self._notified = 0.0
        self._unraisable = sys.unraisablehook

    def install(self) -> None:
        """Install the handler of SIGINT."""
        signal.signal(signal.SIGINT, self._on_interrupt)
        accept_nudges()
        sys.unraisablehook = self._on_unraisable

    def _on_unraisable(self, unraisable: Any) -> None:
        """Repeat an interrupt that was raised in a finalizer or a callback, where Python drops exceptions."""
        if unraisable.exc_type is KeyboardInterrupt and self._interrupted:
            self.possible = True
            self.resend(self.block)
        else:
            self._unraisable(unraisable)

    def resend(self, block: int) -> None:
        """Repeat SIGINT until the block with the number `block` has handled it, or has ended. Works in any thread.

        CPython runs signal handlers between bytecodes only: a signal just before a system call that waits, such as that
        in `time.sleep`, is not handled before the end of the system call.
        """
        _thread.start_new_thread(self._repeat, (block,))

    def _repeat(self, block: int) -> None:
        main: Any = threading.main_thread().ident
        while True:
            time.sleep(PAUSE)
            with self._turning:
                answered = not self.possible or self.block != block
                if answered or signal.getsignal(signal.SIGINT) not in (self._on_interrupt, defer):  # fn's own
                    return
                signal.pthread_kill(main, signal.SIGINT)

    def _on_interrupt(self, signum: int, frame: types.FrameType | None) -> None:
        if not self.possible:
            return
        if what := _left_by_half(frame):
            now = time.monotonic()
            if self._waits is None:
                self._waits = now
                self.resend(self.block)
            if now < self._waits + _MOST:
                if now > self._notified + _WORD:
                    self._notified = now
                    self._notify(what, now - self._waits)
                return
        # Only once: `finally` blocks must not be interrupted.
        self.possible, self._interrupted = False, True
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow an interrupt in this block."""
        with self._turning:  # an interrupt that is sent again is handled, without effect, before the next block begins
            self.block += 1
        self._waits = None
        self.possible, self._interrupted = True, False
        try:
            yield
        finally:
            self.possible = self._interrupted = False

    def refuse(self) -> None:
        """Allow no interrupt from now on until the end of the block."""
        self.possible = self._interrupted = False


def _left_by_half(frame: types.FrameType | None) -> str:
    """Describe the step in this frame that an interrupt must not break; an empty string if there is none."""
    while frame is not None:
        code = frame.f_code
        if what := undivided_steps.get(code):
            return what
        if code.co_filename == "<frozen importlib._bootstrap>":
            return "imports a module"
        module = str(frame.f_globals.get("__name__"))
        if module == "torch.serialization" and code.co_name in _OF_A_FILE:
            return "saves a file"
        # A block of torch.distributed may wait there for other ranks.
        if module.startswith("torch.") and not module.startswith("torch.distributed") and code.co_name in _OF_A_BLOCK:
            return "begins or ends a block of torch"
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def kept_grad_mode() -> Iterator[None]:
    """Restore torch's grad mode after an interrupt: an interrupt between `set_grad_enabled(False)` and the `with` block
    that this begins would leave gradients switched off.
    """
    torch = sys.modules.get("torch")
    before = torch is None or torch.is_grad_enabled()
    try:
        yield
    except KeyboardInterrupt:
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_grad_enabled(before)
        raise
