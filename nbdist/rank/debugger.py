"""pdb in a rank, its commands asked of the kernel."""

from __future__ import annotations

import io
import pdb
import sys
import types
from typing import Any

from ..wire.channel import Channel


class _Keyboard(io.TextIOBase):
    """Asks the kernel for a line."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        sys.stdout.flush()
        self._channel.send(("prompt",))
        message, _, _ = self._channel.receive()
        return f"{message[1]}\n"


def interact(channel: Channel, tb: types.TracebackType) -> None:
    """Let the user look at the frames of a traceback, until `quit`."""
    keyboard: Any = _Keyboard(channel)
    shell = pdb.Pdb(stdin=keyboard, stdout=sys.stdout, nosigint=True)
    shell.prompt = ""  # the kernel has one
    shell.reset()
    shell.interaction(None, tb)
