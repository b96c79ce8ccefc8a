"""When a rank may be interrupted: while it works for the kernel, and once."""

from __future__ import annotations

import contextlib
import signal
import types
from collections.abc import Iterator


class Interrupts:
    """SIGINT as `KeyboardInterrupt`, where that is `allowed`."""

    def __init__(self) -> None:
        self._possible = False

    def install(self) -> None:
        """Answer SIGINT from now on."""
        signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_interrupt(self, signum: int, frame: types.FrameType | None) -> None:
        if self._possible:
            self._possible = False  # once: what cleans up after it must not be torn away from its work
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """An interrupt may come in this block."""
        self._possible = True
        try:
            yield
        finally:
            self._possible = False

    def refuse(self) -> None:
        """No interrupt any more, for the rest of the block."""
        self._possible = False
