"""When a rank may be interrupted: while it works for the kernel, and once."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

from ..postponing import postpone

#: Seconds from one interrupt to the next, until one is heard.
_PAUSE = 0.05


class Interrupts:
    """SIGINT as `KeyboardInterrupt`, where that is `allowed`."""

    def __init__(self) -> None:
        self._possible = self._interrupted = False
        self._block = 0  # the number of that in which an interrupt may come
        self._unraisable = sys.unraisablehook

    def install(self) -> None:
        """Answer SIGINT from now on."""
        signal.signal(signal.SIGINT, self._on_interrupt)
        sys.unraisablehook = self._on_unraisable

    def _on_unraisable(self, unraisable: Any) -> None:
        """Python drops what a finalizer or a callback raises: an interrupt that came there comes again."""
        if unraisable.exc_type is KeyboardInterrupt and self._interrupted:
            self._possible = True
            self.insist()
        else:
            self._unraisable(unraisable)

    def insist(self) -> None:
        """In any thread: see to it that an interrupt which was sent does come.

        Python hears of a signal between two steps of its own: where one comes right before a system call that waits,
        such as that of `time.sleep`, nothing is heard before the end of this.
        """
        _thread.start_new_thread(self._repeat, (self._block,))

    def _repeat(self, block: int) -> None:
        main: Any = threading.main_thread().ident
        while True:
            time.sleep(_PAUSE)
            answered = not self._possible or self._block != block
            if answered or signal.getsignal(signal.SIGINT) not in (self._on_interrupt, postpone):  # the function's own
                return
            signal.pthread_kill(main, signal.SIGINT)

    def _on_interrupt(self, signum: int, frame: types.FrameType | None) -> None:
        if self._possible:
            # Once: what cleans up after it must not be torn away from its work.
            self._possible, self._interrupted = False, True
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """An interrupt may come in this block."""
        self._block += 1
        self._possible, self._interrupted = True, False
        try:
            yield
        finally:
            self._possible = self._interrupted = False

    def refuse(self) -> None:
        """No interrupt any more, for the rest of the block."""
        self._possible = self._interrupted = False
